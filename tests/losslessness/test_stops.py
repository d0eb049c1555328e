"""What fires inside a block ends the text exactly where plain `generate` ends it, and nothing beyond is streamed."""

from __future__ import annotations

import string

import pytest
import torch
from scripted_drafts import DRAFT_KINDS, assert_drafted, scripted_draft
from tiny_models import SLIDING_WINDOW, VOCAB, random_prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxLengthCriteria, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer

PROMPT = random_prompt(9)
LENGTH = PROMPT.shape[1]


@pytest.fixture(scope="module")
def tokenizer():
    """Every id is one character."""
    vocabulary = {character: i for i, character in enumerate((string.ascii_letters + string.digits)[:VOCAB])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


class Recorder(BaseStreamer):
    """Keeps every `put` as it came."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


class SumCriterion(StoppingCriteria):
    """Depends on the whole prefix, and counts how often it is asked."""

    def __init__(self, modulus):
        self.modulus, self.lengths = modulus, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        done = int(input_ids[0, LENGTH:].sum()) % self.modulus == 0
        return torch.tensor([done])


class ScoreCriterion(StoppingCriteria):
    """Reads the scores of the last token, which it needs to be those of that token."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) == input_ids.shape[1] - LENGTH
        assert int(scores[-1].argmax()) == int(input_ids[0, -1])
        self.seen.append(len(scores))
        return torch.tensor([len(scores) == 11])


def both(target, make_arguments, kind, free_text, check=True):
    """Runs plain and assisted, each with a streamer, and compares texts and streams."""
    plain_stream, stream = Recorder(), Recorder()
    plain = target.generate(PROMPT, streamer=plain_stream, **make_arguments())
    draft = scripted_draft(target, kind, free_text)
    assisted = target.generate(PROMPT, assistant_model=draft, streamer=stream, **make_arguments())
    assert assisted.tolist() == plain.tolist(), (kind, draft.last_stats)
    assert stream.puts == plain_stream.puts
    assert stream.ends == plain_stream.ends == 1
    if check and plain.shape[1] - LENGTH > 3:
        assert_drafted(draft, kind)
    stats = draft.last_stats
    assert stats.new_tokens == plain.shape[1] - LENGTH
    # Every committed token but the first is an accepted draft or the one token of the target's own per round.
    own = stats.new_tokens - 1 - sum(stats.accepted)
    assert stats.rounds - 1 <= own <= stats.rounds
    return plain, draft


@pytest.fixture(scope="module")
def free_text(targets):
    texts = {}

    def get(target):
        name = type(target).__name__
        if name not in texts:
            texts[name] = target.generate(PROMPT, max_new_tokens=40, do_sample=False)[0, LENGTH:].tolist()
        return texts[name]

    return get


@pytest.mark.parametrize("kind", ["oracle", "corrupted50", "random"])
@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_every_length(llama, free_text, kind, mode):
    choice = {"do_sample": False} if mode == "greedy" else {"do_sample": True, "top_k": 1}
    for new_tokens in range(1, 15):
        plain, _ = both(
            llama, lambda n=new_tokens: {"max_new_tokens": n, **choice}, kind, free_text(llama), new_tokens > 6
        )
        assert plain.shape[1] == LENGTH + new_tokens
    both(llama, lambda: {"max_length": LENGTH + 8, **choice}, kind, free_text(llama))


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_eos_at_every_place(target, free_text, kind):
    text = free_text(target)
    for place in range(14):
        eos = [text[place], 4]
        plain, _ = both(
            target, lambda ids=eos: {"max_new_tokens": 30, "eos_token_id": ids, "do_sample": False}, kind, text, False
        )
        assert plain[0, -1] in eos or plain.shape[1] == LENGTH + 30


def test_one_eos_id(llama, free_text):
    text = free_text(llama)
    plain, _draft = both(
        llama, lambda: {"max_new_tokens": 30, "eos_token_id": text[9], "do_sample": False}, "oracle", text
    )
    assert plain.shape[1] - LENGTH == text.index(text[9]) + 1


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_stop_strings(target, free_text, tokenizer, kind):
    text = free_text(target)
    for place in (5, 6, 7, 8, 9):
        stop = tokenizer.decode(text[place : place + 2])
        plain, _ = both(
            target,
            lambda stop=stop: {
                "max_new_tokens": 30, "stop_strings": [stop, "zz"], "tokenizer": tokenizer, "do_sample": False,
            },
            kind,
            text,
            False,
        )  # fmt: skip
        assert plain.shape[1] < LENGTH + 30


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_custom_criteria_see_every_prefix_once(target, free_text, kind):
    for modulus in (7, 13, 19):
        criteria = []

        def arguments(modulus=modulus, criteria=criteria):
            criteria.append(SumCriterion(modulus))
            return {
                "max_new_tokens": 25, "stopping_criteria": StoppingCriteriaList([criteria[-1]]), "do_sample": False,
            }  # fmt: skip

        both(target, arguments, kind, free_text(target), False)
        plain, assisted = criteria
        assert assisted.lengths == plain.lengths


@pytest.mark.parametrize("kind", ["oracle", "corrupted50"])
def test_criteria_get_the_scores_so_far(llama, free_text, kind):
    for processors in ({}, {"repetition_penalty": 1.0001}):
        criterion = ScoreCriterion()
        draft = scripted_draft(llama, kind, free_text(llama))
        out = llama.generate(
            PROMPT,
            assistant_model=draft,
            max_new_tokens=25,
            stopping_criteria=StoppingCriteriaList([criterion]),
            output_scores=True,
            return_dict_in_generate=True,
            do_sample=False,
            **processors,
        )
        assert criterion.seen == list(range(1, 12))
        assert out.sequences.shape[1] == LENGTH + 11
        assert_drafted(draft, kind)


def test_max_length_criterion_of_the_caller(llama, free_text):
    both(
        llama,
        lambda: {
            "max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(LENGTH + 12)]),
            "do_sample": False,
        },
        "oracle",
        free_text(llama),
    )  # fmt: skip


def test_stop_past_the_sliding_window(targets, free_text):
    """An eos inside an accepted block, with the cache well past the window; the cache goes on from there."""
    target = targets("gemma3")
    text = free_text(target)
    place = next(i for i in range(2 * SLIDING_WINDOW, 36) if text[i] not in text[:i])
    arguments = dict(max_new_tokens=40, eos_token_id=text[place], do_sample=False, return_dict_in_generate=True)
    plain = target.generate(PROMPT, **arguments)
    draft = scripted_draft(target, "oracle", text)
    assisted = target.generate(PROMPT, assistant_model=draft, **arguments)
    assert torch.equal(assisted.sequences, plain.sequences)
    assert plain.sequences.shape[1] == LENGTH + place + 1
    for ours, theirs in zip(assisted.cache.layers, plain.cache.layers):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        assert ours.get_seq_length() == theirs.get_seq_length()
    follow_up = torch.cat([plain.sequences, random_prompt(3, seed=8)], dim=1)
    ours, theirs = (
        target.generate(follow_up, cache=out.cache, max_new_tokens=12, do_sample=False) for out in (assisted, plain)
    )
    assert torch.equal(ours, theirs)


def test_text_streamer(llama, free_text, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    draft = scripted_draft(llama, "corrupted10", free_text(llama))
    out = llama.generate(PROMPT, assistant_model=draft, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, LENGTH:])
