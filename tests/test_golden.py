"""Parity with the reference implementation: tiny checkpoints that DeepSpec wrote, and what it computed with them.

`tests/data/golden/<case>/` holds `draft/` (DeepSpec's layout), `target/` (transformers' layout) and
`expected.safetensors` (DESIGN §9). The reference overshoots the length limit and trims afterwards, so its `accepted`
says the same as ours for every round but the last.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from hf_dspark import DSparkDraftModel

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash", "gemma4_vanilla")
NEW_TOKENS = 48


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    folder = GOLDEN / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    draft = DSparkDraftModel.from_pretrained(folder / "draft", target=target)
    draft.scheduler = None  # the reference verifies full blocks
    return target, draft, load_file(folder / "expected.safetensors")


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def generate(golden, **arguments):
    target, draft, expected = golden
    stop = int(expected["trace.stop_id"])
    return target.generate(
        expected["trace.prompt_ids"],
        attention_mask=torch.ones_like(expected["trace.prompt_ids"]),
        assistant_model=draft,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
        **arguments,
    )


def test_own_tables_are_the_targets(golden):
    """The reference writes copies of the target's tables; binding drops them, so saving never writes them."""
    _, draft, _ = golden
    assert draft.embed_tokens is None and draft.lm_head is None


@torch.no_grad()
def test_every_round(golden):
    """Each block by itself, from the target's features of the text before its anchor."""
    target, draft, expected = golden
    output_ids = expected["trace.output_ids"]
    states = target(output_ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)
    for r, start in enumerate(expected["trace.start"].tolist()):
        anchor = expected["trace.anchor"][r : r + 1]
        assert int(anchor) == int(output_ids[0, start])
        cache = DynamicCache()
        draft.extend_context(cache, features[:, :start], torch.arange(start)[None])
        hidden, state = draft.start_block(cache, anchor, torch.tensor([start]))
        base_logits = draft.base_logits(hidden)
        close(hidden[0], expected["trace.block_hidden"][r])
        close(base_logits[0], expected["trace.base_logits"][r])
        previous = anchor
        for k in range(draft.config.num_draft_tokens):
            logits, embedding, state = draft.sequential_step(base_logits[:, k], hidden[:, k], previous, state)
            close(logits[0], expected["trace.draft_logits"][r, k])
            previous = logits.argmax(-1)
            assert int(previous) == int(expected["trace.tokens"][r, k])
            if draft.confidence_head is not None:
                close(
                    draft.confidence_head(hidden[:, k], embedding)[0], expected["trace.confidence_logits"][r, k].float()
                )


def test_output_and_accepted_counts(golden):
    _, draft, expected = golden
    out = generate(golden)
    assert out.tolist() == expected["trace.output_ids"].tolist()
    accepted = expected["trace.accepted"].tolist()
    ours = draft.last_stats.accepted
    assert len(accepted) - 1 <= len(ours) <= len(accepted)
    assert ours[: len(accepted) - 1] == accepted[:-1]
    # full, partial and empty acceptance all occur somewhere in the five cases; each has at least two kinds
    assert len(set(accepted)) > 1


def test_context_is_grown_as_if_it_had_been_built_at_once(golden):
    """The blocks of the running `generate`, whose context grows round by round, are those of the reference."""
    _, draft, expected = golden
    rows = []
    step = draft.sequential_step
    draft.sequential_step = lambda *a: (rows.append(step(*a)), rows[-1])[1]
    try:
        generate(golden)
    finally:
        del draft.sequential_step
    stats = draft.last_stats
    theirs = expected["trace.draft_logits"]
    k = 0
    for r, length in enumerate(stats.proposed):
        for position in range(length):
            close(rows[k][0][0], theirs[r, position])
            k += 1
    assert k == len(rows) > 0


def test_limits_of_the_block(golden):
    """A smaller `num_assistant_tokens` drafts the prefix of the full block and gives the same text."""
    _, draft, expected = golden
    out = generate(golden, num_assistant_tokens=2)
    assert out.tolist() == expected["trace.output_ids"].tolist()
    assert max(draft.last_stats.proposed) == 2


def test_save_and_load_in_our_layout(golden, tmp_path):
    target, draft, expected = golden
    draft.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path, target=target)
    again.scheduler = None
    assert generate((target, again, expected)).tolist() == expected["trace.output_ids"].tolist()
    assert again.last_stats.accepted == generate_stats(golden).accepted


def generate_stats(golden):
    generate(golden)
    return golden[1].last_stats
