"""Left padding, embeddings as input, explicit positions, token types, and the pipeline."""

from __future__ import annotations

import string

import pytest
import torch
from scripted_drafts import DRAFT_KINDS, assert_drafted, scripted_draft
from tiny_models import VOCAB, random_prompt, tiny_draft, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

PROMPT = random_prompt(9)
GREEDY = dict(max_new_tokens=18, do_sample=False)


def compare(target, kind, new_tokens=18, **inputs):
    plain = target.generate(**inputs, **GREEDY)
    draft = scripted_draft(target, kind, plain[0, -new_tokens:].tolist())
    assert torch.equal(target.generate(assistant_model=draft, **inputs, **GREEDY), plain)
    assert_drafted(draft, kind)
    return draft.last_stats


@pytest.mark.parametrize("kind", DRAFT_KINDS)
@pytest.mark.parametrize("pads", [1, 5, 12])
def test_left_padding(target, kind, pads):
    ids = torch.cat([torch.full((1, pads), 3), PROMPT], dim=1)
    mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(PROMPT)], dim=1)
    stats = compare(target, kind, inputs=ids, attention_mask=mask)
    assert stats.context_tokens == PROMPT.shape[1]  # pads never enter the draft's context
    compare(target, kind, inputs=ids, attention_mask=mask, prefill_chunk_size=4)
    compare(target, kind, inputs=ids, attention_mask=mask, repetition_penalty=1.3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_draft_does_not_see_the_padding(llama, cache):
    """Block for block, a padded prompt is drafted as the bare one."""
    draft = tiny_draft(llama)
    seen = []
    step = draft.sequential_step
    draft.sequential_step = lambda *a: (seen[-1].append(a[0].clone()), step(*a))[1]
    ids = torch.cat([torch.full((1, 6), 3), PROMPT], dim=1)
    mask = torch.cat([torch.zeros(1, 6, dtype=torch.long), torch.ones_like(PROMPT)], dim=1)
    for inputs in ({"inputs": PROMPT}, {"inputs": ids, "attention_mask": mask}):
        seen.append([])
        llama.generate(assistant_model=draft, cache_implementation=cache, **inputs, **GREEDY)
    torch.testing.assert_close(torch.cat(seen[0]), torch.cat(seen[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", DRAFT_KINDS)
@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds(target, kind, with_ids):
    embeds = target.get_input_embeddings()(PROMPT)
    inputs = {"inputs_embeds": embeds, **({"input_ids": PROMPT} if with_ids else {})}
    stats = compare(target, kind, **inputs)
    assert stats.context_tokens == PROMPT.shape[1]
    compare(target, kind, repetition_penalty=1.3, **inputs)


@pytest.mark.parametrize("kind", ["oracle", "corrupted50"])
def test_explicit_positions(llama, targets, kind):
    for target in (llama, targets("qwen3")):
        positions = torch.arange(PROMPT.shape[1])[None] + 40
        draft_positions = []
        compare(target, kind, inputs=PROMPT, position_ids=positions)
        draft = tiny_draft(target)
        extend = draft.extend_context
        draft.extend_context = lambda c, f, p, e=extend, d=draft_positions: (d.extend(p[0].tolist()), e(c, f, p))[1]
        target.generate(PROMPT, position_ids=positions, assistant_model=draft, **GREEDY)
        assert draft_positions[: PROMPT.shape[1]] == positions[0].tolist()
        assert draft_positions == list(range(40, 40 + len(draft_positions)))


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(target, length):
    for kind in ("oracle", "random"):
        compare(target, kind, inputs=random_prompt(length, seed=2))


def test_no_prompt_but_bos(llama):
    plain = llama.generate(bos_token_id=5, **GREEDY)
    draft = scripted_draft(llama, "oracle", plain[0, 1:].tolist())
    assert torch.equal(llama.generate(bos_token_id=5, assistant_model=draft, **GREEDY), plain)
    assert_drafted(draft, "oracle")


def test_same_draft_for_a_shorter_prompt_afterwards(target):
    draft = tiny_draft(target)
    for length in (20, 5, 12):
        prompt = random_prompt(length, seed=length)
        plain = target.generate(prompt, **GREEDY)
        assert torch.equal(target.generate(prompt, assistant_model=draft, **GREEDY), plain)
        assert draft.last_stats.context_tokens == length


def test_pipeline():
    target = tiny_llama(bos_token_id=1, eos_token_id=2)
    vocabulary = {character: i for i, character in enumerate((string.ascii_letters + string.digits)[:VOCAB])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="b", eos_token="c", pad_token="c")
    arguments = dict(max_new_tokens=20, do_sample=False, return_full_text=False)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("defgh", **arguments)
    ids = tokenizer("defgh", return_tensors="pt").input_ids
    text = target.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=2)[0, ids.shape[1] :].tolist()
    draft = scripted_draft(target, "corrupted10", text)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    assert assisted("defgh", **arguments) == plain
    assert_drafted(draft, "corrupted10")
