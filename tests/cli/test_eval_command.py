import json
from pathlib import Path

import pytest
from tiny_pair import save_pair

from hf_dspark.cli import main
from hf_dspark.evaluation import harness


def run(*argv):
    return main(["eval", "--threads", "1", "--max-new-tokens", "8", *argv])


def test_eval_writes_table_json_and_plots(pair, prompts, tmp_path, capsys):
    target, draft = pair
    out, plots = tmp_path / "results" / "out.json", tmp_path / "plots"
    argv = ["--target", target, "--draft", draft, "--data", prompts, "--temperature", "0", "1"]
    assert run(*argv, "--json", str(out), "--plots", str(plots)) == 0
    printed = capsys.readouterr()
    assert "draft, greedy: drafting" in printed.out and "3/3" in printed.out
    assert "draft, temperature 1: speed" in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert "6/6 prompts" in printed.err

    values = json.loads(out.read_text())
    assert set(values) == {"settings", "sets", "averages", "divergences", "prompts"}
    settings = values["settings"]
    assert settings["target"] == target and settings["drafts"]["draft"]["path"] == draft
    assert settings["temperatures"] == [0.0, 1.0] and settings["dtype"] == "float32" and settings["threads"] == 1
    assert {"torch", "transformers", "hf-dspark"} <= set(settings["versions"])
    assert [(row["prompt_set"], row["temperature"], row["identical"]) for row in values["sets"]] == [
        ("prompts", 0.0, 3),
        ("prompts", 1.0, None),
    ]
    summary = values["sets"][0]["summary"]
    assert {"accepted_length", "acceptance_by_position", "decode_speedup", "efficiency", "draft_share"} <= set(summary)
    assert len(values["prompts"]) == 6 and len(values["prompts"][0]["runs"][0]["tokens"]) == 8
    assert len(list(plots.glob("*.png"))) == 6
    assert not Path(f"{out}.partial.jsonl").exists()


def test_full_blocks_or_what_generate_does(pair, prompts, tmp_path):
    """By default the scheduler is on, as in `generate`. Full blocks are what it says."""
    for flags, full in ((["--full-blocks"], True), ([], False)):
        out = tmp_path / f"{full}.json"
        assert run("--draft", pair[1], "--data", prompts, "--json", str(out), *flags) == 0
        values = json.loads(out.read_text())
        assert values["settings"]["full_blocks"] is full
        reasons = {r for p in values["prompts"] for one in p["runs"] if one["stats"] for r in one["stats"]["reasons"]}
        assert (reasons <= {"full block", "length budget"}) is full


def test_the_target_may_be_left_to_the_draft(pair, prompts):
    assert run("--draft", pair[1], "--data", prompts, "--limit", "1") == 0


def test_eval_goes_on_after_an_interrupt_and_starts_anew_for_another_limit(
    pair, prompts, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out.json"
    argv = ["--draft", pair[1], "--data", prompts, "--json", str(out)]
    original = harness.timed_generate
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 + 2 * 2 + 1:  # the warm-up, two prompts, and into the third
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(harness, "timed_generate", interrupted)
    assert run(*argv) == 130
    partial = Path(f"{out}.partial.jsonl")
    assert partial.exists() and not out.exists()
    assert "2 prompts are kept" in capsys.readouterr().err
    assert run(*argv) == 0
    assert "2 prompts are done" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["prompts"]) == 3 and not partial.exists()

    calls.clear()
    assert run(*argv) == 130
    assert run(*argv, "--limit", "2") == 0
    assert "are done" not in capsys.readouterr().err


def test_a_text_that_differs_gives_status_1(pair, prompts, capsys, monkeypatch):
    original = harness.timed_generate

    def wrong(target, inputs, draft, *args, **kwargs):
        made = original(target, inputs, draft, *args, **kwargs)
        if draft is not None:
            made.tokens[2] = (made.tokens[2] + 1) % 48
        return made

    monkeypatch.setattr(harness, "timed_generate", wrong)
    assert run("--draft", pair[1], "--data", prompts) == 1
    printed = capsys.readouterr().out
    assert "3 DIFFERENT" in printed
    assert "draft, prompts prompt 0: DIFFERENT at new token 2 (top-2 gap" in printed
    assert "FAILED: draft, prompts prompt 0" in printed


def one_line(capsys):
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


def test_missing_files_are_one_line(pair, prompts, tmp_path, capsys):
    target, draft = pair
    none = str(tmp_path / "none")
    for argv, named in (
        (["--draft", draft, "--data", none], none),
        (["--draft", none, "--data", prompts], none),
        (["--draft", draft, "--target", none, "--data", prompts], none),
        (["--draft", target, "--data", prompts], "LlamaForCausalLM"),
        (["--draft", draft, "--target", "pypi:nothing==1", "--data", prompts], "pypi:nothing==1"),
        (["--draft", draft, "--data", prompts, prompts], "twice"),
        (["--draft", draft, "--draft", draft, "--data", prompts], "twice"),
    ):
        assert run(*argv) == 2
        assert named in one_line(capsys)


def test_a_pair_that_does_not_fit_is_one_line(pair, prompts, tmp_path, capsys):
    from tiny_pair import tiny_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            eos_token_id=None,
        )
    )
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    assert run("--draft", pair[1], "--target", str(tmp_path / "other"), "--data", prompts) == 2
    message = one_line(capsys)
    assert "vocab_size 50" in message and "does not fit" in message


def test_a_draft_that_names_no_target_is_one_line(tmp_path, prompts, capsys):
    _, draft = save_pair(tmp_path)
    config = Path(draft) / "config.json"
    values = json.loads(config.read_text())
    values["target_model_name_or_path"] = None
    config.write_text(json.dumps(values))
    assert run("--draft", draft, "--data", prompts) == 2
    assert "--target" in one_line(capsys)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_one_line(tmp_path, prompts, capsys, content):
    _, draft = save_pair(tmp_path)
    (Path(draft) / "config.json").write_text(content)
    assert run("--draft", draft, "--data", prompts) == 2
    assert f"config.json of {draft}" in one_line(capsys)
