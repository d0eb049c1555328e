"""Regenerated data: the user's turns of given conversations, answered by the target itself, in the trainer's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DSparkConfigError, DSparkDataError
from .masks import first_control_token, frame, render
from .record_file import RecordFile
from .target_text import Sampling, Stops, TargetWriter, digest

_WINDOW = 16  # batches that are planned together, per temperature

PROMPTS_HELP = '{"messages": [...]}, {"prompt": text} or {"turns": [text, ...]}'


@dataclass(frozen=True)
class Conversation:
    """What the target is to answer.

    Attributes:
        id: from the content, so that it stays the same when other records come or go; equal ones are told apart by
            their number.
        turns: the messages up to and including each user turn; the target answers after each.
        tools: functions that the template shows, or `None`.
        template_kwargs: of the chat template.
    """

    id: str
    turns: list[list[dict[str, Any]]]
    tools: list[Any] | None
    template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One conversation to be written at one temperature, and the id of its record."""

    id: str
    conversation: Conversation
    temperature: float


def read_conversations(
    records: Iterable[dict[str, Any]],
    prompt_field: str | None = None,
    system: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Conversation]:
    """The user and system turns of records; what others answered is left out.

    `messages` are read up to the first tool result, because the call that it answers was another model's.

    Args:
        records: each with `messages`, `prompt` or `turns`; `tools` and `chat_template_kwargs` are kept.
        prompt_field: the field that holds the prompt instead.
        system: a system turn for conversations without one.
        template_kwargs: for the chat template, over those of a record.

    Raises:
        DSparkDataError: a record has no user turn, or an empty one; the message has its number, from 0.
    """
    seen: dict[str, int] = {}
    conversations = []
    for number, record in enumerate(records):
        try:
            turns = _split(_prompt_messages(record, prompt_field))
        except DSparkDataError as error:
            raise DSparkDataError(f"Record {number}: {error}") from error
        if system is not None and turns[0][0]["role"] != "system":
            turns[0].insert(0, {"role": "system", "content": system})
        kwargs = {**(record.get("chat_template_kwargs") or {}), **(template_kwargs or {})}
        tools = record.get("tools") or None
        key = f"{digest(turns, tools, kwargs):016x}"[-12:]
        seen[key] = seen.get(key, 0) + 1
        id = key if seen[key] == 1 else f"{key}-{seen[key]}"
        conversations.append(Conversation(id, turns, tools, kwargs))
    return conversations


def _prompt_messages(record: dict[str, Any], prompt_field: str | None) -> list[dict[str, Any]]:
    if prompt_field is not None:
        if prompt_field not in record:
            raise DSparkDataError(f"it has the fields {sorted(record)}, but no {prompt_field!r}. Set --prompt-field.")
        record = {"prompt": record[prompt_field]}
    if record.get("messages"):
        messages = record["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise DSparkDataError(f"`messages` must be a list of objects with a role, but is {str(messages)[:60]!r}.")
        return [{"role": m["role"], "content": m.get("content")} for m in messages]
    texts = [record["prompt"]] if record.get("prompt") is not None else record.get("turns")
    if not isinstance(texts, list) or not texts:
        raise DSparkDataError(f"it has the fields {sorted(record)}; it must be {PROMPTS_HELP}.")
    return [{"role": "user", "content": text} for text in texts]


def _split(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    turns: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] == "assistant":
            continue
        text = message["content"]
        if not isinstance(text, list) and (not isinstance(text, str) or not text.strip()):
            raise DSparkDataError(f"the {message['role']} turn is {text!r}, but must be text.")
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    if len(turns) == 1:
        raise DSparkDataError("it has no user turn to answer.")
    return turns[:-1]  # what follows the last user turn is never answered


def make_jobs(
    conversations: list[Conversation], temperatures: list[float], samples: int = 1, seed: int = 0
) -> list[Job]:
    """`samples` jobs per conversation, each at one of the temperatures: the first drawn by (seed, id), then in turn.

    Raises:
        DSparkConfigError: more samples than temperatures, one of which is 0: its answers would all be the same.
    """
    if 0 in temperatures and samples > len(temperatures):
        raise DSparkConfigError(
            f"--samples is {samples} with the temperatures {temperatures}: at temperature 0 the same prompt would get "
            "the same answer twice. Leave 0 out, or ask for fewer samples."
        )
    jobs = []
    for conversation in conversations:
        start = digest(seed, conversation.id)
        for number in range(samples):
            id = conversation.id if number == 0 else f"{conversation.id}.{number}"
            jobs.append(Job(id, conversation, temperatures[(start + number) % len(temperatures)]))
    return jobs


def answer_stops(
    writer: TargetWriter,
    history: list[dict[str, Any]],
    tools: list[Any] | None,
    template_kwargs: dict[str, Any] | None,
) -> Stops:
    """Where answers end: the ids of the target's `generation_config`, and the template's end-of-turn token, which
    configs have been known to lack."""
    _, tail = frame(writer.tokenizer, history, "assistant", tools=tools, template_kwargs=template_kwargs)
    end = first_control_token(writer.tokenizer, tail)
    return Stops(list(dict.fromkeys([*writer.end_ids(), *([end.id] if end else [])])))


def plan(
    writer: TargetWriter,
    jobs: list[Job],
    sampling: Sampling,
    batch_size: int,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> tuple[list[list[Job]], list[Job]]:
    """Batches of jobs at one temperature with prompts of like length, and the jobs whose prompt is too long.

    Every job is planned, done or not, in windows of the given order: a run that goes on makes the batches of the run
    that was interrupted, and so the same texts.

    Raises:
        DSparkDataError: the chat template refuses a prompt.
    """
    fitting: list[tuple[int, Job]] = []
    too_long = []
    for done, job in enumerate(jobs, start=1):
        conversation = job.conversation
        prompt = render(writer.tokenizer, conversation.turns[0], True, conversation.tools, conversation.template_kwargs)
        length = len(writer.prompt_ids(prompt))
        if writer.fits(length, sampling):
            fitting.append((length, job))
        else:
            too_long.append(job)
        on_prompt(done)
    batches = []
    temperatures = sorted({job.temperature for job in jobs})
    window = _WINDOW * batch_size * len(temperatures)
    for start in range(0, len(fitting), window):
        for temperature in temperatures:
            alike = [(n, job) for n, job in fitting[start : start + window] if job.temperature == temperature]
            alike.sort(key=lambda entry: (len(entry[1].conversation.turns), entry[0]))
            ordered = [job for _, job in alike]
            batches += [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    return batches, too_long


def regenerate(
    writer: TargetWriter,
    batches: list[list[Job]],
    file: RecordFile,
    sampling: Sampling,
    seed: int = 0,
    on_batch: Callable[[int, int], None] = lambda records, tokens: None,
) -> None:
    """Writes the records that `file` does not have yet, a batch at a time.

    Sampling is seeded per batch and turn, from `seed` and the ids in the batch. With the same jobs, batch size, machine
    and versions, and without a draft model, a run that was interrupted and goes on writes what one in a single go
    does, text for text. Another batch size, or other prompts beside them, gives other sampled texts; greedy ones change
    by floating-point ties only.

    Args:
        writer: of the answers.
        batches: of `plan`.
        file: takes `{"id", "messages", "finished", "temperature", "tokens"}`, and `tools` and `chat_template_kwargs`
            where there are any.
        sampling: of the answers; its temperature is each job's.
        seed: of the sampling.
        on_batch: called with the new records and the tokens generated after every batch.
    """
    for batch in batches:
        missing = {job.id for job in batch} - file.ids
        if missing:  # the whole batch, so that its texts are what they would have been
            records = answer_batch(writer, batch, sampling, seed)
            file.append([record for record in records if record["id"] in missing])
            on_batch(len(missing), sum(record["tokens"] for record in records))


def answer_batch(writer: TargetWriter, batch: list[Job], sampling: Sampling, seed: int) -> list[dict[str, Any]]:
    """The records of a batch. A conversation ends at an answer that was cut at the limit (no further turn would follow
    it), or before a turn that the context has no room for."""
    sampling = replace(sampling, temperature=batch[0].temperature)
    ids = [job.id for job in batch]
    messages: list[list[dict[str, Any]]] = [[] for _ in batch]
    tokens, finished = [0] * len(batch), [True] * len(batch)
    stops = answer_stops(
        writer,
        batch[0].conversation.turns[0],
        batch[0].conversation.tools,
        batch[0].conversation.template_kwargs,
    )
    going_on = list(range(len(batch)))
    for turn in range(max(len(job.conversation.turns) for job in batch)):
        asked: dict[int, tuple[list[dict[str, Any]], list[int]]] = {}
        for i in going_on:
            conversation = batch[i].conversation
            if turn < len(conversation.turns):
                history = [*messages[i], *conversation.turns[turn]]
                prompt = render(writer.tokenizer, history, True, conversation.tools, conversation.template_kwargs)
                prompt_ids = writer.prompt_ids(prompt)
                if writer.fits(len(prompt_ids), sampling):
                    asked[i] = history, prompt_ids
        if not asked:
            break
        written = writer([prompt for _, prompt in asked.values()], sampling, stops, digest(seed, ids, turn))
        for (i, (history, _)), answer in zip(asked.items(), written):
            messages[i] = [*history, {"role": "assistant", "content": answer.text}]
            tokens[i] += answer.tokens
            finished[i] = answer.finished
        going_on = [i for i in asked if finished[i]]
    return [
        make_record(
            job.id,
            messages[i],
            finished[i],
            job.temperature,
            tokens[i],
            job.conversation.tools,
            job.conversation.template_kwargs,
        )
        for i, job in enumerate(batch)
    ]


def make_record(
    id: str,
    messages: list[dict[str, Any]],
    finished: bool,
    temperature: float,
    tokens: int,
    tools: list[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A record in the trainer's format. `tokens`: of all its answers, ends of turn included."""
    record = {"id": id, "messages": messages, "finished": finished, "temperature": temperature, "tokens": tokens}
    return {
        **record,
        **({"tools": tools} if tools else {}),
        **({"chat_template_kwargs": template_kwargs} if template_kwargs else {}),
    }
