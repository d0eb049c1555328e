"""What is supervised under templates of the stock shapes, and in which context."""

import pytest
from chat_templates import (
    GEMMA,
    LLAMA3,
    MISTRAL,
    MISTRAL_SYSTEM_LAST,
    OPENS_THOUGHTS,
    PHI,
    QWEN3,
    SMOLLM2,
    STOCK,
    THINKS_FIRST,
    byte_tokenizer,
)
from tiny_pair import tiny_tokenizer

from hf_dspark.errors import DSparkDataError
from hf_dspark.training.data import DSparkDataset
from hf_dspark.training.inspection import pieces
from hf_dspark.training.masks import encode_conversation, first_control_token, render

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
SECOND_USER, SECOND = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes — quite."}
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {"name": "clock", "arguments": {"zone": "UTC"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "name": "clock", "content": "12:00"}
NO_THOUGHT = "<think>\n\n</think>\n\n"

END = {
    "smollm2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "mistral, system last": "</s>",
    "phi": "<|end|>",
}


def encoded(template, messages, **kwargs):
    """Per sample a list of (context, answer): the text before a supervised stretch, and that stretch."""
    tokenizer = byte_tokenizer(template)
    found = []
    for ids, mask in encode_conversation(tokenizer, messages, **kwargs):
        assert len(ids) == len(mask)
        text, spans = "", []
        for piece, supervised in pieces(tokenizer, ids, mask):
            if supervised:
                spans.append((text, piece))
            text += piece
        found.append(spans)
    return found


def prompt(template, messages, **kwargs):
    """What `generate` is given."""
    return render(byte_tokenizer(template), messages, True, **kwargs)


@pytest.mark.parametrize("name", STOCK)
def test_one_turn(name):
    ((span,),) = encoded(STOCK[name], [USER, ANSWER])
    blank = " " * name.startswith("mistral")
    assert span == (prompt(STOCK[name], [USER]) + NO_THOUGHT * (name == "qwen3"), f"{blank}Because.{END[name]}")


@pytest.mark.parametrize("name", STOCK)
def test_every_answer_of_many_turns_has_the_context_it_was_written_in(name):
    template = STOCK[name]
    samples = encoded(template, [USER, ANSWER, SECOND_USER, SECOND])
    assert len(samples) == (2 if name == "qwen3" else 1)  # whose earlier turns lose their think block
    (first, answer), (second, again) = [span for sample in samples for span in sample]
    inserted = NO_THOUGHT * (name == "qwen3")
    blank = " " * name.startswith("mistral")
    assert (first, answer) == (prompt(template, [USER]) + inserted, f"{blank}Because.{END[name]}")
    assert second == prompt(template, [USER, ANSWER, SECOND_USER]) + inserted
    assert again == f"{blank}Yes — quite.{END[name]}"


@pytest.mark.parametrize("name", [name for name in STOCK if name not in ("gemma", "mistral")])
def test_a_system_turn_is_context(name):
    template = STOCK[name]
    samples = encoded(template, [SYSTEM, USER, ANSWER, SECOND_USER, SECOND])
    spans = [span for sample in samples for span in sample]
    blank = " " * name.startswith("mistral")
    assert [answer for _, answer in spans] == [f"{blank}Because.{END[name]}", f"{blank}Yes — quite.{END[name]}"]
    inserted = NO_THOUGHT * (name == "qwen3")
    assert spans[0][0] == prompt(template, [SYSTEM, USER]) + inserted
    assert spans[1][0] == prompt(template, [SYSTEM, USER, ANSWER, SECOND_USER]) + inserted
    assert all("Be brief." in context for context, _ in spans)
    assert len(samples) == (2 if name in ("qwen3", "mistral, system last") else 1)  # the system's text moves there


def test_what_a_template_refuses_is_said_with_the_record():
    record = {"messages": [SYSTEM, USER, ANSWER]}
    with pytest.raises(DSparkDataError, match=r"Record 0: The chat template refuses.*'system'.*Roles must alternate"):
        DSparkDataset.from_records([record], byte_tokenizer(GEMMA), 512, 4, 0, 512)
    with pytest.raises(DSparkDataError, match="refuses"):  # a template that adds text to None
        encoded(SMOLLM2.replace("~", "+"), [USER, {"role": "assistant", "content": None}])


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, MISTRAL_SYSTEM_LAST])
def test_a_tool_call_is_supervised_and_its_result_is_not(template):
    tools = [{"type": "function", "function": {"name": "clock", "description": "time", "parameters": {}}}]
    messages = [USER, CALL, RESULT, ANSWER]
    spans = [span for sample in encoded(template, messages, tools=tools) for span in sample]
    assert len(spans) == 2
    (before_call, call), (before_answer, answer) = spans
    assert before_call.startswith(prompt(template, [USER], tools=tools)) and '"zone"' in call
    assert call.endswith(("<|im_end|>", "<|eot_id|>", "</s>"))
    assert before_answer.startswith(prompt(template, messages[:3], tools=tools)) and "12:00" in before_answer
    assert "12:00" not in answer and "Because." in answer
    if template == MISTRAL_SYSTEM_LAST:
        assert call.startswith("[TOOL_CALLS]")  # a control token, but the target writes it


def test_an_inserted_think_block_is_supervised_only_when_the_target_wrote_it():
    """Qwen3's template puts an empty block before an answer without a thought, as its prompt without thinking does."""
    ((span,),) = encoded(QWEN3, [USER, ANSWER])
    assert span == (prompt(QWEN3, [USER], template_kwargs={"enable_thinking": False}), "Because.<|im_end|>")
    off = {"template_kwargs": {"enable_thinking": False}}
    assert encoded(QWEN3, [USER, ANSWER], **off) == [[span]]
    for thought in (NO_THOUGHT, "<think>\nHm.\n</think>\n\n"):
        written = {"role": "assistant", "content": thought + "Because."}
        assert encoded(QWEN3, [USER, written]) == [[(prompt(QWEN3, [USER]), f"{thought}Because.<|im_end|>")]]
    apart = {**ANSWER, "reasoning_content": "Hm."}
    assert encoded(QWEN3, [USER, apart]) == [[(prompt(QWEN3, [USER]), "<think>\nHm.\n</think>\n\nBecause.<|im_end|>")]]


def test_thoughts_are_dropped_from_the_context_of_later_answers_alone():
    written = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nBecause."}
    (first,), (second,) = encoded(QWEN3, [USER, written, SECOND_USER, SECOND])
    assert "Hm." in first[1] and "Hm." not in second[0]
    assert second[0] == prompt(QWEN3, [USER, written, SECOND_USER]) + NO_THOUGHT


@pytest.mark.parametrize("template", [QWEN3, OPENS_THOUGHTS, THINKS_FIRST])
def test_a_thought_that_was_cut_stands_where_it_was_written(template):
    opening = "<think>\n" if template == QWEN3 else ""
    cut = {"role": "assistant", "content": f"{opening}Let me see, the"}
    spans = encoded(template, [USER, cut], finished=False)
    assert spans == [[(prompt(template, [USER]), f"{opening}Let me see, the")]]


def test_a_prompt_that_opens_a_think_block_and_answers_shown_without_it():
    first = {"role": "assistant", "content": "Hm.</think>\n\nBecause."}
    second = {"role": "assistant", "content": "Sure.</think>\n\nYes."}
    samples = encoded(THINKS_FIRST, [USER, first, SECOND_USER, second])
    context = prompt(THINKS_FIRST, [USER, first, SECOND_USER])
    assert "Hm." not in context
    assert samples == [
        [("<|user|>Why?<|assistant|><think>\n", "Hm.</think>\n\nBecause.<|end|>")],
        [(context, "Sure.</think>\n\nYes.<|end|>")],
    ]


def test_white_space_behind_another_header_is_not_the_answers():
    template = THINKS_FIRST.replace("'<|assistant|>' ~ m", "'<|assistant|>\\n\\n' ~ m")
    written = {"role": "assistant", "content": "Hm.</think>\n\nBecause."}
    ((span,),) = encoded(template, [USER, written])
    assert span == ("<|user|>Why?<|assistant|><think>\n", "Hm.</think>\n\nBecause.<|end|>")


def test_a_template_that_knows_no_generation_prompt():
    template = SMOLLM2.replace("{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}", "")
    assert "add_generation" not in template
    ((span,),) = encoded(template, [USER, ANSWER])
    assert span[0].endswith("<|im_start|>assistant\n") and span[1] == "Because.<|im_end|>"


@pytest.mark.parametrize("name", STOCK)
def test_a_cut_answer_has_no_end(name):
    spans = [s for sample in encoded(STOCK[name], [USER, ANSWER, SECOND_USER, SECOND], finished=False) for s in sample]
    assert [answer.strip() for _, answer in spans] == [f"Because.{END[name]}", "Yes — quite."]


def test_the_date_that_a_template_writes_is_the_records_own():
    kwargs = {"date_string": "1 May 2026"}
    ((span,),) = encoded(LLAMA3, [USER, ANSWER], template_kwargs=kwargs)
    assert "Today: 1 May 2026" in span[0]
    record = {"messages": [USER, ANSWER], "chat_template_kwargs": kwargs, "finished": None}
    tokenizer = byte_tokenizer(LLAMA3)
    data = DSparkDataset.from_records([record], tokenizer, 512, 4, 0, 512)
    assert "1 May 2026" in tokenizer.decode(data[0]["input_ids"])


def test_contents_in_parts():
    template = SMOLLM2.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in (USER, ANSWER)]
    assert encoded(template, parts) == encoded(template, [USER, ANSWER])


def test_an_assistant_turn_before_any_other_is_context():
    greeting = {"role": "assistant", "content": "Hello!"}
    ((span,),) = encoded(SMOLLM2, [greeting, USER, ANSWER])
    assert "Hello!" in span[0] and span[1] == "Because.<|im_end|>"
    assert encoded(SMOLLM2, [greeting]) == encoded(SMOLLM2, [USER]) == []


MARKED = SMOLLM2.replace(
    "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' ~ m.role ~ '\\n' }}{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content ~ '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}"
    "{% else %}{{ m.content ~ '<|im_end|>\\n' }}{% endif %}",
)


def test_markers_give_what_is_found_without_them():
    messages = [SYSTEM, USER, ANSWER, SECOND_USER, SECOND]
    assert "{%- generation -%}" in MARKED
    assert encoded(MARKED, messages) == encoded(SMOLLM2, messages)
    assert encoded(MARKED, messages, finished=False) == encoded(SMOLLM2, messages, finished=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}" + SMOLLM2 + "{% endgeneration %}",
        "{{ '<s>' }}{% generation %}" + SMOLLM2 + "{% endgeneration %}",
        SMOLLM2.replace("{{ '<|im_start|>' ~", "{% generation %}{{ '<|im_start|>' ~").replace(
            "'<|im_end|>\\n' }}\n{%- endfor", "'<|im_end|>\\n' }}{% endgeneration %}\n{%- endfor"
        ),
    ],
)
def test_markers_around_the_users_text_are_refused(template):
    assert "endgeneration" in template
    with pytest.raises(DSparkDataError, match=r"cover .* before the first answer"):
        encoded(template, [USER, ANSWER])


def test_markers_that_cover_no_answer_are_refused():
    template = MARKED.replace("m.role == 'assistant'", "m.role == 'bot'")
    with pytest.raises(DSparkDataError, match="cover no answer"):
        encoded(template, [USER, ANSWER])


def test_records_without_an_answer_are_counted_and_nothing_else_is_an_error():
    records = [{"messages": [USER]}, {"messages": [USER, ANSWER, SECOND_USER, SECOND]}]
    data = DSparkDataset.from_records(records, byte_tokenizer(QWEN3), 512, 4, 0, 512)
    assert (data.skipped, len(data)) == (1, 2)
    shares = [mask.mean() for _, mask in data.samples]
    assert all(0 < share < 1 for share in shares)
    with pytest.raises(DSparkDataError, match="none of 2 records"):
        DSparkDataset.from_records(records[:1] * 2, byte_tokenizer(QWEN3), 512, 4, 0, 512)


def test_a_template_that_never_shows_answers():
    template = PHI.replace("m.content", "(m.content if m.role == 'user' else '')")
    with pytest.raises(DSparkDataError, match="does not show the content"):
        encoded(template, [USER, ANSWER])


def test_a_tool_call_that_cannot_be_located():
    template = MISTRAL_SYSTEM_LAST.replace("'[TOOL_CALLS] '", "'[INST]' ~ messages | length")
    with pytest.raises(DSparkDataError, match=r"message 2\) cannot be located"):
        encoded(template.replace("'<s>'", "'<s>' ~ messages[-1].role"), [SYSTEM, USER, CALL])


def test_a_blank_in_front_belongs_to_the_first_word():
    """A tokenizer that joins a blank to the word behind it, as the one of Mistral does."""
    template = (
        "{% for m in messages %}{{ ' w1 ' ~ m.content ~ ' w2' if m.role == 'user' else ' ' ~ m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6 w7"}]
    ((ids, mask),) = encode_conversation(tiny_tokenizer(template), messages)
    assert [i for i, kept in zip(ids, mask) if kept] == [6, 7]


def test_control_tokens_in_a_text():
    tokenizer = byte_tokenizer(MISTRAL)
    assert first_control_token(tokenizer, "nothing <|here|>") is None
    token = first_control_token(tokenizer, "ab<|end|>\n<|endoftext|>")
    assert (token.start, token.end) == (2, 9) and tokenizer.convert_ids_to_tokens(token.id) == "<|end|>"
