"""A load test of continuous batching with a draft model: requests come, stream, are cancelled and faulty, at random.

    python benchmarks/load.py --minutes 5 --seed 0

needs no weights: a tiny random target, and a draft that says what the target says four times out of five. It fails
when a request is lost, a text differs from plain `generate`'s, or something is left behind; it prints what it did.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import sys
import time

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from hf_dspark import DSparkDraftModel

VOCAB, LONGEST, NEW_TOKENS, PLACES = 64, 40, 48, 8


def tiny_pair():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    return target, DSparkDraftModel.for_target(
        target, num_hidden_layers=1, block_size=5, target_layer_ids=[0, 2]
    ).eval()


class Knowing:
    """Makes a draft say what followed the same token at the same position in `texts`; wrongly at every fifth one."""

    def __init__(self, draft, texts):
        self.known = {(len(prompt) + i, new[i]): new[i + 1 :] for prompt, new in texts for i in range(len(new))}
        self._start_block = draft.start_block
        draft.start_block, draft.sequential_step = self.start_block, self.sequential_step

    def start_block(self, cache, anchor_ids, anchor_positions):
        self.k, self.at = 0, list(zip(anchor_positions.tolist(), anchor_ids.tolist()))
        return self._start_block(cache, anchor_ids, anchor_positions)

    def sequential_step(self, base_logits, hidden, previous_ids, state):
        logits = torch.zeros_like(base_logits)
        for i, place in enumerate(self.at):
            following = self.known.get(place, [])
            right = following[self.k] if self.k < len(following) else 0
            logits[i, (right + ((place[0] + self.k) % 5 == 4)) % VOCAB] = 50.0
        self.k += 1
        return logits, torch.zeros(len(base_logits), 64), None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long requests keep coming; default: 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-draft", action="store_true", help="the engine alone, for comparison")
    parser.add_argument("--json", metavar="FILE", help="write the counts there")
    args = parser.parse_args()

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it shows every faulty request
    chance = random.Random(args.seed)
    target, draft = tiny_pair()
    draft.scheduler = None
    prompts = [[chance.randrange(1, VOCAB) for _ in range(chance.randint(1, LONGEST))] for _ in range(40)]
    texts = []
    for prompt in prompts:
        out = target.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append((prompt, out[0, len(prompt) :].tolist()))
    Knowing(draft, texts)

    engine = ContinuousBatchingConfig(
        page_size=8, num_blocks=2 * PLACES * (LONGEST + NEW_TOKENS) // 8, max_batch_tokens=128,
        max_requests_per_batch=PLACES,
    )  # fmt: skip
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    counts = {"submitted": 0, "finished": 0, "cancelled": 0, "faulty": 0, "streamed": 0, "tokens": 0}
    waiting: dict[str, tuple[int, int]] = {}  # by request: its text and length
    cancelled, faulty, problems = set(), set(), []
    memory: list[int] = []

    def take(manager, timeout):
        result = manager.get_result(timeout=timeout)
        if result is None:
            return
        if not result.is_finished():
            counts["streamed"] += 1
            return
        own = waiting.pop(result.request_id, None)
        if result.request_id in faulty:
            counts["faulty"] += 1
            if result.error is None:
                problems.append(f"{result.request_id} was faulty, but was answered")
        elif own is None and result.request_id not in cancelled:
            problems.append(f"{result.request_id} was answered twice, or never asked for")
        elif own is not None:
            index, length = own
            counts["finished"] += 1
            counts["tokens"] += len(result.generated_tokens)
            if result.error is not None or result.generated_tokens != texts[index][1][:length]:
                problems.append(f"{result.request_id}: {result.error or 'another text'}")

    more = {} if args.no_draft else {"assistant_model": draft}
    with target.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=engine, block=True, timeout=20, **more
    ) as manager:
        until = time.monotonic() + 60 * args.minutes
        while time.monotonic() < until:
            if len(waiting) < 3 * PLACES:
                index, length = chance.randrange(len(prompts)), chance.randint(1, NEW_TOKENS)
                name = f"r{counts['submitted']}"
                counts["submitted"] += 1
                bad = chance.random() < 0.05
                waiting[name] = (index, length)
                if bad:
                    faulty.add(name)
                manager.add_request(
                    prompts[index],
                    request_id=name,
                    max_new_tokens=length,
                    streaming=chance.random() < 0.3,
                    **({"no_such_setting": 1} if bad else {}),
                )
            if waiting and chance.random() < 0.02:
                name = chance.choice(list(waiting))
                if name not in faulty:
                    cancelled.add(name)
                    del waiting[name]
                    counts["cancelled"] += 1
                    manager.cancel_request(name)
            take(manager, 0.002)
            if counts["submitted"] % 100 == 0:
                memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        until = time.monotonic() + 120
        while waiting and time.monotonic() < until:
            take(manager, 0.2)
        processor = manager.batch_processor
        while processor.has_pending_requests() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1.0)  # the idle engine looks for work ten times a second, and forgets what is gone
        left = {
            "requests": len(waiting),
            "cache": sum(len(a.block_table) for a in processor.cache.cache_allocators.values()),
        }
        if not args.no_draft:
            rows, stats = processor.generator._contexts.lengths, manager.draft_stats
            left["draft rows in use"] = sum(length > 0 for length in rows) + len(processor._drafted)
    problems += [f"left behind: {count} {what}" for what, count in left.items() if count]
    if not args.no_draft:
        counts |= {"accepted_length": round(stats.accepted_length, 2), "draft_rows": len(rows)}
        if stats.failure is not None or not 0 < stats.accepted < stats.proposed:
            problems.append(f"the draft did not take part: {stats}")
    # The first third may still find larger pools; after that it must not grow.
    if len(memory) > 9 and memory[-1] > 1.1 * memory[len(memory) // 3]:
        problems.append(f"memory grew from {memory[len(memory) // 3]} to {memory[-1]} kB")
    counts["peak_kb"] = memory[-1] if memory else 0
    print(json.dumps(counts))
    for problem in problems[:10]:
        print(f"FAILED: {problem}", file=sys.stderr)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as stream:
            json.dump({**counts, "problems": problems}, stream, indent=1)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
