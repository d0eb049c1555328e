"""`return_dict_in_generate`: scores, logits, hidden states, attentions and cache are those of plain `generate`."""

from __future__ import annotations

import pytest
import torch
from scripted_drafts import DRAFT_KINDS, assert_drafted, scripted_draft
from tiny_models import TARGETS, random_prompt

PROMPT = random_prompt(9)
EVERYTHING = dict(
    return_dict_in_generate=True,
    output_scores=True,
    output_logits=True,
    output_hidden_states=True,
    output_attentions=True,
)


@pytest.fixture(scope="module", params=list(TARGETS))
def eager_target(request):
    target = TARGETS[request.param]()
    target.set_attn_implementation("eager")  # the one kernel that hands out attention weights
    return target


def assert_same(ours, theirs, name="output"):
    """Same nesting, shapes, dtypes and, up to rounding between one-row and many-row forwards, numbers."""
    assert type(ours) is type(theirs), name
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, name
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4, msg=lambda text: f"{name}: {text}")
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs), name
        for i, (a, b) in enumerate(zip(ours, theirs)):
            assert_same(a, b, f"{name}[{i}]")
    else:
        assert ours == theirs, name


def assert_same_cache(ours, theirs):
    assert type(ours) is type(theirs)
    for a, b in zip(ours.layers, theirs.layers):
        assert type(a) is type(b)
        assert int(a.get_seq_length()) == int(b.get_seq_length())
        assert not getattr(a, "record_past", False)
        torch.testing.assert_close(a.keys, b.keys, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(a.values, b.values, atol=2e-4, rtol=1e-4)


def compare(target, kind, check=True, **arguments):
    plain = target.generate(PROMPT, **arguments)
    draft = scripted_draft(target, kind, plain.sequences[0, PROMPT.shape[1] :].tolist())
    assisted = target.generate(PROMPT, assistant_model=draft, **arguments)
    assert list(assisted.keys()) == list(plain.keys())
    for name in ("sequences", "scores", "logits", "attentions", "hidden_states"):
        assert_same(getattr(assisted, name), getattr(plain, name), name)
    assert_same_cache(assisted.cache, plain.cache)
    if check:
        assert_drafted(draft, kind)
    return assisted


@pytest.mark.parametrize("kind", DRAFT_KINDS)
@pytest.mark.parametrize("mode", ["greedy", "penalty", "sampling"])
def test_everything_at_once(eager_target, kind, mode):
    choice = {
        "greedy": {"do_sample": False},
        "penalty": {"do_sample": False, "repetition_penalty": 1.2},
        "sampling": {"do_sample": True, "top_k": 1},
    }[mode]
    compare(eager_target, kind, max_new_tokens=22, **choice, **EVERYTHING)


@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "return_dict_in_generate"])
def test_one_at_a_time(eager_target, name):
    compare(
        eager_target, "corrupted50", max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **{name: True}
    )


def test_nothing_extra(target):
    out = compare(target, "corrupted50", max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    assert out.scores is out.logits is out.hidden_states is out.attentions is None


def test_attentions_of_kernels_that_have_none(target):
    out = compare(
        target, "oracle", max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_attentions=True
    )
    assert out.attentions == ((),) * 12


@pytest.mark.parametrize("selection", [2, [0, 3], [-1, 1]])
def test_selected_hidden_states(target, selection):
    compare(
        target, "oracle", max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
        output_hidden_states=selection,
    )  # fmt: skip


def test_flags_without_the_dict(llama):
    """Without `return_dict_in_generate` the flags change nothing that is returned."""
    flags = {**EVERYTHING, "return_dict_in_generate": False}
    plain = llama.generate(PROMPT, max_new_tokens=12, do_sample=False, **flags)
    draft = scripted_draft(llama, "oracle", plain[0, PROMPT.shape[1] :].tolist())
    assert torch.equal(
        llama.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=draft, **flags), plain
    )


def test_a_stop_inside_a_block(eager_target):
    free = eager_target.generate(PROMPT, max_new_tokens=20, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    for place in (7, 8, 9):
        compare(
            eager_target, "oracle", False, max_new_tokens=20, do_sample=False, eos_token_id=free[place], **EVERYTHING
        )
    compare(eager_target, "oracle", False, max_new_tokens=1, do_sample=False, **EVERYTHING)
    compare(eager_target, "oracle", False, max_new_tokens=2, do_sample=False, **EVERYTHING)


def test_static_cache(llama, targets):
    for target in (llama, targets("qwen3")):
        for kind in ("oracle", "corrupted50"):
            compare(
                target, kind, max_new_tokens=20, do_sample=False, cache_implementation="static",
                **{**EVERYTHING, "output_attentions": False},
            )  # fmt: skip
