"""Several prompts at once with a draft model: as a batch, and through transformers' continuous batching.

    pip install -e ".[demo]"
    python examples/batch.py                                           # SmolLM2 and the draft that ships (93 MB, once)
    python examples/batch.py "Why is the sky blue?" "Name three rivers." --draft OWNER/NAME

A row's text is what it would be alone (up to ties in bf16). `hf-dspark bench` measures what it brings on a machine.
"""

from __future__ import annotations

import argparse
import time

from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.demo_weights import resolve_target, shipped_draft

PROMPTS = ["Why is the sky blue?", "List four kinds of bread.", "What is 12 times 7?", "Write a haiku about rain."]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", nargs="*", default=PROMPTS)
parser.add_argument("--draft", default=shipped_draft(), help="folder or Hub id; default: the draft that ships")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

config = DSparkConfig.from_pretrained(options.draft)
name = resolve_target(config.target_model_name_or_path, report=print)
# Rows end together, so what fills the short ones up stands before them.
tokenizer = AutoTokenizer.from_pretrained(name, revision=config.target_revision, padding_side="left")
target = AutoModelForCausalLM.from_pretrained(name, revision=config.target_revision, dtype="auto", device_map="auto")
draft = DSparkDraftModel.from_pretrained(options.draft, target=target)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token

conversations = [[{"role": "user", "content": prompt}] for prompt in options.prompts]
batch = tokenizer.apply_chat_template(
    conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
)
batch = {key: batch[key].to(target.device) for key in ("input_ids", "attention_mask")}

print("As a batch")
started = time.perf_counter()
out = target.generate(**batch, assistant_model=draft, do_sample=False, max_new_tokens=options.max_new_tokens)
seconds = time.perf_counter() - started
answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
for prompt, answer, row in zip(options.prompts, answers, draft.last_stats.rows):
    print(f"\n> {prompt}\n{answer}\n({row.new_tokens} tokens in {row.rounds} rounds)")
print(f"\n{seconds:.1f} s; {draft.last_stats}")

print("\nThrough continuous batching: requests may come at any time, and each leaves when it is done")
prompt_ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in conversations]
generation_config = GenerationConfig(
    do_sample=False,
    max_new_tokens=options.max_new_tokens,
    eos_token_id=target.generation_config.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
started = time.perf_counter()
with target.continuous_batching_context_manager(
    generation_config=generation_config,
    continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=512),
    assistant_model=draft,
) as manager:
    prompts = dict(zip(manager.add_requests(prompt_ids), options.prompts))
    while prompts and manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            answer = tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
            print(f"\n> {prompts.pop(result.request_id)}\n{answer}")
    stats = manager.draft_stats
print(f"\n{time.perf_counter() - started:.1f} s; accepted length {stats.accepted_length:.2f}")
