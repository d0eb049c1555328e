"""Measuring what a target's forward and a draft model's block cost on this machine, and keeping it (DESIGN §7).

`measure_throughput` times what the decoding loop does: forwards of B rows on a filled cache with the choice of their
tokens, and blocks of the draft model. `load_cached_profile` finds the measurement again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import platform
import random
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import cached_assets_path
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..candidate_generator import DSparkCandidateGenerator
from ..errors import DSparkConfigError, DSparkError, DSparkMeasurementError, DSparkTargetError
from ..modeling_dspark import DSparkDraftModel
from ..scheduling.throughput import ThroughputCurve, ThroughputProfile

logger = logging.get_logger(__name__)

CONTEXT_LENGTHS = (128, 512)
_VERSION = 1  # part of the cache key: raise it when other things are measured under the same name
_LEAST = 3  # a median of fewer times is not one
_STEADY, _UNUSABLE = 0.02, 0.10  # standard error of a median, as a share of it: where to stop, what to refuse
_MORE = 4  # times `repeats`: the most rounds that a noisy machine is given
_COMMITTED = 2  # tokens that enter the draft's context before each block, as after a round with one draft accepted


_Job = tuple[int | str, int]  # (context tokens, rows), or ("draft", length)


# --------------------------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------------------------
def measure_throughput(
    target: PreTrainedModel,
    draft: DSparkDraftModel | None = None,
    *,
    max_tokens: int | None = None,
    context_lengths: Sequence[int] | None = None,
    repeats: int = 7,
    warmup: int = 2,
    seconds_limit: float = 120.0,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ThroughputProfile:
    """Measures the target's forwards by rows and context length, and the draft's blocks by length.

    Everything is timed in turn, in a new order each round, so that a machine that is busy for a while is so for all of
    it, and what slowed a whole round is taken out; then medians count. Rounds are added while a median is uncertain by
    more than 2 %.

    Args:
        target: the model, on its device, as it will generate.
        draft: a draft model for it; the target's forwards then also hand out the tapped hidden states.
        max_tokens: the most rows of a forward, at least 2; by default what a full block needs, and at least 8.
        context_lengths: tokens in the cache; by default 128 and 512, or what the target has positions for.
        repeats: rounds that count, at least 3.
        warmup: rounds before them that do not.
        seconds_limit: about how long it may take. A slow model gets fewer rounds, but not fewer than 3.
        cache: whether `load_cached_profile` is to find the result.
        progress: called with (rounds done, rounds planned) after each round; the plan grows on a noisy machine.

    Raises:
        DSparkConfigError: an argument is not allowed.
        DSparkTargetError: the target cannot be used with a draft model at all.
        DSparkMeasurementError: a forward failed or gave NaN, the draft failed, the times vary too much to be used, or
            3 rounds do not fit into the limit. Nothing is kept.
    """
    if draft is not None:
        draft.bind_target(target)
    gamma = 0 if draft is None else draft.config.num_draft_tokens
    max_tokens = max(8, gamma + 1) if max_tokens is None else max_tokens
    contexts = _contexts(target, context_lengths, max_tokens)
    for name, value, least in (("max_tokens", max_tokens, 2), ("repeats", repeats, _LEAST), ("warmup", warmup, 0)):
        if value < least:
            raise DSparkConfigError(f"{name} is {value}, but must be at least {least}.")
    if not 0 < seconds_limit < math.inf:
        raise DSparkConfigError(f"seconds_limit is {seconds_limit}, but must be positive and finite.")

    try:
        steps = {context: _Steps(target, draft, context, max_tokens) for context in contexts}
        jobs: dict[_Job, Callable[[], float]] = {
            (context, rows): partial(steps[context].verify, rows)
            for context in contexts
            for rows in row_counts(max_tokens)
        }
        jobs |= {("draft", n): partial(steps[contexts[-1]].propose, n) for n in range(1, gamma + 1)}
        with steps[contexts[0]].decoding():
            times = _interleaved(jobs, repeats, warmup, seconds_limit, progress)
    except DSparkError:
        raise
    except Exception as error:
        raise DSparkMeasurementError(
            f"The measurement failed: {type(error).__name__}: {error} Where memory is short, measure shorter contexts "
            "or fewer rows; nothing was kept."
        ) from error
    typical, spread = dict(zip(jobs, _typical(times))), dict(zip(jobs, _spreads(times)))
    profile = ThroughputProfile(
        {c: ThroughputCurve.from_seconds({b: typical[c, b] for b in row_counts(max_tokens)}) for c in contexts},
        {c: tuple(spread[c, b] for b in row_counts(max_tokens)) for c in contexts},
        None if draft is None else tuple(typical["draft", n] for n in range(1, gamma + 1)),
        profile_facts(target, draft),
    )
    if cache:
        try:
            profile.save(cached_profile_path(target, draft))
        except (OSError, ValueError) as error:  # no home to write to; the result is good all the same
            logger.warning(f"The measured throughput could not be kept for later calls: {error}")
    return profile


def row_counts(max_tokens: int) -> list[int]:
    """The numbers of rows to measure: each up to 16, then four per doubling, and the last."""
    counts, b = [], 1
    while b < max_tokens:
        counts.append(b)
        b += 1 if b < 16 else 2 ** (b.bit_length() - 3)
    return [*counts, max_tokens]


def _contexts(target: PreTrainedModel, asked: Sequence[int] | None, max_tokens: int) -> list[int]:
    """The context lengths in ascending order, checked against the target's positions."""
    room = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    room -= max_tokens + 1
    contexts = sorted(set(CONTEXT_LENGTHS if asked is None else asked))
    if asked is None:
        contexts = [length for length in contexts if length <= room] or [max(room // 2, 1)]
    if not contexts or contexts[0] < 1 or contexts[-1] > room:
        raise DSparkConfigError(
            f"context_lengths is {contexts}, but must be one length or more, each from 1 to {room} (the target's "
            f"positions less the {max_tokens + 1} that are measured)."
        )
    return contexts


def _interleaved(
    jobs: dict[_Job, Callable[[], float]],
    repeats: int,
    warmup: int,
    seconds_limit: float,
    progress: Callable[[int, int], None] | None,
) -> np.ndarray:
    """Times [rounds, jobs] of jobs run in turn, in rounds, until their medians are known or the time is up."""
    deadline = perf_counter() + seconds_limit
    random_order, order = random.Random(0), list(jobs)
    rounds: list[list[float]] = []
    for done in range(1, warmup + _MORE * repeats + 1):
        random_order.shuffle(order)  # so that no job always follows the same one
        seconds = {job: jobs[job]() for job in order}
        if done > warmup:
            rounds.append([seconds[job] for job in jobs])
        steady = len(rounds) >= repeats and _uncertainty(np.array(rounds)) <= _STEADY
        late = perf_counter() > deadline
        if progress is not None:
            progress(done, done if steady or late else max(warmup + repeats, done + 1))
        if late and len(rounds) < _LEAST:
            raise DSparkMeasurementError(
                f"Only {len(rounds)} rounds of measurements (of {_LEAST} needed) fitted into the limit of "
                f"{seconds_limit:g} seconds. Raise the limit, or measure fewer rows; nothing was kept."
            )
        if steady or late:
            break
    times = np.array(rounds)
    error = _uncertainty(times)
    if error > _UNUSABLE:
        raise DSparkMeasurementError(
            f"The times vary so much that their medians are uncertain by {error:.0%} (at most {_UNUSABLE:.0%} can be "
            "used). Something else keeps this machine busy; measure again when it is quiet. Nothing was kept."
        )
    return times


def _even(times: np.ndarray) -> np.ndarray:
    """Times [rounds, jobs] with what slowed a whole round taken out: each round over its typical ratio to the jobs'
    medians. A machine that is slower for a while is so for all jobs alike, and their ratios are what matters."""
    medians = np.median(times, axis=0)
    for _ in range(4):  # the two kinds of medians depend on each other; this is plenty
        pace = np.median(times / medians, axis=1, keepdims=True)
        pace /= np.median(pace)  # the typical round keeps its seconds
        medians = np.median(times / pace, axis=0)
    return times / pace


def _typical(times: np.ndarray) -> list[float]:
    """Seconds of each job, from times [rounds, jobs]."""
    return np.median(_even(times), axis=0).tolist()


def _spreads(times: np.ndarray) -> list[float]:
    """Median absolute deviation over median of each job, what slowed whole rounds left out."""
    even = _even(times)
    medians = np.median(even, axis=0)
    return (np.median(np.abs(even - medians), axis=0) / medians).tolist()


def _uncertainty(times: np.ndarray) -> float:
    """The largest standard error of a median, as a share of it: 1.2533·σ/√n, with 1.4826·MAD for σ."""
    return 1.2533 * 1.4826 * max(_spreads(times)) / math.sqrt(len(times))


class _Steps:
    """The target's cache filled with `context` tokens, an anchor after them, and the loop's two steps from there."""

    def __init__(self, target: Any, draft: DSparkDraftModel | None, context: int, max_tokens: int):
        from .loop import check_cache  # here, because the loop looks its curve up in this module
        from .seam import TransformersHost

        if target.config.is_encoder_decoder:
            raise DSparkTargetError(
                f"{type(target).__name__} is an encoder-decoder; only decoder-only targets can be measured."
            )
        self._target, self._draft, self._host = target, draft, TransformersHost(target)
        self._context = context
        self._ids = _random_ids(target, context + max_tokens)  # [1, T + most rows]: context, anchor, drafts
        text_config = target.config.get_text_config(decoder=True)
        kwargs: dict[str, Any] = {"cache": DynamicCache(config=text_config), "use_cache": True}
        check_cache(kwargs["cache"])
        # What `generate` hands to the loop: no mask where nothing is padded, positions where they are taken.
        accepted = inspect.signature(target.forward).parameters
        if "position_ids" in accepted:
            kwargs["position_ids"] = torch.arange(context, device=target.device)[None]
        if "logits_to_keep" in accepted:
            kwargs["logits_to_keep"] = 1
        if draft is not None:
            kwargs["output_hidden_states"] = [i + 1 for i in draft.config.target_layer_ids]
        with torch.no_grad():
            inputs = target.prepare_inputs_for_generation(self._ids[:, :context], is_first_iteration=True, **kwargs)
            self._prefilled = target(**inputs, return_dict=True)
        kwargs["cache"] = self._prefilled.cache
        self._cache = kwargs["cache"]
        self._cache.activate_past_recording()
        self._kwargs = self._host.advance(kwargs, 1)

    def decoding(self) -> Any:
        """The host's context manager around its decoding steps."""
        return self._host.decoding()

    @torch.no_grad()
    def verify(self, rows: int) -> float:
        """Seconds of a forward on the anchor and `rows` - 1 drafts, with the choice of a token in every row.

        Raises:
            DSparkMeasurementError: the logits are NaN.
        """
        _synchronize(self._target)
        started = perf_counter()
        ids, kwargs = self._ids[:, : self._context + rows], self._kwargs
        if rows > 1:
            kwargs = self._host.advance(dict(kwargs), rows - 1)
        inputs = self._target.prepare_inputs_for_generation(ids, next_sequence_length=rows, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = rows
        logits = self._target(**inputs, return_dict=True).logits[0, -rows:]  # [rows, V]
        logits.max(dim=-1).indices.tolist()  # as the loop: this is where the host waits for the device
        seconds = perf_counter() - started
        self._cache.crop(-rows)
        if bool(logits.isnan().any()):
            raise DSparkMeasurementError(
                f"{type(self._target).__name__} gives NaN logits on {rows} rows, so its times mean nothing; try "
                "another dtype. Nothing was kept."
            )
        return seconds

    @torch.no_grad()
    def propose(self, length: int) -> float:
        """Seconds of drafting `length` tokens greedily, the last round's tokens entering the context included.

        Raises:
            DSparkMeasurementError: the draft failed, stopped early, or gave NaN.
        """
        assert self._draft is not None
        config = GenerationConfig(num_assistant_tokens=self._draft.config.num_draft_tokens)
        generator = DSparkCandidateGenerator(self._draft, config)
        generator.limit, generator.threshold = self._draft.config.num_draft_tokens, None
        features = generator.features(self._prefilled.hidden_states)  # [1, T, L·Ht]
        positions = torch.arange(self._context, device=self._ids.device)[None]
        ids = self._ids[:, : self._context + 1]
        anchor_position = torch.tensor([self._context], device=ids.device)
        late = min(_COMMITTED, self._context - 1)  # the rest of the context is there before the clock starts
        generator.observe(features[:, : self._context - late], positions[:, : self._context - late])
        generator.propose(ids, anchor_position, 1)
        generator.observe(features[:, self._context - late :], positions[:, self._context - late :])
        self.verify(1)  # in a real round the target's weights have just gone through the caches
        _synchronize(self._target)
        started = perf_counter()
        block = generator.propose(ids, anchor_position, length)
        _synchronize(self._target)
        seconds = perf_counter() - started
        if block.length != length or not bool(block.usable.all()):
            why = generator.failure or "it stopped early or gave NaN"
            raise DSparkMeasurementError(
                f"The draft model gave {int(block.usable.sum())} of {length} drafts ({why}), so its time means "
                "nothing. Nothing was kept."
            )
        return seconds


def _random_ids(target: Any, count: int) -> torch.Tensor:
    """int64 [1, count], the same for every call; no ids that stand for images and the like."""
    config = target.config
    special = {value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))
               and isinstance(value, int)}  # fmt: skip
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
    plain = next(i for i in range(vocab_size) if i not in special)
    ids[torch.isin(ids, torch.tensor(sorted(special), dtype=torch.long))] = plain
    return ids.to(target.device)


def _synchronize(target: Any) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize()


# --------------------------------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------------------------------
def load_cached_profile(target: PreTrainedModel, draft: DSparkDraftModel | None = None) -> ThroughputProfile | None:
    """The profile that `measure_throughput` kept for this pair in this setting; `None` when there is none.

    With a draft model, a profile of the target alone is second best: its `draft_seconds` is `None`. A file that cannot
    be read is passed over with one warning.
    """
    for model in dict.fromkeys((draft, None)):
        try:
            path = cached_profile_path(target, model)
            if path.is_file():
                return ThroughputProfile.load(path)
        except (DSparkError, OSError, ValueError) as error:
            logger.warning_once(f"The kept throughput measurement is passed over: {error}")
    return None


def cached_profile_path(target: PreTrainedModel, draft: DSparkDraftModel | None = None) -> Path:
    """Where the profile of this pair in this setting is kept, whether or not it is there."""
    folder = cached_assets_path("hf_dspark", namespace="throughput", subfolder="profiles")
    return Path(folder) / f"{profile_key(target, draft)}.json"


def profile_key(target: PreTrainedModel, draft: DSparkDraftModel | None = None) -> str:
    """A hash of all that the times depend on: `profile_facts` but for the models' names."""
    facts = {name: value for name, value in profile_facts(target, draft).items() if name not in ("target", "draft")}
    return hashlib.sha256(json.dumps([_VERSION, facts], sort_keys=True).encode()).hexdigest()[:32]


def profile_facts(target: PreTrainedModel, draft: DSparkDraftModel | None = None) -> dict[str, Any]:
    """What is measured, and where; JSON-ready. The weights' values are left out: they do not change a time."""
    facts: dict[str, Any] = {
        "target": target.config.name_or_path or type(target).__name__,
        **{f"target_{name}": value for name, value in _model_facts(target).items()},
        "device": _device_name(target.device),
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    devices = sorted({str(device) for device in (getattr(target, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        facts["split_over"] = devices
    if draft is not None:
        facts["draft"] = draft.config.name_or_path or type(draft).__name__
        facts |= {f"draft_{name}": value for name, value in _model_facts(draft).items()}
        facts["draft_device"] = _device_name(draft.device)
    return facts


def _model_facts(model: Any) -> dict[str, Any]:
    quantization = getattr(model.config, "quantization_config", None) or {}
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return {
        "class": type(model).__name__,
        "config": _config_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": values.get("quant_method"),  # its settings are part of the config
        "attention": model.config.get_text_config(decoder=True)._attn_implementation,
    }


# Fields without an influence on a time, which differ between copies of a model, or change in a draft's life.
_IDLE_FIELDS = {
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"),
    *("confidence_temperatures", "confidence_shifts", "target_model_name_or_path", "target_revision"),
    "training_max_length",
}
_fingerprints: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _config_fingerprint(model: Any) -> str:
    """A hash of the config, quantisation included; computed once per model, which takes milliseconds."""
    known = _fingerprints.get(model)
    if known is None:
        values = {name: value for name, value in model.config.to_dict().items() if name not in _IDLE_FIELDS}
        text = json.dumps(values, sort_keys=True, default=str)
        known = _fingerprints[model] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return known


@lru_cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    name = platform.processor()
    try:  # Linux leaves the name out of what `platform` asks
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name} ({platform.machine()})"
