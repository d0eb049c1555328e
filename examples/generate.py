"""Generates an answer plain and with a draft model, and says what the draft model did.

pip install -e ".[demo]"
python examples/generate.py                                        # SmolLM2 and the draft that ships (93 MB, once)
python examples/generate.py "count from 5 to 19" --draft runs/own/draft
python examples/generate.py "Why is the sky blue?" --draft OWNER/NAME --temperature 0.7
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.demo_weights import resolve_target, shipped_draft

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
parser.add_argument("--draft", default=shipped_draft(), help="folder or Hub id; default: the draft that ships")
parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
parser.add_argument("--max-new-tokens", type=int, default=96)
options = parser.parse_args()

# A draft model's config names the weights that it was trained for.
config = DSparkConfig.from_pretrained(options.draft)
name = resolve_target(config.target_model_name_or_path, report=print)
tokenizer = AutoTokenizer.from_pretrained(name, revision=config.target_revision)
target = AutoModelForCausalLM.from_pretrained(name, revision=config.target_revision, dtype="auto", device_map="auto")
draft = DSparkDraftModel.from_pretrained(options.draft, target=target)

messages = [{"role": "user", "content": options.prompt}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
inputs = {key: inputs[key].to(target.device) for key in ("input_ids", "attention_mask")}
sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0} if options.temperature > 0 else {}

texts = {}
for label, assistant in (("plain", None), ("with the draft model", draft)):
    torch.manual_seed(0)
    started = time.perf_counter()
    out = target.generate(
        **inputs,
        **(sampling or {"do_sample": False}),
        max_new_tokens=options.max_new_tokens,
        assistant_model=assistant,
    )
    seconds = time.perf_counter() - started
    new = out[0, inputs["input_ids"].shape[1] :]
    texts[label] = tokenizer.decode(new, skip_special_tokens=True)
    print(f"\n--- {label}: {len(new)} tokens in {seconds:.2f} s\n{texts[label]}")
print(f"\n{draft.last_stats}")
if not sampling:
    print("The two texts are the same." if len(set(texts.values())) == 1 else "The two texts differ (a tie in bf16?).")
