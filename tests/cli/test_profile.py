import json
import re
import sys

import pytest

from hf_dspark.cli import main, profile
from hf_dspark.generation import profiling
from hf_dspark.scheduling.throughput import ThroughputCurve, ThroughputProfile


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    folder = tmp_path / "assets"
    folder.mkdir()
    monkeypatch.setattr(profiling, "cached_assets_path", lambda *args, **kwargs: folder)
    monkeypatch.setattr(profiling, "_UNUSABLE", float("inf"))
    monkeypatch.setattr(profiling, "_STEADY", float("inf"))


def run(*argv):
    return main(["profile", "--threads", "1", *argv])


def test_profile_prints_a_table_and_a_verdict_and_writes_files(pair, tmp_path, capsys):
    target, draft = pair
    out, plot = tmp_path / "new" / "out.json", tmp_path / "new" / "plot.png"
    argv = ["--target", target, "--draft", draft, "--context", "4", "8", "--max-tokens", "6"]
    assert run(*argv, "--json", str(out), "--plot", str(plot)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert len(re.findall(r"^ +[1-6]( +[0-9.]+ +[0-9.]+ +[0-9.]+ %){2}", printed.out, re.M)) == 6
    assert "Drafting takes" in printed.out
    for acceptance in profile.ACCEPTANCES:
        assert printed.out.count(f"expected speed-up at acceptance {acceptance}: ") == 2
    assert "kept in" in printed.out
    found = ThroughputProfile.load(out)
    assert list(found.curves) == [4, 8] and len(found.draft_seconds) == 4
    assert json.loads(out.read_text())["facts"]["target"] == target
    assert plot.read_bytes().startswith(b"\x89PNG")
    (kept,) = (tmp_path / "assets").iterdir()
    assert ThroughputProfile.load(kept) == found


def test_a_target_alone(pair, capsys):
    assert run("--target", pair[0], "--context", "4") == 0
    printed = capsys.readouterr().out
    assert "No draft model was measured" in printed and "Drafting takes" not in printed


def test_the_target_may_be_left_to_the_draft(pair, capsys):
    assert run("--draft", pair[1], "--context", "4", "--max-tokens", "3") == 0
    assert pair[0] in capsys.readouterr().out


def profile_of(seconds, draft_seconds=None):
    curve = ThroughputCurve.from_seconds(dict(enumerate(seconds, start=1)))
    return ThroughputProfile({128: curve}, {128: (0.01,) * len(seconds)}, draft_seconds)


def test_the_verdict_on_free_rows():
    text = "\n".join(profile.verdict(profile_of([0.1] * 6, (0.01,) * 5)))
    assert "length cannot matter here: the full block is verified" in text
    assert "expected speed-up at acceptance 0.5: 1.79 × (blocks of 5)" in text  # (1 - 0.5^6) / 0.5 / 1.1
    assert "do not speculate" not in text


def test_the_verdict_on_costly_rows():
    text = "\n".join(profile.verdict(profile_of([0.1, 0.2, 0.3], (0.05, 0.06))))
    assert "do not speculate here" in text and "cannot matter" not in text


def test_the_verdict_between():
    text = "\n".join(profile.verdict(profile_of([0.1, 0.12, 0.14, 0.16], (0.01, 0.01, 0.01))))
    assert "do not speculate" not in text and "cannot matter" not in text
    assert "acceptance 0.3: 1.00 × (blocks of 1)" in text  # 1.3 · 0.1 / 0.13
    assert "acceptance 0.9: 2.02 × (blocks of 3)" in text  # 3.439 · 0.1 / 0.17


def one_line(capsys):
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


def test_bad_input_is_one_line(pair, tmp_path, capsys):
    none = str(tmp_path / "none")
    for argv, named in (
        ([], "--target"),
        (["--target", none], none),
        (["--target", pair[0], "--draft", none], none),
        (["--target", pair[0], "--draft", pair[0]], "LlamaForCausalLM"),
        (["--target", pair[0], "--context", "99999"], "99999"),
        (["--target", pair[0], "--max-tokens", "1"], "max_tokens is 1"),
    ):
        assert run(*argv) == 2
        assert named in one_line(capsys)
    assert not list((tmp_path / "assets").iterdir())
    with pytest.raises(SystemExit) as stop:
        run("--target", pair[0], "--context", "0")
    assert stop.value.code == 2 and "'0'" in one_line(capsys)


def test_a_failed_measurement_writes_nothing(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiling._Steps, "verify", lambda self, rows: 1 / 0)
    out = tmp_path / "out.json"
    assert run("--target", pair[0], "--context", "4", "--json", str(out)) == 2
    assert "ZeroDivisionError" in one_line(capsys)
    assert not out.exists() and not list((tmp_path / "assets").iterdir())


def test_a_missing_matplotlib_is_told_before_measuring(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "hf_dspark.evaluation.plots", raising=False)
    assert run("--target", pair[0], "--plot", str(tmp_path / "plot.png")) == 2
    assert "hf-dspark[eval]" in one_line(capsys)
