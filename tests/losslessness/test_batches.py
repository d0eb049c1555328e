"""Several rows at once: each row's text is plain `generate`'s, and that of its own single-row call with the draft."""

from __future__ import annotations

import pytest
import torch
from scripted_drafts import BatchScript
from test_greedy import CASES
from test_stops import tokenizer  # noqa: F401 (a fixture)
from tiny_models import TARGETS, VOCAB, tiny_draft
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_dspark import ThroughputCurve
from hf_dspark.errors import DSparkGenerationError

LENGTHS = (5, 13, 1, 9)
NEW_TOKENS = 18
# Every token in the forward costs something: lengths differ from row to row.
DEAR_ROWS = ThroughputCurve.from_points({b: 1 / (8 + b) for b in range(1, 40)})


def batch(lengths=LENGTHS, seed=3):
    """Left-padded rows; what stands at the padding is not 0, so that a look at it shows."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.stack([(torch.arange(longest) >= longest - n).long() for n in lengths])
    return {"input_ids": ids, "attention_mask": mask}


def one_row(inputs, row):
    return {name: value[row : row + 1] for name, value in inputs.items()}


def script(draft, plain, inputs):
    """Rows 0 and 2 draft rightly but for every fourth position, row 1 always wrongly, the others rightly."""
    start = inputs["input_ids"].shape[1]
    continuations = [row[start:].tolist() for row in plain]
    return BatchScript(draft, continuations, lambda row, position: row == 1 or (row in (0, 2) and position % 4 == 2))


def assert_drafted(draft):
    rows = draft.last_stats.rows
    assert draft.last_stats.failure is None
    assert sum(rows[1].proposed) > 0 == sum(rows[1].accepted)
    assert 0 < sum(rows[0].accepted) < sum(rows[0].proposed)
    assert sum(rows[3].accepted) > 0


def drafted(target, plain, inputs, scheduled=False, **changes):
    draft = tiny_draft(target, **changes)
    script(draft, plain, inputs)
    if scheduled:
        draft.scheduler, draft.throughput = "auto", DEAR_ROWS
    return draft


@pytest.fixture(params=TARGETS)
def target(request):
    return TARGETS[request.param]()


@pytest.fixture
def llama():
    return TARGETS["llama"]()


@pytest.mark.parametrize("scheduled", [False, True], ids=["full", "scheduled"])
@pytest.mark.parametrize("mode", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampling"])
def test_same_rows(target, mode, scheduled):
    inputs = batch()
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, **mode)
    draft = drafted(target, plain, inputs, scheduled)
    ours = target.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert torch.equal(ours, plain)
    if scheduled:
        rows = draft.last_stats.rows
        assert len({length for row in rows for length in row.scheduled}) > 2
        assert 0 < sum(sum(row.accepted) for row in rows) < sum(sum(row.proposed) for row in rows)
    else:
        assert_drafted(draft)
    for row in range(len(LENGTHS)):
        single = target.generate(
            **one_row(inputs, row), max_new_tokens=NEW_TOKENS, assistant_model=tiny_draft(target), **mode
        )
        assert torch.equal(single[0], ours[row])


@pytest.mark.parametrize("case", [case for case in CASES if "guidance" not in case and case != "many"])
def test_every_processor(llama, case):
    """Against plain `generate` on the same batch, and against each row's own call."""
    inputs = batch()
    plain = llama.generate(**inputs, max_new_tokens=NEW_TOKENS, pad_token_id=0, **CASES[case]())
    draft = drafted(llama, plain, inputs)
    ours = llama.generate(**inputs, max_new_tokens=NEW_TOKENS, pad_token_id=0, assistant_model=draft, **CASES[case]())
    assert sum(sum(row.accepted) for row in draft.last_stats.rows) > 0
    assert sum(sum(row.proposed) - sum(row.accepted) for row in draft.last_stats.rows) > 0
    assert torch.equal(ours, plain)


class RowBan(LogitsProcessor):
    """Stateful: bans the id that it chose to ban when it first saw its text."""

    def __init__(self):
        self.banned = None

    def __call__(self, input_ids, scores):
        if self.banned is None:
            self.banned = scores.argmax(-1)
        return scores.scatter(1, self.banned[:, None], -torch.inf)


def test_a_stateful_processor_has_a_state_per_row(llama):
    inputs = batch()

    def arguments():
        return {"logits_processor": LogitsProcessorList([RowBan()]), "max_new_tokens": NEW_TOKENS}

    plain = llama.generate(**inputs, **arguments())
    draft = drafted(llama, plain, inputs)
    assert torch.equal(llama.generate(**inputs, assistant_model=draft, **arguments()), plain)
    assert_drafted(draft)


def test_rows_finish_on_their_own(llama):
    """Each at its own end-of-sequence token, inside a block too; the output is padded as plain `generate` pads it."""
    inputs = batch()
    start = inputs["input_ids"].shape[1]
    free = llama.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, start:]
    stops = [int(free[0, 6]), int(free[3, 11])]
    plain = llama.generate(**inputs, max_new_tokens=NEW_TOKENS, eos_token_id=stops, pad_token_id=7)
    ends = {int((row[start:] != 7).sum()) for row in plain}
    assert len(ends) > 1
    draft = drafted(llama, plain, inputs)
    ours = llama.generate(
        **inputs, max_new_tokens=NEW_TOKENS, eos_token_id=stops, pad_token_id=7, assistant_model=draft
    )
    assert torch.equal(ours, plain)
    assert draft.last_stats.active[0] == len(LENGTHS) > draft.last_stats.active[-1]


class LongEnough(StoppingCriteria):
    """Rows stop at different lengths; no criterion knows an eos, so plain `generate` lets all go on together."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(set(row.tolist())) > 14 for row in input_ids])


@pytest.mark.parametrize("with_eos", [False, True])
def test_stop_strings_and_criteria(llama, tokenizer, with_eos):  # noqa: F811
    inputs = batch()
    start = inputs["input_ids"].shape[1]
    free = llama.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, start:]
    arguments = {"stop_strings": [tokenizer.decode(free[0, 5:6])], "tokenizer": tokenizer}
    arguments |= {"max_new_tokens": NEW_TOKENS, "stopping_criteria": [LongEnough()]}
    if with_eos:
        arguments |= {"eos_token_id": int(free[3, 8]), "pad_token_id": 0}
    plain = llama.generate(**inputs, **arguments)
    draft = drafted(llama, plain, inputs)
    assert torch.equal(llama.generate(**inputs, assistant_model=draft, **arguments), plain)
    assert sum(sum(row.accepted) for row in draft.last_stats.rows) > 0


def test_scores_and_logits(llama):
    inputs = batch()
    start = inputs["input_ids"].shape[1]
    stop = int(llama.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, start + 6])
    arguments = dict(max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_scores=True, output_logits=True)
    arguments |= {"eos_token_id": stop, "pad_token_id": 7, "repetition_penalty": 1.1}
    plain = llama.generate(**inputs, **arguments)
    draft = drafted(llama, plain.sequences, inputs)
    ours = llama.generate(**inputs, assistant_model=draft, **arguments)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.scores) == len(plain.scores) == len(ours.logits)
    for row in range(len(LENGTHS)):
        count = draft.last_stats.rows[row].new_tokens
        for name in ("scores", "logits"):
            mine, theirs = (torch.stack(getattr(output, name))[:, row] for output in (ours, plain))
            torch.testing.assert_close(mine[:count], theirs[:count], atol=1e-4, rtol=1e-4)
            assert not mine[count:].any()


def test_embeddings_as_input(llama):
    inputs = batch()
    embeds = {
        "inputs_embeds": llama.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    plain = llama.generate(**embeds, max_new_tokens=NEW_TOKENS)
    draft = tiny_draft(llama)
    BatchScript(draft, plain.tolist(), lambda row, position: position % 3 == 2)
    assert torch.equal(llama.generate(**embeds, max_new_tokens=NEW_TOKENS, assistant_model=draft), plain)
    assert 0 < sum(draft.last_stats.rows[0].accepted) < sum(draft.last_stats.rows[0].proposed)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompts_in_chunks(name):
    """A pack never holds more tokens than the limit, and a prompt may be cut by it."""
    target = TARGETS[name]()
    inputs = batch()
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS)
    draft = drafted(target, plain, inputs)
    sizes = []
    handle = target.get_decoder().register_forward_hook(lambda m, a, out: sizes.append(out.last_hidden_state.shape[1]))
    ours = target.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft, prefill_chunk_size=7)
    handle.remove()
    assert torch.equal(ours, plain)
    assert sizes[-draft.last_stats.rounds - 4 : -draft.last_stats.rounds] == [7, 7, 7, 7]
    assert_drafted(draft)
    assert [row.context_tokens for row in draft.last_stats.rows] == list(LENGTHS)


def test_a_draft_that_fails_midway(llama):
    inputs = batch()
    plain = llama.generate(**inputs, max_new_tokens=NEW_TOKENS)
    draft = drafted(llama, plain, inputs)
    step, calls = draft.sequential_step, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 8:  # draft 3 of the second round: the two before it are verified all the same
            raise RuntimeError("no more")
        return step(*arguments)

    draft.sequential_step = failing
    assert torch.equal(llama.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft), plain)
    stats = draft.last_stats
    assert stats.failure == "RuntimeError: no more" and stats.rows[3].proposed[:3] == [5, 2, 0]


def test_a_draft_with_nan_logits_in_one_row(llama):
    inputs = batch()
    plain = llama.generate(**inputs, max_new_tokens=NEW_TOKENS)
    draft = drafted(llama, plain, inputs)
    step, calls = draft.sequential_step, []

    def spoilt(*arguments):
        logits, embedding, state = step(*arguments)
        calls.append(1)
        if len(calls) % 5 == 3:
            logits[-1] = torch.nan
        return logits, embedding, state

    draft.sequential_step = spoilt
    assert torch.equal(llama.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft), plain)
    first, last = draft.last_stats.rows[0], draft.last_stats.rows[3]
    assert first.proposed[0] == 5 and last.proposed[0] == 2 and last.reasons[0] == "NaN logits"


REFUSED = {
    "hidden": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "guidance": ({"guidance_scale": 1.4}, "guidance_scale"),
    "right padding": ({"attention_mask": batch()["attention_mask"].flip(1)}, "padding_side='left'"),
    "mask": ({"attention_mask": torch.ones(4, 15, dtype=torch.long)}, "attention_mask"),
    "input": ({"token_type_ids": torch.zeros(4, 13, dtype=torch.long)}, "token_type_ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(llama, case):
    arguments, name = REFUSED[case]
    forwards = []
    llama.register_forward_hook(lambda *_: forwards.append(1))
    if case == "input":
        llama.prepare_inputs_for_generation = lambda input_ids, token_type_ids=None, **kwargs: {}
    with pytest.raises(DSparkGenerationError, match=name):
        llama.generate(**{**batch(), **arguments}, max_new_tokens=3, assistant_model=tiny_draft(llama))
    assert not forwards


class Ignoring(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


def test_a_cache_or_a_streamer_is_refused(llama):
    for given, name in (({"cache": DynamicCache()}, "user-made cache"), ({"streamer": Ignoring()}, "streamer")):
        with pytest.raises(DSparkGenerationError, match=name):
            llama.generate(**batch(), **given, max_new_tokens=3, assistant_model=tiny_draft(llama))


def test_the_targets_own_attention_is_back(llama):
    """After a batch, and after one that failed."""
    own = llama.config._attn_implementation
    llama.generate(**batch(), max_new_tokens=3, assistant_model=tiny_draft(llama))
    assert llama.config._attn_implementation == own

    def failing(input_ids, scores, **kwargs):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        llama.generate(**batch(), max_new_tokens=3, assistant_model=tiny_draft(llama), stopping_criteria=[failing])
    assert llama.config._attn_implementation == own
