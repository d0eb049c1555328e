"""What a training run will take, in time and memory, from a few of its own steps."""

from __future__ import annotations

import copy
import math
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .data import DSparkDataset
from .trainer import DSparkTrainer

_STRATA = 8  # measured steps: one from each eighth of the run's steps, sorted by their size
_EVALUATED = 32  # measured batches of the held-out data
_WARM_UP = 2  # steps before them; they have the largest batch, so that memory has peaked and is reused afterwards
_LOOK_AHEAD = 512  # steps of the run whose sizes are looked at


@dataclass
class RunEstimate:
    """Time and memory of a run.

    Attributes:
        steps: optimiser steps of the run.
        seconds_per_step, cpu_seconds_per_step: mean wall and CPU time; the latter is what a busy machine leaves alone.
        evaluations, seconds_per_evaluation: how often the held-out samples are evaluated, and what one takes.
        tokens_per_step: mean, padding included, over all processes.
        peak_bytes: per device, for this process; "cpu" is the process's peak resident memory.
        target_bytes, draft_bytes, training_bytes: of the peak, what the target's weights, the draft's weights, and
            gradients and optimiser take.
    """

    steps: int
    seconds_per_step: float
    cpu_seconds_per_step: float
    evaluations: int
    seconds_per_evaluation: float
    tokens_per_step: float
    peak_bytes: dict[str, int]
    target_bytes: int
    draft_bytes: int
    training_bytes: int

    @property
    def seconds(self) -> float:
        """Wall time of the run, without loading and without writing checkpoints."""
        return self.steps * self.seconds_per_step + self.evaluations * self.seconds_per_evaluation


def estimate_run(trainer: DSparkTrainer) -> RunEstimate:
    """Runs a few steps of `trainer`'s run and extrapolates; the trainer is used up by it. Writes nothing.

    Time comes from one step out of each eighth of the run's steps, sorted by size, so that no model of the cost is
    needed; memory from the largest batch. With `target_states` the cost is that of their first use.
    """
    args = trainer.args
    dataset: DSparkDataset = trainer.train_dataset
    loader = trainer.get_train_dataloader()
    steps = trainer.set_initial_training_values(args, loader)[-1]
    plan = _steps_of(trainer, loader, min(steps, _LOOK_AHEAD))
    cost = _cost_of(trainer)
    by_cost = sorted(plan, key=cost)
    largest = by_cost[-1]
    if steps > len(plan):  # sooner or later, the longest samples come
        order = sorted(range(len(dataset)), key=lambda i: len(dataset.samples[i][0]))
        longest = order[-len(largest[0]) :]
        largest = max(largest, [longest] * len(largest), key=cost)
    chosen = [by_cost[int((i + 0.5) * len(by_cost) / _STRATA)] for i in range(_STRATA)]
    with tempfile.TemporaryDirectory() as folder:
        probe = _probe(trainer, [largest] * _WARM_UP + chosen, folder)
        clock = _Clock()
        probe.add_callback(clock)
        probe.train()
        wall, cpu = (sum(times[-_STRATA:]) / _STRATA for times in clock.durations)
        evaluations, seconds = _evaluations(args, steps, trainer.eval_dataset), 0.0
        if evaluations:
            seconds = _evaluation_seconds(probe, trainer.eval_dataset)
    parameters = list(probe.draft.parameters())
    gradients = sum(_bytes(p) for p in parameters if p.requires_grad)
    moments = sum(_bytes(t) for s in _optimizer_states(probe) for t in s.values() if torch.is_tensor(t))
    return RunEstimate(
        steps=steps,
        seconds_per_step=wall,
        cpu_seconds_per_step=cpu,
        evaluations=evaluations,
        seconds_per_evaluation=seconds,
        tokens_per_step=sum(_padded_tokens(dataset, step) for step in plan) / len(plan),
        peak_bytes=_peaks(),
        target_bytes=sum(_bytes(p) for p in trainer.target.parameters()),
        draft_bytes=sum(_bytes(p) for p in parameters),
        training_bytes=gradients + moments,
    )


Step = list[list[int]]  # the micro-batches of one optimiser step, over all processes: indices into the dataset


def _steps_of(trainer: DSparkTrainer, loader: Any, count: int) -> list[Step]:
    """The first steps of the run, in its own order. An epoch's last one is filled up with its own samples."""
    sampler = loader.batch_sampler
    sampler = sampler.batch_sampler if isinstance(sampler, BatchSamplerShard) else sampler
    micro = trainer.args.gradient_accumulation_steps * trainer.args.world_size
    batches = [list(batch) for batch in islice(sampler, count * micro)]
    size = max(map(len, batches))
    batches = [(batch * size)[:size] for batch in batches]
    batches += [batches[-1]] * (-len(batches) % micro)
    return [batches[i : i + micro] for i in range(0, len(batches), micro)]


def _padded_tokens(dataset: DSparkDataset, step: Step) -> int:
    return sum(len(batch) * max(len(dataset.samples[i][0]) for i in batch) for batch in step)


def _cost_of(trainer: DSparkTrainer) -> Any:
    """What steps are sorted by: multiply-adds of the target on tokens, and of draft and heads on slots."""
    dataset, config = trainer.train_dataset, trainer.draft.config
    per_token = sum(p.numel() for p in trainer.target.parameters())
    per_slot = 3 * (sum(p.numel() for p in trainer.draft.layers.parameters()) + config.vocab_size * config.hidden_size)

    def cost(step: Step) -> int:
        anchors = sum(min(dataset.num_anchors, int(dataset.samples[i][1].sum())) for batch in step for i in batch)
        return per_token * _padded_tokens(dataset, step) + per_slot * anchors * config.block_size

    return cost


def _probe(trainer: DSparkTrainer, plan: list[Step], folder: str) -> DSparkTrainer:
    """A trainer whose run is `plan`, and which logs, saves and evaluates nothing."""
    args = copy.copy(trainer.args)
    args.output_dir = folder
    args.max_steps, args.report_to, args.disable_tqdm = len(plan), [], True
    args.save_strategy, args.train_sampling_strategy = SaveStrategy.NO, "sequential"
    args.eval_strategy = args.logging_strategy = IntervalStrategy.NO
    args.load_best_model_at_end, args.push_to_hub, args.check_data = False, False, False
    args.target_states = None if args.target_states is None else folder
    samples = [trainer.train_dataset.samples[i] for step in plan for batch in step for i in batch]
    probe = DSparkTrainer(
        model=trainer.draft,
        target=trainer.target,
        args=args,
        train_dataset=DSparkDataset(samples, trainer.train_dataset.num_anchors, trainer.train_dataset.seed),
    )
    probe.remove_callback(PrinterCallback)
    return probe


class _Clock(TrainerCallback):
    """Durations of the steps, wall and CPU, what is between them (the next batch) included."""

    def __init__(self) -> None:
        self.durations: tuple[list[float], list[float]] = ([], [])
        self._last = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = _now()
        for times, before, after in zip(self.durations, self._last, now):
            times.append(after - before)
        self._last = now


def _now() -> tuple[float, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def _evaluations(args: Any, steps: int, dataset: DSparkDataset | None) -> int:
    """Those that the strategy asks for, the last of them after the last step; without a strategy that one alone."""
    if dataset is None:
        return 0
    if args.eval_strategy == IntervalStrategy.STEPS:
        return math.ceil(steps / (args.eval_steps if args.eval_steps >= 1 else math.ceil(steps * args.eval_steps)))
    return math.ceil(args.num_train_epochs) if args.eval_strategy == IntervalStrategy.EPOCH else 1


def _evaluation_seconds(probe: DSparkTrainer, dataset: DSparkDataset) -> float:
    """From some batches; the held-out samples are in random order. Before them the longest ones, for their memory.

    Every batch has shapes of its own, and on a CPU the heap grows with them for a while: eight are too few to see it.
    """
    batch = probe.args.eval_batch_size * probe.args.world_size
    longest = sorted(dataset.samples, key=lambda sample: len(sample[0]))[-batch:]
    probe.evaluate(DSparkDataset(longest, dataset.num_anchors, dataset.seed))
    measured = min(len(dataset), _EVALUATED * batch)
    part = DSparkDataset(dataset.samples[:measured], dataset.num_anchors, dataset.seed)
    start = _now()[0]
    probe.evaluate(part)
    return (_now()[0] - start) * len(dataset) / measured


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_states(probe: DSparkTrainer) -> list[dict[str, Any]]:
    optimizer: Any = probe.optimizer.optimizer  # type: ignore[union-attr]  # accelerate's wrapper around ours
    parts = optimizer.parts if probe.args.muon_learning_rate is not None else [optimizer]
    return [state for part in parts for state in part.state.values()]


def peak_memory() -> int:
    """The largest resident memory that this process has had, in bytes."""
    if sys.platform == "linux":  # what `getrusage` says there, a process inherits from the one that started it
        with open("/proc/self/status", encoding="ascii") as stream:
            line = next(line for line in stream if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peaks() -> dict[str, int]:
    peaks = {"cpu": peak_memory()}
    for index in range(torch.cuda.device_count()):
        if torch.cuda.max_memory_reserved(index):
            peaks[f"cuda:{index}"] = torch.cuda.max_memory_reserved(index)
    return peaks
