"""Static confidence thresholds against acceptance: what a higher one saves, and what it costs (paper, figure 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DSparkConfigError
from ..generation.stats import GenerationStats
from ..modeling_dspark import DSparkDraftModel
from .blocks import all_prompts, generate_stats
from .partial import PartialResults
from .prompts import PromptSet
from .runs import ratio

THRESHOLDS = tuple(i / 10 for i in range(10))


@dataclass
class SweepRun:
    """Counts of one `generate` call.

    Attributes:
        temperature, prompt_set, index, threshold: which call.
        rounds: target forwards after the prefill.
        committed: new tokens of these rounds, the target's own ones included.
        drafts: draft tokens verified; a round has one row more.
        failure: the exception that switched drafting off, if any.
    """

    temperature: float
    prompt_set: str
    index: int
    threshold: float
    rounds: int
    committed: int
    drafts: int
    failure: str | None = None


@dataclass
class SweepPoint:
    """A threshold on a prompt set.

    Attributes:
        temperature, prompt_set, threshold: which.
        prompts, rounds, committed, drafts: sums over its calls (see `SweepRun`).
    """

    temperature: float
    prompt_set: str
    threshold: float
    prompts: int
    rounds: int
    committed: int
    drafts: int

    @property
    def acceptance_rate(self) -> float | None:
        """τ/(ℓ+1) over all rounds: tokens committed per row verified, the target's own token counted in both."""
        return ratio(self.committed, self.drafts + self.rounds)

    @property
    def tokens_per_round(self) -> float | None:
        """τ."""
        return ratio(self.committed, self.rounds)

    @property
    def drafts_per_round(self) -> float | None:
        """The mean scheduled length ℓ."""
        return ratio(self.drafts, self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, derived values included."""
        derived = ("acceptance_rate", "tokens_per_round", "drafts_per_round")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def sweep(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: DSparkDraftModel,
    prompt_sets: list[PromptSet],
    temperatures: tuple[float, ...] = (0.0,),
    max_new_tokens: int = 256,
    seed: int = 0,
    thresholds: tuple[float, ...] = THRESHOLDS,
    partial: PartialResults | None = None,
    on_result: Callable[[SweepRun], None] = lambda result: None,
) -> list[SweepRun]:
    """Generates for every prompt with every threshold.

    Args:
        target: the target model.
        tokenizer: the target's, with a chat template.
        draft: a draft model with a confidence head. Its calibrated temperatures apply where it has some.
        prompt_sets: what to generate for.
        temperatures: 0 means greedy.
        max_new_tokens: the limit of every call.
        seed: prompt i is sampled with seed + i.
        thresholds: of c_k; a block ends before the first draft below it. 0 verifies every block in full.
        partial: where finished calls are kept; those already there are not run again.
        on_result: called after each call, also for those found in `partial`.

    Raises:
        DSparkConfigError: the draft has no confidence head.
        DSparkDataError: the tokenizer has no chat template.
        DSparkTargetError: the draft does not fit the target.
    """
    if draft.confidence_head is None:
        raise DSparkConfigError("This draft model has no confidence head, so a threshold has nothing to compare.")
    draft.bind_target(target)
    runs = []
    for temperature in temperatures:
        for prompt in all_prompts(prompt_sets):
            for threshold in thresholds:
                key = (temperature, f"{prompt.digest} at {threshold:g}", prompt.index)
                row = partial.get(key) if partial is not None else None
                if row is not None:
                    run = SweepRun(**{**row, "prompt_set": prompt.prompt_set})
                else:
                    stats: GenerationStats = generate_stats(
                        target, tokenizer, draft, prompt, temperature, max_new_tokens, seed, threshold
                    )
                    counts = (stats.rounds, stats.new_tokens - 1, sum(stats.proposed), stats.failure)
                    run = SweepRun(temperature, prompt.prompt_set, prompt.index, threshold, *counts)
                    if partial is not None:
                        partial.add(key, asdict(run))
                runs.append(run)
                on_result(run)
    return runs


def sum_up(runs: list[SweepRun]) -> list[SweepPoint]:
    """One point per temperature, prompt set and threshold, in this order."""
    points: dict[tuple[float, str, float], SweepPoint] = {}
    for run in runs:
        key = (run.temperature, run.prompt_set, run.threshold)
        point = points.setdefault(key, SweepPoint(*key, 0, 0, 0, 0))
        point.prompts += 1
        point.rounds += run.rounds
        point.committed += run.committed
        point.drafts += run.drafts
    order = {name: i for i, name in enumerate(dict.fromkeys(run.prompt_set for run in runs))}
    return sorted(points.values(), key=lambda p: (p.temperature, order[p.prompt_set], p.threshold))
