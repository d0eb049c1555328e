import json

import pytest
from tiny_pair import tiny_tokenizer

from hf_dspark.errors import DSparkDataError
from hf_dspark.evaluation.prompts import encode, load_prompts


def write(tmp_path, *rows):
    path = tmp_path / "some-set.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_the_three_forms_give_conversations(tmp_path):
    system = {"role": "system", "content": "s"}
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    path = write(tmp_path, {"turns": ["one", "two"]}, "", {"prompt": "p"}, {"messages": [system, question, answer]})
    prompts = load_prompts(path)
    assert prompts.name == "some-set"
    assert prompts.conversations == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "p"}],
        [system, question],  # the answer is what the model is to write
    ]
    assert load_prompts(path, limit=2).conversations == prompts.conversations[:2]


@pytest.mark.parametrize(
    "row",
    [{"turns": []}, {"turns": [1]}, {"text": "x"}, {"messages": []}, {"messages": [{"role": "user"}]}, ["x"], "{"],
)
def test_a_wrong_line_is_named(tmp_path, row):
    path = write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(DSparkDataError, match=r"some-set\.jsonl:2 "):
        load_prompts(path)


def test_missing_and_empty_files_are_errors(tmp_path):
    with pytest.raises(DSparkDataError, match="Cannot read"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DSparkDataError, match="has no prompts"):
        load_prompts(write(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DSparkDataError, match="Cannot read"):
        load_prompts(tmp_path / "latin.jsonl")


def test_the_prompt_ends_where_the_assistant_begins(tokenizer):
    encoded = encode(tokenizer, [{"role": "user", "content": "w5"}], "cpu")
    assert tokenizer.decode(encoded["input_ids"][0]) == " w1 w5 w2"
    assert encoded["attention_mask"].tolist() == [[1, 1, 1]]


def test_a_tokenizer_without_template_is_refused():
    with pytest.raises(DSparkDataError, match="no chat template"):
        encode(tiny_tokenizer(chat_template=None), [{"role": "user", "content": "w5"}], "cpu")
