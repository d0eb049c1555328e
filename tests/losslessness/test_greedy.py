"""Token for token: `generate` with a draft gives what plain `generate` gives, whatever the draft proposes.

Each case is a set of arguments; each is run on every target with every kind of draft, greedily and through the sampling
code (`top_k=1` makes sampling deterministic and its code no simpler). The suite is meant to be copied: a case is one
line in `CASES`.
"""

from __future__ import annotations

import pytest
import torch
from scripted_drafts import DRAFT_KINDS, assert_drafted, scripted_draft
from tiny_models import VOCAB, random_prompt
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

from hf_dspark import ThroughputCurve

PROMPT = random_prompt(9)
NEW_TOKENS = 20


class HistoryProcessor(LogitsProcessor):
    """A stateful processor as users write them: it counts its calls, and the bias it adds depends on the count."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.calls)) % VOCAB] += 3.0
        return scores


def allowed_after(batch_id, prefix):
    """A toy grammar: the parity of the id changes with every token."""
    return list(range(len(prefix) % 2, VOCAB, 2))


# Each entry makes the arguments anew for every call: stateful objects must not be shared by two runs.
CASES = {
    "nothing": lambda: {},
    "repetition_penalty": lambda: {"repetition_penalty": 1.4},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "encoder_penalties": lambda: {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "bad_words": lambda: {"bad_words_ids": [[38], [23, 45], [1]]},
    "sequence_bias": lambda: {"sequence_bias": [[[38], -4.0], [[5, 6], 6.0], [[23], 2.0]]},
    "suppress": lambda: {"suppress_tokens": [38, 1, 40], "begin_suppress_tokens": [23]},
    "forced_eos": lambda: {"forced_eos_token_id": 4},
    "min_new_tokens": lambda: {"min_new_tokens": 12, "eos_token_id": [23, 38, 40]},
    "min_length": lambda: {"min_length": 18, "eos_token_id": [23, 38, 40]},
    "exponential_decay": lambda: {
        "exponential_decay_length_penalty": (5, 1.1), "eos_token_id": 59,
    },
    "guidance": lambda: {"guidance_scale": 1.6, "negative_prompt_ids": random_prompt(5, seed=3)},
    "guidance_without_prompt": lambda: {"guidance_scale": 1.3},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "history": lambda: {"logits_processor": LogitsProcessorList([HistoryProcessor()])},
    "history_and_guidance": lambda: {
        "logits_processor": LogitsProcessorList([HistoryProcessor()]), "guidance_scale": 1.4,
    },
    "allowed_tokens": lambda: {"prefix_allowed_tokens_fn": allowed_after},
    "renormalized": lambda: {"renormalize_logits": True, "remove_invalid_values": True},
    "many": lambda: {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [2], "guidance_scale": 1.2,
        "logits_processor": LogitsProcessorList([HistoryProcessor()]),
    },
}  # fmt: skip


def run(target, arguments, draft=None, **more):
    return target.generate(PROMPT, max_new_tokens=NEW_TOKENS, assistant_model=draft, **arguments, **more)


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("case", CASES)
def test_same_text(target, case, mode):
    choice = {"do_sample": False} if mode == "greedy" else {"do_sample": True, "top_k": 1}
    plain_arguments = CASES[case]()
    plain = run(target, plain_arguments, **choice)
    continuation = plain[0, PROMPT.shape[1] :].tolist()
    for kind in DRAFT_KINDS:
        draft = scripted_draft(target, kind, continuation)
        arguments = CASES[case]()
        assisted = run(target, arguments, draft, **choice)
        assert assisted.tolist() == plain.tolist(), (kind, draft.last_stats)
        if len(continuation) > 3:
            assert_drafted(draft, kind)
        for processor, plain_processor in zip(
            arguments.get("logits_processor", ()), plain_arguments.get("logits_processor", ())
        ):  # once per committed token, in order
            assert processor.calls == plain_processor.calls


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("case", CASES)
def test_same_text_with_the_scheduler(llama, case, mode):
    """As `generate` does by default, with what rounds cost given: lengths vary, and drafting pauses and resumes."""
    choice = {"do_sample": False} if mode == "greedy" else {"do_sample": True, "top_k": 1}
    plain = run(llama, CASES[case](), **choice)
    draft = scripted_draft(llama, "corrupted50", plain[0, PROMPT.shape[1] :].tolist())
    draft.scheduler, draft.throughput = "auto", ThroughputCurve.from_seconds({1: 1.0, 6: 1.6})
    assert run(llama, CASES[case](), draft, **choice).tolist() == plain.tolist(), draft.last_stats
    if plain.shape[1] > PROMPT.shape[1] + 3:
        assert_drafted(draft, "corrupted50")
        assert len(set(draft.last_stats.proposed)) > 1


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["oracle", "wrong"])
def test_same_text_under_synthid_watermark(llama, kind, mode):
    choice = {"do_sample": False} if mode == "greedy" else {"do_sample": True, "top_k": 1}
    config = {"ngram_len": 3, "keys": [654, 400, 836, 123], "context_history_size": 16}
    plain = run(llama, {"watermarking_config": SynthIDTextWatermarkingConfig(**config)}, **choice)
    draft = scripted_draft(llama, kind, plain[0, PROMPT.shape[1] :].tolist())
    assisted = run(llama, {"watermarking_config": SynthIDTextWatermarkingConfig(**config)}, draft, **choice)
    assert torch.equal(assisted, plain)
    assert_drafted(draft, kind)


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("layout", ["anchor", "one_plus_n", "reduced_vocabulary"])
def test_same_text_with_every_head(target, head, layout):
    changes = {"markov_rank": 0} if head == "none" else {"markov_head_type": head}
    if layout == "one_plus_n":
        changes["sample_from_anchor"] = False
    if layout == "reduced_vocabulary":
        changes["draft_token_ids"] = torch.arange(0, VOCAB, 2)
    plain = run(target, {}, do_sample=False)
    draft = scripted_draft(target, "random", [], **changes)
    assert torch.equal(run(target, {}, draft, do_sample=False), plain)
    assert max(draft.last_stats.proposed) == draft.config.num_draft_tokens
    assert_drafted(draft, "random")
    penalty = {"repetition_penalty": 1.3}
    assert torch.equal(run(target, penalty, draft, do_sample=False), run(target, penalty, do_sample=False))
    assert_drafted(draft, "random")
