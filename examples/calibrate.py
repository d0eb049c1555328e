"""Makes a draft model's confidences true, and writes the temperatures and shifts into its folder.

    pip install -e ".[train,eval]"
    python examples/calibrate.py                          # the draft of train_your_own.py, which is made if need be
    python examples/calibrate.py --draft my-draft --data prompts.jsonl --max-new-tokens 256 --blocks 8000

This is `hf-dspark calibrate` (greedy), step by step. A confidence of 0.8 should mean that 80 % of such drafts are
accepted; the scheduler, which decides how many drafts are verified, relies on it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from train_your_own import make
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.demo_weights import resolve_target
from hf_dspark.evaluation.blocks import FIT, HELD_OUT, CollectionSettings, collect, split_prompts, stack
from hf_dspark.evaluation.calibration import calibrate_blocks
from hf_dspark.evaluation.prompts import load_prompts

OWN = Path("runs/own")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--draft", type=Path, default=OWN / "draft", help="folder; default: runs/own/draft")
parser.add_argument("--data", type=Path, default=OWN / "prompts.jsonl", help='JSONL lines of {"prompt": ...}')
parser.add_argument("--max-new-tokens", type=int, default=40)
parser.add_argument("--blocks", type=int, default=200, help="to fit on, and to measure on; default: 200")
options = parser.parse_args()
if options.draft == OWN / "draft" and not options.draft.is_dir():
    OWN.mkdir(parents=True, exist_ok=True)
    make(OWN)

config = DSparkConfig.from_pretrained(options.draft)
name = resolve_target(config.target_model_name_or_path, report=print)
tokenizer = AutoTokenizer.from_pretrained(name, revision=config.target_revision)
target = AutoModelForCausalLM.from_pretrained(name, revision=config.target_revision, dtype="auto", device_map="auto")
draft = DSparkDraftModel.from_pretrained(options.draft, target=target)

# Real calls on real prompts; whole prompts are held out, since blocks of one text are alike.
fit, held_out = split_prompts([load_prompts(options.data)], held_out_share=0.5)
settings = CollectionSettings(max_new_tokens=options.max_new_tokens, temperatures=(0.0,), blocks=options.blocks)
results = collect(target, tokenizer, draft, {FIT: fit, HELD_OUT: held_out}, settings)
sides = [[r for r in results if r.side == side] for side in (FIT, HELD_OUT)]
blocks = [stack(side, draft.config.num_draft_tokens) for side in sides]

# The command insists on 2,000 blocks to fit on: with fewer, as in this small example, chance has a large part in it.
calibration = calibrate_blocks("greedy", *blocks, minimum_blocks=min(options.blocks, 2000))
print(f"fitted on {calibration.fit_blocks} blocks, measured on {calibration.held_out_blocks} others")
print("position  temperature  shift  error as trained  calibrated  by chance alone")
for p, shift in zip(calibration.positions, calibration.shifts):
    errors = (p.before.ece, p.after.ece, p.after.noise_floor)
    print(
        f"{p.position:8}  {p.temperature:11.2f}  {shift:5.2f}" + "".join(f"  {100 * error:12.1f} %" for error in errors)
    )
if calibration.is_worse:
    print("They do not help here; nothing was written.")
else:
    # Those of the other mode, sampling, stay as they are.
    draft.config.confidence_temperatures = {
        **(draft.config.confidence_temperatures or {}),
        "greedy": calibration.temperatures,
    }
    draft.config.confidence_shifts = {**(draft.config.confidence_shifts or {}), "greedy": calibration.shifts}
    draft.config.save_pretrained(options.draft)
    print(f"written into {options.draft / 'config.json'}")
