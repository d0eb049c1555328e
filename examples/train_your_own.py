"""A draft model of your own, from nothing, on a CPU, in about two minutes.

    pip install -e ".[train,eval]"
    python examples/train_your_own.py            # writes runs/own/target and runs/own/draft

A real target takes its place by its name (see docs/training.md). Here one is made first: a small Llama that has learnt
to count, to spell and to tell of animals. Then what every draft model needs:

1. text that the target wrote itself, because that is what will be drafted;
2. a draft model for it, and `DSparkTrainer`;
3. a measurement: the text must be the same, in fewer passes of the target.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hf_dspark import DSparkDraftModel, DSparkTrainer, DSparkTrainingArguments
from hf_dspark.evaluation.prompts import encode
from hf_dspark.training import initialize_draft

ANIMALS = [
    *("fox", "owl", "bear", "frog", "seal", "crow", "hare", "wolf"),
    *("deer", "swan", "mole", "toad", "lynx", "crab", "moth", "newt"),
]
PLACES = ["forest", "barn", "cave", "pond", "bay", "field", "meadow", "hill"]
FOODS = ["berries", "mice", "fish", "flies", "corn", "clover", "moss", "seeds"]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<assistant> ' }}{{ m['content'] }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def lessons() -> list[tuple[str, str]]:
    """Questions, and the one right answer to each."""
    counting = [
        (f"count from {a} to {b}", " ".join(str(n) for n in range(a, b + 1)))
        for a in range(0, 60)
        for b in range(a + 5, min(a + 16, 75))
    ]
    spelling = [(f"spell {word}", " ".join(word)) for word in ANIMALS + PLACES + FOODS]
    stories = []
    for i, animal in enumerate(ANIMALS):
        place, food = PLACES[i % 8], FOODS[(3 * i) % 8]
        for mood in ("old", "young", "happy", "shy"):
            text = f"the {mood} {animal} lives in the {place} , where it looks for {food} . when the {food} are gone ,"
            text += f" the {mood} {animal} sleeps near the {place} ."
            stories.append((f"tell of the {mood} {animal}", text))
    return counting + 8 * spelling + 4 * stories


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token a word."""
    special = ["<unk>", "<pad>", "<user>", "<assistant>", "<end>"]
    words = special + sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>", "padding_side": "left"},
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def make_target(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, steps: int) -> LlamaForCausalLM:
    """A small Llama that knows the answers to nearly all of them."""
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6},
        **{"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": tokenizer.pad_token_id},
        **{"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id},
    )
    target = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(target.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    draw = random.Random(0)
    for step in range(steps):
        texts = [f"<user> {question} <end> <assistant> {answer} <end>" for question, answer in draw.sample(pairs, 32)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = target(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    return target.eval()


@torch.no_grad()
def answers(target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[str]) -> list[dict[str, str]]:
    """What the target itself says: the training data."""
    records = []
    for start in range(0, len(questions), 64):
        part = questions[start : start + 64]
        texts = [f"<user> {question} <end> <assistant>" for question in part]
        batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        out = target.generate(**batch, do_sample=True, max_new_tokens=40)
        replies = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        records += [{"prompt": question, "response": reply} for question, reply in zip(part, replies)]
    return records


def make(folder: Path, target_steps: int = 300, draft_steps: int = 250) -> None:
    """Leaves `target`, `draft` and the prompts that were held out below `folder`."""
    set_seed(0)
    pairs = lessons()
    print("Making a target")
    tokenizer = make_tokenizer([text for pair in pairs for text in pair])
    target = make_target(pairs, tokenizer, target_steps)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")

    print("Letting it write its answers")
    questions = sorted({question for question, _ in pairs})
    random.Random(1).shuffle(questions)
    held_out, training = questions[:200], questions[200:]
    with open(folder / "prompts.jsonl", "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"prompt": question}) + "\n" for question in held_out)
    records = answers(target, tokenizer, 2 * training)

    print("Training a draft model")
    draft = DSparkDraftModel.for_target(target, num_hidden_layers=1, block_size=5, markov_rank=16)
    draft.config.target_model_name_or_path = str(folder / "target")
    args = DSparkTrainingArguments(
        **{"output_dir": str(folder / "draft"), "max_steps": draft_steps, "per_device_train_batch_size": 16},
        **{"num_anchors": 12, "learning_rate": 3e-3, "bf16": False, "use_cpu": True},
        **{"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 50, "logging_steps": 50},
        **{"report_to": "none", "disable_tqdm": True},
    )
    train_dataset, eval_dataset = (
        DSparkTrainer.encode(part, tokenizer, args, target) for part in (records[:-64], records[-64:])
    )
    initialize_draft(draft, train_dataset)
    trainer = DSparkTrainer(
        model=draft,
        target=target,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_names=["answers of the target"],
    )
    trainer.train()
    trainer.save_model()  # the draft, and training_facts.json for its card

    print("Measuring it on questions that it has not seen")
    same = new = rounds = 0
    for question in held_out[:20]:
        inputs = encode(tokenizer, [{"role": "user", "content": question}], target.device)
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=40)
        draft.scheduler = None  # every block in full: this target is too small for its times to mean anything
        drafted = target.generate(**inputs, do_sample=False, max_new_tokens=40, assistant_model=draft)
        same += torch.equal(plain, drafted)
        new += drafted.shape[1] - inputs["input_ids"].shape[1] - 1
        rounds += draft.last_stats.rounds
    print(f"{same} of 20 texts are the plain ones; {new / rounds:.2f} tokens per pass of the target (plain: 1)")
    print(f"The draft model is in {folder / 'draft'}; its card: python examples/push.py {folder / 'draft'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/own"), help="default: runs/own")
    parser.add_argument("--target-steps", type=int, default=300)
    parser.add_argument("--draft-steps", type=int, default=250)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options.folder, options.target_steps, options.draft_steps)
