"""User-made caches in both of the host's styles, next turns, static caches, sliding windows, chunked prefill."""

from __future__ import annotations

import copy

import pytest
import torch
from scripted_drafts import DRAFT_KINDS, assert_drafted, scripted_draft
from tiny_models import SLIDING_WINDOW, random_prompt, tiny_draft
from transformers import DynamicCache, QuantizedCache, StaticCache

from hf_dspark.errors import DSparkGenerationError

PROMPT = random_prompt(9)
GREEDY = dict(do_sample=False)


def first_turn(target, new_tokens=7):
    """A cache that holds the prompt and an answer but its last token, and the whole text."""
    cache = DynamicCache(config=target.config)
    text = target.generate(PROMPT, cache=cache, max_new_tokens=new_tokens, **GREEDY)
    return text, cache


def drafted(target, kind, arguments, plain_new):
    draft = scripted_draft(target, kind, plain_new)
    out = target.generate(assistant_model=draft, **arguments)
    assert_drafted(draft, kind)
    return out, draft.last_stats


@pytest.mark.parametrize("kind", DRAFT_KINDS)
@pytest.mark.parametrize("style", ["full ids", "new ids"])
@pytest.mark.parametrize("first_length", [4, 14])
def test_cache_that_holds_a_first_turn(target, style, kind, first_length):
    text, cache = first_turn(target, first_length)
    question = random_prompt(5, seed=11)
    ids = torch.cat([text, question], dim=1)
    held = ids.shape[1] - question.shape[1] - 1
    mask = torch.ones_like(ids)
    arguments = dict(
        inputs=ids if style == "full ids" else ids[:, held:], attention_mask=mask, max_new_tokens=18, **GREEDY
    )
    plain_cache, our_cache = copy.deepcopy(cache), copy.deepcopy(cache)
    plain = target.generate(cache=plain_cache, **arguments)
    assisted, stats = drafted(target, kind, {**arguments, "cache": our_cache}, plain[0, -18:].tolist())
    assert torch.equal(assisted, plain)
    assert stats.context_tokens == question.shape[1] + 1  # all that was fed in this call
    for ours, theirs in zip(our_cache.layers, plain_cache.layers):
        assert ours.get_seq_length() == theirs.get_seq_length()
        torch.testing.assert_close(ours.keys, theirs.keys, atol=2e-4, rtol=1e-4)


def test_draft_positions_after_a_first_turn(llama):
    """The draft's context has absolute positions, although it starts in the middle of the text."""
    text, cache = first_turn(llama)
    ids = torch.cat([text, random_prompt(5, seed=11)], dim=1)
    draft = tiny_draft(llama)
    seen, anchors = [], []
    extend, start = draft.extend_context, draft.start_block
    draft.extend_context = lambda cache, f, p: (seen.extend(p[0].tolist()), extend(cache, f, p))[1]
    draft.start_block = lambda c, a, p: (anchors.append(int(p)), start(c, a, p))[1]
    llama.generate(ids, cache=cache, assistant_model=draft, max_new_tokens=12, **GREEDY)
    assert seen == list(range(text.shape[1] - 1, text.shape[1] - 1 + len(seen)))
    assert anchors[0] == ids.shape[1]
    assert anchors == sorted(set(anchors))


@pytest.mark.parametrize("first_with, then_with", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["oracle", "corrupted50"])
def test_turns_with_and_without_a_draft(target, first_with, then_with, kind):
    def conversation(with_draft, texts=None):
        cache, ids, new = DynamicCache(config=target.config), PROMPT, []
        for turn, drafting in enumerate(with_draft):
            draft = scripted_draft(target, kind, texts[turn]) if drafting else None
            out = target.generate(ids, cache=cache, assistant_model=draft, max_new_tokens=15, **GREEDY)
            if drafting:
                assert_drafted(draft, kind)
            new.append(out[0, ids.shape[1] :].tolist())
            ids = torch.cat([out, random_prompt(4, seed=20 + turn)], dim=1)
        return new

    plain = conversation((False, False, False))
    assert conversation((first_with, then_with, first_with), plain) == plain


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_far_past_the_sliding_window(targets, kind):
    for name in ("gemma3", "gemma4"):
        target = targets(name)
        prompt = random_prompt(3 * SLIDING_WINDOW, seed=5)
        plain = target.generate(prompt, max_new_tokens=4 * SLIDING_WINDOW, **GREEDY)
        draft = scripted_draft(target, kind, plain[0, prompt.shape[1] :].tolist())
        assisted = target.generate(prompt, assistant_model=draft, max_new_tokens=4 * SLIDING_WINDOW, **GREEDY)
        assert torch.equal(assisted, plain)
        assert_drafted(draft, kind)


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_static_cache(llama, targets, kind):
    for target in (llama, targets("qwen3")):
        arguments = dict(inputs=PROMPT, max_new_tokens=20, cache_implementation="static", **GREEDY)
        plain = target.generate(**arguments)
        assert torch.equal(drafted(target, kind, arguments, plain[0, PROMPT.shape[1] :].tolist())[0], plain)


@pytest.mark.parametrize("kind", ["oracle", "corrupted50"])
def test_user_made_static_cache_over_two_turns(llama, kind):
    def turns(texts=None):
        cache, ids, new = StaticCache(config=llama.config, max_cache_len=64), PROMPT, []
        for turn in range(2):
            draft = scripted_draft(llama, kind, texts[turn]) if texts else None
            out = llama.generate(ids, cache=cache, assistant_model=draft, max_new_tokens=15, **GREEDY)
            new.append(out[0, ids.shape[1] :].tolist())
            ids = torch.cat([out, random_prompt(4, seed=30)], dim=1)
            if texts:
                assert_drafted(draft, kind)
        return new

    plain = turns()
    assert turns(plain) == plain


def test_static_cache_that_fits_the_window(targets):
    target = targets("gemma3")
    prompt = random_prompt(3)
    arguments = dict(inputs=prompt, max_new_tokens=5, cache_implementation="static", **GREEDY)
    plain = target.generate(**arguments)
    draft = scripted_draft(target, "oracle", plain[0, 3:].tolist())
    assert torch.equal(target.generate(assistant_model=draft, **arguments), plain)
    assert sum(draft.last_stats.accepted) > 0


def test_caches_that_cannot_be_cropped_are_refused_by_name(targets, monkeypatch):
    target = targets("gemma3")
    draft = tiny_draft(target)
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(DSparkGenerationError, match="StaticSlidingWindowLayer"):
        target.generate(
            PROMPT, assistant_model=draft, max_new_tokens=2 * SLIDING_WINDOW, cache_implementation="static", **GREEDY
        )
    cache = QuantizedCache.__new__(QuantizedCache)
    from transformers.cache_utils import Fp8QuantizedLayer

    cache.layers, cache.offloading, cache.layer_class_to_replicate = (
        [Fp8QuantizedLayer() for _ in range(4)],
        False,
        None,
    )
    with pytest.raises(DSparkGenerationError, match="Fp8QuantizedLayer"):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=8, cache=cache, **GREEDY)
    handle.remove()
    assert not forwards  # before the prefill


def test_no_cache_is_refused_in_the_hosts_words(llama):
    with pytest.raises(RuntimeError, match="Assisted decoding requires a cache"):
        llama.generate(PROMPT, assistant_model=tiny_draft(llama), max_new_tokens=5, use_cache=False, **GREEDY)


@pytest.mark.parametrize("chunk", [1, 2, 4, 9, 50])
def test_chunked_prefill(target, chunk):
    arguments = dict(inputs=PROMPT, max_new_tokens=16, prefill_chunk_size=chunk, **GREEDY)
    plain = target.generate(**arguments)
    for kind in ("oracle", "corrupted50", "random"):
        assisted, stats = drafted(target, kind, arguments, plain[0, PROMPT.shape[1] :].tolist())
        assert torch.equal(assisted, plain)
        assert stats.context_tokens == PROMPT.shape[1]


def test_chunked_prefill_gives_the_draft_the_same_context(llama):
    """A real draft proposes the same blocks whether the prompt came in one piece or in three."""
    draft = tiny_draft(llama)
    blocks = []
    step = draft.sequential_step
    draft.sequential_step = lambda *a: (blocks[-1].append(a[0].clone()), step(*a))[1]
    for chunk in (None, 4):
        blocks.append([])
        llama.generate(PROMPT, assistant_model=draft, max_new_tokens=10, prefill_chunk_size=chunk, **GREEDY)
    torch.testing.assert_close(torch.cat(blocks[0]), torch.cat(blocks[1]), atol=1e-4, rtol=1e-4)
