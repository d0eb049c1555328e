"""`hf-dspark push`, from real runs of the other verbs to a fake Hub; and what the verbs say when the Hub refuses."""

import json
import shutil
from pathlib import Path

import pytest
from fake_hub import READ, fill_cache
from safetensors.torch import load_file
from tiny_pair import tiny_target, tiny_tokenizer
from training_pair import TEMPLATE
from yaml import safe_load

from hf_dspark.cli import main
from hf_dspark.demo_weights import shipped_draft

TARGET = "org/target"


@pytest.fixture
def draft(pair, tmp_path):
    """A copy of the draft, which names `TARGET`."""
    folder = tmp_path / "draft"
    shutil.copytree(pair[1], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target_model_name_or_path": TARGET}))
    return folder


@pytest.fixture
def refused(capsys):
    """Runs a command, which must say one line and exit with 2; gives the line."""

    def run(*argv):
        assert main([*map(str, argv)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("hf-dspark: error: ") and printed.err.count("\n") == 1, printed.err
        return printed.err

    return run


def test_a_dry_run_shows_all_and_touches_no_network(draft, hub, pair, tmp_path, capsys):
    """The licence comes from the target's card in the cache."""
    snapshot = fill_cache(tmp_path / "cache", TARGET, tmp_path / "draft")
    (snapshot / "README.md").write_text("---\nlicense: mit\n---\n# Target\n")
    (draft / "optimizer.pt").write_bytes(b"x")
    before = {path: path.read_bytes() for path in draft.iterdir()}
    assert main(["push", str(draft), "me/poems", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed and "kB" in printed and "Left out: optimizer.pt." in printed
    assert "license: mit" in printed and "base_model: org/target" in printed and "# poems" in printed
    assert "Nothing was pushed" in printed
    assert not hub.requests and before == {path: path.read_bytes() for path in draft.iterdir()}


def test_the_shipped_card_comes_out_unharmed(hub, capsys):
    folder = shipped_draft()
    with open(f"{folder}/README.md", encoding="utf-8") as stream:
        card = stream.read()
    assert main(["push", folder, "me/x", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert card.strip() in printed and "nothing to add" in printed


def test_a_draft_that_was_evaluated_is_pushed(draft, pair, prompts, hub, capsys):
    """The results that `eval` leaves in the draft's folder are found; with `--eval` they may lie elsewhere."""
    argv = ["--target", pair[0], "--draft", str(draft), "--data", prompts, "--max-new-tokens", "8", "--temperature"]
    inside = draft / "eval.json"
    assert main(["eval", *argv, "0", "1", "--json", str(inside), "--plots", str(draft / "plots")]) == 0
    capsys.readouterr()
    assert main(["push", str(draft), "me/poems", "--license", "mit", "--private"]) == 0
    printed = capsys.readouterr().out
    assert f"Pushed: https://huggingface.co/me/poems/commit/{hub.commit('me/poems')}" in printed
    assert "eval.json: in the card" in printed
    card = hub.card("me/poems")
    assert "at most 8 new tokens" in card and "block lengths scheduled" in card and "](plots/speedup_0.png)" in card
    summary = json.loads(inside.read_text())["sets"][0]["summary"]
    assert f"| prompts | 3 | {summary['accepted_length']:.2f} | {summary['decode_speedup']:.2f} × |" in card
    assert "Of 3 greedy texts, 3 are the plain ones" in card and "| temperature 1 | prompts |" in card
    assert f"weights were those of `{pair[0].split('/')[-1]}`" in card and pair[0] not in card
    assert len(safe_load(card.split("---\n")[1])["model-index"][0]["results"][0]["metrics"]) == 4
    assert "eval.json" not in hub.files("me/poems") and "plots/speedup_1.png" in hub.files("me/poems")
    outside = inside.rename(draft.parent / "elsewhere.json")
    assert main(["push", str(draft), "me/two", "--license", "mit", "--eval", str(outside), "--revision", "v1"]) == 0
    assert "## Measured" in hub.card("me/two", "v1") and "README.md" not in hub.files("me/two")


def _target_to_train_for(folder):
    """Its chat template marks where answers begin and end."""
    path = folder / "target"
    tiny_target().save_pretrained(path)
    tiny_tokenizer(TEMPLATE).save_pretrained(path)
    return str(path)


def test_a_trained_draft_is_pushed_with_how_it_was_trained(tmp_path, hub):
    """From the facts that `train` leaves in its folder, an earlier run's included."""
    target = _target_to_train_for(tmp_path)
    data = tmp_path / "poems.jsonl"
    rows = [{"prompt": f"w{i}", "response": " ".join(f"w{(i + j) % 30 + 1}" for j in range(12))} for i in range(1, 13)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    options = {
        **{"target": target, "data": data, "num_hidden_layers": 1, "block_size": 4, "markov_rank": 4},
        **{"validation_share": 0.25, "num_anchors": 6, "per_device_train_batch_size": 2, "learning_rate": 0.001},
        **{"bf16": "no", "use_cpu": "true", "check_data": "no", "save_strategy": "no", "logging_steps": 1},
        **{"eval_strategy": "steps", "eval_steps": 1, "report_to": "none", "disable_tqdm": "true"},
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    taps = ["--target_layer_ids", "0", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", *flags, *taps, "--max_steps", "2", "--output_dir", str(first)]) == 0
    assert main(["train", *flags, "--draft", str(first), "--max_steps", "3", "--output_dir", str(second)]) == 0
    facts = json.loads((second / "training_facts.json").read_text())["runs"]
    assert [run["steps"] for run in facts] == [2, 3] and facts[1]["started_from"] == "first"
    assert facts[0]["data"]["names"] == ["poems.jsonl"] and facts[0]["data"]["train"]["samples"] == 9
    state = json.loads((second / "trainer_state.json").read_text())["log_history"]
    assert facts[1]["slots"] == sum(entry["slots"] for entry in state if "loss" in entry)
    assert facts[1]["metrics"]["eval_loss"] == [e["eval_loss"] for e in state if "eval_loss" in e][-1]
    assert [point["step"] for point in facts[1]["curve"]] == [1, 2, 3]
    assert str(tmp_path) not in (second / "training_facts.json").read_text()

    argv = ["push", str(second), "me/poems", "--license", "mit", "--base-model", TARGET]
    assert main(argv) == 0
    card = hub.card("me/poems")
    assert "| | run 1 | run 2 |" in "".join(" ".join(line.split()) + "\n" for line in card.splitlines())
    assert "| steps | 2 (0.40 epochs) | 3 (0.60 epochs) |" in card and "| started from |  | first |" in card
    assert f"| supervised slots | {facts[0]['slots']:,} | {facts[1]['slots']:,} |" in card
    assert "AdamW, peak rate 0.001 (cosine)" in card and "9 samples, " in card and "| hardware | CPU (" in card
    assert "![learning curve](learning_curve.png)" in card and "learning_curve.png" in hub.files("me/poems")
    assert str(tmp_path) not in b"".join(hub.files("me/poems").values()).decode("latin-1")
    (second / "learning_curve.png").unlink()  # without matplotlib there is none: numbers take its place
    assert main(argv) == 0
    assert f"| 3 | {facts[1]['curve'][-1]['greedy']:.2f} |" in hub.card("me/poems")


def test_training_pushes_as_it_goes(tmp_path, hub, capsys, monkeypatch):
    """`--push_to_hub`: a commit with a card per save, and at last the finished draft, in its own dtype."""
    data = tmp_path / "poems.jsonl"
    target = _target_to_train_for(tmp_path)
    data.write_text("\n".join(json.dumps({"prompt": f"w{i}", "response": "w3 w4 w5 w6 w7 w8"}) for i in range(1, 9)))
    argv = ["train", "--target", target, "--data", str(data), "--output_dir", str(tmp_path / "out")]
    argv += ["--num_hidden_layers", "1", "--block_size", "4", "--markov_rank", "4", "--target_layer_ids", "0", "2"]
    argv += ["--validation_share", "0", "--per_device_train_batch_size", "2", "--max_steps", "2", "--bf16", "no"]
    argv += ["--use_cpu", "true", "--check_data", "no", "--save_strategy", "steps", "--save_steps", "1"]
    argv += ["--report_to", "none", "--disable_tqdm", "true", "--push_to_hub", "true", "--hub_model_id", "me/poems"]
    assert main(argv) == 2  # told before the first step
    assert "--base-model" in capsys.readouterr().err and not (tmp_path / "out" / "checkpoint-1").exists()
    argv += ["--hub_base_model", TARGET]
    assert main(argv) == 2
    assert "Under which licence" in capsys.readouterr().err and "me/poems" not in hub.repos
    argv += ["--hub_license", "mit"]
    assert main(argv) == 0
    card = hub.card("me/poems")
    assert "| steps | 2 (0.50 epochs) |" in card and "license: mit" in card and "poems.jsonl" in card
    pushed = tmp_path / "pushed.safetensors"
    pushed.write_bytes(hub.files("me/poems")["model.safetensors"])
    assert {str(t.dtype) for t in load_file(pushed).values()} == {"torch.bfloat16"}
    commits = [request for request in hub.requests if "/commit/" in request]
    assert len(commits) >= 2

    monkeypatch.setenv("HF_TOKEN", READ)
    assert main(argv) == 2
    assert "may not write" in capsys.readouterr().err


def test_bad_input_is_one_line(draft, hub, refused, tmp_path, pair, monkeypatch, offline):
    assert "no folder" in refused("push", tmp_path / "none", "me/x")
    assert "no folder with a config.json" in refused("push", "none", "me/x")
    assert "is no Hub id" in refused("push", draft, "a/b/c", "--dry-run", "--license", "mit")
    assert "Under which licence" in refused("push", draft, "me/x")
    assert "--base-model" in refused("push", pair[1], "me/x", "--license", "mit")
    assert "There is no file" in refused("push", draft, "me/x", "--license", "mit", "--eval", "none.json")
    (draft / "README.md").write_text("---\nlicense: mit\n---\nHi\n")
    assert "Change one of the two" in refused("push", draft, "me/x", "--license", "apache-2.0")
    (draft / "README.md").unlink()
    monkeypatch.setenv("HF_TOKEN", READ)
    assert "may not write to me/x" in refused("push", draft, "me/x", "--license", "mit")
    hub.down = True
    assert "cannot be reached" in refused("push", draft, "me/x", "--license", "mit")
    offline()
    assert "HF_HUB_OFFLINE" in refused("push", draft, "me/x", "--license", "mit")
    (draft / "model.safetensors").unlink()
    assert "no model.safetensors" in refused("push", draft, "me/x", "--dry-run")
    (draft / "config.json").write_text('{"model_type": "qwen3"}')
    assert "save_pretrained" in refused("push", draft, "me/x", "--dry-run")
    (draft / "config.json").write_text("{")
    assert "not JSON" in refused("push", draft, "me/x", "--dry-run")
    (draft / "config.json").unlink()
    assert "no folder with a config.json" in refused("push", draft, "me/x", "--dry-run")


@pytest.mark.parametrize("verb", ["generate", "eval", "profile"])
def test_targets_and_drafts_that_the_hub_does_not_give(verb, draft, prompts, hub, pair, refused, offline, tmp_path):
    more = {"generate": ["hello"], "eval": ["--data", prompts], "profile": []}[verb]

    def tried(*options):
        return refused(verb, *more, *options)

    assert "Cannot load the target 'org/target': 'org/target' is no folder here" in tried("--draft", draft)
    assert "'me/none' is no folder here" in tried("--draft", "me/none", "--target", pair[0])
    hub.add(TARGET, tmp_path / "draft")
    hub.gated.add(TARGET)
    assert "org/target is gated" in tried("--draft", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "target_revision": "v7"}))
    hub.gated.clear()
    assert "org/target has no revision 'v7'" in tried("--draft", draft)
    hub.down = True
    assert "org/target at revision 'v7' is not in the cache" in tried("--draft", draft)
    offline()
    assert "HF_HUB_OFFLINE is set" in tried("--draft", draft)


def test_generate_from_the_cache_alone(draft, pair, hub, offline, tmp_path, capsys):
    """Draft by Hub id, and its target at the commit that its config names."""
    commit = "c" * 40
    fill_cache(tmp_path / "cache", TARGET, Path(pair[0]), commit=commit)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "target_revision": commit}))
    fill_cache(tmp_path / "cache", "me/poems", draft)
    offline()
    assert main(["generate", "w3 w4", "--draft", "me/poems", "--max-new-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True
    assert not hub.requests
