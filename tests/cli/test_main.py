import json
import subprocess
import sys
import types

import pytest
import yaml

import hf_dspark
from hf_dspark import __version__, cli
from hf_dspark.errors import DSparkConfigError


def status_of(argv):
    """The exit status, whether `main` returns it or argparse exits with it."""
    try:
        return cli.main(argv)
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def verb_that(monkeypatch):
    """Replaces a verb's `run` by one that raises."""

    def replace(error):
        def run(args):
            raise error

        module = types.SimpleNamespace(HELP="help", add_arguments=lambda parser: None, run=run)
        monkeypatch.setattr(cli, "_verb", lambda name: module)

    return replace


def test_help_lists_every_verb(capsys):
    assert status_of(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {verb}" in text for verb in cli.VERBS)


def test_version(capsys):
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-dspark {__version__}\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_verb_has_help(verb, capsys):
    assert status_of([verb, "--help"]) == 0
    assert f"hf-dspark {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "x", "--draft"],
        ["generate", "x", "--draft", "d", "--max-new-tokens", "0"],
        ["generate", "x", "--draft", "d", "--temperature", "-1"],
        ["generate", "x", "--draft", "d", "--temperature", "hot"],
        ["eval", "--draft", "d"],
        ["eval", "--draft", "d", "--data", "f", "--limit", "few"],
    ],
)
def test_a_mistyped_command_is_one_line_and_status_2(argv, capsys):
    assert status_of(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and "error: " in printed.err and "--help" in printed.err


@pytest.mark.parametrize(
    "error",
    [
        DSparkConfigError("the value is wrong,\n  see below"),
        FileNotFoundError(2, "No such file", "x.yaml"),
        ConnectionError("no network"),
        json.JSONDecodeError("Expecting value", "{", 1),
        yaml.YAMLError("bad\nYAML"),
        UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "invalid"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_bad_input_is_one_line_and_status_2(error, verb_that, capsys):
    verb_that(error)
    assert cli.main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("hf-dspark: error: ") and printed.err.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback(verb_that):
    verb_that(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


def test_an_interrupt_is_130(verb_that, capsys):
    verb_that(KeyboardInterrupt())
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_a_verb_may_parse_its_own_command_line(monkeypatch):
    seen = []
    module = types.SimpleNamespace(HELP="help", PASS_ARGV=True, run=lambda argv: seen.append(argv) or 7)
    monkeypatch.setattr(cli, "_verb", lambda name: module)
    assert cli.main(["train", "--config", "x.yaml", "--help"]) == 7
    assert seen == [["--config", "x.yaml", "--help"]]


def test_a_reader_that_goes_away_is_no_error():
    script = "import sys; from hf_dspark.cli import main; sys.exit(main(['eval', '--help']) or 0)"
    piped = f'{sys.executable} -c "{script}" | head -n 1'
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_a_missing_extra_is_one_line():
    argv = ["eval", "--draft", "x/y", "--data", "none"]
    script = f"import sys; sys.modules['torchmetrics'] = None; from hf_dspark.cli import main; sys.exit(main({argv}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "hf-dspark[eval]" in done.stderr


def test_importing_the_package_leaves_the_heavy_parts_alone():
    heavy = ["datasets", "matplotlib", "torchmetrics", "transformers.trainer", "pandas", "gguf"]
    script = f"import sys, hf_dspark, hf_dspark.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_training_classes_are_public_names():
    from hf_dspark import DSparkTrainer, training

    assert DSparkTrainer is training.DSparkTrainer
    assert all(getattr(hf_dspark, name) is not None for name in hf_dspark.__all__)
    assert not hasattr(hf_dspark, "DSparkTreiner")
