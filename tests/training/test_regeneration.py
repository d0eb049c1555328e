"""Prompts, how they are planned, and the answers that the target gives to them."""

import pytest
import torch
from tiny_pair import tiny_draft
from writing import END, Stopped, chat_tokenizer, chatty_target, chatty_writer, contents, record_file, roles

from hf_dspark.errors import DSparkConfigError, DSparkDataError
from hf_dspark.training.data import DSparkDataset, read_jsonl
from hf_dspark.training.masks import render
from hf_dspark.training.regeneration import answer_batch, make_jobs, plan, read_conversations, regenerate
from hf_dspark.training.target_text import Sampling, Stops, digest

RECORDS = [
    {"prompt": "w1"},
    {"prompt": "w2 w3 w4 w5 w6 w7 w8", "response": "w9"},
    {"turns": ["w3 w9", "w10 w11 w12", "w13"]},
    {
        "messages": [
            {"role": "system", "content": "w20"},
            {"role": "user", "content": "w21 w22"},
            {"role": "assistant", "content": "w23"},
            {"role": "user", "content": "w24"},
            {"role": "assistant", "content": "w25"},
        ]
    },
    {"prompt": "w30 w31 w32"},
]


def written(
    path, writer=None, records=RECORDS, temperatures=(0.0,), samples=1, batch_size=2, stop_after=None, limit=24
):
    """Regenerates into `path`; raises `Stopped` after so many batches."""
    writer = writer or chatty_writer()
    sampling = Sampling(limit)
    jobs = make_jobs(read_conversations(records), list(temperatures), samples)
    batches, _ = plan(writer, jobs, sampling, batch_size)
    file = record_file(path)
    done = []

    def on_batch(records, tokens):
        done.append(records)
        if len(done) == stop_after:
            raise Stopped

    regenerate(writer, batches, file, sampling, 0, on_batch)
    assert sum(done) == len(jobs) - (len(file) - sum(done))
    file.sort([job.id for job in jobs])
    return read_jsonl(path)


def test_user_turns_are_kept_and_every_answer_is_the_targets_own(tmp_path):
    """Greedy, in padded batches, against one call per answer."""
    records = written(tmp_path / "out.jsonl", batch_size=3)
    assert [contents(record, "user") for record in records] == [
        ["w1"],
        ["w2 w3 w4 w5 w6 w7 w8"],
        ["w3 w9", "w10 w11 w12", "w13"][: len(contents(records[2], "user"))],
        ["w21 w22", "w24"],
        ["w30 w31 w32"],
    ]
    assert roles(records[2]) == "uauaua" and roles(records[3]) == "suaua"
    assert contents(records[3], "system") == ["w20"]
    target, tokenizer = chatty_target(), chat_tokenizer()
    finished = []
    for record in records:
        for i, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                text = render(tokenizer, record["messages"][:i], True)
                ids = tokenizer(text, return_tensors="pt")["input_ids"]
                output = target.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=END)[0, ids.shape[1] :]
                finished.append(output[-1].item() == END)
                assert message["content"] == tokenizer.decode(output[: len(output) - finished[-1]])
        assert record["finished"] is finished[-1] and record["temperature"] == 0
    assert any(finished)


def test_what_is_written_is_what_the_trainer_reads(tmp_path):
    """The answers' tokens come back, with an end of turn where there was one."""
    records = written(tmp_path / "out.jsonl", temperatures=[1.0], limit=12)
    assert {record["finished"] for record in records} == {True, False}
    data = DSparkDataset.from_records(records, chat_tokenizer(), 512, 4, 0, 48)
    supervised = {int(mask.sum()) for _, mask in data.samples}
    assert supervised <= {record["tokens"] for record in records}
    ends = [ids[mask.astype(bool)][-1] == END for ids, mask in data.samples]
    assert data.skipped == 0 and ends == [record["finished"] for record in records]


@pytest.mark.parametrize("temperatures", [[0.0], [0.0, 0.7, 1.0]])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_run_that_goes_on_writes_the_same_file(tmp_path, temperatures, stop_after):
    records = [*RECORDS, *({"prompt": f"w{i} w{i + 1}"} for i in range(1, 9))]
    whole = written(tmp_path / "whole.jsonl", records=records, temperatures=temperatures)
    path = tmp_path / "out.jsonl"
    with pytest.raises(Stopped):
        written(path, records=records, temperatures=temperatures, stop_after=stop_after)
    kept = len(path.read_text().splitlines())
    assert 0 < kept < len(whole)
    with open(path, "a") as stream:  # killed in the middle of a line
        stream.write('{"id": "torn", "mess')
    assert written(path, records=records, temperatures=temperatures) == whole
    assert len({record["id"] for record in whole}) == len(records)


def test_a_batch_that_was_written_in_part_is_completed_with_the_same_texts(tmp_path):
    whole = written(tmp_path / "whole.jsonl", temperatures=[1.0], batch_size=5)
    path = tmp_path / "out.jsonl"
    written(path, temperatures=[1.0], batch_size=5)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:10])
    assert written(path, temperatures=[1.0], batch_size=5) == whole


def test_more_prompts_may_come_and_nothing_is_written_twice(tmp_path):
    path = tmp_path / "out.jsonl"
    first = written(path, records=RECORDS[:3])
    longer = written(path)
    assert longer[:3] == first and len(longer) == 5


def test_equal_prompts_are_both_answered(tmp_path):
    records = written(tmp_path / "out.jsonl", records=[{"prompt": "w1"}] * 3 + [{"prompt": "w2"}])
    assert [contents(record, "user") for record in records] == [["w1"], ["w1"], ["w1"], ["w2"]]
    assert len({record["id"] for record in records}) == 4


def test_temperatures_are_drawn_by_id_and_samples_take_turns():
    conversations = read_conversations({"prompt": f"w{i}"} for i in range(60))
    jobs = make_jobs(conversations, [0.0, 0.7, 1.0])
    assert {job.temperature for job in jobs} == {0.0, 0.7, 1.0}
    assert make_jobs(conversations[30:], [0.0, 0.7, 1.0]) == jobs[30:]  # whatever else there is
    assert make_jobs(conversations, [0.0, 0.7, 1.0], seed=1) != jobs
    for samples in (2, 3):
        jobs = make_jobs(conversations, [0.0, 0.7, 1.0], samples)
        assert len({job.id for job in jobs}) == len(jobs) == 60 * samples
        assert len({(job.conversation.id, job.temperature) for job in jobs}) == len(jobs)
    with pytest.raises(DSparkConfigError, match="--samples is 2"):
        make_jobs(conversations, [0.0], 2)
    assert len(make_jobs(conversations, [0.7], 2)) == 120


def test_a_conversation_ends_at_a_cut_answer(tmp_path):
    writer = chatty_writer(bias=-1e4)
    records = written(tmp_path / "out.jsonl", writer, limit=4)
    assert [roles(record) for record in records] == ["ua", "ua", "ua", "sua", "ua"]
    assert all(record["finished"] is False and record["tokens"] == 4 for record in records)


def test_the_templates_end_of_turn_stops_an_answer_whatever_the_config_says():
    """The tiny target's generation_config names no end at all."""
    writer = chatty_writer(bias=8.0)
    assert writer.target.generation_config.eos_token_id is None
    jobs = make_jobs(read_conversations([{"prompt": "w1"}]), [1.0])
    (batch,), _ = plan(writer, jobs, Sampling(40), 1)
    (record,) = answer_batch(writer, batch, Sampling(40), 0)
    assert record["finished"] and record["tokens"] < 40 and "w43" not in contents(record, "assistant")[0]


def test_prompts_of_like_length_and_one_temperature_share_a_batch():
    writer = chatty_writer()
    records = [{"prompt": " ".join(["w1"] * (1 + i % 10))} for i in range(40)]
    jobs = make_jobs(read_conversations(records), [0.0, 1.0])
    batches, _ = plan(writer, jobs, Sampling(8), 4)
    assert sorted(job.id for batch in batches for job in batch) == sorted(job.id for job in jobs)
    lengths = [[len(job.conversation.turns[0][0]["content"]) for job in batch] for batch in batches]
    assert all(len({job.temperature for job in batch}) == 1 for batch in batches)
    assert max(max(row) - min(row) for row in lengths) <= 6  # two words; unsorted it would be 27


def test_prompts_that_leave_no_room_are_left_out_and_told():
    writer = chatty_writer()
    writer.context_length = 20
    jobs = make_jobs(read_conversations(RECORDS), [0.0])
    batches, too_long = plan(writer, jobs, Sampling(9), 8)
    assert [job.conversation.turns[0][-1]["content"] for job in too_long] == ["w2 w3 w4 w5 w6 w7 w8"]
    assert sum(map(len, batches)) == 4


def test_a_later_turn_without_room_ends_the_conversation(tmp_path):
    writer = chatty_writer(bias=8.0)
    writer.context_length = 18
    (record,) = written(tmp_path / "out.jsonl", writer, records=[{"turns": ["w1", "w2 w3 w4 w5 w6"]}], limit=6)
    assert roles(record) == "ua" and record["finished"]


def test_tool_results_end_what_can_be_asked():
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "tool", "content": "w2"},
        {"role": "assistant", "content": "w3"},
        {"role": "user", "content": "w4"},
    ]
    (conversation,) = read_conversations([{"messages": messages, "tools": [{"name": "clock"}]}])
    assert conversation.turns == [messages[:1]] and conversation.tools == [{"name": "clock"}]


def test_template_settings_and_system_turns():
    record = {"prompt": "w1", "chat_template_kwargs": {"a": 1, "b": 1}}
    (one,) = read_conversations([record], system="w9", template_kwargs={"b": 2})
    assert one.template_kwargs == {"a": 1, "b": 2}
    assert one.turns == [[{"role": "system", "content": "w9"}, {"role": "user", "content": "w1"}]]
    (own,) = read_conversations([RECORDS[3]], system="w9")
    assert own.turns[0][0]["content"] == "w20"
    (named,) = read_conversations([{"question": "w5"}], prompt_field="question")
    assert named.turns == [[{"role": "user", "content": "w5"}]]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "w1"}, r"\['text'\]"),
        ({"prompt": " "}, "user turn is ' '"),
        ({"turns": ["w1", None]}, "user turn is None"),
        ({"turns": []}, r"\['turns'\]"),
        ({"messages": ["w1"]}, "list of objects"),
        ({"messages": [{"role": "system", "content": "w1"}]}, "no user turn"),
    ],
)
def test_a_record_that_is_no_prompt_is_named(record, words):
    with pytest.raises(DSparkDataError, match=f"Record 1: .*{words}"):
        read_conversations([{"prompt": "w1"}, record])
    with pytest.raises(DSparkDataError, match="--prompt-field"):
        read_conversations([{"prompt": "w1"}], prompt_field="question")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_draft_changes_no_greedy_text(tmp_path, batch_size):
    plain = written(tmp_path / "plain.jsonl", chatty_writer(bias=-1e4), batch_size=batch_size)
    writer = chatty_writer(bias=-1e4)
    writer.draft = tiny_draft(writer.target)
    assert written(tmp_path / "drafted.jsonl", writer, batch_size=batch_size) == plain
    stats = writer.draft.last_stats
    assert sum(sum(row.proposed) for row in ([stats] if batch_size == 1 else stats.rows)) > 0


def test_sampling_follows_the_temperature_and_the_limits():
    writer = chatty_writer(bias=-1e4)
    prompts = [writer.prompt_ids(" w1 w2")] * 64

    def first_tokens(**kwargs):
        return [text.text for text in writer(prompts, Sampling(1, **kwargs), Stops(), 3)]

    assert len(set(first_tokens(temperature=0.0))) == 1
    assert len(set(first_tokens(temperature=1.0))) > 8
    assert len(set(first_tokens(temperature=1.0, top_k=2))) == 2
    assert len(set(first_tokens(temperature=1.0, top_p=1e-3))) == 1
    assert first_tokens(temperature=1.0) == first_tokens(temperature=1.0)
    for wrong in ({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(DSparkConfigError, match=next(iter(wrong))):
            Sampling(1, **wrong)


def test_digests_are_the_same_everywhere():
    assert digest(0, "a") == digest(0, "a") != digest(0, "b")
    assert 0 <= digest("é", ["x"]) < 2**63
    torch.manual_seed(digest("anything"))
