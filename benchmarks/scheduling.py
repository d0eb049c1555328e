"""Is the scheduler never slower? Four measurements against the baseline in the same run, interleaved and warm.

    python benchmarks/scheduling.py untrained|changing|lengths|rows --draft FOLDER --data FILE... [--json OUT]

* `untrained`: a draft with random weights against plain `generate`: what the pause rule lets a useless draft cost.
* `changing`: a processor forces 100 random tokens, then a text that the draft knows, then 100 random ones again.
* `lengths`: the scheduler against every fixed length, with the trained draft.
* `rows`: a target whose rows cost: `--row-milliseconds` of waiting per row, or really (`--dtype float32`); scheduled
  lengths against full blocks.

Each prints a table and the ratios that matter; with `--json` every number is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import LogitsProcessor, LogitsProcessorList

from hf_dspark import DSparkDraftModel
from hf_dspark.cli.loading import add_model_arguments, load_draft, load_target, quiet_libraries, target_name
from hf_dspark.evaluation.prompts import encode, load_prompts
from hf_dspark.evaluation.runs import Run, generation_kwargs, timed_generate

SENTENCE = "I'm sorry for the misunderstanding, but as an AI assistant, "  # the target likes it, and the draft knows it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("untrained", "changing", "lengths", "rows"))
    add_model_arguments(parser)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--limit", type=int, default=5, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths: the fixed ones to measure; default: all")
    parser.add_argument("--row-milliseconds", type=float, default=0.0, help="rows: waiting per row and forward")
    parser.add_argument("--json")
    args = parser.parse_args()
    quiet_libraries()
    name, revision = target_name(args, args.draft)
    target, tokenizer = load_target(name, args, revision=revision)
    args.tokenizer = tokenizer
    draft = load_draft(args.draft, target, args)
    prompts = [
        encode(tokenizer, conversation, target.device)
        for path in args.data
        for conversation in load_prompts(path, args.limit).conversations
    ]
    rows = {"untrained": untrained, "changing": changing, "lengths": lengths, "rows": costly_rows}[args.what](
        target, draft, prompts, args
    )
    if args.json:
        arguments = {name: value for name, value in vars(args).items() if name != "tokenizer"}
        Path(args.json).write_text(json.dumps({"arguments": arguments, "rows": rows}, indent=1))


def interleaved(target, arms, prompts, max_new_tokens, stop_at_eos=False) -> dict[str, list[Run]]:
    """Every arm (draft or `None`, scheduler, keywords) on every prompt, in a rotating order; a warm call each first."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    names = list(arms)
    for i, prompt in enumerate([prompts[0], *prompts]):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            draft, scheduler, kwargs = arms[name]
            if draft is not None:
                draft.scheduler = scheduler
            common = generation_kwargs(24 if i == 0 else max_new_tokens)
            if not stop_at_eos:
                common["min_new_tokens"] = common["max_new_tokens"]
            run = timed_generate(target, prompt, draft, name, **common, **kwargs)
            if i > 0:
                runs[name].append(run)
    return runs


def speeds(runs: list[Run], baseline: list[Run]) -> list[float]:
    """Decode speed over the baseline's, prompt by prompt."""
    return [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, baseline)]


def _rate(runs: list[Run]) -> float:
    """Tokens per second over all prompts: what a machine that is slow for a while distorts least."""
    return sum(run.decode_tokens for run in runs) / sum(run.decode_seconds for run in runs)


def show(title: str, rows: list[dict]) -> list[dict]:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    return rows


def summary(name: str, runs: list[Run], baseline: list[Run]) -> dict:
    values = speeds(runs, baseline)
    stats = [run.stats for run in runs if run.stats is not None]
    return {
        "run": name,
        "speed": _rate(runs) / _rate(baseline),
        "median": statistics.median(values),
        "least": min(values),
        "accepted length": statistics.mean(s.accepted_length for s in stats) if stats else 1.0,
        "mean length": statistics.mean(sum(s.proposed) / s.rounds for s in stats) if stats else 0.0,
        "paused": statistics.mean(s.paused_rounds / s.rounds for s in stats) if stats else 0.0,
        "prompts": len(values),
    }


def untrained(target, trained, prompts, args) -> list[dict]:
    torch.manual_seed(0)
    config = trained.config.to_dict()
    names = ("num_hidden_layers", "block_size", "target_layer_ids", "num_key_value_heads", "markov_rank")
    fields = {name: config[name] for name in (*names, "draft_vocab_size", "mask_token_id")}
    ids = trained.draft_token_ids
    draft = DSparkDraftModel.for_target(target, draft_token_ids=ids, **fields).to(target.dtype).eval()
    arms = {"plain": (None, None, {}), "auto": (draft, "auto", {}), "full blocks": (draft, None, {})}
    runs = interleaved(target, arms, prompts, args.max_new_tokens)
    return show("An untrained draft", [summary(name, runs[name], runs["plain"]) for name in arms])


class Forced(LogitsProcessor):
    """The text that must come; the draft never sees this processor."""

    def __init__(self, start: int, ids: list[int]):
        self.start, self.ids = start, ids

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1] - self.start]] = 0.0
        return forced


def changing(target, draft, prompts, args) -> list[dict]:
    """100 random tokens, 200 of a sentence again and again, 100 random ones."""
    sentence = args.tokenizer(SENTENCE, add_special_tokens=False).input_ids
    times: dict[str, list[list[float]]] = {"plain": [], "auto": [], "full blocks": []}
    vocab_size = target.config.get_text_config().vocab_size
    for i, prompt in enumerate([prompts[0], *prompts]):
        start = prompt["input_ids"].shape[1]
        generator = torch.Generator().manual_seed(i)
        noise = torch.randint(100, vocab_size, (200,), generator=generator).tolist()
        ids = noise[:100] + (sentence * 200)[:200] + noise[100:]
        names = list(times)
        for name in names[i % 3 :] + names[: i % 3]:
            draft.scheduler = "auto" if name == "auto" else None
            stamps: list[float] = []
            timed_generate(
                target,
                prompt,
                None if name == "plain" else draft,
                name,
                on_tokens=lambda new, stamps=stamps: stamps.extend([time.perf_counter()] * len(new)),
                logits_processor=LogitsProcessorList([Forced(start, ids)]),
                **generation_kwargs(len(ids)),
            )
            if i > 0:
                # From the first token on; a block's tokens come together, which the long parts even out.
                times[name].append([stamps[99] - stamps[0], stamps[299] - stamps[99], stamps[399] - stamps[299]])
    rows = []
    for name, values in times.items():
        parts = [statistics.median(base[k] / value[k] for value, base in zip(values, times["plain"])) for k in range(3)]
        outside = statistics.median(
            (base[0] + base[2]) / (value[0] + value[2]) for value, base in zip(values, times["plain"])
        )
        rows.append(
            {
                "run": name,
                "first 100": parts[0],
                "middle 200": parts[1],
                "last 100": parts[2],
                "outside": outside,
                "prompts": len(values),
            }
        )
    return show("A text that changes (speed over plain)", rows)


def lengths(target, draft, prompts, args) -> list[dict]:
    arms = {"plain": (None, None, {}), "auto": (draft, "auto", {})}
    for length in args.lengths or range(1, draft.config.num_draft_tokens + 1):
        arms[f"length {length}"] = (draft, None, {"num_assistant_tokens": length})
    runs = interleaved(target, arms, prompts, args.max_new_tokens, stop_at_eos=True)
    rows = [summary(name, runs[name], runs["plain"]) for name in arms]
    best = max((row for row in rows if row["run"].startswith("length")), key=lambda row: row["speed"])
    show("Scheduled against fixed lengths", rows)
    print(f"auto / best fixed length ({best['run']}): {rows[1]['speed'] / best['speed']:.3f}")
    return rows


def costly_rows(target, draft, prompts, args) -> list[dict]:
    wait = args.row_milliseconds / 1000
    if wait:

        def slow(module, positional, keywords):
            ids = keywords.get("input_ids", positional[0] if positional else None)
            if ids is not None and ids.shape[1] <= 1 + draft.config.num_draft_tokens:
                until = time.perf_counter() + wait * ids.shape[1]
                while time.perf_counter() < until:
                    pass

        target.register_forward_pre_hook(slow, with_kwargs=True)
    arms = {"plain": (None, None, {}), "full blocks": (draft, None, {}), "auto": (draft, "auto", {})}
    runs = interleaved(target, arms, prompts, args.max_new_tokens, stop_at_eos=True)
    rows = show("Rows that cost", [summary(name, runs[name], runs["plain"]) for name in arms])
    print(f"scheduled / full blocks: {rows[2]['speed'] / rows[1]['speed']:.3f}")
    return rows


if __name__ == "__main__":
    main()
