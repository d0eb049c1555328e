"""A tiny target with tokenizer and chat template, and a draft model for it, made in memory."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_dspark import DSparkDraftModel

VOCAB_SIZE = 48
CHAT_TEMPLATE = (
    "{% for message in messages %} w1 {{ message['content'] }}{% endfor %}{% if add_generation_prompt %} w2{% endif %}"
)


def tiny_target(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # wide enough for the best logit to stand out
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<unk>", *(f" w{i}" for i in range(1, VOCAB_SIZE))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = chat_template
    return fast


def tiny_draft(target: LlamaForCausalLM, seed: int = 1, **config) -> DSparkDraftModel:
    torch.manual_seed(seed)
    config = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 4, "target_layer_ids": [0, 2], **config}
    draft = DSparkDraftModel.for_target(target, **config).eval()
    draft.scheduler = None  # full blocks, whatever the clock says
    return draft


def save_pair(folder, **draft_config) -> tuple[str, str]:
    """Writes target, tokenizer and draft below `folder`; returns the two paths."""
    target_path, draft_path = folder / "target", folder / "draft"
    target = tiny_target()
    target.save_pretrained(target_path)
    tiny_tokenizer().save_pretrained(target_path)
    draft = tiny_draft(target, target_model_name_or_path=str(target_path), **draft_config)
    draft.save_pretrained(draft_path)
    return str(target_path), str(draft_path)
