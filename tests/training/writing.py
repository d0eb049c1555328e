"""A tiny target that ends its turns, for the tests of what it writes."""

from tiny_pair import tiny_target, tiny_tokenizer

from hf_dspark.training.record_file import RecordFile
from hf_dspark.training.target_text import TargetWriter

# w40 opens a turn, w41 is the user, w42 the assistant, w43 ends a turn, w44 is the system.
TEMPLATE = (
    "{% for m in messages %} w40{{ {'user': ' w41', 'system': ' w44'}.get(m['role'], ' w42') }}"
    " {{ m['content'].strip() }} w43{% endfor %}{% if add_generation_prompt %} w40 w42{% endif %}"
)
END = 43


def chat_tokenizer(template=TEMPLATE):
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [" w40", " w41", " w42", " w43", " w44"]})
    return tokenizer


def chatty_target(bias=2.0):
    """`bias`: how much likelier than by chance a turn ends at every token; the other marks are never written."""
    target = tiny_target()
    target.lm_head.weight.requires_grad_(False)
    bias_of = target.lm_head.weight.new_zeros(48)
    bias_of[END] = bias
    bias_of[[0, 40, 41, 42, 44]] = -1e4

    def add(module, inputs, output):
        return output + bias_of

    target.lm_head.register_forward_hook(add)
    return target


def chatty_writer(bias=2.0, draft=None, template=TEMPLATE):
    return TargetWriter(chatty_target(bias), chat_tokenizer(template), draft)


def record_file(path, settings=None, **notes):
    return RecordFile(path, settings or {"verb": "test"}, notes, {"machine": "this one"})


class Stopped(Exception):
    """In place of a kill."""


def roles(record):
    return "".join(message["role"][0] for message in record["messages"])


def contents(record, role):
    return [message["content"] for message in record["messages"] if message["role"] == role]
