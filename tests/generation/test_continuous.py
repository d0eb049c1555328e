"""Continuous batching with a draft gives what transformers' own continuous batching gives without one."""

from __future__ import annotations

import copy
import itertools
import logging
import time

import pytest
import torch
from tiny_models import SLIDING_WINDOW, TARGETS, VOCAB, tiny_draft, tiny_gemma3, tiny_llama
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_dspark.generation.pacing as pacing
from hf_dspark import ThroughputCurve
from hf_dspark.errors import DSparkGenerationError

LENGTHS = (3, 17, 1, 6, 9, 12)
GREEDY = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)


def prompts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def engine(**changes):
    return ContinuousBatchingConfig(
        **{"page_size": 4, "max_batch_tokens": 48, "num_blocks": 80, "max_requests_per_batch": 4, **changes}
    )


def run(target, texts, config=GREEDY, draft=None, **changes):
    more = {} if draft is None else {"assistant_model": draft}
    return target.generate_batch(
        texts, generation_config=copy.copy(config), continuous_batching_config=engine(**changes), **more
    )


def tokens(outputs):
    return [output.generated_tokens for output in outputs.values()]


class Lookup:
    """Scripts a draft to say what plain decoding said after the same token at the same position, but for every fifth
    position, where it says something else."""

    def __init__(self, draft, texts, continuations):
        self.known = {}
        for text, new in zip(texts, continuations):
            for i in range(len(new)):
                self.known[len(text) + i, new[i]] = new[i + 1 :]
        self._start_block = draft.start_block
        draft.start_block, draft.sequential_step = self.start_block, self.sequential_step

    def start_block(self, cache, anchor_ids, anchor_positions):
        self.k = 0
        self.at = list(zip(anchor_positions.tolist(), anchor_ids.tolist()))
        return self._start_block(cache, anchor_ids, anchor_positions)

    def sequential_step(self, base_logits, hidden, previous_ids, state):
        logits = torch.zeros_like(base_logits)
        for i, place in enumerate(self.at):
            following = self.known.get(place, [])
            right = following[self.k] if self.k < len(following) else 0
            wrong = (place[0] + self.k) % 5 == 4
            logits[i, (right + wrong) % VOCAB] = 50.0
        self.k += 1
        return logits, torch.zeros(len(base_logits), 8), None


@pytest.fixture
def unpaused(monkeypatch):
    monkeypatch.setattr(pacing, "_START", 1e9)
    monkeypatch.setattr(pacing, "_CREDIT", 1e9)


@pytest.fixture
def managers(monkeypatch):
    """The managers made, for a look at their stats."""
    from hf_dspark.generation import continuous

    made, original = [], continuous.DSparkContinuousBatchingManager.__init__

    def noting(self, *arguments):
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(continuous.DSparkContinuousBatchingManager, "__init__", noting)
    return made


def assert_drafted(manager):
    stats = manager.draft_stats
    assert stats.failure is None and 0 < stats.accepted < stats.proposed
    assert 1 < stats.accepted_length <= 6


@pytest.mark.parametrize("scheduled", [False, True], ids=["full", "scheduled"])
@pytest.mark.parametrize("name", TARGETS)
def test_same_texts(name, scheduled, managers, unpaused):
    """More requests than places, so that they come and go; past a sliding window where there is one."""
    target, texts = TARGETS[name](), prompts()
    plain = tokens(run(target, texts))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    if scheduled:
        draft.scheduler, draft.throughput = "auto", ThroughputCurve.from_points({b: 1 / (30 + b) for b in range(1, 60)})
    assert tokens(run(target, texts, draft=draft)) == plain
    assert_drafted(managers[0])
    assert max(map(len, plain)) + max(LENGTHS) > SLIDING_WINDOW
    assert target.config._attn_implementation == "sdpa"
    # And it is what `generate` says, row by row.
    for text, new in zip(texts, plain):
        alone = target.generate(torch.tensor([text]), max_new_tokens=24, do_sample=False)
        assert alone[0, len(text) :].tolist() == new


@pytest.mark.parametrize("changes", [{"max_batch_tokens": 9}, {"num_blocks": 24}, {"page_size": 16, "num_blocks": 20}])
def test_small_budgets(changes, managers, unpaused):
    """Prompts in pieces, blocks cut by the step's tokens, requests that must give their cache up and begin anew."""
    target, texts = tiny_llama(), prompts()
    plain = tokens(run(target, texts, **changes))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    assert tokens(run(target, texts, draft=draft, **changes)) == plain
    assert_drafted(managers[0])


def test_ends_inside_a_block(managers, unpaused):
    target, texts = tiny_llama(), prompts()
    free = tokens(run(target, texts))
    config = copy.copy(GREEDY)
    config.eos_token_id = [free[0][4], free[3][9]]
    plain = tokens(run(target, texts, config))
    assert len({len(new) for new in plain}) > 2
    draft = tiny_draft(target)
    Lookup(draft, texts, free)
    assert tokens(run(target, texts, config, draft)) == plain
    assert_drafted(managers[0])


def test_shared_prefixes(managers, unpaused):
    """Blocks are shared by what they hold, after acceptance: a refused draft must never be found by another request."""
    target = tiny_llama()
    shared = prompts([16])[0]
    texts = [[*shared, 5], [*shared, 6, 7], [*shared, 5], shared, [*shared, 5, 9, 3]]
    plain = tokens(run(target, texts, max_requests_per_batch=2, allow_block_sharing=False))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    ours = run(target, texts, draft=draft, max_requests_per_batch=2, allow_block_sharing=True)
    assert tokens(ours) == plain
    assert_drafted(managers[0])
    assert managers[0].draft_stats.shared_tokens >= 16  # what the draft has not seen is told


def test_further_sequences_take_the_drafts_context_along(managers, unpaused):
    target, texts = tiny_llama(), prompts()[:2]
    plain = tokens(run(target, texts))
    config = copy.copy(GREEDY)
    config.num_return_sequences = 3
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    ours = run(target, texts, config, draft, max_requests_per_batch=8)
    assert len(ours) == 6 and tokens(ours) == [plain[0]] * 3 + [plain[1]] * 3
    assert managers[0].draft_stats.shared_tokens == 0
    assert_drafted(managers[0])


def test_logprobs(managers):
    target, texts = tiny_llama(), prompts()
    plain = run(target, texts, return_logprobs=True)
    draft = tiny_draft(target)
    Lookup(draft, texts, tokens(plain))
    ours = run(target, texts, draft=draft, return_logprobs=True)
    for a, b in zip(plain.values(), ours.values()):
        assert a.generated_tokens == b.generated_tokens
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=1e-3)
    assert_drafted(managers[0])


def finish(manager, request_ids, limit=60):
    results, until = {}, time.monotonic() + limit
    while set(results) != set(request_ids) and time.monotonic() < until:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
    return results


def test_requests_come_stream_and_are_cancelled(unpaused):
    target, texts = tiny_llama(), prompts()
    config = copy.copy(GREEDY)
    config.max_new_tokens = 60
    plain = tokens(run(target, texts, config, num_blocks=200))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    with target.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=engine(num_blocks=200), assistant_model=draft, block=True
    ) as manager:
        first = manager.add_request(texts[0], request_id="a", streaming=True)
        doomed = manager.add_request(texts[1], request_id="b", max_new_tokens=5000)
        seen = []
        for output in manager.request_id_iter(first):
            seen.append(list(output.generated_tokens))
            if len(seen) == 3:
                manager.cancel_request(doomed)
                manager.add_request(texts[2], request_id="c")
                manager.add_request(texts[3], request_id="d", max_new_tokens=7)
        results = finish(manager, ["c", "d"])
        processor = manager.batch_processor
        deadline = time.monotonic() + 20

        def kept():  # the idle engine looks for work ten times a second, and forgets what is gone
            return processor._drafted or any(processor.generator._contexts.lengths)

        while (processor.has_pending_requests() or kept()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not kept()
        assert manager.draft_stats.accepted > 0
    # One token more with every delivery, drafts too.
    assert seen[-1] == plain[0] and all(len(b) - len(a) == 1 for a, b in itertools.pairwise(seen))
    assert results["c"].generated_tokens == plain[2] and results["d"].generated_tokens == plain[3][:7]


def test_a_faulty_request_leaves_the_others_alone():
    target, texts = tiny_llama(), prompts()
    plain = tokens(run(target, texts))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    with target.continuous_batching_context_manager(
        generation_config=copy.copy(GREEDY), continuous_batching_config=engine(), assistant_model=draft, block=True
    ) as manager:
        manager.add_request(texts[0], request_id="good")
        manager.add_request(texts[1], request_id="bad", temperature=0.5)  # there is no such per-request setting
        results = finish(manager, ["good", "bad"])
    assert results["good"].generated_tokens == plain[0] and results["good"].error is None
    assert "temperature" in results["bad"].error


def test_a_draft_that_fails(managers):
    target, texts = tiny_llama(), prompts()
    plain = tokens(run(target, texts))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    step, calls = draft.sequential_step, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("no more")
        return step(*arguments)

    draft.sequential_step = failing
    assert tokens(run(target, texts, draft=draft)) == plain
    assert managers[0].draft_stats.failure == "RuntimeError: no more" and managers[0].draft_stats.accepted > 0


def test_memory_is_flat_over_many_requests(managers, unpaused):
    """Places in the draft's context are used again."""
    target = tiny_llama()
    draft = tiny_draft(target)
    texts = prompts([5] * 60)
    config = copy.copy(GREEDY)
    config.max_new_tokens = 6
    run(target, texts, config, draft, max_requests_per_batch=4)
    manager = managers[0]
    assert manager.draft_stats.request_steps > 100
    contexts = made_contexts[-1]
    assert len(contexts.lengths) <= 8 and contexts._keys[0].shape[2] < 140
    # The engine's thread records gradients unless it is told not to, and then nothing is ever let go.
    assert contexts._keys[0].grad_fn is None and not contexts._keys[0].requires_grad


made_contexts = []


@pytest.fixture(autouse=True)
def note_contexts(monkeypatch):
    from hf_dspark.generation import batch_drafting

    class Noted(batch_drafting.PackedCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made_contexts.append(self)

    monkeypatch.setattr(batch_drafting, "PackedCache", Noted)
    made_contexts.clear()


def test_managers_are_kept_and_used_again():
    target, texts = tiny_llama(), prompts()
    plain = tokens(run(target, texts))
    draft = tiny_draft(target)
    Lookup(draft, texts, plain)
    for _ in range(2):
        outputs = target.generate_batch(
            texts,
            generation_config=copy.copy(GREEDY),
            continuous_batching_config=engine(),
            assistant_model=draft,
            persistent_manager=True,
        )
        assert tokens(outputs) == plain
    with pytest.raises(DSparkGenerationError, match="destroy_cached_continuous_batching_manager"):
        run(target, texts, draft=tiny_draft(target))
    target.destroy_cached_continuous_batching_manager()
    assert tokens(run(target, texts)) == plain and target.config._attn_implementation == "sdpa"


def test_asynchronous_batching_is_switched_off_with_one_line(caplog):
    target, texts = tiny_llama(), prompts()[:1]
    logger = logging.getLogger("transformers")
    propagate, logger.propagate = logger.propagate, True
    try:
        run(target, texts, draft=tiny_draft(target), use_async_batching=True)
    finally:
        logger.propagate = propagate
    assert sum("asynchronous batching and CUDA graphs are switched off" in r.getMessage() for r in caplog.records) == 1


REFUSED = {
    "repetition penalty": ({"repetition_penalty": 1.3}, {}, "RepetitionPenaltyLogitsProcessor"),
    "per request": ({}, {"per_request_processors": True}, "per_request_processors=True"),
    "scheduler": ({}, {"scheduler_type": "prefill_first"}, "scheduler_type is 'prefill_first'"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, {}, "prompt_lookup_num_tokens=3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    settings, changes, message = REFUSED[case]
    target = tiny_llama()
    config = copy.copy(GREEDY)
    config.update(**settings)
    with pytest.raises(DSparkGenerationError, match=message):
        target.init_continuous_batching(config, engine(**changes), assistant_model=tiny_draft(target))
    assert target.config._attn_implementation == "sdpa"


def test_another_kind_of_assistant_is_refused():
    target = tiny_llama()
    with pytest.raises(DSparkGenerationError, match="assistant_model is a LlamaForCausalLM"):
        target.init_continuous_batching(copy.copy(GREEDY), engine(), assistant_model=tiny_llama())


def test_a_ring_keeps_what_a_refused_draft_has_overwritten(managers, unpaused):
    """Only sliding layers, always wrong drafts, long past the window."""
    target = tiny_gemma3(layer_types=["sliding_attention"] * 4)
    texts = prompts([2, 11, 7])
    config = copy.copy(GREEDY)
    config.max_new_tokens = 40
    plain = tokens(run(target, texts, config))
    draft = tiny_draft(target)
    assert tokens(run(target, texts, config, draft)) == plain
    stats = managers[0].draft_stats
    assert stats.proposed > 100 and stats.accepted < stats.proposed / 4
