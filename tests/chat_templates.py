"""Chat templates in the shape of the stock ones, in words of our own, and tokenizers that encode any text."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[TOOL_CALLS]"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
)

SMOLLM2 = """\
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}{% endif -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

# Shows an (empty) think block in the last answer, drops thoughts from answers before the last question.
QWEN3 = """\
{%- set last = namespace(question=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}{{ '<|im_start|>system\\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set said = m.content or '' -%}{%- set thought = m.reasoning_content or '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.question and (loop.last or thought) -%}
{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}
{%- endif -%}
{{ said }}
{%- for call in m.tool_calls or [] -%}
{{ ('\\n' if said or not loop.first else '') ~ '<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""

# A system turn with the date, always; contents are trimmed; a tool call is JSON.
LLAMA3 = """\
{%- set head = '<|start_header_id|>' -%}{%- set neck = '<|end_header_id|>\\n\\n' -%}
{%- set rest = messages -%}{%- set system = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- endif -%}
{{ '<|begin_of_text|>' ~ head ~ 'system' ~ neck -}}
{{ 'Today: ' ~ (date_string or '26 Jul 2024') ~ '\\n\\n' ~ system ~ '<|eot_id|>' }}
{%- for m in rest -%}
{%- if m.tool_calls -%}
{{ head ~ 'assistant' ~ neck ~ (m.tool_calls[0].function | tojson) ~ '<|eot_id|>' }}
{%- elif m.role == 'tool' -%}
{{ head ~ 'ipython' ~ neck ~ (m.content | tojson) ~ '<|eot_id|>' }}
{%- else -%}
{{ head ~ m.role ~ neck ~ (m.content | trim) ~ '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ head ~ 'assistant' ~ neck }}{% endif -%}
"""

# No system turn; the assistant is called model.
GEMMA = """\
{{ '<bos>' }}
{%- for m in messages -%}
{%- if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate') }}
{%- endif -%}
{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' -}}
{{ m.content | trim ~ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

# Turns are marked by plain text; an answer begins with a blank.
MISTRAL = """\
{{ '<s>' }}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% else %}{{ ' ' ~ m.content ~ '</s>' }}{% endif -%}
{%- endfor -%}
"""

# The later one: the system's text stands in the last turn, when that is the user's.
MISTRAL_SYSTEM_LAST = """\
{{ '<s>' }}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '[INST] ' ~ (messages[0].content ~ '\\n\\n' if loop.last and messages[0].role == 'system' else '') -}}
{{ m.content ~ '[/INST]' }}
{%- elif m.tool_calls -%}
{{ '[TOOL_CALLS] ' ~ (m.tool_calls | map(attribute='function') | list | tojson) ~ '</s>' }}
{%- elif m.role == 'tool' -%}
{{ '[TOOL_RESULTS] ' ~ m.content ~ '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' -%}
{{ ' ' ~ m.content ~ '</s>' }}
{%- endif -%}
{%- endfor -%}
"""

# Without a generation prompt the whole text is closed by another token.
PHI = """\
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}{% endfor -%}
{{ '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' }}
"""

# The generation prompt opens a think block, and finished answers are shown without it.
THINKS_FIRST = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '<|user|>' ~ m.content }}
{%- else -%}
{{ '<|assistant|>' ~ m.content.split('</think>')[-1].lstrip('\\n') ~ '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif -%}
"""

# As the newest thinking models: the generation prompt opens the block, the last answer is shown with it.
OPENS_THOUGHTS = QWEN3.replace(
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}",
    "{{- '<think>\\n' -}}",
)

STOCK = {
    "smollm2": SMOLLM2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "mistral, system last": MISTRAL_SYSTEM_LAST,
    "phi": PHI,
}


def byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and the control tokens above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    fast.chat_template = chat_template
    return fast
