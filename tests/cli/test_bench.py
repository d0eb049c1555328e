import json
from pathlib import Path

import pytest

from hf_dspark.cli import main
from hf_dspark.evaluation import concurrency


def run(*argv):
    return main(["bench", "--threads", "1", "--max-new-tokens", "6", *argv])


def test_bench_writes_table_json_and_plots(pair, prompts, tmp_path, capsys):
    target, draft = pair
    out, plots = tmp_path / "results" / "out.json", tmp_path / "plots"
    argv = ["--target", target, "--draft", draft, "--data", prompts, "--requests", "3", "--concurrency", "1", "2"]
    assert run(*argv, "--lengths", "1", "--json", str(out), "--plots", str(plots)) == 0
    printed = capsys.readouterr()
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert "30/30 groups" in printed.err

    values = json.loads(out.read_text())
    settings, results, groups = values["settings"], values["results"], values["groups"]
    modes = ["plain", "continuous", "full blocks", "length 1", "scheduled", "continuous + draft"]
    assert settings["modes"] == modes and settings["concurrency"] == [1, 2]
    assert sorted((r["concurrency"], r["mode"]) for r in results) == sorted((c, m) for c in (1, 2) for m in modes)
    assert len(groups) == 6 * (3 + 2)  # the last group of two has one request
    for group in groups:
        assert group["tokens"] == 6 * group["requests"] == 6 * len(group["request_speeds"])  # no eos: each runs full
        assert group["seconds"] > 0 and min(group["request_speeds"]) > 0
    by_mode = {r["mode"]: r for r in results if r["concurrency"] == 2}
    assert by_mode["plain"]["speed"] == 1 and by_mode["plain"]["verified"] == by_mode["continuous"]["verified"] == 0
    assert by_mode["continuous + draft"]["verified"] > 0
    assert by_mode["length 1"]["verified"] <= 1 < by_mode["full blocks"]["verified"] <= 3
    assert len(list(plots.glob("*.png"))) == 2
    assert not Path(f"{out}.partial.jsonl").exists()


def test_all_modes_say_the_same(pair, prompts, monkeypatch):
    """Greedy texts, from every mode."""
    texts, original = {}, concurrency._run

    def watching(target, tokenizer, draft, group, mode, *rest):
        generate = type(target).generate
        target.generate = lambda **kwargs: (
            texts.setdefault(mode, []).append(generate(target, **kwargs)) or texts[mode][-1]
        )
        try:
            return original(target, tokenizer, draft, group, mode, *rest)
        finally:
            del target.generate

    monkeypatch.setattr(concurrency, "_run", watching)
    assert run("--draft", pair[1], "--data", prompts, "--requests", "3", "--concurrency", "3", "--no-continuous") == 0
    plain = [t.tolist() for t in texts.pop("plain")]
    assert set(texts) == {"full blocks", "scheduled"}
    assert all([t.tolist() for t in own] == plain for own in texts.values())


def test_bench_goes_on_after_an_interrupt(pair, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.json"
    argv = ["--draft", pair[1], "--data", prompts, "--requests", "2", "--concurrency", "1", "--no-continuous"]
    argv += ["--json", str(out)]
    original, calls = concurrency._run, []

    def interrupted(*arguments):
        calls.append(arguments[4])
        if len(calls) == 9:  # three warm-ups and five groups are done
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(concurrency, "_run", interrupted)
    assert run(*argv) == 130
    assert not out.exists() and Path(f"{out}.partial.jsonl").exists()
    monkeypatch.setattr(concurrency, "_run", original)
    capsys.readouterr()
    assert run(*argv) == 0
    assert "5 groups are done" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["groups"]) == 6


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--requests", "9"], "the files hold 3 prompts"),
        (["--requests", "2", "--concurrency", "4"], "--concurrency 4 needs as many prompts"),
        (["--concurrency", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line(pair, prompts, capsys, argv, message):
    try:
        status = run("--draft", pair[1], "--data", prompts, *argv)
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr().err
    assert status == 2 and message in printed and len(printed.strip().splitlines()) == 1
