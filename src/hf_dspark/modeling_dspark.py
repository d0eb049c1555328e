"""`DSparkDraftModel`: feature fusion, backbone, heads, and the pieces of drafting one block (paper §3.1, DESIGN §4)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils import ModelOutput, resolve_revision

from .backbones import draft_layer, draft_norm
from .backbones.attention import BlockMask
from .backbones.qwen3 import RopeTables
from .configuration_dspark import DSparkConfig
from .errors import DSparkCheckpointError, DSparkConfigError, DSparkTargetError
from .heads import ConfidenceHead, MarkovHead
from .hub import PUSH_KEYWORDS, HubMixin
from .hub_errors import explained
from .scheduling.prefix_scheduler import PrefixScheduler
from .scheduling.throughput import ThroughputCurve, ThroughputProfile

if TYPE_CHECKING:
    from .generation.pacing import RoundTimes
    from .generation.stats import BatchGenerationStats, GenerationStats

_COMPARED_ROWS = 64  # rows of two vocabulary tables compared before they are compared in full


@dataclass
class DSparkDraftOutput(ModelOutput):
    """What one training forward gives for A blocks of n predicting slots per sequence.

    Attributes:
        hidden_states: [B, A, n, H], the backbone output h of every predicting slot (after the final norm).
        markov_latents: [B, A, n, r], m; the slot's draft logits are `base_logits(h) + markov_head.markov_w2(m)`.
            `None` with `markov_rank=0`.
        confidence_logits: fp32 [B, A, n], the logit of c_k; `None` without a confidence head.
    """

    hidden_states: torch.Tensor
    markov_latents: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None


class DSparkDraftModel(HubMixin, PreTrainedModel):
    """A DSpark draft model. Pass it to `target.generate(..., assistant_model=draft)`.

    It holds what is its own: feature fusion, backbone, sequential head, confidence head. Embedding and output head are
    the target's, called as modules, unless the checkpoint's own tables differ from them. The target is held outside
    the module tree by a weak reference, bound by `target=` here or at the first `generate`.

    Attributes:
        last_stats (`GenerationStats`): what the last `generate` call did; `None` before the first.
        generation_config (`GenerationConfig`): the draft's own; `num_assistant_tokens` (a cap on the drafts per round)
            and `assistant_confidence_threshold` are unset, which means γ and off.
        scheduler (`"auto"`, `None` or [`PrefixScheduler`]): how many drafts of a block are verified, and whether to
            draft at all. `"auto"` decides by confidence and by what rounds cost on this machine, verifies full blocks
            while it learns that, and pauses where drafting does not pay. `None` verifies every block in full. Since
            measured times decide, a seed gives the same sampled text again only with `None`, or with `throughput` set.
        throughput ([`ThroughputCurve`] or `ThroughputProfile`): what rounds cost, fixed; `None` to measure it.
        round_times (`dict[str, RoundTimes]`): what the rounds so far cost, one row at a time, in batches and in
            continuous batching; `clear()` forgets it.
        record_confidence (`bool`): whether `last_stats.confidence_logits` is filled.
    """

    config_class = DSparkConfig
    base_model_prefix = ""
    main_input_name = "features"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    layers: Any  # an `nn.ModuleList` of draft layers, whose elements torch types as plain modules

    def __init__(self, config: DSparkConfig, own_embed_tokens: bool = False, own_lm_head: bool = False):
        """`own_embed_tokens`, `own_lm_head`: whether the checkpoint holds its own tables (a reduced draft vocabulary
        always owns its head)."""
        super().__init__(config)
        self._target_ref: weakref.ref | None = None
        self.last_stats: GenerationStats | BatchGenerationStats | None = None
        self._scheduler: PrefixScheduler | Literal["auto"] | None = "auto"
        self.throughput: ThroughputCurve | ThroughputProfile | None = None
        self.round_times: dict[str, RoundTimes] = {}
        self.record_confidence = False
        self.generation_config = GenerationConfig()
        own_lm_head = own_lm_head or config.draft_vocab_size < config.vocab_size
        self.embed_tokens: nn.Embedding | None = None
        if own_embed_tokens and config.backbone == "gemma4":
            self.embed_tokens = Gemma4TextScaledWordEmbedding(
                config.vocab_size, config.hidden_size, None, embed_scale=config.hidden_size**0.5
            )
        elif own_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = draft_norm(config)
        self.layers = nn.ModuleList(draft_layer(config) for _ in range(config.num_hidden_layers))
        self._no_split_modules = [type(self.layers[0]).__name__]  # FSDP refuses a name that the model does not have
        self.norm = draft_norm(config)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_lm_head else None
        if config.draft_vocab_size < config.vocab_size:
            # Offsets: target id = draft id + d2t[draft id]. All zero means "the first ids".
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.markov_head = MarkovHead(config) if config.markov_rank > 0 else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def scheduler(self) -> PrefixScheduler | Literal["auto"] | None:
        """See the class."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, value: PrefixScheduler | Literal["auto"] | None) -> None:
        if value is not None and value != "auto" and not isinstance(value, PrefixScheduler):
            raise DSparkConfigError(
                f"draft.scheduler is {value!r}, but must be 'auto', None (every block in full) or a PrefixScheduler."
            )
        self._scheduler = value

    # ------------------------------------------------------------------------------------------------------------
    # The target and the two shared tables
    # ------------------------------------------------------------------------------------------------------------
    @property
    def was_bound(self) -> bool:
        """Whether a target was bound at some time, so that tables of the draft's own are known to differ from its."""
        return self._target_ref is not None

    @property
    def target(self) -> PreTrainedModel:
        """The bound target.

        Raises:
            DSparkTargetError: none is bound, or it was deleted.
        """
        target = self._target_ref() if self._target_ref is not None else None
        if target is None:
            raise DSparkTargetError(
                "This draft model needs its target's embedding and output head, but no target is bound. Pass "
                "`target=` to `from_pretrained`, call `draft.bind_target(target)`, or run `target.generate(..., "
                "assistant_model=draft)`."
            )
        return target

    def bind_target(self, target: PreTrainedModel) -> None:
        """Binds the model whose tables are borrowed, after checking that the pair fits.

        A table of the draft's own that equals the target's is dropped, one that differs is kept.

        Raises:
            DSparkTargetError: vocabulary, depth or width do not fit; the message has both values.
        """
        if self._target_ref is not None and self._target_ref() is target:
            return
        text = target.config.get_text_config(decoder=True)
        pairs = (
            ("vocab_size", text.vocab_size, self.config.vocab_size),
            ("num_hidden_layers", text.num_hidden_layers, self.config.num_target_layers),
            ("hidden_size", text.hidden_size, self.config.target_hidden_size),
        )
        wrong = [f"{name} {theirs} (the draft was made for {ours})" for name, theirs, ours in pairs if theirs != ours]
        if (
            not wrong
            and text.hidden_size != self.config.hidden_size
            and (self.embed_tokens is None or self.lm_head is None)
        ):
            wrong = [
                f"hidden_size {text.hidden_size}, and the draft ({self.config.hidden_size}) has no tables of its own"
            ]
        if wrong:
            made_for = self.config.target_model_name_or_path
            hint = f" It was trained for {made_for!r}: load that one." if made_for else ""
            raise DSparkTargetError(
                f"{type(target).__name__} {target.config.name_or_path!r} does not fit this draft model: "
                f"{'; '.join(wrong)}.{hint}"
            )
        if self.embed_tokens is not None and _tables_equal(self.embed_tokens, target.get_input_embeddings()):
            self.embed_tokens = None
        full_vocab = self.config.draft_vocab_size == self.config.vocab_size
        if self.lm_head is not None and full_vocab and _tables_equal(self.lm_head, target.get_output_embeddings()):
            self.lm_head = None
        self._target_ref = weakref.ref(target)
        self.round_times = {}

    def get_input_embeddings(self) -> nn.Module | None:
        """The draft's own embedding, or `None` when it borrows the target's."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        """The draft's own head, or `None` when it borrows the target's."""
        return self.lm_head

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds int64 ids [...] → [..., H] in the draft's dtype, on the draft's device."""
        if self.embed_tokens is not None:
            return self.embed_tokens(ids.to(self.device))
        table = self.target.get_input_embeddings()
        with torch.no_grad():  # in training, no gradient may reach the target's table
            states = table(ids.to(_device_of(table, ids.device)))
        return states.to(device=self.device, dtype=self.dtype)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """U: the target's whole head map (head, logit scale, soft-cap) on `hidden` [..., H] → [..., Vd]."""
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            logits = head_logits(self.target, hidden).to(hidden.device)
        return self.scale_and_cap(logits)

    def scale_and_cap(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target does to its head's output: logit scale, then tanh soft-cap."""
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """int64 [Vd]: the target id of every draft id; `None` when the two vocabularies are the same."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    # ------------------------------------------------------------------------------------------------------------
    # Drafting one block
    # ------------------------------------------------------------------------------------------------------------
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Context features [B, T, L·Ht] (tapped states, concatenated in the order of the ids) → ctx [B, T, H]."""
        return self.hidden_norm(self.fc(features.to(device=self.fc.weight.device, dtype=self.dtype)))

    def extend_context(self, cache: Any, features: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Appends verified tokens to the draft's context, which keeps context keys and values only.

        Args:
            cache: the draft's context, anything with a cache's `update`; one entry per draft layer.
            features: [B, T, L·Ht], the target's tapped states of T verified tokens.
            position_ids: int64 [B, T], their absolute positions.
        """
        ctx = self.fuse(features)  # [B, T, H]
        rope = self.rotary_emb(ctx, position_ids.to(ctx.device))
        for i, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.context_keys_values(ctx, rope), i)

    def start_block(
        self, cache: Any, anchor_ids: torch.Tensor, anchor_positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The backbone on one block per sequence: anchor, then γ-1 mask tokens.

        Args:
            cache: the context before the anchors; it is not changed. `cache.layers[i]` holds `.keys` and `.values`.
            anchor_ids: int64 [B], the newest token, not yet processed by the target.
            anchor_positions: int64 [B], the number of tokens before it.

        Returns:
            [B, n, H], h of the slots that predict (all γ, or the last γ-1 with `sample_from_anchor=False`), and the
            state for the first `sequential_step` (`None` but for the rnn head in the 1+N layout).
        """
        anchors = anchor_ids.to(self.device)
        states, rope = self._block(anchors[:, None], anchor_positions[:, None])
        for layer, kept in zip(self.layers, cache.layers):
            states = layer(states, rope, (kept.keys, kept.values))
        hidden = self.norm(states)[:, 0]  # [B, γ, H]
        if self.config.sample_from_anchor:
            return hidden, None
        state = None
        if self.markov_head is not None:  # training unrolls the recurrence over slot 0 too (FORMATS §2.3)
            _, state = self.markov_head.latent(hidden[:, 0], self.markov_head.markov_w1(anchors), None)
        return hidden[:, 1:], state

    def sequential_step(
        self, base_logits: torch.Tensor, hidden: torch.Tensor, previous_ids: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """One step of the sequential stage, for the slot whose base logits and hidden state are given.

        Args:
            base_logits: [B, Vd].
            hidden: [B, H].
            previous_ids: int64 [B], target ids; the anchor for the first step.
            state: the recurrent state (rnn), `None` at the first step.

        Returns:
            Draft logits [B, Vd], the Markov embedding e [B, r] (for the confidence head) and the next state.
        """
        if self.markov_head is None:
            return base_logits, None, None
        embedding = self.markov_head.markov_w1(previous_ids)
        latent, state = self.markov_head.latent(hidden, embedding, state)
        return base_logits + self.markov_head.markov_w2(latent), embedding, state

    def _block(self, anchor_ids: torch.Tensor, anchor_positions: torch.Tensor) -> tuple[torch.Tensor, RopeTables]:
        """int64 [B, A] twice → the embedded blocks [B, A, γ, H] and RoPE's tables at their positions."""
        block_size = self.config.block_size
        masks = anchor_ids.new_full((*anchor_ids.shape, block_size - 1), self.config.mask_token_id)
        states = self.embed(torch.cat([anchor_ids[..., None], masks], dim=-1))
        positions = anchor_positions[..., None].to(self.device) + torch.arange(block_size, device=self.device)
        cos, sin = self.rotary_emb(states, positions.flatten(1))
        return states, (cos.view(*positions.shape, -1), sin.view(*positions.shape, -1))

    # ------------------------------------------------------------------------------------------------------------
    # Training
    # ------------------------------------------------------------------------------------------------------------
    def forward(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        detach_confidence: bool = False,
        objective: Callable[[DSparkDraftOutput], Any] | None = None,
    ) -> Any:
        """All blocks of a batch at once, teacher-forced (paper §3.3, DESIGN §8).

        A block attends to the context before its anchor and to itself; the sequential head sees the true previous
        tokens, so the token after each anchor, and so on, must be in `input_ids`. Slots past the end of the sequence
        are computed on clamped tokens and must be masked by the caller.

        Args:
            features: [B, T, L·Ht], the target's tapped states.
            input_ids: int64 [B, T].
            anchor_positions: int64 [B, A], indices into the sequence.
            position_ids: int64 [B, T]; 0..T-1 by default.
            attention_mask: [B, T], 0 at padding; all ones by default.
            detach_confidence: whether the confidence head's gradient stops at the head.
            objective: called on the output in here, where the parameters that it reads are whole (FSDP) and their
                gradients are awaited (DDP).

        Returns:
            A `DSparkDraftOutput`, or what `objective` makes of it.
        """
        batch, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand(batch, -1)
        ctx = self.fuse(features)
        context_rope = self.rotary_emb(ctx, position_ids)
        mask = BlockMask.before_anchors(
            anchor_positions, torch.ones_like(input_ids) if attention_mask is None else attention_mask
        )

        steps = torch.arange(self.config.block_size, device=input_ids.device)
        anchor_ids = input_ids.gather(1, anchor_positions)  # [B, A]
        states, rope = self._block(anchor_ids, position_ids.gather(1, anchor_positions))  # [B, A, γ, H]
        for layer in self.layers:
            states = layer(states, rope, ctx, context_rope, mask)
        hidden = self.norm(states)

        # Slot k predicts token anchor+k+1 and follows token anchor+k; in the 1+N layout slot k predicts anchor+k and
        # slot 0, which predicts nothing, is unrolled with the anchor as its previous token.
        offset = steps if self.config.sample_from_anchor else (steps - 1).clamp(min=0)
        previous = (anchor_positions[:, :, None] + offset).clamp(max=length - 1)  # [B, A, γ]
        previous_ids = input_ids.gather(1, previous.flatten(1)).view_as(previous)
        latents = embedding = confidence = None
        if self.markov_head is not None:
            latents, embedding = self.markov_head.teacher_forced(hidden, previous_ids)
        if self.confidence_head is not None:
            seen = (hidden, embedding)
            if detach_confidence:
                seen = (hidden.detach(), None if embedding is None else embedding.detach())
            confidence = self.confidence_head(*seen)
        first = 0 if self.config.sample_from_anchor else 1
        output = DSparkDraftOutput(
            hidden_states=hidden[:, :, first:],
            markov_latents=None if latents is None else latents[:, :, first:],
            confidence_logits=None if confidence is None else confidence[:, :, first:],
        )
        return output if objective is None else objective(output)

    # ------------------------------------------------------------------------------------------------------------
    # Building, loading, saving
    # ------------------------------------------------------------------------------------------------------------
    @classmethod
    def for_target(
        cls, target: PreTrainedModel, draft_token_ids: torch.Tensor | None = None, **config_kwargs: Any
    ) -> DSparkDraftModel:
        """A new, untrained draft model for `target`, bound to it, on the device of its output head, in fp32.

        Args:
            target: a decoder-only causal language model.
            draft_token_ids: int64 [Vd], ascending target ids of a reduced output vocabulary (with
                `draft_vocab_size=Vd`); the draft then owns a copy of those rows of the target's head.
            config_kwargs: fields of [`DSparkConfig`], such as `num_hidden_layers`, `block_size`, `target_layer_ids`.

        Raises:
            DSparkConfigError: a field is wrong, or `draft_token_ids` does not fit `draft_vocab_size`.
        """
        if draft_token_ids is not None:
            config_kwargs.setdefault("draft_vocab_size", len(draft_token_ids))
        draft = cls(DSparkConfig.for_target(target.config, **config_kwargs))
        draft.bind_target(target)
        if draft.lm_head is not None:
            draft._copy_head_rows(draft.lm_head, target, draft_token_ids)
        head = target.get_output_embeddings()
        return draft.to(_device_of(head, target.device))

    @torch.no_grad()
    def _copy_head_rows(
        self, lm_head: nn.Linear, target: PreTrainedModel, draft_token_ids: torch.Tensor | None
    ) -> None:
        size, vocab_size = self.config.draft_vocab_size, self.config.vocab_size
        ids = torch.arange(size) if draft_token_ids is None else draft_token_ids.cpu()
        if len(ids) != size or (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
            raise DSparkConfigError(
                f"draft_token_ids has {len(ids)} ids from {int(ids[0])} to {int(ids[-1])}, but must have "
                f"draft_vocab_size ({size}) ascending, distinct ids below vocab_size ({vocab_size})."
            )
        self.d2t.copy_(ids - torch.arange(size))
        # Through the module, so that a quantised head gives its rows as well: W = head(I)ᵀ.
        identity = torch.eye(self.config.hidden_size, dtype=target.dtype)
        rows = head_logits(target, identity)  # [H, V]
        lm_head.weight.copy_(rows.T[ids.to(rows.device)])

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *args: Any,
        target: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> DSparkDraftModel:
        """Loads a draft model from a folder or the Hub: this package's own layout, or DeepSpec's.

        Args:
            pretrained_model_name_or_path: a folder, or a Hub id.
            target: the model it is for; binding it here drops the checkpoint's copies of the target's tables and
                moves the draft to the device of the target's output head, unless `device_map` is given.
            kwargs: those of `PreTrainedModel.from_pretrained` (`revision`, `subfolder`, `token`, `cache_dir`,
                `local_files_only`, `dtype`, `device_map`, …). The dtype is the checkpoint's unless given.

        Raises:
            DSparkCheckpointError: the layout is not one of the two (the message names it), a file is missing or the
                Hub does not give it (the message says why, and what to do), or tensors are missing, unexpected or of
                the wrong shape (the message lists them).
            DSparkTargetError: `target` does not fit.
        """
        from .checkpoints import read_checkpoint

        kwargs.pop("config", None)  # given by AutoModel; the raw file is what decides the layout
        with_info = kwargs.pop("output_loading_info", False)
        asked_for = kwargs.get("revision")
        # Once for all files: they are of one commit then, and those in the cache need no further word with the Hub.
        kwargs["revision"] = resolve_revision(
            pretrained_model_name_or_path,
            asked_for,
            **{key: kwargs[key] for key in ("token", "local_files_only", "cache_dir") if key in kwargs},
        )
        checkpoint = read_checkpoint(pretrained_model_name_or_path, kwargs)
        kwargs.setdefault("dtype", "auto")
        kwargs["ignore_mismatched_sizes"] = True  # the host's own error does not say which; all are refused below
        with explained(DSparkCheckpointError, pretrained_model_name_or_path, asked_for):
            draft, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                config=checkpoint.config,
                own_embed_tokens="embed_tokens.weight" in checkpoint.tensor_names,
                own_lm_head="lm_head.weight" in checkpoint.tensor_names,
                output_loading_info=True,
                **kwargs,
            )
        wrong = {kind: sorted(info[f"{kind}_keys"]) for kind in ("missing", "unexpected")}
        wrong["mismatched"] = sorted(
            f"{name} {list(found)}, not {list(needed)}" for name, found, needed in info["mismatched_keys"]
        )
        if any(wrong.values()):
            listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
            raise DSparkCheckpointError(
                f"{pretrained_model_name_or_path}: the tensors do not fit its config.json ({listed}). The file is "
                "incomplete, or config.json does not belong to it."
            )
        if checkpoint.generation_config is not None:
            draft.generation_config = checkpoint.generation_config
        if target is not None:
            draft.bind_target(target)
            if kwargs.get("device_map") is None:
                draft.to(_device_of(target.get_output_embeddings(), target.device))
        return (draft, info) if with_info else draft  # type: ignore[return-value]  # a pair on request, as the host's

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes config.json, generation_config.json and the draft's own tensors; never a table of the target's.

        Args:
            save_directory: a folder; made if there is none.
            push_to_hub: also does [`~DSparkDraftModel.push_to_hub`], with `repo_id` (by default the folder's name) and
                its other keywords.
            kwargs: those of `PreTrainedModel.save_pretrained`.
        """
        for_push = {name: kwargs.pop(name) for name in PUSH_KEYWORDS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, **kwargs)
        self.generation_config.save_pretrained(save_directory)
        if push_to_hub:
            repo_id = for_push.pop("repo_id", os.path.basename(os.path.abspath(save_directory)))
            self.push_to_hub(repo_id, token=kwargs.get("token"), **for_push)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without the target, which cannot be held by reference across processes."""
        return {**self.__dict__, "_target_ref": None}


def head_logits(target: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The target's output head, called as a module on `hidden` [..., H], without logit scale or soft-cap."""
    head = target.get_output_embeddings()
    return head(hidden.to(device=_device_of(head, hidden.device), dtype=target.dtype))


def _device_of(module: nn.Module, default: torch.device) -> torch.device:
    """The device a module computes on; offloaded ("meta") weights are placed by accelerate's hooks: `default`."""
    parameter = next(module.parameters(), None)
    return default if parameter is None or parameter.device.type == "meta" else parameter.device


def _tables_equal(own: nn.Embedding | nn.Linear, theirs: nn.Module) -> bool:
    """Whether two vocabulary tables hold the same numbers in the dtype of `own`. Quantised tables never do."""
    a, b = own.weight, getattr(theirs, "weight", None)
    if (
        not isinstance(theirs, nn.Embedding | nn.Linear)  # an adapted table is more than its `weight`
        or b is None
        or b.shape != a.shape
        or not b.is_floating_point()
        or b.device.type == "meta"
        or a.device.type == "meta"
    ):
        return False
    rows = torch.randint(len(a), (_COMPARED_ROWS,), generator=torch.Generator().manual_seed(0))
    return all(  # a few rows first: two different tables are told apart at once
        torch.equal(a[index], b[index].to(device=a.device, dtype=a.dtype)) for index in (rows, slice(None))
    )
