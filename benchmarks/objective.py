"""What the training objective costs against the plain formulation, on the same work: time and peak memory.

    python benchmarks/objective.py --bf16 [--vocab 49152 --length 2048 --anchors 512 ...] [--json OUT]

`plain` is the formulation of the reference: the blocks are one sequence behind the context under one dense mask, and
the logits of draft and target stand in memory as whole tensors [slots, vocabulary] with everything that autograd keeps
of them. `fused` is this package's. Both do one step of the draft and its loss, forward and backward, from the same
weights, features and anchors; the target's forward, which is the same for both, is left out. The losses are compared.

Time: both in one process, alternating, medians. Memory: each in a process of its own, the rise of the peak above what a
tiny step needs. `--profile` prints where the time of each goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark import DSparkDraftModel
from hf_dspark.backbones.attention import apply_rope
from hf_dspark.training.estimate import peak_memory
from hf_dspark.training.objective import dspark_objective, slot_weights

ALPHA_CE, ALPHA_TV = 0.1, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3), metavar=("HEADS", "KV_HEADS"))
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--rank", type=int, default=64, help="of the sequential head")
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--bf16", action="store_true", help="autocast, as the trainer does where the machine has it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--peak-of", choices=tuple(STEPS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(json.dumps(peak_rise(args.peak_of, args)))
        return
    result = measure(args)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"arguments": vars(args), "torch": torch.__version__, **result}, indent=1)
        )


class Work:
    """One draft with its batch; the target is only there for its two tables."""

    def __init__(self, args: argparse.Namespace, length: int, anchors: int):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_hidden_layers=4,
            num_attention_heads=args.heads[0],
            num_key_value_heads=args.heads[1],
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.target = LlamaForCausalLM(config).eval().requires_grad_(False)
        if args.bf16:
            self.target.bfloat16()
        self.draft = DSparkDraftModel.for_target(
            self.target,
            num_hidden_layers=args.layers,
            block_size=args.block,
            markov_rank=args.rank,
            target_layer_ids=[0, 2],
        )
        dtype = self.target.dtype
        self.ids = torch.randint(args.vocab, (1, length))
        self.features = torch.randn(1, length, 2 * args.hidden, dtype=dtype)
        self.states = torch.randn(1, length, args.hidden, dtype=dtype)
        last = length - args.block - 1
        self.anchors = torch.randperm(last)[:anchors].sort().values[None]
        self.slots = torch.ones(1, anchors, args.block, dtype=torch.bool)
        self.weights = slot_weights(args.block, 4.0)
        self.denominator = self.weights.sum().item() * anchors
        self.bf16 = args.bf16

    def step(self, kind: str) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = STEPS[kind](self)
        loss.backward()
        self.draft.zero_grad()
        return loss.item()


def fused(work: Work) -> torch.Tensor:
    def objective(output):
        return dspark_objective(
            work.draft,
            output,
            work.states,
            work.ids,
            work.anchors,
            work.slots,
            work.weights,
            work.denominator,
            ALPHA_CE,
            ALPHA_TV,
        )

    return work.draft(work.features, work.ids, work.anchors, objective=objective).loss


def plain(work: Work) -> torch.Tensor:
    draft, config, ids, anchors = work.draft, work.draft.config, work.ids, work.anchors
    length, blocks, block_size = ids.shape[1], anchors.shape[1], config.block_size
    ctx = draft.fuse(work.features)  # [1, T, H]
    states = torch.full((1, blocks, block_size), config.mask_token_id)
    states[..., 0] = ids[:, anchors[0]]
    states = draft.embed(states.flatten(1))  # [1, A·γ, H]
    at = (anchors[..., None] + torch.arange(block_size)).flatten(1)  # [1, A·γ]
    # Dense: every block slot against the context before its anchor and against every block slot.
    owner = torch.arange(blocks).repeat_interleave(block_size)
    sees_context = torch.arange(length)[None] < anchors[0][owner][:, None]
    mask = torch.cat([sees_context, owner[:, None] == owner[None]], dim=1)  # [A·γ, T + A·γ]
    ropes = draft.rotary_emb(states, at), draft.rotary_emb(ctx, torch.arange(length)[None])
    for layer in draft.layers:
        states = plain_layer(layer, states, ctx, ropes, mask)
    hidden = draft.norm(states)
    embedding = draft.markov_head.markov_w1(ids[0, at])  # teacher forcing
    logits = draft.base_logits(hidden) + draft.markov_head.markov_w2(embedding)  # [1, A·γ, V]
    teacher = draft.base_logits(work.states[0, at].to(hidden.dtype)).detach()
    q, p = logits.float().softmax(dim=-1), teacher.float().softmax(dim=-1)
    l1 = (q - p).abs().sum(dim=-1)
    agrees = logits.argmax(dim=-1) == teacher.argmax(dim=-1)  # both report how often
    assert agrees.shape == at.shape
    ce = torch.nn.functional.cross_entropy(logits[0].float(), ids[0, at[0] + 1], reduction="none")[None]
    confidence = draft.confidence_head(hidden, embedding)
    bce = binary_cross_entropy_with_logits(confidence, 1 - 0.5 * l1.detach(), reduction="none")
    weight = work.weights.repeat(blocks) / work.denominator
    return (weight * (ALPHA_CE * ce + ALPHA_TV * l1 + bce)).sum()


def plain_layer(layer, states, ctx, ropes, mask):
    attention, normed = layer.self_attn, layer.input_layernorm(states)
    shape = (1, normed.shape[1], -1, attention.head_dim)
    query = apply_rope(attention.q_norm(attention.q_proj(normed).view(shape)), *ropes[0])
    keys, values = zip(attention.keys_values(ctx, ropes[1]), attention.keys_values(normed, ropes[0]))
    key, value = torch.cat(keys, dim=1), torch.cat(values, dim=1)
    out = scaled_dot_product_attention(
        query.transpose(1, 2).to(value.dtype),
        key.transpose(1, 2).to(value.dtype),
        value.transpose(1, 2),
        mask,
        scale=attention.scaling,
        enable_gqa=True,
    )
    states = states + attention.o_proj(out.transpose(1, 2).flatten(2))
    return states + layer.mlp(layer.post_attention_layernorm(states))


STEPS = {"fused": fused, "plain": plain}


def peak_rise(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Peak memory in MiB: that of the process, and its rise over a step on 32 tokens."""
    Work(args, 32, 4).step(kind)
    work = Work(args, args.length, args.anchors)
    before = peak_memory()
    work.step(kind)
    return {"peak_mib": peak_memory() / 2**20, "rise_mib": (peak_memory() - before) / 2**20}


def measure(args: argparse.Namespace) -> dict:
    work = Work(args, args.length, args.anchors)
    losses = {kind: work.step(kind) for kind in STEPS}  # warm-up, and the proof that the work is the same
    wall: dict[str, list[float]] = {kind: [] for kind in STEPS}
    cpu: dict[str, list[float]] = {kind: [] for kind in STEPS}
    for _ in range(args.repeats):
        for kind in STEPS:
            start = time.perf_counter(), time.process_time()
            work.step(kind)
            wall[kind].append(time.perf_counter() - start[0])
            cpu[kind].append(time.process_time() - start[1])
    if args.profile:
        for kind in STEPS:
            with torch.profiler.profile() as profile:
                work.step(kind)
            print(kind, profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12), sep="\n")
    slots = args.anchors * args.block
    rows = []
    for kind in STEPS:
        command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", kind]
        memory = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        seconds = statistics.median(cpu[kind])
        rows.append(
            {
                "kind": kind,
                "loss": losses[kind],
                "cpu_seconds": seconds,
                "wall_seconds": statistics.median(wall[kind]),
                "tokens_per_second": args.length / seconds,
                "slots_per_second": slots / seconds,
                **memory,
                "all_cpu_seconds": cpu[kind],
                "all_wall_seconds": wall[kind],
            }
        )
    ours, theirs = rows
    ratios = {
        "speed": statistics.median(b / a for a, b in zip(cpu["fused"], cpu["plain"])),
        "speed_wall": statistics.median(b / a for a, b in zip(wall["fused"], wall["plain"])),
        "peak": ours["peak_mib"] / theirs["peak_mib"],
        "rise": ours["rise_mib"] / theirs["rise_mib"],
    }
    table = Table(title=f"One step of {slots:,} slots in {args.length:,} tokens, vocabulary {args.vocab:,}")
    names = ("kind", "loss", "cpu_seconds", "wall_seconds", "tokens_per_second", "peak_mib", "rise_mib")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{row[name]:,.4g}" if isinstance(row[name], float) else row[name] for name in names))
    console = Console()
    console.print(table)
    console.print(
        f"fused: {ratios['speed']:.2f} x the speed (CPU time; {ratios['speed_wall']:.2f} x by the clock), "
        f"{ratios['peak']:.0%} of the peak memory ({ratios['rise']:.0%} of its rise).",
        highlight=False,
    )
    return {"rows": rows, "ratios": ratios}


if __name__ == "__main__":
    main()
