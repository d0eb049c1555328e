"""Masks, anchors and records."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_pair import tiny_tokenizer

from hf_dspark.errors import DSparkDataError
from hf_dspark.training.data import (
    DSparkCollator,
    DSparkDataset,
    encode_conversation,
    load_records,
    most_frequent_ids,
    read_jsonl,
    split_records,
)

# ChatML-like, word by word: w40 opens a turn, w41 user, w42 assistant, w43 ends a turn, w44 follows every turn.
CHATML = (
    "{% for m in messages %} w40{{ ' w41' if m['role'] == 'user' else ' w42' }} {{ m['content'] }} w43 w44"
    "{% endfor %}{% if add_generation_prompt %} w40 w42{% endif %}"
)
MARKED = (
    "{% for m in messages %} w40{% if m['role'] == 'user' %} w41 {{ m['content'] }} w43{% else %} w42"
    "{% generation %} {{ m['content'] }} w43{% endgeneration %}{% endif %} w44{% endfor %}"
    "{% if add_generation_prompt %} w40 w42{% endif %}"
)
TWO_TURNS = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3 w4"},
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": "w6 w7"},
]


def supervised(template, messages=TWO_TURNS, **kwargs):
    tokenizer = tiny_tokenizer(template)
    ((ids, mask),) = encode_conversation(tokenizer, messages, **kwargs)
    assert len(ids) == len(mask)
    return ids, [i for i, kept in zip(ids, mask) if kept]


def test_all_answers_are_supervised_up_to_their_end_of_turn():
    ids, kept = supervised(CHATML.replace(" w44", ""))
    assert ids == [40, 41, 1, 2, 43, 40, 42, 3, 4, 43, 40, 41, 5, 43, 40, 42, 6, 7, 43]
    assert kept == [3, 4, 43, 6, 7, 43]


def test_generation_markers_are_believed():
    ids, kept = supervised(MARKED)
    assert kept == [3, 4, 43, 6, 7, 43]
    assert ids[-1] == 44


def test_an_answer_that_was_cut_has_no_end_of_turn():
    ids, kept = supervised(CHATML.replace(" w44", ""), finished=False)
    assert ids[-1] == 7 and kept == [3, 4, 43, 6, 7]


def test_a_cut_answer_must_be_text():
    parts = [TWO_TURNS[0], {"role": "assistant", "content": ["w3"]}]
    with pytest.raises(DSparkDataError, match="list"):
        supervised(CHATML.replace("m['content']", "m['content'] | string"), parts, finished=False)


def test_the_newline_after_the_end_of_turn_is_not_supervised():
    """SmolLM2 and Qwen put a newline behind <|im_end|>; nobody generates it."""
    template = CHATML.replace(" w44", " \n")
    tokenizer = tiny_tokenizer(template)
    ((ids, mask),) = encode_conversation(tokenizer, TWO_TURNS[:2])
    kept = [i for i, m in zip(ids, mask) if m]
    assert kept[:2] == [3, 4] and mask[-1] in (0, 1)
    assert sum(mask) == 3  # w3 w4 w43


def test_no_template():
    with pytest.raises(DSparkDataError, match="chat template"):
        encode_conversation(tiny_tokenizer(None), TWO_TURNS)


def records(count=6):
    return [
        {"prompt": f"w{i + 1}", "response": " ".join(f"w{(i + j) % 30 + 1}" for j in range(9))} for i in range(count)
    ]


def dataset(**changes):
    settings = dict(max_length=64, num_anchors=4, seed=7, vocab_size=48)
    return DSparkDataset.from_records(records(), tiny_tokenizer(CHATML), **{**settings, **changes})


def test_anchors_depend_on_seed_epoch_and_sample_only():
    first, again = dataset(), dataset()
    again[3], again[0]  # another call order
    assert all(torch.equal(first[i]["anchors"], again[i]["anchors"]) for i in range(6))
    again.epoch = 1
    assert any(not torch.equal(first[i]["anchors"], again[i]["anchors"]) for i in range(6))
    again.epoch = 0
    assert all(torch.equal(first[i]["anchors"], again[i]["anchors"]) for i in range(6))
    other = dataset(seed=8)
    assert any(not torch.equal(first[i]["anchors"], other[i]["anchors"]) for i in range(6))


def test_nothing_to_supervise():
    with pytest.raises(DSparkDataError, match="Nothing to supervise"):
        DSparkDataset.from_records(
            [{"messages": [{"role": "user", "content": "w1"}]}], tiny_tokenizer(CHATML), 64, 4, 0, 48
        )
    with pytest.raises(DSparkDataError, match="Nothing to supervise"):
        dataset(max_length=4)


def test_ids_beyond_the_target():
    with pytest.raises(DSparkDataError, match="vocab_size 20"):
        dataset(vocab_size=20)


def test_fields():
    with pytest.raises(DSparkDataError, match=r"Record 0.*question"):
        DSparkDataset.from_records([{"question": "w1"}], tiny_tokenizer(CHATML), 64, 4, 0, 48)


def test_most_frequent_ids_are_supervised_ones():
    data = dataset()
    ids = most_frequent_ids(data, 48, 10)
    counts = data.token_counts(48)
    assert (ids.diff() > 0).all() and counts[ids].min() >= counts[[i for i in range(48) if i not in ids]].max()
    assert counts[41] == 0  # the user's turn


def test_collator():
    data = dataset(num_anchors=100)
    items = [data[0], {name: value[:-2] for name, value in data[1].items()}]
    batch = DSparkCollator(num_slots=3, loss_decay_gamma=4.0)(items)
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(items[0]["input_ids"]), len(items[1]["input_ids"])]
    assert not batch["slots"][1, len(items[1]["anchors"]) :].any()
    weights = torch.exp(-torch.arange(3) / 4.0)
    torch.testing.assert_close(batch["slot_weight"], (batch["slots"] * weights).sum())


def test_reading(tmp_path):
    file = tmp_path / "x.jsonl"
    with pytest.raises(DSparkDataError, match="No such data file"):
        read_jsonl(file)
    file.write_text("\n")
    with pytest.raises(DSparkDataError, match="no records"):
        read_jsonl(file)
    file.write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(DSparkDataError, match="line 2"):
        read_jsonl(file)
    file.write_text("[1]\n")
    with pytest.raises(DSparkDataError, match="line 1"):
        read_jsonl(file)
    file.write_text("\n".join(json.dumps(record) for record in records()))
    assert len(load_records([str(file), str(file)])) == 12
    with pytest.raises(DSparkDataError, match="single datasets id"):
        load_records([str(file), "no/such"])


def test_split():
    rows = [{"i": i} for i in range(100)]
    train, held_out = split_records(rows, 0.02, seed=0)
    assert len(train) == 98 and len(held_out) == 2
    assert {row["i"] for row in train}.isdisjoint({row["i"] for row in held_out})
    assert split_records(rows, 0.02, seed=0) == (train, held_out) != split_records(rows, 0.02, seed=1)
    assert split_records(rows, 0.0, seed=0) == (rows, [])
    with pytest.raises(DSparkDataError, match="cannot be split"):
        split_records(rows[:1], 0.5, seed=0)
    with pytest.raises(DSparkDataError, match="validation_share"):
        split_records(rows, 1.5, seed=0)
