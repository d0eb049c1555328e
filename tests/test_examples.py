"""The scripts in `examples/` run as they stand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def run(script: str, *options: str, status: int = 0) -> str:
    """Runs a script in a process of its own; gives what it printed."""
    argv = [sys.executable, str(EXAMPLES / script), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1200)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """What `train_your_own.py` says and leaves."""
    folder = tmp_path_factory.mktemp("own")
    return folder, run("train_your_own.py", "--folder", str(folder))


def test_train_your_own(own):
    folder, printed = own
    assert "20 of 20 texts are the plain ones" in printed
    per_pass = float(printed.split("plain ones; ")[1].split(" ")[0])
    assert per_pass > 2  # it has learnt something
    (facts,) = json.loads((folder / "draft" / "training_facts.json").read_text())["runs"]
    assert facts["steps"] == 250 and facts["data"]["names"] == ["answers of the target"]


def test_generate(own):
    printed = run("generate.py", "count from 5 to 19", "--draft", str(own[0] / "draft"), "--max-new-tokens", "40")
    # Where it stops counting is the little target's affair, and not the same on every machine.
    assert printed.count("5 6 7 8 9 10 11 12") == 2 and "The two texts are the same." in printed
    sampled = run("generate.py", "spell owl", "--draft", str(own[0] / "draft"), "--temperature", "0.7")
    assert "drafts accepted" in sampled and "The two texts" not in sampled


def test_calibrate(own):
    folder = own[0]
    printed = run("calibrate.py", "--draft", str(folder / "draft"), "--data", str(folder / "prompts.jsonl"))
    written = "written into" in printed
    assert written or "nothing was written" in printed
    config = json.loads((folder / "draft" / "config.json").read_text())
    temperatures = config.get("confidence_temperatures")
    assert (len(temperatures["greedy"]) == 5) if written else temperatures is None
    assert (len(config["confidence_shifts"]["greedy"]) == 5) if written else config.get("confidence_shifts") is None


def test_push(own):
    """A dry run unless told otherwise; the draft that ships needs nothing more, one of one's own its target's id."""
    printed = run("push.py")
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in printed and "Nothing was pushed" in printed
    folder = str(own[0] / "draft")
    assert "--base-model" in run("push.py", folder, "me/own", status=1)
    printed = run("push.py", folder, "me/own", "--base-model", "me/own-target", "--license", "mit")
    assert "| data | answers of the target |" in printed and "training_facts.json" in printed
    assert "Left out: " in printed and "tokenizer.json" in printed


@pytest.mark.real
def test_generate_with_the_draft_that_ships():
    printed = run("generate.py", "--max-new-tokens", "24")
    assert "24 tokens in" in printed and "drafts accepted" in printed


@pytest.mark.real
def test_a_batch_with_the_draft_that_ships():
    printed = run("batch.py", "Why is the sky blue?", "Say hello.", "--max-new-tokens", "24")
    assert printed.count("> Why is the sky blue?") == 2 and printed.count("> Say hello.") == 2
    assert printed.count("accepted length") == 2
