"""What training reports is what generation does: acceptance on the same anchors, after reloading in a new process.

A tiny draft is over-fitted to what a tiny target says after some texts. Training measures 1 − TV along continuations
that the target sampled; `generate` accepts and refuses, at temperature 1 without warpers, after the same prefixes.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_pair import VOCAB_SIZE
from training_pair import arguments
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import DSparkDraftModel, DSparkTrainer
from hf_dspark.training.data import DSparkDataset

pytestmark = pytest.mark.slow

BLOCK = 4
PREFIXES = {8: 25, 512: 25, 4096: 10}  # tokens before the anchor: texts
CONTINUATIONS = {8: 80, 512: 80, 4096: 30}  # that training sees of each
ROUNDS = {8: 5000, 512: 5000, 4096: 2000}  # of `generate`; every long prompt is prefilled anew for one round
WORKER = Path(__file__).with_name("acceptance_in_generate.py")


class OneAnchor(DSparkDataset):
    """Samples [prefix, anchor, continuation] whose only anchor is that one."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return {**item, "anchors": torch.tensor([len(item["input_ids"]) - 1 - BLOCK])}


@torch.no_grad()
def samples(target, length):
    """The prefixes with their anchors, int64 [texts, length + 1], and an `OneAnchor` of them with continuations."""
    texts = target.generate(
        torch.randint(VOCAB_SIZE, (PREFIXES[length], 1)), do_sample=True, top_k=0, max_new_tokens=length
    )
    pairs = []
    for text in texts:
        copies = CONTINUATIONS[length]
        longer = target.generate(text[None], do_sample=True, top_k=0, max_new_tokens=BLOCK, num_return_sequences=copies)
        mask = np.zeros(length + 1 + BLOCK, dtype=np.int8)
        mask[length:] = 1
        pairs += [(row.numpy().astype(np.int32), mask) for row in longer]
    return texts, OneAnchor(pairs, num_anchors=1, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder, prefixes and what training reports, by prefix length."""
    folder = tmp_path_factory.mktemp("metric")
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192},
        **{"initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None},
    )
    target = LlamaForCausalLM(config).eval()
    draft = DSparkDraftModel.for_target(
        target, num_hidden_layers=1, block_size=BLOCK, markov_rank=8, target_layer_ids=[0, 1]
    )
    data = {length: samples(target, length) for length in PREFIXES}
    seen = [pair for length in (8, 512) for pair in data[length][1].samples]
    args = arguments(
        folder / "run",
        max_steps=300,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=4,
        train_sampling_strategy="group_by_length",
        learning_rate=1e-2,
        logging_steps=100,
    )
    trainer = DSparkTrainer(model=draft, target=target, args=args, train_dataset=OneAnchor(seen, 1, 0))
    before = trainer.evaluate(trainer.train_dataset)
    trainer.train()
    reported = {length: trainer.evaluate(dataset) for length, (_, dataset) in data.items()}
    assert reported[8]["eval_acceptance_sample_1"] > before["eval_acceptance_sample_1"] + 0.1  # it has learnt them
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return folder, {length: texts for length, (texts, _) in data.items()}, reported


@pytest.mark.parametrize("length", PREFIXES)
def test_acceptance_in_generate_is_what_training_reports(trained, length):
    folder, texts, reported = trained
    prefixes = folder / f"prefixes-{length}.json"
    prefixes.write_text(json.dumps(texts[length].tolist()))
    argv = [sys.executable, str(WORKER), str(folder), str(prefixes), str(ROUNDS[length] // PREFIXES[length])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    counts = torch.tensor(json.loads(done.stdout.splitlines()[-1]))  # [texts, rounds]
    assert counts.numel() == ROUNDS[length]
    first = (counts >= 1).float().mean().item()
    cumulative = counts.float().mean().item() / BLOCK
    assert 0.1 < first < 0.99 and 0.02 < cumulative < 0.9  # some are accepted, some refused
    assert first == pytest.approx(reported[length]["eval_acceptance_sample_1"], abs=0.03)
    assert cumulative == pytest.approx((reported[length]["eval_accepted_length_sample"] - 1) / BLOCK, abs=0.03)
