"""Several processes train what one does: DDP and FSDP with gloo on CPUs, through the command and real launchers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_pair import tiny_target, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %} w40{{ ' w41' if m['role'] == 'user' else ' w42' }} {{ m['content'] }} w43{% endfor %}"
    "{% if add_generation_prompt %} w40 w42{% endif %}"
)
SETTINGS = """
num_hidden_layers: 2
block_size: 4
markov_rank: 4
target_layer_ids: [0, 2]
validation_share: 0.3
num_anchors: 6
num_train_epochs: 2
learning_rate: 1e-2
optim: sgd
bf16: no
use_cpu: true
check_data: no
save_strategy: no
logging_steps: 1
report_to: none
disable_tqdm: true
export_dtype: float32
"""
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
TORCHRUN += ["--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
# accelerate uses FSDP on accelerators only; on CPUs it falls back to DDP and says nothing. This opens that one gate,
# and everything behind it is real: accelerate's wrapping, the Trainer's checkpoints, torch's sharding.
FSDP_ON_CPU = """
import sys
import accelerate.state as state
from accelerate.utils import DistributedType
original = state.AcceleratorState.__init__
def init(self, *args, fsdp_plugin=None, **kwargs):
    original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
    if plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
state.AcceleratorState.__init__ = init

from hf_dspark.cli import main, train
build = train.build_trainer
def build_and_watch(*args):
    trainer, target = build(*args)
    train_as_usual = trainer.train
    def train_and_tell(**kwargs):
        train_as_usual(**kwargs)
        for layer in [*trainer.draft.layers, *target.model.layers]:
            if hasattr(layer, "reshard"):
                layer.reshard()
        kinds = [type(m.mlp.up_proj.weight).__name__ for m in (trainer.draft.layers[0], target.model.layers[0])]
        if trainer.is_world_process_zero():
            print("KINDS", *kinds, flush=True)
    trainer.train = train_and_tell
    return trainer, target
train.build_trainer = build_and_watch
sys.exit(main())
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(name, *options, launcher=..., batch=...)` trains in processes of its own; gives the folder and stdout."""
    root = tmp_path_factory.mktemp("distributed")
    tiny_target().save_pretrained(root / "target")
    tiny_tokenizer(TEMPLATE).save_pretrained(root / "target")
    # 9 samples to train on, of different lengths: with 4 a step, the last step of an epoch has 1.
    rows = [
        {"prompt": f"w{i}", "response": " ".join(f"w{(i + j) % 30 + 1}" for j in range(8 + i % 5))}
        for i in range(1, 14)
    ]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "train.yaml").write_text(SETTINGS)
    (root / "fsdp_on_cpu.py").write_text(FSDP_ON_CPU)

    def train(name, *options, launcher=(), batch=4, script=("-m", "hf_dspark")):
        command = [sys.executable, *launcher, *([str(root / "fsdp_on_cpu.py")] if script is None else script), "train"]
        command += ["--config", str(root / "train.yaml"), "--target", str(root / "target"), "--data"]
        command += [str(root / "data.jsonl"), "--output_dir", str(root / name)]
        command += ["--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", str(batch), *options]
        if not launcher:
            command.insert(1, "-u")
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        return root / name, done.stdout

    return train


@pytest.fixture(scope="module")
def one(run):
    return run("one")[0]


def same(first: Path, second: Path) -> None:
    """Weights, and all losses on the way, within fp32 rounding."""
    expected, got = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (first, second)]
    assert len(logs[0]) == len(logs[1])
    for a, b in zip(*logs):
        for key in {"loss", "eval_loss", "ce_loss", "slots", "eval_slots", "eval_acceptance_sample_2"} & set(a):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key


def test_two_processes_are_one(run, one):
    """`accelerate launch`, DDP: two processes with half the batch, although the last batch of an epoch is not full."""
    two, _ = run("two", launcher=ACCELERATE, batch=2)
    same(one, two)


def test_two_processes_that_accumulate_are_one(run, one):
    two, _ = run("accumulate", "--gradient_accumulation_steps", "2", launcher=TORCHRUN, batch=1)
    same(one, two)


def test_fsdp_with_the_target_sharded_too(run, one):
    sharded, out = run("fsdp", "--fsdp", "--shard_target", launcher=TORCHRUN, batch=2, script=None)
    assert "KINDS DTensor DTensor" in out
    same(one, sharded)


def test_fsdp_with_a_head_that_trains_resumes_exactly(run):
    options = ["--draft_vocab_size", "20", "--train_head", "--optim", "adamw_torch", "--learning_rate", "1e-3"]
    saving = ["--fsdp", "--save_strategy", "steps", "--save_steps", "3", "--seed", "7"]
    alone, _ = run("head", *options, "--seed", "7")
    whole, out = run("whole", *options, *saving, launcher=TORCHRUN, batch=2, script=None)
    assert "KINDS DTensor Parameter" in out
    same(alone, whole)
    part = whole.parent / "part"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoint-6")
    (part / "model.safetensors").unlink()
    part, _ = run("part", *options, *saving, "--resume", launcher=TORCHRUN, batch=2, script=None)
    expected, got = load_file(whole / "model.safetensors"), load_file(part / "model.safetensors")
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_estimate_in_two_processes(run):
    folder, out = run("estimate", "--estimate", launcher=TORCHRUN, batch=2)
    assert out.count("6 steps take") == 1 and not folder.exists()
