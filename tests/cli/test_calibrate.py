import functools
import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_pair import save_pair

from hf_dspark import DSparkConfig, GenerationStats
from hf_dspark.cli import main
from hf_dspark.errors import DSparkConfigError
from hf_dspark.evaluation import blocks, calibration, sweep

TRUE = {"greedy": [2.0, 1.8, 1.5, 1.5], "sample": [1.0, 1.3, 1.6, 2.0]}
ROUNDS = 2100  # per call


def run(*argv):
    return main(["calibrate", "--threads", "1", "--max-new-tokens", "16", *argv])


@pytest.fixture(scope="module")
def own_pair(tmp_path_factory):
    """A pair whose draft folder these tests write into."""
    return save_pair(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture
def config(own_pair):
    """The draft's config.json; put back afterwards."""
    file = Path(own_pair[1]) / "config.json"
    text = file.read_text()
    yield file
    file.write_text(text)


@pytest.fixture
def recorded(monkeypatch):
    """Calls that return synthetic rounds with known temperatures; gives the list of those made."""
    calls = []

    def generate_stats(
        target, tokenizer, draft, prompt, temperature, max_new_tokens, seed=0, threshold=0.0, record=False
    ):
        calls.append((temperature, prompt.index, threshold))
        rng = np.random.default_rng([prompt.index, int(temperature), int(10 * threshold)])
        truth = TRUE["sample" if temperature else "greedy"]
        logits = rng.normal(0.5, 2.0, (ROUNDS if record else 20, 4))
        accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits / truth)), axis=1).sum(axis=1).tolist()
        proposed = [4] * len(accepted)
        new_tokens = 1 + sum(accepted) + len(accepted)
        return SimpleNamespace(
            proposed=proposed, accepted=accepted, rounds=len(accepted), new_tokens=new_tokens,
            confidence_logits=logits.round(4).tolist(), failure=None,
        )  # fmt: skip

    for module in (blocks, sweep):
        monkeypatch.setattr(module, "generate_stats", generate_stats)
    return calls


def test_calibrate_writes_tables_json_pictures_and_temperatures(own_pair, config, prompts, recorded, tmp_path, capsys):
    target, draft = own_pair
    before = json.loads(config.read_text())
    others = {path: path.read_bytes() for path in config.parent.iterdir() if path != config}
    out, plots = tmp_path / "results" / "out.json", tmp_path / "plots"
    argv = ["--target", target, "--draft", draft, "--data", prompts]
    assert run(*argv, "--json", str(out), "--plots", str(plots)) == 0
    printed = capsys.readouterr()
    assert "greedy: calibration, 2100 blocks fitted, 4200 held out" in " ".join(printed.out.split())
    assert "sample: ranking on the held-out blocks" in printed.out and "4200 held-out blocks are few" in printed.out
    assert "config.json: greedy, sample." in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines() if "Written into" not in line)
    assert "6/6 calls, 12600 blocks" in printed.err

    values = json.loads(out.read_text())
    assert set(values) == {"settings", "modes"} and set(values["modes"]) == {"greedy", "sample"}
    settings = values["settings"]
    assert settings["target"] == target and settings["draft"] == draft and settings["temperatures"] == [0.0, 1.0]
    assert settings["prompts"] == {"fit": 1, "held out": 2} and "hf-dspark" in settings["versions"]
    for name, mode in values["modes"].items():
        assert len(mode["positions"]) == 4 and len(mode["positions"][0]["before"]["bins"]) == 10
        assert np.allclose(np.log(mode["temperatures"][:2]), np.log(TRUE[name][:2]), atol=0.3)
    assert sorted(path.name for path in plots.iterdir()) == ["reliability_greedy.png", "reliability_sample.png"]

    after = json.loads(config.read_text())
    assert list(after) == sorted(
        [*before, "confidence_calibration"] if "confidence_calibration" not in before else before
    )
    new = {"confidence_temperatures", "confidence_shifts", "confidence_calibration"}
    assert {k: v for k, v in after.items() if k not in new} == {k: v for k, v in before.items() if k not in new}
    assert after["confidence_temperatures"] == {name: m["temperatures"] for name, m in values["modes"].items()}
    assert after["confidence_shifts"] == {name: m["shifts"] for name, m in values["modes"].items()}
    record = after["confidence_calibration"]["sample"]
    assert record["blocks"] == 2100 and record["held_out_blocks"] == 4200 and record["temperature"] == 1.0
    assert record["prompts"] == 1 and record["data"] == ["prompts.jsonl"] and record["target"] == target
    assert len(record["ece_before"]) == len(record["ece_after"]) == 4 and record["dropped"] == 0
    assert {"target_revision", "date", "seed", "max_new_tokens", "dtype"} <= set(record)
    assert {path: path.read_bytes() for path in config.parent.iterdir() if path != config} == others
    assert DSparkConfig.from_pretrained(draft).confidence_calibration["greedy"]["blocks"] == 2100

    # The blocks stay, so another fit costs no generation.
    recorded.clear()
    assert run(*argv, "--json", str(out), "--held-out-share", "0.4", "--dry-run") == 0
    assert recorded == [] and "has the blocks of 6 calls" in capsys.readouterr().err


def test_one_mode_leaves_the_other_as_it_was(own_pair, config, prompts, recorded):
    values = json.loads(config.read_text())
    values["confidence_temperatures"] = {"sample": [3.0, 3.0, 3.0, 3.0]}
    values["z"] = values.pop("vocab_size")  # no longer in alphabetical order
    values["vocab_size"] = values.pop("z")
    config.write_text(json.dumps(values))
    assert run("--draft", own_pair[1], "--data", prompts, "--temperature", "0") == 0
    after = json.loads(config.read_text())
    assert after["confidence_temperatures"]["sample"] == [3.0] * 4
    assert set(after["confidence_temperatures"]) == {"sample", "greedy"}
    assert set(after["confidence_calibration"]) == {"greedy"}
    assert [key for key in after if key in values] == list(values)


def test_a_dry_run_changes_nothing(own_pair, config, prompts, recorded, capsys):
    text = config.read_text()
    assert run("--draft", own_pair[1], "--data", prompts, "--dry-run") == 0
    assert config.read_text() == text and "Written" not in capsys.readouterr().out


def test_prompts_to_measure_on_may_be_given(own_pair, config, prompts, recorded, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "w9"}))
    argv = ["--draft", own_pair[1], "--data", prompts, "--temperature", "1"]
    assert run(*argv, "--held-out", str(other)) == 0
    record = json.loads(config.read_text())["confidence_calibration"]["sample"]
    assert (record["prompts"], record["held_out_prompts"]) == (3, 1)
    assert (record["data"], record["held_out_data"]) == (["prompts.jsonl"], ["other.jsonl"])
    capsys.readouterr()
    other.write_text(json.dumps({"prompt": "w4 w5"}))
    assert run(*argv, "--held-out", str(other)) == 2
    assert "which is fitted on" in one_line(capsys)


def test_temperatures_that_do_harm_are_not_written(own_pair, config, prompts, recorded, capsys, monkeypatch):
    monkeypatch.setattr(calibration.Calibration, "is_worse", property(lambda self: self.mode == "greedy"))
    text = config.read_text()
    assert run("--draft", own_pair[1], "--data", prompts) == 1
    assert "FAILED: greedy" in capsys.readouterr().out
    assert set(json.loads(config.read_text())["confidence_temperatures"]) == {"sample"}
    config.write_text(text)


def test_too_few_blocks_are_one_line_and_write_nothing(own_pair, config, prompts, recorded, capsys, monkeypatch):
    monkeypatch.setattr("test_calibrate.ROUNDS", 300)
    text = config.read_text()
    assert run("--draft", own_pair[1], "--data", prompts) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "greedy: 300 full blocks" in message and "at least 2000" in message
    assert config.read_text() == text


def test_an_interrupt_keeps_what_was_collected(own_pair, config, prompts, recorded, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.json"
    original = blocks.generate_stats

    def interrupted(*args, **kwargs):
        if len(recorded) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(blocks, "generate_stats", interrupted)
    argv = ["--draft", own_pair[1], "--data", prompts, "--json", str(out)]
    assert run(*argv) == 130
    assert "blocks of 2 calls are kept" in capsys.readouterr().err and not out.exists()
    monkeypatch.setattr(blocks, "generate_stats", original)
    assert run(*argv) == 0
    assert len(recorded) == 6 and out.exists()


def test_failed_drafting_gives_status_1(own_pair, config, prompts, recorded, capsys, monkeypatch):
    original = blocks.generate_stats

    def failing(*args, **kwargs):
        stats = original(*args, **kwargs)
        stats.failure = "RuntimeError: out of memory"
        return stats

    monkeypatch.setattr(blocks, "generate_stats", failing)
    assert run("--draft", own_pair[1], "--data", prompts, "--temperature", "0") == 1
    assert "FAILED: prompts prompt" in capsys.readouterr().out


def test_sweep_writes_table_json_and_picture(own_pair, config, prompts, recorded, tmp_path, capsys):
    text = config.read_text()
    out, plots = tmp_path / "sweep.json", tmp_path / "plots"
    argv = ["--draft", own_pair[1], "--data", prompts, "--limit", "2", "--sweep"]
    assert run(*argv, "--json", str(out), "--plots", str(plots)) == 0
    printed = capsys.readouterr().out
    assert "greedy: static confidence threshold" in printed and "τ / (ℓ + 1)" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert len(recorded) == 20 and {threshold for *_, threshold in recorded} == {i / 10 for i in range(10)}
    values = json.loads(out.read_text())
    assert [p["threshold"] for p in values["points"]] == [i / 10 for i in range(10)]
    point = values["points"][0]
    assert point["drafts"] == 160 and point["acceptance_rate"] == point["committed"] / 200
    assert values["settings"]["confidence_temperatures"] is None
    assert [path.name for path in plots.iterdir()] == ["sweep_0.png"]
    assert config.read_text() == text and not Path(f"{out}.partial.jsonl").exists()


@pytest.mark.skipif(
    "confidence_logits" not in {field.name for field in fields(GenerationStats)}, reason="calls record no confidences"
)
def test_real_calls_are_collected_and_swept(own_pair, config, prompts, tmp_path, monkeypatch, capsys):
    few = functools.partial(calibration.calibrate_blocks, minimum_blocks=10)
    monkeypatch.setattr(calibration, "calibrate_blocks", few)
    out = tmp_path / "out.json"
    argv = ["--draft", own_pair[1], "--data", prompts, "--max-new-tokens", "40"]
    assert run(*argv, "--json", str(out), "--dry-run") in (0, 1)  # 1: random drafts may well get worse
    rows = [json.loads(line)["row"] for line in Path(f"{out}.blocks.jsonl").read_text().splitlines()[1:]]
    assert len(rows) == 6
    for row in rows:
        assert row["failure"] is None and len(row["proposed"]) == len(row["confidence_logits"]) > 8
        assert all(len(logits) == n for logits, n in zip(row["confidence_logits"][:-1], row["proposed"][:-1]))
        assert sum(n == 4 for n in row["proposed"]) > 8
    capsys.readouterr()
    swept = tmp_path / "sweep.json"
    assert run(*argv, "--sweep", "--json", str(swept), "--limit", "2") == 0
    points = json.loads(swept.read_text())["points"]
    lengths = [point["drafts_per_round"] for point in points]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    assert len({point["committed"] for point in points}) == 1  # greedy: the same texts


def one_line(capsys):
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


def test_bad_input_is_one_line(own_pair, config, pair, prompts, tmp_path, capsys):
    target, draft = own_pair
    none = str(tmp_path / "none")
    for argv, named in (
        (["--draft", "owner/name", "--data", prompts], "give a local folder"),
        (["--draft", none, "--data", prompts], none),
        (["--draft", target, "--data", prompts], "model_type 'llama'"),
        (["--draft", draft, "--data", none], none),
        (["--draft", draft, "--data", prompts, prompts], "twice"),
        (["--draft", draft, "--data", prompts, "--held-out", prompts], "twice"),
        (["--draft", draft, "--data", prompts, "--held-out-share", "1.5"], "held_out_share is 1.5"),
        (["--draft", draft, "--data", prompts, "--held-out", none, "--held-out-share", "0.5"], "two ways"),
        (["--draft", draft, "--data", prompts, "--temperature", "0.5", "1"], "one above 0"),
        (["--draft", draft, "--data", prompts, "--sweep", "--blocks", "10"], "--blocks has no meaning"),
        (["--draft", draft, "--data", prompts, "--limit", "1"], "1 prompts"),
    ):
        assert run(*argv) == 2, argv
        assert named in one_line(capsys)


def test_a_draft_without_a_confidence_head_is_one_line(tmp_path, prompts, capsys):
    _, draft = save_pair(tmp_path, enable_confidence_head=False)
    for extra in ([], ["--sweep"]):
        assert run("--draft", draft, "--data", prompts, *extra) == 2
        assert "no confidence head" in one_line(capsys)


def test_a_config_that_values_do_not_fit_stays_as_it_is(own_pair, config):
    from hf_dspark.cli.calibrate import write_calibrations
    from hf_dspark.evaluation.calibration import Calibration

    text = config.read_text()
    for temperatures, shifts, message in (
        ([1.0] * 3, [0.0] * 4, "4 positive finite numbers"),
        ([1.0] * 4, [0.0] * 3, "4 finite numbers"),
    ):
        fitted = Calibration("greedy", temperatures, shifts, 1, 0, 1, 0, [])
        with pytest.raises(DSparkConfigError, match=message):
            write_calibrations(config, {"greedy": fitted}, {"greedy": {}})
    assert config.read_text() == text and not list(config.parent.glob("*.tmp"))
