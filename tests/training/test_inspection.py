"""What is counted and shown of a data file."""

import json

import pytest
from chat_templates import QWEN3, SMOLLM2, byte_tokenizer

from hf_dspark.errors import DSparkDataError
from hf_dspark.training.data import DSparkDataset
from hf_dspark.training.inspection import Inspection, inspect_records, pieces

TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because — ß."}]
RECORDS = [
    {"prompt": "Why?", "response": "Because.", "temperature": 0.7},
    {"messages": [*TURNS, *TURNS], "finished": False, "temperature": 0},
    {"messages": TURNS[:1]},
]


def test_counts_are_the_trainers():
    tokenizer = byte_tokenizer(QWEN3)
    for max_length in (512, 45):
        found = inspect_records(RECORDS, tokenizer, max_length)
        data = DSparkDataset.from_records(RECORDS, tokenizer, max_length, 4, 0, len(tokenizer))
        assert (found.samples, found.skipped, found.supervised) == (len(data), data.skipped, data.supervised_tokens)
        assert found.tokens == sum(len(ids) for ids, _ in data.samples)
        assert found.supervised_share == found.supervised / found.tokens
    assert (found.records, found.unfinished, found.temperatures) == (3, 1, {0.7: 1, 0: 1})
    assert found.answers == {0: 1, 1: 1, 2: 1}
    assert found.longer == found.samples and len(found.lengths) == 3 and max(found.lengths) > 45


def test_samples_are_drawn_by_seed_and_shown_as_text():
    tokenizer = byte_tokenizer(SMOLLM2)
    records = [{"prompt": f"Number {i}?", "response": f"It is {i} €."} for i in range(30)]
    first = inspect_records(records, tokenizer, 512).shown
    assert len(first) == 3 and first == inspect_records(records, tokenizer, 512).shown
    assert first != inspect_records(records, tokenizer, 512, seed=1).shown
    assert len(inspect_records(records, tokenizer, 512, show=5).shown) == 5
    for shown in first:
        (context, plain), (answer, supervised) = shown
        assert (plain, supervised) == (False, True)
        assert context.endswith("<|im_start|>assistant\n") and "Number" in context
        assert answer.startswith("It is") and answer.endswith(" €.<|im_end|>")
    assert "".join(piece for piece, _ in first[0]).count("<|im_end|>") == 3


def test_nothing_to_supervise():
    with pytest.raises(DSparkDataError, match="none of 2 records"):
        inspect_records(RECORDS[2:] * 2, byte_tokenizer(SMOLLM2), 512)


@pytest.mark.parametrize(("longest", "width"), [(1, 1), (12, 1), (13, 2), (412, 50), (2400, 200), (2401, 500)])
def test_the_histogram_has_round_borders_and_every_sample(longest, width):
    ranges = Inspection(512, lengths=[1, longest]).histogram()
    assert ranges[0][:2] == (1, width) and ranges[-1][0] <= longest <= ranges[-1][1]
    assert sum(number for _, _, number in ranges) == 2 and len(ranges) <= 12


def test_the_histogram_begins_with_the_shortest():
    assert Inspection(512, lengths=[45, 95, 100, 120]).histogram() == [
        (41, 50, 1),
        (51, 60, 0),
        (61, 70, 0),
        (71, 80, 0),
        (81, 90, 0),
        (91, 100, 2),
        (101, 110, 0),
        (111, 120, 1),
    ]


def test_as_json():
    values = json.loads(json.dumps(inspect_records(RECORDS, byte_tokenizer(QWEN3), 512).to_dict()))
    assert values["records"] == 3 and 0 < values["supervised_share"] < 1
    assert values["length"]["max"] == max(inspect_records(RECORDS, byte_tokenizer(QWEN3), 512).lengths)
    assert sum(row["samples"] for row in values["histogram"]) == 3


def test_pieces_of_an_empty_and_a_plain_text():
    tokenizer = byte_tokenizer(SMOLLM2)
    ids = tokenizer("abc")["input_ids"]
    assert pieces(tokenizer, ids, [0, 0, 0]) == [("abc", False)]
    assert pieces(tokenizer, ids, [1, 0, 1]) == [("a", True), ("b", False), ("c", True)]
