"""Conversations of which the target writes both sides."""

import pytest
import torch
from chat_templates import byte_tokenizer
from tiny_pair import tiny_target, tiny_tokenizer
from writing import END, Stopped, chat_tokenizer, chatty_writer, contents, record_file, roles

from hf_dspark.errors import DSparkConfigError, DSparkDataError
from hf_dspark.training.data import DSparkDataset, read_jsonl
from hf_dspark.training.masks import render
from hf_dspark.training.record_file import read_meta
from hf_dspark.training.synthesis import SynthesisSettings, UserTurns, normalized, refusal, synthesize
from hf_dspark.training.target_text import Sampling, Stops, TargetWriter


def settings(count, **changes):
    values = dict(answers=Sampling(12), user_turns=Sampling(8, 1.0), temperatures=[0.0, 1.0])
    return SynthesisSettings(count=count, **{**values, **changes})


def synthesized(path, wanted, batch_size=4, writer=None, stop_after=None):
    file = record_file(path)
    seen = []

    def on_batch(records, tokens):
        seen.append(records)
        if len(seen) == stop_after:
            raise Stopped

    synthesize(writer or chatty_writer(bias=3.0), file, wanted, batch_size, on_batch)
    return list(file)


def test_exactly_so_many_distinct_records(tmp_path):
    path = tmp_path / "out.jsonl"
    records = synthesized(path, settings(11))
    assert len(records) == 11
    users = [contents(record, "user")[0] for record in records]
    assert len({normalized(text) for text in users}) == 11 and all(users)
    assert {record["temperature"] for record in records} == {0.0, 1.0}
    counts = read_meta(path)["counts"]
    dropped = {name: number for name, number in counts.items() if name.startswith("dropped")}
    assert counts["attempts"] >= 11 + sum(dropped.values()) and "dropped: empty" in dropped
    data = DSparkDataset.from_records(records, chat_tokenizer(), 512, 4, 0, 48)
    assert len(data) + data.skipped == 11


def test_the_answer_is_the_targets_to_that_user_turn(tmp_path):
    writer = chatty_writer(bias=3.0)
    records = synthesized(tmp_path / "out.jsonl", settings(6, temperatures=[0.0]), writer=writer)
    for record in records:
        ids = writer.prompt_ids(render(writer.tokenizer, record["messages"][:1], True))
        (answer,) = writer([ids], Sampling(12, 0.0), Stops([END]), 0)
        assert (answer.text, answer.finished) == (contents(record, "assistant")[0], record["finished"])


def test_user_turns_begin_where_the_template_has_them(monkeypatch):
    seen = []
    original = TargetWriter.__call__

    def spy(self, prompts, sampling, stops, seed):
        seen.append(([self.tokenizer.decode(prompt) for prompt in prompts], stops.ids))
        return original(self, prompts, sampling, stops, seed)

    monkeypatch.setattr(TargetWriter, "__call__", spy)
    turns = UserTurns(chatty_writer(), settings(1, system="w7"))
    said = turns([turns.start] * 2, ["", "w5 w6 "], 1)
    assert seen == [([" w40 w44 w7 w43 w40 w41", " w40 w44 w7 w43 w40 w41 w5 w6"], [END])]
    assert said[1].text.startswith("w5 w6")


def test_openings_take_turns_and_begin_the_first_user_turn_only(tmp_path):
    records = synthesized(tmp_path / "out.jsonl", settings(8, openings=["w5 w6", "w7"], turns=2))
    users = [contents(record, "user") for record in records]
    assert all(first.startswith(("w5 w6", "w7")) for first, *_ in users)
    assert {first[:2] for first, *_ in users} == {"w5", "w7"}
    later = [text for _, *rest in users for text in rest]
    assert later and not all(text.startswith(("w5 w6", "w7")) for text in later)


def test_many_turns_alternate_and_end_well(tmp_path):
    records = synthesized(tmp_path / "out.jsonl", settings(12, turns=3))
    assert {roles(record) for record in records} <= {"ua", "uaua", "uauaua"} and max(map(len, map(roles, records))) > 2
    for record in records:
        assert all(text.strip() for text in contents(record, "assistant"))


def test_synthesis_goes_on_without_repeating_itself(tmp_path):
    whole = synthesized(tmp_path / "whole.jsonl", settings(10))
    path = tmp_path / "out.jsonl"
    with pytest.raises(Stopped):
        synthesized(path, settings(10), stop_after=2)
    with open(path, "a") as stream:
        stream.write('{"id": "0000')
    assert synthesized(path, settings(10)) == whole
    longer = synthesized(path, settings(13))
    assert longer[:10] == whole and len(longer) == 13
    assert len({normalized(contents(record, "user")[0]) for record in longer}) == 13
    with pytest.raises(DSparkConfigError, match="holds 13 records already, but --count is 12"):
        synthesized(path, settings(12))


def test_a_target_with_nothing_more_to_say_ends_it_and_keeps_what_there_is(tmp_path):
    path = tmp_path / "out.jsonl"
    few = settings(50, user_turns=Sampling(8, 1.0, top_k=1), openings=["w5", "w6", "w7", "w8"], give_up_after=12)
    with pytest.raises(DSparkDataError, match=r"12 user turns in a row .*4 seen before.* [1-4] of 50 records"):
        synthesized(path, few)
    assert 1 <= len(read_jsonl(path)) == read_meta(path)["counts"]["records"]


def test_a_user_turn_may_end_at_plain_text():
    """As in Mistral's first templates, where [/INST] is no token of its own."""
    template = "{% for m in messages %}{{ '<s>' ~ m.content ~ '[/' if m.role == 'user' else m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(template)
    target = tiny_target(vocab_size=len(tokenizer))
    bias = torch.full((len(tokenizer),), -1e4)
    bias[tokenizer.convert_tokens_to_ids(["[", "/", "a", "b"])] = 0.0
    target.lm_head.register_forward_hook(lambda module, inputs, output: 0.1 * output + bias)
    turns = UserTurns(TargetWriter(target, tokenizer), settings(1, user_turns=Sampling(40, 1.0)))
    assert turns.stops == Stops([], ["[/"])
    said = turns([[]] * 32, [""] * 32, 1)
    assert all(set(turn.text) <= set("[/ab") and "[/" not in turn.text for turn in said)
    ended = [turn for turn in said if turn.finished]
    assert ended and all(turn.tokens == len(turn.text) + 2 < 40 for turn in ended)
    assert {turn.tokens for turn in said if not turn.finished} <= {40}


def test_a_template_that_does_not_end_user_turns():
    with pytest.raises(DSparkDataError, match="nothing would end it"):
        UserTurns(chatty_writer(template="{% for m in messages %} w1 {{ m['content'] }}{% endfor %}"), settings(1))


def test_settings_that_cannot_work():
    with pytest.raises(DSparkConfigError, match="--user-temperature is 0"):
        settings(1, user_turns=Sampling(8, 0.0))
    with pytest.raises(DSparkConfigError, match="empty text"):
        settings(1, openings=["w1", " "])


def test_no_room_for_a_user_turn(tmp_path):
    writer = chatty_writer()
    writer.context_length = 9
    with pytest.raises(DSparkDataError, match="context of 9 tokens has no room"):
        synthesized(tmp_path / "out.jsonl", settings(1), writer=writer)


@pytest.mark.parametrize(
    ("text", "finished", "reason"),
    [
        ("What is the time?", True, None),
        ("Is it  \n late", True, None),
        (" \n", True, "empty"),
        ("What is", False, "cut at the limit"),
        ("12 + 7?", True, "no letters"),
        ("One w42 two", True, None),
        ("One w42 two w43", True, None),
        ("one two three " * 9, True, "repeats itself"),
        ("one two three", True, None),
        ("Was ist das", True, None),
        ("Hi w40 there", True, None),
    ],
)
def test_why_a_user_turn_is_dropped(text, finished, reason):
    assert refusal(text, finished, tiny_tokenizer()) == reason


def test_control_tokens_in_a_user_turn():
    assert refusal("w1 w42 w2", True, chat_tokenizer()) == "control token inside"


def test_normalized():
    assert normalized("  What\n IS it ") == normalized("what is it") != normalized("what is it?")
