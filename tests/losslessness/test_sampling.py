"""Sampling with a draft has exactly the distribution of plain sampling.

Chi-square over every text of one to four tokens of a five-token vocabulary, against the exact probabilities from the
target's own logits under the same processors. The drafts are real, untrained ones, so q ≠ p. Seeds are fixed: a run is
deterministic. That the test can see a bias is shown by samplers that are biased on purpose, which it must reject.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny_models import tiny_draft, tiny_gemma3, tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList

import hf_dspark.candidate_generator as candidate_generator
import hf_dspark.generation.committing as committing
from hf_dspark.generation.verification import Verdict, sample_index, verify_sampled

VOCAB, EOS, NEW_TOKENS = 5, 0, 4
SAMPLES, ALPHA = 1500, 1e-3
PROMPT = torch.tensor([[3, 1, 4, 1, 2]])
HEADS = {
    "none": {"markov_rank": 0},
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
WARPERS = {
    "no warper": {"top_k": 0},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.85, "top_k": 0},
    "all three": {"temperature": 1.3, "top_k": 4, "top_p": 0.9},
}


class PreviousTokenBias(LogitsProcessor):
    """Not row-wise, and not known to be pure: the loop goes token by token and drafting does not use it."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, int(input_ids[0, -1])] -= 1.5
        return scores


SLOW_PATH = {
    "repetition penalty": {"repetition_penalty": 1.5, "top_k": 0},
    "user-made": {"logits_processor": LogitsProcessorList([PreviousTokenBias()]), "top_k": 4},
}


def small(build):
    return build(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        **({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4} if build is tiny_gemma3 else {}),
    )


@pytest.fixture(scope="module")
def target():
    return flattened(small(tiny_llama))


def flattened(model):
    """Weaker logits, so that no text has a probability near one."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)
    return model


def exact(target, arguments):
    """The probability of every text, by running through all of them with plain `generate`'s own processors."""
    captured = {}

    def catch(model, input_ids, logits_processor, **kwargs):
        captured["processors"] = logits_processor
        return input_ids

    target.generate(
        PROMPT, do_sample=True, eos_token_id=EOS, max_new_tokens=NEW_TOKENS, custom_generate=catch, **arguments
    )
    finished, growing = {}, {(): 1.0}
    for step in range(NEW_TOKENS):
        texts = list(growing)
        ids = torch.cat(
            [PROMPT.expand(len(texts), -1), torch.tensor(texts, dtype=torch.long).view(len(texts), -1)], dim=1
        )
        with torch.no_grad():
            logits = target(ids).logits[:, -1].float()
        rows = torch.cat([captured["processors"](ids[i : i + 1], logits[i : i + 1]) for i in range(len(texts))])
        following = {}
        for text, row in zip(texts, rows.double().softmax(-1).tolist()):
            for token, probability in enumerate(row):
                home = finished if token == EOS or step == NEW_TOKENS - 1 else following
                home[(*text, token)] = growing[text] * probability
        growing = following
    assert abs(sum(finished.values()) - 1) < 1e-6
    return finished


def p_value(target, draft, arguments, samples, seed=0):
    """The chance of counts this far from the exact distribution, if the sampler is right."""
    torch.manual_seed(seed)
    counts, proposed, accepted, draft.reasons = Counter(), 0, 0, Counter()
    for _ in range(samples):
        out = target.generate(
            PROMPT,
            assistant_model=draft,
            do_sample=True,
            eos_token_id=EOS,
            pad_token_id=EOS,
            max_new_tokens=NEW_TOKENS,
            **arguments,
        )
        counts[tuple(out[0, PROMPT.shape[1] :].tolist())] += 1
        proposed += sum(draft.last_stats.proposed)
        accepted += sum(draft.last_stats.accepted)
        draft.reasons.update(draft.last_stats.reasons)
        assert draft.last_stats.failure is None
    assert 0 < accepted < proposed
    return chance(counts, exact(target, arguments))


def chance(counts, probabilities):
    """Of counts of texts this far from `probabilities`, if they are right."""
    samples = counts.total()
    expected = {text: probability * samples for text, probability in probabilities.items()}
    if any(expected.get(text, 0) == 0 for text in counts):
        return 0.0  # a text that plain sampling never gives
    # Rare texts are pooled into cells of five expected counts, which chi-square needs.
    statistic, cells, pool = 0.0, 0, [0.0, 0]
    for text in sorted(expected, key=expected.get):
        pool = [pool[0] + expected[text], pool[1] + counts[text]]
        if pool[0] >= 5:
            statistic, cells, pool = statistic + (pool[1] - pool[0]) ** 2 / pool[0], cells + 1, [0.0, 0]
    assert cells > 10
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    "head, warper",
    [("none", "no warper"), ("vanilla", "no warper"), ("gated", "all three"), ("rnn", "temperature")],
)
def test_distribution(target, head, warper):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1], **HEADS[head])
    assert p_value(target, draft, WARPERS[warper], SAMPLES) > ALPHA


@pytest.mark.parametrize("arguments", SLOW_PATH.values(), ids=SLOW_PATH)
def test_distribution_token_by_token(target, arguments):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    assert p_value(target, draft, arguments, SAMPLES) > ALPHA


def test_distribution_with_a_confidence_threshold(target):
    """The threshold ends a block before the draft at that position is drawn, so it biases nothing."""
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    draft.generation_config.assistant_confidence_threshold = 0.5
    assert p_value(target, draft, WARPERS["no warper"], SAMPLES) > ALPHA
    assert 0 < draft.reasons["threshold"] < draft.reasons.total()


def test_distribution_with_a_reduced_draft_vocabulary(target):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1], draft_token_ids=torch.tensor([0, 2, 4]))
    assert p_value(target, draft, WARPERS["no warper"], SAMPLES) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("head", HEADS)
def test_distribution_in_full(target, head, warper):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1], **HEADS[head])
    assert p_value(target, draft, WARPERS[warper], 3 * SAMPLES) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_distribution_past_a_sliding_window(head):
    target = flattened(small(tiny_gemma3))
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1], **HEADS[head])
    assert p_value(target, draft, WARPERS["all three"], 3 * SAMPLES) > ALPHA


# ----------------------------------------------------------------------------------------------------------------------
# Biased on purpose
# ----------------------------------------------------------------------------------------------------------------------
def always_accept(p, token_ids, q, usable):
    if token_ids is None:
        return verify_sampled(p, token_ids, q, usable)
    return Verdict([*token_ids.tolist(), int(sample_index(p[-1]))], len(token_ids), len(token_ids))


def residual_not_subtracted(p, token_ids, q, usable):
    verdict = verify_sampled(p, token_ids, q, usable)
    if token_ids is None or verdict.accepted == len(token_ids):
        return verdict
    return verdict._replace(tokens=[*verdict.tokens[:-1], int(sample_index(p[verdict.accepted]))])


def residual_soft_maxed(p, token_ids, q, usable):
    verdict = verify_sampled(p, token_ids, q, usable)
    if token_ids is None or verdict.accepted == len(token_ids):
        return verdict
    residual = (p[verdict.accepted] - q[verdict.accepted]).clamp(min=0)
    return verdict._replace(tokens=[*verdict.tokens[:-1], int(sample_index(residual.softmax(-1)))])


def accept_by_p_alone(p, token_ids, q, usable):
    return verify_sampled(p, token_ids, None if q is None else torch.ones_like(q) * q.mean(), usable)


VERIFIERS = [always_accept, residual_not_subtracted, residual_soft_maxed, accept_by_p_alone]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.__name__)
def test_biased_verification_is_rejected(target, monkeypatch, verifier):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    monkeypatch.setattr(committing, "verify_sampled", verifier)
    samples = SAMPLES if verifier in (residual_not_subtracted, accept_by_p_alone) else 500
    assert p_value(target, draft, WARPERS["no warper"], samples) < ALPHA


def q_that_was_not_sampled(draw):
    def choose(self, logits, prefix):
        q = logits.softmax(dim=-1, dtype=torch.float32)
        return draw(logits, q), q

    return choose


DRAWS = {
    "arg-max drafts": lambda logits, q: logits.argmax(-1),
    "temperature ignored in q": lambda logits, q: sample_index((logits.float() / 0.3).softmax(-1)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_q_that_was_not_sampled_is_rejected(target, monkeypatch, draw):
    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    monkeypatch.setattr(candidate_generator.DSparkCandidateGenerator, "_choose", q_that_was_not_sampled(draw))
    assert p_value(target, draft, WARPERS["no warper"], 500) < ALPHA


def test_withholding_a_draft_for_what_it_is_is_rejected(target, monkeypatch):
    """The anticipation that scheduling must avoid: a block is cut before its least likely token."""
    propose = candidate_generator.DSparkCandidateGenerator.propose

    def anticipating(self, *arguments):
        block = propose(self, *arguments)
        if block.length == 0:
            return block
        chances = block.probabilities.gather(1, block.token_ids[0][:, None])[:, 0]
        likely = chances > block.probabilities.amax(-1) * 0.7
        return block._replace(usable=block.usable & (likely.long().cumprod(0) > 0))

    draft = tiny_draft(target, std=0.5, target_layer_ids=[0, 1])
    monkeypatch.setattr(candidate_generator.DSparkCandidateGenerator, "propose", anticipating)
    monkeypatch.setattr(
        committing,
        "verify_sampled",
        # as a withheld position is treated: the target's own distribution
        lambda p, token_ids, q, usable: verify_sampled(
            p[: 1 if token_ids is None else int(usable.sum()) + 1],
            None if token_ids is None or not usable.any() else token_ids[: int(usable.sum())],
            None if token_ids is None or not usable.any() else q[: int(usable.sum())],
            None if token_ids is None or not usable.any() else usable[: int(usable.sum())],
        ),
    )
    assert p_value(target, draft, WARPERS["no warper"], SAMPLES) < ALPHA
