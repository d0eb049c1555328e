"""Packed forwards: what a cache of many rows holds, what attention sees, and which targets are refused."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tiny_models import TARGETS, VOCAB, tiny_gemma3, tiny_llama
from transformers import Gemma2Config, Gemma2ForCausalLM

import hf_dspark.generation.packed as packed
from hf_dspark.errors import DSparkTargetError
from hf_dspark.generation.packed import PackedCache, PackedTable, attend, packed_forward, prove_packable
from hf_dspark.generation.seam import TransformersHost


def states(count, seed=0, heads=2):
    return torch.randn(1, heads, count, 8, generator=torch.Generator().manual_seed(seed))


def add(cache, rows, counts, seed=0):
    key, value = states(sum(counts), seed), states(sum(counts), seed + 1)
    cache.begin(rows, counts)
    out = tuple(s.rows({}) if isinstance(s, PackedTable) else s for s in cache.update(key, value, 0))
    cache.end()
    return key, value, out


def test_rows_grow_apart_and_take_back():
    cache = PackedCache(3)
    key, value, (keys, values) = add(cache, [0, 2], [4, 2])
    assert [k.shape[2] for k in keys] == [4, 2] and cache.lengths == [4, 0, 2]
    assert torch.equal(keys[1], key[:, :, 4:]) and torch.equal(values[0], value[:, :, :4])
    cache.crop(0, 3)
    later, _, (keys, _) = add(cache, [2, 0, 1], [1, 2, 5], seed=7)
    assert cache.lengths == [3, 5, 3]
    assert torch.equal(keys[0], torch.cat([key[:, :, 4:], later[:, :, :1]], dim=2))
    assert torch.equal(keys[1], torch.cat([key[:, :, :1], later[:, :, 1:3]], dim=2))
    view = cache.view([1, 0])
    assert view.rows == [1, 0] and torch.equal(view.layers[0].keys[0], later[:, :, 3:])
    cache.free(1)
    assert cache.lengths == [3, 0, 3]


def test_growth_keeps_what_is_there():
    cache = PackedCache(2)
    key, _, _ = add(cache, [0, 1], [2, 3])
    _, _, (keys, _) = add(cache, [1], [500], seed=3)
    assert torch.equal(keys[0][:, :, :3], key[:, :, 2:])
    assert torch.equal(cache.view([0]).layers[0].keys[0], key[:, :, :2])


def test_a_forward_that_fails_appends_nothing():
    target, cache = tiny_llama(), PackedCache(2)
    add_prompts(target, cache, [[1, 2, 3], [4]])
    broken = target.model.layers[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with TransformersHost(target).packed(), pytest.raises(RuntimeError, match="broken"):
        packed_forward(target, cache, [0, 1], [1, 1], torch.tensor([3, 1]), torch.tensor([5, 5]))
    broken.remove()
    assert cache.lengths == [3, 1]


@torch.no_grad()
def add_prompts(target, cache, rows):
    counts = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in counts])
    with TransformersHost(target).packed():
        return packed_forward(
            target, cache, list(range(len(rows))), counts, positions, torch.tensor([t for row in rows for t in row])
        )


def tiny_gemma2():
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        attn_logit_softcapping=2.0,
    )
    torch.manual_seed(0)
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("build", [*TARGETS.values(), tiny_gemma2], ids=[*TARGETS, "gemma2"])
@torch.no_grad()
def test_same_logits_as_single_rows(build):
    """Past a sliding window too, for prompts and for the blocks after them; Gemma 2 caps its scores."""
    target = build()
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 21, 12)]
    cache = PackedCache(3)
    out = add_prompts(target, cache, [text[:-4].tolist() for text in texts])
    parts = [out.logits[0].split([len(text) - 4 for text in texts])]
    with TransformersHost(target).packed():
        counts = [2, 4, 1]
        tokens = torch.cat([text[-4:][:n] for text, n in zip(texts, counts)])
        positions = torch.cat([torch.arange(len(text) - 4, len(text) - 4 + n) for text, n in zip(texts, counts)])
        out = packed_forward(target, cache, [0, 1, 2], counts, positions, tokens)
        parts.append(out.logits[0].split(counts))
    for row, (text, n) in enumerate(zip(texts, counts)):
        alone = target(text[None, : len(text) - 4 + n]).logits[0]
        torch.testing.assert_close(torch.cat([part[row] for part in parts]), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 3], [3, 1]])
@torch.no_grad()
def test_rows_side_by_side(rows, monkeypatch):
    """One call for all rows, some of the cache's rows left out, whatever their keys are."""
    target = tiny_llama()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [7], [8, 9, 1, 2]]
    cache = PackedCache(4)
    add_prompts(target, cache, prompts)
    for table in (*cache._keys.values(), *cache._values.values()):
        for absent in set(range(4)) - set(rows):
            table[absent] = torch.nan
    monkeypatch.setattr(packed, "_attend_row", None)
    tokens = {0: [5], 1: [6, 7, 8], 2: [9, 1, 2, 3, 4], 3: [4, 4]}
    counts = [len(tokens[r]) for r in rows]
    positions = torch.cat([torch.arange(len(prompts[r]), len(prompts[r]) + n) for r, n in zip(rows, counts)])
    with TransformersHost(target).packed():
        out = packed_forward(target, cache, rows, counts, positions, torch.tensor([t for r in rows for t in tokens[r]]))
    for row, logits in zip(rows, out.logits[0].split(counts)):
        alone = target(torch.tensor([prompts[row] + tokens[row]])).logits[0, len(prompts[row]) :]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_linear_layers_see_no_padding():
    target, seen = tiny_llama(), []
    target.model.layers[1].mlp.gate_proj.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[:2]))
    add_prompts(target, PackedCache(3), [[1, 2, 3, 4, 5], [6], [7, 8]])
    assert seen == [(1, 8)]


def test_the_target_is_itself_again():
    target = tiny_llama()
    own = target.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), TransformersHost(target).packed():
        assert target.config._attn_implementation == packed.ATTENTION
        raise RuntimeError("inside")
    assert target.config._attn_implementation == own


def test_attention_sinks_are_refused():
    with pytest.raises(DSparkTargetError, match="attention sinks"):
        attend(torch.nn.Linear(1, 1), states(1), [], [], None, s_aux=torch.zeros(2))


def test_a_target_that_looks_at_more_than_its_row_is_refused(monkeypatch):
    """The proof, with a target that counts positions otherwise when it is packed."""
    monkeypatch.setattr(packed, "_proved", {})
    target = tiny_llama()
    rows = [torch.arange(1, 6), torch.arange(3, 12)]

    @contextmanager
    def shifted():
        with TransformersHost(target).packed():
            handle = target.model.rotary_emb.register_forward_pre_hook(
                lambda module, args, kwargs: (
                    args,
                    {"position_ids": 2 * kwargs["position_ids"]},
                ),
                with_kwargs=True,
            )
            yield
            handle.remove()

    with pytest.raises(DSparkTargetError, match=r"other logits for packed rows than for single ones \(by \d+\.\d%\)"):
        prove_packable(target, rows, shifted)
    prove_packable(target, rows, TransformersHost(target).packed)
    calls = []
    target.register_forward_hook(lambda *_: calls.append(1))
    prove_packable(target, rows, TransformersHost(target).packed)
    assert not calls  # once per class


def test_windows_cut_the_keys():
    """A row of a sliding layer reads no more keys than its window and its own tokens hold."""
    target, seen = tiny_gemma3(), []
    cache = PackedCache(1)
    add_prompts(target, cache, [list(range(1, 31))])
    original = packed._attend_row

    def watching(query, key, *rest):
        seen.append(key.shape[2])
        return original(query, key, *rest)

    packed._attend_row = watching
    try:
        with TransformersHost(target).packed(), torch.no_grad():
            packed_forward(target, cache, [0], [3], torch.arange(30, 33), torch.tensor([1, 2, 3]))
    finally:
        packed._attend_row = original
    assert seen == [10, 33, 10, 33]
