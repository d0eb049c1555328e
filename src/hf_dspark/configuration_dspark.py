"""`DSparkConfig`: one flat, typed, strict configuration for a DSpark draft model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .errors import DSparkConfigError

BACKBONES = ("qwen3", "gemma4")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
DECODING_MODES = ("greedy", "sample")
GEMMA4_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")

_DERIVED: Any = None  # default of the fields that `__post_init__` fills in from the others


def evenly_spaced_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """`count` layer ids from the second layer to the fourth-last one, as the published drafts space them.

    The final layer is never among them: transformers returns it normed in `hidden_states` (see `target_layer_ids`).
    """
    first, last = min(1, num_target_layers - 2), max(num_target_layers - 3, 0)
    if count == 1:
        return [last]
    ids = [round(first + i * (last - first) / (count - 1)) for i in range(count)]
    return sorted(set(ids))


class DSparkConfig(PreTrainedConfig):
    r"""Configuration of a [`DSparkDraftModel`] (arXiv 2607.05147; key names are those of the DeepSpec checkpoints).

    Args:
        vocab_size (`int`): Number of ids of the target, which is also the width of its logits.
        hidden_size (`int`): Width of the draft model. It equals the target's unless the draft owns its two tables.
        backbone (`str`): `"qwen3"` for any dense decoder-only target, or `"gemma4"`.
        target_layer_ids (`list[int]`): Tapped layers, ascending. Id i is the *output of decoder layer i*; -1 is the
            embedding output. The final layer is refused: transformers hands it out after the final norm.
        num_target_layers (`int`): Number of decoder layers of the target.
        target_hidden_size (`int`, *optional*): Width of one tapped state. Defaults to `hidden_size`.
        block_size (`int`): γ, the number of block positions, anchor included.
        sample_from_anchor (`bool`): `True`: slot k predicts token anchor+k+1, γ drafts per round. `False` (1+N
            layout): slot 0 predicts nothing, slots 1..γ-1 give γ-1 drafts.
        mask_token_id (`int`): The id that fills the block after the anchor. It must have a row in the embedding.
        markov_rank (`int`): Rank r of the sequential head; 0 means no head (a DFlash draft).
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`): Whether the model predicts c_k, the chance that draft k is accepted.
        confidence_head_with_markov (`bool`): Whether that head also reads the Markov embedding of the previous token.
        confidence_temperatures (`dict`, *optional*): Calibrated temperatures, `{"greedy": [...], "sample": [...]}`, one
            per draft position; they divide the confidence logits. `hf-dspark calibrate` writes them.
        confidence_shifts (`dict`, *optional*): In the same form, what is then added; modes without one have none.
        confidence_calibration (`dict`, *optional*): What they were fitted on, a dict per mode: blocks, data, target,
            sampling temperature, ECE before and after, date.
        draft_vocab_size (`int`, *optional*): Width of the draft's own output vocabulary. Below `vocab_size`, the draft
            owns `lm_head.weight` and the offset table `d2t` (target id = draft id + d2t[draft id]).
        final_logit_softcapping (`float`, *optional*): tanh soft-cap of the target's head, applied before the bias.
        logit_scale (`float`): Factor on the target's head output (Cohere's `logit_scale`, 1 / Granite's
            `logits_scaling`).
        global_head_dim, num_global_key_value_heads, attention_k_eq_v: Gemma4 only, as in `Gemma4TextConfig`.
        target_model_name_or_path, target_revision (`str`, *optional*): The weights that the draft was trained for.
        training_max_length (`int`, *optional*): The longest sequence seen in training, in tokens.

    Raises:
        DSparkConfigError: for every wrong value, with its name, the value and what is allowed.
    """

    model_type = "dspark"
    keys_to_ignore_at_inference: ClassVar[list[str]] = []

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = _DERIVED
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    attention_bias: bool = False
    layer_types: list[str] = _DERIVED
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    backbone: str = "qwen3"
    target_layer_ids: list[int] = _DERIVED
    num_target_layers: int = 36
    target_hidden_size: int = _DERIVED
    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int = _DERIVED
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = _DERIVED
    confidence_temperatures: dict | None = None
    confidence_shifts: dict | None = None
    confidence_calibration: dict | None = None
    draft_vocab_size: int = _DERIVED
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    target_model_name_or_path: str | None = None
    target_revision: str | None = None
    training_max_length: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        if self.backbone == "gemma4" and self.global_head_dim is not None:
            self.head_dim = self.global_head_dim  # every Gemma4 draft layer is a full-attention layer
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = evenly_spaced_layer_ids(self.num_target_layers, 5)
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.confidence_head_with_markov is None:
            self.confidence_head_with_markov = self.enable_confidence_head and self.markov_rank > 0
        if self.mask_token_id is None:
            self.mask_token_id = self.vocab_size - 1
        # Checked before the host's own steps: rope standardisation reads values that may be wrong.
        self._check_values()
        super().__post_init__(**kwargs)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens per full block: γ with `sample_from_anchor`, else γ-1."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_draft_key_value_heads(self) -> int:
        """Key/value heads of a draft layer (Gemma4 with `attention_k_eq_v` has its own number)."""
        if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
            return self.num_global_key_value_heads
        return self.num_key_value_heads

    def _check_values(self) -> None:
        def refuse(name: str, allowed: str) -> None:
            raise DSparkConfigError(f"DSparkConfig: `{name}` is {getattr(self, name)!r}, but must be {allowed}.")

        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "num_target_layers", "target_hidden_size"),
        ):
            if getattr(self, name) < 1:
                refuse(name, "at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            refuse("num_key_value_heads", f"a divisor of num_attention_heads ({self.num_attention_heads})")
        if self.backbone not in BACKBONES:
            refuse("backbone", f"one of {list(BACKBONES)}")
        if (
            any(kind != "full_attention" for kind in self.layer_types)
            or len(self.layer_types) != self.num_hidden_layers
        ):
            refuse(
                "layer_types", f"{self.num_hidden_layers} times 'full_attention' (sliding draft layers are not built)"
            )
        if self.sliding_window is not None:
            refuse("sliding_window", "None (sliding draft layers are not built)")
        if self.block_size < 1:
            refuse("block_size", "at least 1")
        if not self.sample_from_anchor and self.block_size < 2:
            refuse("block_size", "at least 2 with sample_from_anchor=False, where slot 0 predicts nothing")
        if not 0 <= self.mask_token_id < self.vocab_size:
            refuse("mask_token_id", f"inside the embedding, 0 to {self.vocab_size - 1}")
        ids = self.target_layer_ids
        last = self.num_target_layers - 1
        if not ids:
            refuse("target_layer_ids", "a list of at least one layer id")
        if any(not -1 <= i <= last for i in ids):
            refuse("target_layer_ids", f"ids from -1 (the embedding output) to {last - 1}")
        if last in ids:
            refuse(
                "target_layer_ids",
                f"ids below {last}: transformers returns the final layer's output after the final norm, so what "
                "training and generation see could differ",
            )
        if any(a >= b for a, b in pairwise(ids)):
            refuse("target_layer_ids", "strictly ascending, without repeats")
        if self.markov_rank < 0:
            refuse("markov_rank", "0 (no sequential head) or more")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            refuse("markov_head_type", f"one of {list(MARKOV_HEAD_TYPES)}")
        if self.confidence_head_with_markov and not self.enable_confidence_head:
            refuse("confidence_head_with_markov", "False when enable_confidence_head is False")
        if self.confidence_head_with_markov and self.markov_rank == 0:
            refuse("confidence_head_with_markov", "False with markov_rank=0: there is no Markov embedding to read")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            refuse("draft_vocab_size", f"from 1 to vocab_size ({self.vocab_size})")
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            refuse("final_logit_softcapping", "positive, or None")
        if self.logit_scale <= 0:
            refuse("logit_scale", "positive")
        self._check_calibration(refuse)
        if self.tie_word_embeddings:
            refuse("tie_word_embeddings", "False: a draft model borrows both tables and never ties its own")
        if self.backbone != "gemma4":
            for name in ("global_head_dim", "num_global_key_value_heads"):
                if getattr(self, name) is not None:
                    refuse(name, "None with backbone 'qwen3'")
            if self.attention_k_eq_v:
                refuse("attention_k_eq_v", "False with backbone 'qwen3'")

    def _check_calibration(self, refuse: Callable[[str, str], None]) -> None:
        def is_number(t: Any) -> bool:
            return isinstance(t, (int, float)) and not isinstance(t, bool) and math.isfinite(t)

        def is_row(row: Any) -> bool:
            return isinstance(row, (list, tuple)) and len(row) == self.num_draft_tokens and all(map(is_number, row))

        def is_positive_row(row: Any) -> bool:
            return is_row(row) and all(t > 0 for t in row)

        for name, is_value, allowed in (
            ("confidence_temperatures", is_positive_row, f"a list of {self.num_draft_tokens} positive finite numbers"),
            ("confidence_shifts", is_row, f"a list of {self.num_draft_tokens} finite numbers"),
            ("confidence_calibration", lambda value: isinstance(value, dict), "a dict"),
        ):
            modes = getattr(self, name)
            if modes is None:
                continue
            if (
                not isinstance(modes, dict)
                or not set(modes) <= set(DECODING_MODES)
                or not all(map(is_value, modes.values()))
            ):
                refuse(name, f"None, or a dict with keys 'greedy' and 'sample' (one or both), each {allowed}")

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **kwargs: Any) -> DSparkConfig:
        """A sensible configuration for a decoder-only target; `kwargs` override any field.

        Widths, heads, RoPE, vocabulary, soft-cap and special ids follow the target (its `text_config` where it is a
        composite model); five evenly spaced layers are tapped, and the mask token is the last unused-looking id: the
        target's `pad_token_id` where that differs from its eos, else the last row of the embedding.

        Raises:
            DSparkConfigError: the target is an encoder-decoder, or a value of `kwargs` is wrong.
        """
        if target_config.is_encoder_decoder:
            raise DSparkConfigError(
                f"model_type {target_config.model_type!r} is an encoder-decoder; a DSpark draft needs a decoder-only "
                "target."
            )
        text = target_config.get_text_config(decoder=True)
        gemma4 = text.model_type in GEMMA4_TEXT_TYPES
        # Sizes may differ by layer, and draft layers are full-attention layers.
        kinds = getattr(text, "layer_types", None) or []
        layer = text.per_layer_config[kinds.index("full_attention") if "full_attention" in kinds else -1]
        rope = dict(text.rope_parameters or {})
        if "full_attention" in rope:  # per-layer-type RoPE: draft layers attend to everything
            rope = dict(rope["full_attention"])
        eos = text.eos_token_id if text.eos_token_id is not None else target_config.eos_token_id
        eos_ids = set(eos if isinstance(eos, list) else [eos])
        pad = text.pad_token_id if text.pad_token_id is not None else target_config.pad_token_id
        scale = getattr(text, "logit_scale", None)
        granite_scaling = getattr(text, "logits_scaling", None)
        values: dict[str, Any] = dict(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=getattr(layer, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(layer, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            hidden_act=text.hidden_activation if gemma4 else getattr(text, "hidden_act", None) or "silu",
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            max_position_embeddings=text.max_position_embeddings,
            initializer_range=text.hidden_size**-0.5,  # so that a projection keeps the size of what it reads
            rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
            num_hidden_layers=5,
            backbone="gemma4" if gemma4 else "qwen3",
            num_target_layers=text.num_hidden_layers,
            target_layer_ids=evenly_spaced_layer_ids(text.num_hidden_layers, 5),
            mask_token_id=pad if pad is not None and pad not in eos_ids else text.vocab_size - 1,
            final_logit_softcapping=getattr(text, "final_logit_softcapping", None),
            logit_scale=scale if scale is not None else 1.0 / granite_scaling if granite_scaling else 1.0,
            bos_token_id=text.bos_token_id if text.bos_token_id is not None else target_config.bos_token_id,
            eos_token_id=eos,
            pad_token_id=pad,
            target_model_name_or_path=target_config.name_or_path or None,
        )
        if gemma4:
            values.update(
                global_head_dim=layer.head_dim,
                num_global_key_value_heads=layer.num_key_value_heads if text.attention_k_eq_v else None,
                attention_k_eq_v=text.attention_k_eq_v,
            )
        unknown = set(kwargs) - {field.name for field in fields(cls)}
        if unknown:
            raise DSparkConfigError(f"DSparkConfig has no field {sorted(unknown)}; see `DSparkConfig` for the list.")
        values.update(kwargs)
        if "num_hidden_layers" in kwargs and "layer_types" not in kwargs:
            values["layer_types"] = None
        return cls(**values)
