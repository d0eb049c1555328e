"""One prompt, generated twice: plain, and with a draft model. Shared by `demo` and `generate`."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .loading import (
    add_model_arguments,
    load_draft,
    load_target,
    positive,
    progress_line,
    quiet_libraries,
    target_name,
    temperature,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.comparison import Divergence
    from ..evaluation.runs import Run
    from ..generation.stats import GenerationStats

_WARM_UP_TOKENS = 16


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `demo` and `generate` share."""
    add_model_arguments(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="for temperatures above 0; default: 0")
    parser.add_argument("--no-chat-template", action="store_true", help="continue the bare prompt")
    parser.add_argument("--json", action="store_true", help="print both runs as JSON instead of streaming them")


@dataclass
class PairResult:
    """Both runs of a prompt.

    Attributes:
        divergence: where the greedy texts part; `None` when they are the same, or were sampled.
        sampled: whether the temperature was above 0; then the two texts differ by nature.
    """

    plain: Run
    draft: Run
    divergence: Divergence | None
    sampled: bool

    @property
    def verdict(self) -> str:
        """One line on whether the texts are the same."""
        if self.sampled:
            return "The texts were sampled: their distribution is the same, the texts need not be."
        if self.divergence is None:
            return "The texts are identical."
        if self.divergence.label == "tie":
            return f"The texts are identical up to a tie of the two best logits: {self.divergence}."
        return f"The texts differ: {self.divergence}."

    @property
    def status(self) -> int:
        """Exit status: 1 when the texts differ for no good reason, or the draft failed or proposed nothing."""
        different = self.divergence is not None and self.divergence.label != "tie"
        return int(different or self.nothing_proposed or self.stats.failure is not None)

    @property
    def stats(self) -> GenerationStats:
        """Of the run with the draft model."""
        return self.draft.stats  # type: ignore[return-value]  # None for plain runs only

    @property
    def nothing_proposed(self) -> bool:
        """Whether there was room for drafts, but not one in any round."""
        had_room = any(reason != "length budget" for reason in self.stats.reasons)
        return had_room and not any(self.stats.proposed)


def run_pair(prompt: str, draft_path: str, args: argparse.Namespace) -> int:
    """Loads the pair, generates twice, shows both; returns the exit status."""
    quiet_libraries()
    from rich.console import Console

    from ..errors import DSparkDataError
    from ..evaluation.prompts import encode
    from .pair_view import PairView

    if not prompt.strip():
        raise DSparkDataError("The prompt is empty; give some text.")
    with progress_line() as report:
        name, revision = target_name(args, draft_path)
        target, tokenizer = load_target(name, args, report, revision)
        draft = load_draft(draft_path, target, args)
        if args.no_chat_template:
            inputs = dict(tokenizer(prompt, return_tensors="pt").to(target.device))
            inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        else:
            inputs = encode(tokenizer, [{"role": "user", "content": prompt}], target.device)
        report("Warming up")
        _generate_pair(target, draft, inputs, args, min(_WARM_UP_TOKENS, args.max_new_tokens))
    if args.json:
        result = _generate_pair(target, draft, inputs, args, args.max_new_tokens)
        print(json.dumps(_as_json(result, tokenizer, prompt, name, draft_path, args), indent=2))
    else:
        with PairView(Console(), tokenizer, target, prompt) as view:
            result = _generate_pair(target, draft, inputs, args, args.max_new_tokens, view)
        view.print_result(result)
    return result.status


def _generate_pair(
    target: PreTrainedModel, draft: Any, inputs: dict[str, Any], args: argparse.Namespace, limit: int, view: Any = None
) -> PairResult:
    from ..evaluation.comparison import compare_greedy
    from ..evaluation.runs import PLAIN, generation_kwargs, timed_generate

    kwargs = generation_kwargs(limit, args.temperature)
    runs = []
    for name, assistant in ((PLAIN, None), ("dspark", draft)):
        on_tokens = view.start(name) if view is not None else None
        runs.append(timed_generate(target, inputs, assistant, name, args.seed, on_tokens, **kwargs))
        if view is not None:
            view.finish(runs[-1])
    plain, drafted = runs
    sampled = args.temperature > 0
    divergence = None if sampled else compare_greedy(target, inputs, plain.tokens, drafted.tokens, **kwargs)
    return PairResult(plain, drafted, divergence, sampled)


def _as_json(
    result: PairResult,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    target: str,
    draft: str,
    args: argparse.Namespace,
) -> dict[str, Any]:
    from dataclasses import asdict

    from ..evaluation.runs import decode_speedup, end_to_end_speedup

    def described(run: Run) -> dict[str, Any]:
        return {
            "text": tokenizer.decode(run.tokens, skip_special_tokens=True),
            "tokens_per_second": run.tokens_per_second,
            **run.to_dict(),
        }

    return {
        "prompt": prompt,
        "target": target,
        "draft": draft,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "plain": described(result.plain),
        "dspark": described(result.draft),
        "decode_speedup": decode_speedup(result.plain, result.draft),
        "end_to_end_speedup": end_to_end_speedup(result.plain, result.draft),
        "accepted_length": result.stats.accepted_length,
        "acceptance_by_position": result.stats.acceptance_by_position,
        "identical": None if result.sampled else result.divergence is None,
        "divergence": None if result.divergence is None else asdict(result.divergence),
        "verdict": result.verdict,
    }
