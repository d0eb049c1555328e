"""Runs a target over prompt sets: plain, and with every draft model, interleaved prompt by prompt.

Machines drift (clocks, other load), so the runs that are compared are made one after the other on the same prompt, and
their order rotates from prompt to prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import DSparkConfigError
from ..modeling_dspark import DSparkDraftModel
from .comparison import DIFFERENT, Divergence, compare_greedy
from .metrics import SpeculationMetric, Summary, average_over_sets
from .partial import PartialResults
from .prompts import PromptSet, encode
from .runs import PLAIN, Run, generation_kwargs, timed_generate

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class EvaluationSettings:
    """How to generate.

    Attributes:
        max_new_tokens: the limit of every call.
        temperatures: 0 means greedy, where the text is compared with the plain one.
        top_k, top_p: for temperatures above 0; 0 and 1 (off) sample from the target's whole distribution.
        seed: prompt i is sampled with seed + i, in every run.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [t for t in self.temperatures if t < 0]
        if wrong or not self.temperatures:
            raise DSparkConfigError(f"temperatures {list(self.temperatures)!r}: give one or more, all at least 0.")
        if self.max_new_tokens < 3:
            raise DSparkConfigError(
                f"max_new_tokens is {self.max_new_tokens}; give 3 or more: with fewer nothing is drafted."
            )


@dataclass
class PromptResult:
    """All runs of one prompt at one temperature.

    Attributes:
        temperature, prompt_set, index: which one.
        runs: in the order in which they were made.
        divergences: per draft model where its greedy text leaves the plain one; absent where it does not.
    """

    temperature: float
    prompt_set: str
    index: int
    runs: list[Run]
    divergences: dict[str, Divergence]

    @property
    def key(self) -> tuple[float, str, int]:
        """Identifies the prompt within an evaluation."""
        return (self.temperature, self.prompt_set, self.index)

    def run(self, name: str) -> Run:
        """The run of that name."""
        return next(run for run in self.runs if run.name == name)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> PromptResult:
        """The inverse of `to_dict`."""
        runs = [Run.from_dict(run) for run in row["runs"]]
        divergences = {name: Divergence(**value) for name, value in row["divergences"].items()}
        return cls(row["temperature"], row["prompt_set"], row["index"], runs, divergences)


@dataclass
class SetResult:
    """One draft model on one prompt set at one temperature.

    Attributes:
        identical: greedy texts that equal the plain ones; `None` when sampling.
        ties, different: greedy texts that part from the plain ones, by label.
    """

    temperature: float
    prompt_set: str
    draft: str
    summary: Summary
    identical: int | None
    ties: int
    different: int


@dataclass
class Evaluation:
    """Everything an evaluation gave."""

    drafts: list[str]
    prompt_results: list[PromptResult]
    set_results: list[SetResult]

    @property
    def failures(self) -> list[str]:
        """One sentence per reason not to trust the numbers: another text, a draft that failed or proposed nothing."""
        sentences = [
            f"{name}, {result.prompt_set} prompt {result.index}: {divergence}."
            for result in self.prompt_results
            for name, divergence in result.divergences.items()
            if divergence.label == DIFFERENT
        ]
        sentences += [
            f"{run.name}, {result.prompt_set} prompt {result.index}: drafting failed ({run.stats.failure})."
            for result in self.prompt_results
            for run in result.runs
            if run.stats is not None and run.stats.failure is not None
        ]
        for result in self.set_results:
            if not result.summary.proposed_per_round:
                sentences.append(f"{result.draft}, {result.prompt_set}: not one draft token was proposed.")
        return sentences

    def averages(self) -> list[dict[str, Any]]:
        """Per temperature and draft model, the mean over prompt sets."""
        rows = []
        for temperature in dict.fromkeys(result.temperature for result in self.set_results):
            for draft in self.drafts:
                summaries = [r.summary for r in self.set_results if (r.temperature, r.draft) == (temperature, draft)]
                rows.append({"temperature": temperature, "draft": draft, **average_over_sets(summaries)})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict: `sets`, `averages`, `divergences` and `prompts` (every single run)."""
        divergences = [
            {
                **{"temperature": result.temperature, "prompt_set": result.prompt_set, "index": result.index},
                **{"draft": name, **asdict(divergence), "gap": divergence.gap},
            }
            for result in self.prompt_results
            for name, divergence in result.divergences.items()
        ]
        return {
            "sets": [asdict(result) for result in self.set_results],
            "averages": self.averages(),
            "divergences": divergences,
            "prompts": [result.to_dict() for result in self.prompt_results],
        }


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: dict[str, DSparkDraftModel],
    prompt_sets: list[PromptSet],
    settings: EvaluationSettings,
    partial: PartialResults | None = None,
    on_result: Callable[[PromptResult], None] = lambda result: None,
) -> Evaluation:
    """Measures draft models against plain `generate`.

    Args:
        target: the target model.
        tokenizer: the target's, with a chat template.
        drafts: by display name.
        prompt_sets: what to generate for.
        settings: how to generate.
        partial: where finished prompts are kept; those already there are not run again.
        on_result: called after each prompt, also for those found in `partial`.

    Raises:
        DSparkDataError: the tokenizer has no chat template.
        DSparkTargetError: a draft model does not fit the target.
    """
    for draft in drafts.values():
        draft.bind_target(target)
    runner = _Runner(target, tokenizer, drafts, settings)
    results = []
    for temperature in settings.temperatures:
        for prompts in prompt_sets:
            for index, conversation in enumerate(prompts.conversations):
                row = partial.get((temperature, prompts.name, index)) if partial is not None else None
                if row is not None:
                    result = PromptResult.from_dict(row)
                else:
                    result = runner.run_prompt(temperature, prompts.name, index, conversation)
                    if partial is not None:
                        partial.add(result.key, result.to_dict())
                results.append(result)
                on_result(result)
    return Evaluation(list(drafts), results, _summarise(results, drafts))


class _Runner:
    """Makes the runs of one prompt; warms everything up before the first one that counts."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafts: dict[str, DSparkDraftModel],
        settings: EvaluationSettings,
    ):
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.contestants: list[tuple[str, DSparkDraftModel | None]] = [(PLAIN, None), *drafts.items()]
        self.warm_temperatures: set[float] = set()

    def run_prompt(
        self, temperature: float, prompt_set: str, index: int, conversation: list[dict[str, str]]
    ) -> PromptResult:
        inputs = encode(self.tokenizer, conversation, self.target.device)
        settings = self.settings
        kwargs = generation_kwargs(settings.max_new_tokens, temperature, settings.top_k, settings.top_p)
        seed = settings.seed + index if temperature > 0 else None
        if temperature not in self.warm_temperatures:
            self.warm_temperatures.add(temperature)
            short = {**kwargs, "max_new_tokens": min(_WARM_UP_TOKENS, settings.max_new_tokens)}
            for name, draft in self.contestants:
                timed_generate(self.target, inputs, draft, name, seed, **short)
        shift = index % len(self.contestants)
        order = self.contestants[shift:] + self.contestants[:shift]
        runs = [timed_generate(self.target, inputs, draft, name, seed, **kwargs) for name, draft in order]
        result = PromptResult(temperature, prompt_set, index, runs, {})
        if temperature == 0:
            plain = result.run(PLAIN).tokens
            for run in runs:
                divergence = compare_greedy(self.target, inputs, plain, run.tokens, **kwargs)
                if divergence is not None:
                    result.divergences[run.name] = divergence
        return result


def _summarise(results: list[PromptResult], drafts: dict[str, DSparkDraftModel]) -> list[SetResult]:
    set_results = []
    groups = dict.fromkeys((result.temperature, result.prompt_set) for result in results)
    for temperature, prompt_set in groups:
        group = [r for r in results if (r.temperature, r.prompt_set) == (temperature, prompt_set)]
        for name, draft in drafts.items():
            metric = SpeculationMetric(draft.config.num_draft_tokens)
            for result in group:
                metric.update(result.run(PLAIN), result.run(name))
            found = [result.divergences[name] for result in group if name in result.divergences]
            different = sum(divergence.label == DIFFERENT for divergence in found)
            identical = len(group) - len(found) if temperature == 0 else None
            summary = metric.compute()
            set_results.append(
                SetResult(temperature, prompt_set, name, summary, identical, len(found) - different, different)
            )
    return set_results
