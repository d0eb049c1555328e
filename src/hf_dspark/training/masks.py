"""Which tokens of a conversation the target writes itself: chat templates → token ids and loss masks.

The rule, for every answer: what the target is shown is the conversation before it under the chat template, with the
generation prompt; what is supervised is what it would write behind that, up to and including its end-of-turn token.

* Text that the template puts between the generation prompt and the answer (an empty think block, as a rule) is context,
  not answer: the record does not have it, so the target did not write it. When the record's own content begins with it,
  the target did write it, and it is supervised. White space alone is always the answer's (Mistral's first token is
  " A").
* The answer ends with the first control token behind the content. What the template adds after that (a line break, an
  end of text after the last turn) is never generated.
* A template may show an earlier turn differently once the conversation goes on (thoughts are dropped, a system turn
  moves). Then no single text has every answer in the context that it was written in, and the conversation becomes
  several samples, each with the context that the target sees.
* A template may not show an answer behind its own generation prompt at all (one that opens a think block in the prompt
  and cuts thoughts from answers), or close a think block before a thought that never ended. Then the record's content
  stands behind the generation prompt as it is.
* `{% generation %}` markers in a template are believed instead, and refused where they cannot be right.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import DSparkDataError

Sample = tuple[list[int], list[int]]

_SENTINEL = "dspark5entinel"  # letters and a digit: no template, trim or tokenizer treats it as anything but text
_MARK_LENGTH = 8  # characters: enough to tell </think> from <think> behind another mark
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    generation_prompt: bool = False,
    tools: list[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """A conversation as text under the tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        messages: at least one.
        generation_prompt: whether the opening of the next answer follows.
        tools, template_kwargs: passed to the template.

    Raises:
        DSparkDataError: there is no chat template, or it refuses these messages; the message has its words.
    """
    chat_template_text(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, tools=tools, **(template_kwargs or {})
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:  # templates fail as Python does on odd messages
        roles = [message.get("role") for message in messages]
        raise DSparkDataError(f"The chat template refuses a conversation with the roles {roles}: {error}") from error


def chat_template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template, or all of them as JSON where it has several.

    Raises:
        DSparkDataError: it has none.
    """
    template = tokenizer.chat_template
    if not template:
        raise DSparkDataError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template. Set `tokenizer.chat_template`, or use "
            "the tokenizer of the instruction-tuned target."
        )
    return template if isinstance(template, str) else json.dumps(template)


class ControlToken(NamedTuple):
    """A control token found in a text: where, and its id."""

    start: int
    end: int
    id: int


def first_control_token(tokenizer: PreTrainedTokenizerBase, text: str) -> ControlToken | None:
    """The first special token that stands in `text`, the longest where several begin; `None` without one."""
    found = [
        ControlToken(start, start + len(token.content), id)
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and (start := text.find(token.content)) >= 0
    ]
    return min(found, key=lambda token: (token.start, -token.end), default=None)


def frame(
    tokenizer: PreTrainedTokenizerBase,
    history: list[dict[str, Any]],
    role: str,
    generation_prompt: bool = False,
    like: Any = "",
    tools: list[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> tuple[str, str]:
    """What the template writes before and after the text of a further turn.

    Args:
        tokenizer: with a chat template.
        history: the messages before that turn.
        role: of the turn.
        generation_prompt: as in `render`.
        like: the content that the turn will have; a list of parts is framed as such.
        tools, template_kwargs: passed to the template.

    Raises:
        DSparkDataError: as `render`, or the template does not show the content.
    """
    content = [{"type": "text", "text": _SENTINEL}] if isinstance(like, list) else _SENTINEL
    text = render(tokenizer, [*history, {"role": role, "content": content}], generation_prompt, tools, template_kwargs)
    head, found, tail = text.rpartition(_SENTINEL)
    if not found:
        raise DSparkDataError(f"The chat template does not show the content of a message with the role {role!r}.")
    return head, tail


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    finished: bool = True,
    tools: list[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Sample]:
    """The samples of a conversation: token ids, and the loss mask over what the target writes (see the module).

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: the turns.
        finished: `False` when the last answer was cut at a length limit: its end-of-turn was never written, so the
            sample ends with the answer's text.
        tools, template_kwargs: passed to the template.

    Returns:
        Pairs (ids, mask) of equal length: one, or one per answer where the template shows earlier turns differently;
        none without an assistant turn.

    Raises:
        DSparkDataError: there is no chat template, or it refuses the messages; an answer cannot be located; the
            template's markers cover the user's text, or no answer.
    """
    if not tokenizer.is_fast:
        raise DSparkDataError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for, which masks need. Use a "
            "fast tokenizer."
        )
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i > 0]
    if not answers:
        return []
    chat_template_text(tokenizer)
    if _MARKER.search(tokenizer.get_chat_template(tools=tools)):
        return [_encode_marked(tokenizer, messages, answers[0], finished, tools, template_kwargs)]
    samples: list[tuple[str, list[tuple[int, int]]]] = []
    for i in answers:
        cut = not finished and i == len(messages) - 1
        context, answer = _locate(tokenizer, messages[:i], messages[i], i, cut, tools, template_kwargs)
        span = (len(context), len(context) + len(answer))
        if samples and context.startswith(samples[-1][0]):
            samples[-1] = (context + answer, [*samples[-1][1], span])
        else:
            samples.append((context + answer, [span]))
    return [_encode_spans(tokenizer, text, spans) for text, spans in samples]


def _locate(
    tokenizer: PreTrainedTokenizerBase,
    history: list[dict[str, Any]],
    message: dict[str, Any],
    number: int,
    cut: bool,
    tools: list[Any] | None,
    template_kwargs: dict[str, Any] | None,
) -> tuple[str, str]:
    """The text that the target is shown before an answer, and the text that it writes."""
    content = message.get("content")
    before = render(tokenizer, history, True, tools, template_kwargs)
    shown = render(tokenizer, [*history, message], False, tools, template_kwargs)
    head, tail = frame(tokenizer, history, "assistant", False, content, tools, template_kwargs)
    lead = head[len(before) :] if head.startswith(before) else _white_space(before, head)
    if shown.startswith(before):
        answer = shown[len(before) :]
    elif isinstance(content, str) and content:
        answer = lead + content + tail
    elif shown.startswith(head):
        answer = lead + shown[len(head) :]
    else:
        raise DSparkDataError(
            f"The answer (message {number}) cannot be located: the chat template shows neither its generation prompt "
            "nor its usual header before it. Mark answers in the template with {% generation %}."
        )
    opening = lead.strip()
    if opening and answer.startswith(lead):
        said = content.lstrip() if isinstance(content, str) else ""
        if said.startswith(opening.split()[0]) or (cut and opening.startswith("</")):
            # The target wrote the block; or it never ended a thought, which the template takes for an answer.
            answer = said + tail
        else:
            before, answer = before + lead, answer[len(lead) :]
    if answer.endswith(tail):
        text, end = answer[: len(answer) - len(tail)], first_control_token(tokenizer, tail)
        if cut:
            return before, text.rstrip()
        return before, text + (tail[: end.end] if end else tail.rstrip())
    if cut:
        raise DSparkDataError(
            f"An unfinished answer must be text, but its content is a {type(content).__name__} that the chat template "
            "closes in a way of its own."
        )
    return before, answer.rstrip()


def _white_space(before: str, head: str) -> str:
    """The white space that `head` has at its end and `before` has not, where both end with the same mark."""
    if before.rstrip()[-_MARK_LENGTH:] != head.rstrip()[-_MARK_LENGTH:]:
        return ""
    more, less = (text[len(text.rstrip()) :] for text in (head, before))
    return more[len(less) :] if more.startswith(less) else ""


def _encode_spans(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> Sample:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A token that reaches over a border is not the target's: behind the context it would begin another one.
    mask = [int(any(start <= a and b <= end and b > a for start, end in spans)) for a, b in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), mask


def _encode_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    first_answer: int,
    finished: bool,
    tools: list[Any] | None,
    template_kwargs: dict[str, Any] | None,
) -> Sample:
    user_text = render(tokenizer, messages[:first_answer], False, tools, template_kwargs)
    render(tokenizer, messages, False, tools, template_kwargs)  # so that what the template refuses is said as usual
    encoded: Any = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, tools=tools, **(template_kwargs or {})
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if not any(mask):
        raise DSparkDataError(
            "The chat template has {% generation %} markers, but they cover no answer of this conversation. Put them "
            "around the assistant's text, or remove them: answers are located without them too."
        )
    for token, (theirs, kept) in enumerate(zip(tokenizer(user_text, add_special_tokens=False)["input_ids"], mask)):
        if ids[token] != theirs:
            break
        if kept:
            raise DSparkDataError(
                f"The chat template's {{% generation %}} markers cover {sum(mask)} of {len(mask)} tokens, text before "
                "the first answer among them. Put them around the assistant's text only, or remove them."
            )
    if not finished:
        end = max(i for i, kept in enumerate(mask) if kept) + 1
        while end > 0 and ids[end - 1] in tokenizer.all_special_ids:
            end -= 1  # the end of turn, which was never written
        ids, mask = ids[:end], mask[:end]
    return ids, mask
