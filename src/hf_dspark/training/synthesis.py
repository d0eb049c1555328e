"""Synthetic data: conversations of which the target writes both sides, the user's turn from its own chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DSparkConfigError, DSparkDataError
from .masks import first_control_token, frame, render
from .record_file import RecordFile
from .regeneration import answer_stops, make_record
from .target_text import Sampling, Stops, TargetWriter, Written, digest

# A user's turn of so many words, of which most triples have been there before, goes round in circles.
_LOOP_WORDS = 20
_LOOP_SHARE = 0.5


@dataclass(frozen=True)
class SynthesisSettings:
    """What is written.

    Attributes:
        count: records in the end, those of earlier runs included.
        turns: user turns per conversation at most.
        answers: how answers are chosen; the temperature is one of `temperatures`, in turn from batch to batch.
        temperatures: of the answers.
        user_turns: how the user's turns are chosen.
        openings: texts that first user turns begin with, in turn; none: the target begins.
        system: a system turn, or `None` for what the template does without one.
        template_kwargs: of the chat template.
        seed: of the sampling.
        give_up_after: user turns in a row without a new one after which no more are tried.

    Raises:
        DSparkConfigError: greedy user turns, which would all be the same; an empty opening.
    """

    count: int
    answers: Sampling
    user_turns: Sampling
    turns: int = 1
    temperatures: list[float] = field(default_factory=lambda: [0.7])
    openings: list[str] = field(default_factory=list)
    system: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    give_up_after: int = 200

    def __post_init__(self) -> None:
        if self.user_turns.temperature == 0:
            raise DSparkConfigError(
                "--user-temperature is 0, but greedy user turns would all be the same. Give a positive one, such as 1."
            )
        if not all(opening.strip() for opening in self.openings):
            raise DSparkConfigError("--openings holds an empty text. Leave it out: without openings the target begins.")


def normalized(text: str) -> str:
    """A user turn as it is compared: neither case nor white space counts."""
    return " ".join(text.casefold().split())


def refusal(text: str, finished: bool, tokenizer: Any) -> str | None:
    """Why a user turn is dropped; `None` for a good one."""
    words = normalized(text).split()
    triples = list(zip(words, words[1:], words[2:]))
    if not words:
        return "empty"
    if not finished:
        return "cut at the limit"
    if first_control_token(tokenizer, text) is not None:
        return "control token inside"
    if not any(character.isalpha() for character in text):
        return "no letters"
    if len(words) >= _LOOP_WORDS and len(set(triples)) < _LOOP_SHARE * len(triples):
        return "repeats itself"
    return None


class UserTurns:
    """Writes user turns: the chat template up to where the user's text begins, continued to the end of the turn.

    Raises:
        DSparkDataError: the template does not mark where a user's turn ends.
    """

    def __init__(self, writer: TargetWriter, settings: SynthesisSettings):
        self.writer = writer
        self.settings = settings
        self.start = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        _, tail = frame(writer.tokenizer, self.start, "user", True, template_kwargs=settings.template_kwargs)
        end = first_control_token(writer.tokenizer, tail)
        if end is None and not tail.strip():
            raise DSparkDataError(
                "The chat template writes nothing after a user's turn, so nothing would end it. Use a target whose "
                "template marks turns, or `hf-dspark data regenerate` with prompts."
            )
        # Text before the token, such as a bare [/INST], ends the turn as well.
        mark = (tail if end is None else tail[: end.start]).strip()
        ids = [*writer.end_ids(), *([end.id] if end else [])]
        self.stops = Stops(list(dict.fromkeys(ids)), [mark] if mark else [])

    def __call__(self, histories: list[list[dict[str, Any]]], openings: list[str], seed: int) -> list[Written | None]:
        """A user turn after each history, beginning with its opening; `None` where the context has no room."""
        prompts = []
        for history, opening in zip(histories, openings):
            head, _ = frame(self.writer.tokenizer, history, "user", True, template_kwargs=self.settings.template_kwargs)
            # A blank at the end would be a token of its own; the target writes it in front of its first word.
            prompts.append(self.writer.prompt_ids((head + opening).rstrip(" ")))
        fitting = [i for i, prompt in enumerate(prompts) if self.writer.fits(len(prompt), self.settings.user_turns)]
        if not fitting:
            return [None] * len(prompts)
        written = self.writer([prompts[i] for i in fitting], self.settings.user_turns, self.stops, seed)
        turns: list[Written | None] = [None] * len(prompts)
        for i, turn in zip(fitting, written):
            turns[i] = replace(turn, text=(openings[i].rstrip(" ") + turn.text).strip())
        return turns


def synthesize(
    writer: TargetWriter,
    file: RecordFile,
    settings: SynthesisSettings,
    batch_size: int,
    on_batch: Callable[[int, int], None] = lambda records, tokens: None,
) -> None:
    """Writes conversations until `file` holds `settings.count`.

    First user turns are unlike each other over the whole file (see `normalized`); empty and degenerate ones are
    dropped, and `file.counts` says how many and why. A conversation ends early at a cut answer, before an empty one, or
    before a later user turn that is no good. The id of a record is the number of its attempt. Sampling is seeded per
    batch and turn from `settings.seed` and the batch's first attempt, so a run that goes on with the same batch size
    tries what the interrupted one would have tried next.

    Args:
        writer: of both sides.
        file: takes `{"id", "messages", "finished", "temperature", "tokens"}`; `tokens` counts the answers'.
        settings: what is written.
        batch_size: user turns tried at a time.
        on_batch: called with the new records and the tokens generated after every batch.

    Raises:
        DSparkDataError: too few distinct user turns are to be had; what was written stays.
        DSparkConfigError: `file` holds more records than are asked for.
    """
    if len(file) > settings.count:
        raise DSparkConfigError(
            f"{file.path} holds {len(file)} records already, but --count is {settings.count}. Give at least "
            f"{len(file)}, or another --output."
        )
    seen = {normalized(_first_user_text(record)) for record in file}
    user_turns = UserTurns(writer, settings)
    # The counts may be a batch behind the records, when the process was killed between the two.
    next_attempt = max(file.counts.get("attempts", 0), max((int(id) + 1 for id in file.ids), default=0))
    next_attempt = -(-next_attempt // batch_size) * batch_size
    in_vain = 0
    while len(file) < settings.count:
        attempts = list(range(next_attempt, next_attempt + batch_size))
        openings = [settings.openings[i % len(settings.openings)] if settings.openings else "" for i in attempts]
        first = user_turns([user_turns.start] * batch_size, openings, digest(settings.seed, attempts[0], "user", 0))
        dropped: Counter[str] = Counter()
        kept: list[tuple[int, str]] = []
        for attempt, turn in zip(attempts, first):
            if turn is None:
                raise DSparkDataError(
                    f"The context of {writer.context_length} tokens has no room for a user turn of "
                    f"{settings.user_turns.max_new_tokens} tokens. Lower --max-user-tokens, or shorten --system and "
                    "--openings."
                )
            reason = refusal(turn.text, turn.finished, writer.tokenizer)
            if reason is None and normalized(turn.text) in seen:
                reason = "seen before"
            if reason is not None:
                dropped[reason] += 1
            elif len(file) + len(kept) < settings.count:
                seen.add(normalized(turn.text))
                kept.append((attempt, turn.text))
        records = []
        if kept:  # one temperature per batch, because its answers are generated together
            temperature = settings.temperatures[attempts[0] // batch_size % len(settings.temperatures)]
            records = _converse(writer, user_turns, kept, settings, temperature, attempts[0])
            dropped["without an answer"] = len(kept) - len(records)
        next_attempt += batch_size
        file.append(records)
        for reason, number in (+dropped).items():
            file.counts[f"dropped: {reason}"] = file.counts.get(f"dropped: {reason}", 0) + number
        file.counts["attempts"] = next_attempt
        file.save_meta()
        on_batch(len(records), sum(record["tokens"] for record in records) + sum(turn.tokens for turn in first if turn))
        in_vain = 0 if records else in_vain + batch_size
        if in_vain >= settings.give_up_after:
            reasons = ", ".join(f"{number} {reason}" for reason, number in (+dropped).most_common())
            raise DSparkDataError(
                f"{in_vain} user turns in a row were no new ones (of the last {batch_size}: {reasons}). The "
                f"{len(file)} of {settings.count} records that were written are kept in {file.path}. Raise "
                "--user-temperature or --give-up-after, or give other --openings, and another --output with them."
            )


def _first_user_text(record: dict[str, Any]) -> str:
    return next(message["content"] for message in record["messages"] if message["role"] == "user")


def _converse(
    writer: TargetWriter,
    user_turns: UserTurns,
    first: list[tuple[int, str]],
    settings: SynthesisSettings,
    temperature: float,
    batch: int,
) -> list[dict[str, Any]]:
    """Records from first user turns (attempt, text): answers, and further turns of both sides; `batch` is for seeds."""
    kwargs = settings.template_kwargs
    sampling = replace(settings.answers, temperature=temperature)
    messages = [[*user_turns.start, {"role": "user", "content": text}] for _, text in first]
    stops = answer_stops(writer, messages[0], None, kwargs)
    tokens, finished = [0] * len(first), [True] * len(first)
    going_on = list(range(len(first)))
    for turn in range(settings.turns):
        prompts = {i: writer.prompt_ids(render(writer.tokenizer, messages[i], True, None, kwargs)) for i in going_on}
        asked = [i for i, prompt in prompts.items() if writer.fits(len(prompt), sampling)]
        for i in set(going_on) - set(asked):
            messages[i].pop()  # the user turn that there is no room to answer
        if not asked:
            break
        seed = digest(settings.seed, batch, "answer", turn)
        going_on = []
        for i, answer in zip(asked, writer([prompts[i] for i in asked], sampling, stops, seed)):
            if not answer.text.strip():
                messages[i].pop()
                continue
            messages[i].append({"role": "assistant", "content": answer.text})
            tokens[i] += answer.tokens
            finished[i] = answer.finished
            if answer.finished:
                going_on.append(i)
        if turn + 1 == settings.turns or not going_on:
            break
        seed = digest(settings.seed, batch, "user", turn + 1)
        asked, going_on = going_on, []
        for i, said in zip(asked, user_turns([messages[i] for i in asked], [""] * len(asked), seed)):
            if said is not None and refusal(said.text, said.finished, writer.tokenizer) is None:
                messages[i].append({"role": "user", "content": said.text})
                going_on.append(i)
    return [
        make_record(f"{attempt:08d}", messages[i], finished[i], temperature, tokens[i], template_kwargs=kwargs)
        for i, (attempt, _) in enumerate(first)
        if messages[i] and messages[i][-1]["role"] == "assistant"
    ]
