"""Packed forwards: the tokens of many rows in one sequence without padding; only attention knows about rows (§5.3).

`PackedCache` holds keys and values by row, `packed_forward` runs a target on it, `attend` is the attention of a pack:
row by row, or in one call over rows padded to a batch where they have few tokens each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import AttentionInterface, PreTrainedModel

from ..errors import DSparkTargetError

ATTENTION = "dspark_packed"  # the name under which transformers finds `attend`
PAGED_ATTENTION = "dspark_paged"  # and `attend_paged`
_PAGED_ONLY = (
    "max_length_q",
    "max_length_k",
    "write_index",
    "read_index",
    "block_table",
    "is_causal",
    "logits_indices",
)
_FEW = 16  # new tokens of a row, up to which rows are put side by side
_GROWTH = 64  # slots per row that a cache grows by at the least, so that it is copied rarely
LAYER_TYPES = ("full_attention", "sliding_attention")  # what `attend` knows
_PROVED_TOKENS = 24  # of each of two rows, in the proof that a target may be packed
_TOLERANCE = {torch.float32: 1e-3}  # of the largest logit; 16-bit rows of different shapes differ by less than _ROUGH
_ROUGH = 0.05
_proved: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class PackedStates(list):
    """Keys (or values) of a pack, one [1, kv_heads, T_r, hd] per row: what `PackedCache.update` hands to attention."""

    def __init__(self, rows: Sequence[torch.Tensor], counts: Sequence[int], masks: dict[tuple, torch.Tensor]):
        super().__init__(rows)
        self.counts = counts  # tokens of each row in this forward
        self.masks = masks  # made once per forward, used by every layer


class PackedTable(NamedTuple):
    """Keys (or values) of a pack's rows side by side, padded: what `PackedCache.update` hands to attention instead
    where every row has few new tokens.

    Attributes:
        states: [S, kv_heads, T, hd], a view of the cache; S - R of its rows are not in the pack.
        side_by_side: where in it what is.
    """

    states: torch.Tensor
    side_by_side: SideBySide

    def rows(self, masks: dict[tuple, torch.Tensor]) -> PackedStates:
        """The same, row by row."""
        at = self.side_by_side
        views = [
            self.states[r - at.first : r - at.first + 1, :, : length + n]
            for r, length, n in zip(at.rows, at.lengths, at.counts)
        ]
        return PackedStates(views, at.counts, masks)


class SideBySide:
    """Attention of a pack in one call: its queries are padded to the row with most of them, its keys to the longest.

    One call over a batch takes two thirds of the time of a call per row, on a CPU too, as long as little is padded.

    Args:
        rows: ids in the cache, some of which may be missing in between.
        counts: new tokens of each.
        lengths: tokens that each had before.
    """

    def __init__(self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]):
        self.rows, self.counts, self.lengths = rows, counts, lengths
        self.first = min(rows)
        self.span = max(rows) - self.first + 1  # S
        self.most, self.total = max(counts), max(length + n for length, n in zip(lengths, counts))  # n, T
        places = [(r - self.first) * self.most + i for r, n in zip(rows, counts) for i in range(n)]
        self._places = torch.tensor(places)  # [N], of every query in [S · n]
        self.masks: dict[tuple, torch.Tensor] = {}  # made once per forward, used by every layer

    @staticmethod
    def pays(rows: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether so little is padded that one call is faster."""
        return len(rows) > 1 and max(rows) - min(rows) < 2 * len(rows) and max(counts) <= _FEW

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """`query` [1, heads, N, hd]; `key`, `value` [S, kv_heads, T, hd] → [1, N, heads, hd]."""
        _, heads, _, head_dim = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        if self._places.device != query.device:
            self._places = self._places.to(query.device)
        padded = query.new_zeros(self.span * self.most, heads, head_dim)
        padded[self._places] = query[0].transpose(0, 1)
        # Query heads that share a key head stand as further rows, so that the keys are not repeated for them.
        states = padded.view(self.span, self.most, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        states = states.reshape(self.span, kv_heads, groups * self.most, head_dim)
        out = scaled_dot_product_attention(states, key, value, attn_mask=self._mask(query, groups), scale=scaling)
        out = out.view(self.span, kv_heads, groups, self.most, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(self.span * self.most, heads, -1)[self._places][None]

    def _mask(self, query: torch.Tensor, groups: int) -> torch.Tensor:
        """0 where a query sees a key, else -inf, [S, 1, g · n, T].

        What is not in the pack sees something as well, because attention to nothing is NaN.
        """
        at = (groups, query.dtype, query.device)
        if at not in self.masks:
            before = torch.zeros(self.span, dtype=torch.long)
            before[torch.tensor(self.rows) - self.first] = torch.tensor(self.lengths)
            newest = before[:, None] + torch.arange(self.most)  # [S, n], the place of each query
            hidden = torch.arange(self.total) > newest.repeat(1, groups)[..., None]  # [S, g·n, T]
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
            self.masks[at] = mask[:, None].to(query.device)
        return self.masks[at]


class PackedLayer(NamedTuple):
    """One layer of some rows: keys and values, each [1, kv_heads, T_r, hd] per row."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class PackedView(NamedTuple):
    """Some rows of a `PackedCache`, layer by layer; `rows` are their ids."""

    layers: list[PackedLayer]
    rows: Sequence[int]


class PackedCache:
    """Keys and values of many rows, each with a length of its own.

    One [rows, kv_heads, slots, hd] tensor per layer for keys and one for values; a row takes back refused drafts by
    its length alone. Layers with a sliding window keep all keys, like the others. Memory: 2 · layers · rows ·
    kv_heads · hd · (longest row, up to a quarter more) numbers.

    A forward is `begin`, one `update` per layer, `end`; without `end` (an exception) nothing counts as appended.

    Args:
        num_rows: rows that it can hold; row ids are 0 … num_rows - 1.
    """

    is_compileable = False

    def __init__(self, num_rows: int):
        self.lengths = [0] * num_rows
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._tables = (self._keys, self._values)
        self._rows: Sequence[int] = ()
        self._counts: Sequence[int] = ()
        self._index: tuple[torch.Tensor, torch.Tensor] | None = None
        self._masks: dict[tuple, torch.Tensor] = {}
        self._side_by_side: SideBySide | None = None

    def begin(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """The next forward holds `counts[i]` tokens of row `rows[i]`, row by row."""
        self._rows, self._counts, self._masks = rows, counts, {}
        slots = torch.cat([torch.arange(self.lengths[r], self.lengths[r] + n) for r, n in zip(rows, counts)])
        self._index = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts)), slots
        lengths = [self.lengths[r] for r in rows]
        self._side_by_side = SideBySide(rows, counts, lengths) if SideBySide.pays(rows, counts) else None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[PackedStates | PackedTable, PackedStates | PackedTable]:
        """Stores `key` and `value` [1, kv_heads, N, hd] of a pack; returns those of its rows, old and new."""
        assert self._index is not None  # begin was called
        needed = max(self.lengths[r] + n for r, n in zip(self._rows, self._counts))
        rows, slots = (index.to(key.device) for index in self._index)
        states: list[PackedStates | PackedTable] = []
        for store, new in zip(self._tables, (key, value)):
            table = store.get(layer_idx)
            if table is None or table.shape[2] < needed or table.shape[0] < len(self.lengths):
                store[layer_idx] = table = self._grown(table, new, needed)
            table[rows, :, slots] = new[0].transpose(0, 1)
            at = self._side_by_side
            if at is not None:
                states.append(PackedTable(table[at.first : at.first + at.span, :, : at.total], at))
                continue
            views = [table[r : r + 1, :, : self.lengths[r] + n] for r, n in zip(self._rows, self._counts)]
            states.append(PackedStates(views, self._counts, self._masks))
        return states[0], states[1]

    def _grown(self, table: torch.Tensor | None, new: torch.Tensor, needed: int) -> torch.Tensor:
        """A larger table, with all that was in `table`."""
        kept_rows, kept_slots = (0, 0) if table is None else (table.shape[0], table.shape[2])
        slots = max(kept_slots, needed + max(_GROWTH, needed // 4) if needed > kept_slots else 0)
        # Zeros: what is masked counts nothing only if it is finite.
        larger = new.new_zeros((len(self.lengths), new.shape[1], slots, new.shape[3]))
        if table is not None:
            larger[:kept_rows, :, :kept_slots] = table
        return larger

    def end(self) -> None:
        """What the forward stored stays."""
        for r, n in zip(self._rows, self._counts):
            self.lengths[r] += n
        self._index = None

    def crop(self, row: int, tokens: int) -> None:
        """Takes back the newest `tokens` tokens of a row."""
        self.lengths[row] -= tokens

    def add_row(self) -> int:
        """One more row; returns its id."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    def free(self, row: int) -> None:
        """Empties a row, for another text."""
        self.lengths[row] = 0

    def copy(self, source: int, target: int) -> None:
        """Gives row `target` what row `source` holds."""
        self.lengths[target] = length = self.lengths[source]
        for store in self._tables:
            for layer_idx, table in store.items():
                if target >= table.shape[0]:
                    store[layer_idx] = table = self._grown(table, table, table.shape[2])
                table[target, :, :length] = table[source, :, :length]

    def view(self, rows: Sequence[int]) -> PackedView:
        """What `rows` hold."""
        return PackedView(
            [
                PackedLayer(*([table[i][r : r + 1, :, : self.lengths[r]] for r in rows] for table in self._tables))
                for i in sorted(self._keys)
            ],
            rows,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row; models ask only where they are given no positions."""
        return max(self.lengths)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: PackedStates | PackedTable,
    value: PackedStates | PackedTable,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a pack, under transformers' interface: `query` [1, heads, N, hd] → [1, N, heads, hd].

    Every row attends to its own keys and to nothing else, so no mask over all rows is ever made: one dense mask of all
    queries over all keys costs several times as much as a call per row.

    Raises:
        DSparkTargetError: the target's attention has sinks.
    """
    if s_aux is not None:
        raise DSparkTargetError(
            f"{type(module).__name__} uses attention sinks, which packed rows do not have; generate one row at a time."
        )
    if isinstance(key, PackedTable) and isinstance(value, PackedTable):
        at = key.side_by_side
        if softcap is None and (sliding_window is None or sliding_window >= at.total):
            return at.attend(query, key.states, value.states, scaling), None
        key, value = key.rows(at.masks), value.rows(at.masks)
    assert isinstance(key, PackedStates) and isinstance(value, PackedStates)  # the cache gives two alike
    parts = []
    for part, k, v, n in zip(query.split(list(key.counts), dim=2), key, value, key.counts):
        total = k.shape[2]
        if sliding_window is not None and total > sliding_window + n - 1:
            first = total - (sliding_window + n - 1)
            k, v = k[:, :, first:], v[:, :, first:]
        parts.append(_attend_row(part, k, v, scaling, sliding_window, softcap, key.masks))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    masks: dict[tuple, torch.Tensor],
) -> torch.Tensor:
    """`query` [1, heads, n, hd], the newest tokens of `key` and `value` [1, kv_heads, T, hd] → [1, heads, n, hd]."""
    _, heads, n, head_dim = query.shape
    kv_heads, total = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    reaches = window is not None and window < total
    if n == total and not reaches and softcap is None:  # a prompt from its beginning
        return scaled_dot_product_attention(query, key, value, is_causal=n > 1, scale=scaling, enable_gqa=groups > 1)
    mask = None
    if n > 1 or (reaches and n == total):
        at = (n, total, window if reaches else None, groups, query.device)
        if at not in masks:
            masks[at] = _mask(n, total, window if reaches else None, query.device).repeat(groups, 1)  # [g·n, T]
        mask = masks[at]
    # Query heads that share a key head stand as further rows, so that the keys are not repeated for them.
    rows = query.reshape(1, kv_heads, groups * n, head_dim)
    if softcap is None:
        out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = rows @ key.transpose(-1, -2) * (head_dim**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out = softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return out.reshape(1, heads, n, value.shape[3])


def _mask(n: int, total: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [n, T]: what each of the newest n tokens sees of T."""
    distance = torch.arange(total - n, total, device=device)[:, None] - torch.arange(total, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor | dict[str, torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`attend` on what transformers' paged cache gives: keys and values [1, kv_heads, ΣT_r, hd] of all requests.

    Args:
        cu_seq_lens_q, cu_seq_lens_k: int32 [R+1], where each request begins among the queries and the keys.

    Raises:
        DSparkTargetError: a layer reads keys that another layer stored, which come without their places.
    """
    if isinstance(cu_seq_lens_k, dict):
        raise DSparkTargetError(
            f"{type(module).__name__} has layers that read another layer's keys, which continuous batching does not "
            "carry on this device; use `generate` with a batch."
        )
    counts = cu_seq_lens_q.diff().tolist()
    totals = cu_seq_lens_k.diff().tolist()
    masks: dict[tuple, torch.Tensor] = {}
    keys, values = (PackedStates(states.split(totals, dim=2), counts, masks) for states in (key, value))
    for name in _PAGED_ONLY:
        kwargs.pop(name, None)
    return attend(module, query, keys, values, None, **kwargs)


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(PAGED_ATTENTION, attend_paged)


def packed_forward(
    target: PreTrainedModel,
    cache: PackedCache,
    rows: Sequence[int],
    counts: Sequence[int],
    positions: torch.Tensor,
    input_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """One forward of `target`, whose attention is `attend`, on the pack of `counts[i]` tokens of each row `rows[i]`.

    Args:
        cache: gets the keys and values; it keeps them if nothing is raised.
        positions: int64 [N], absolute.
        input_ids: int64 [N], or `inputs_embeds` [N, H].
        kwargs: more arguments of the target's forward.
    """
    cache.begin(rows, counts)
    inputs = {"input_ids": input_ids[None]} if inputs_embeds is None else {"inputs_embeds": inputs_embeds[None]}  # type: ignore[index]
    outputs = target(**inputs, position_ids=positions[None], cache=cache, use_cache=True, return_dict=True, **kwargs)
    cache.end()
    return outputs


@torch.no_grad()
def prove_packable(
    target: PreTrainedModel, rows: list[torch.Tensor], packed: Callable[[], AbstractContextManager]
) -> None:
    """Proves once per target class, on the beginnings of two rows int64 [T], that packing leaves the logits alone.

    A target may do with its mask or its positions what no config tells.

    Args:
        packed: makes the context in which `attend` is the target's attention.

    Raises:
        DSparkTargetError: the logits differ.
    """
    if _proved.get(type(target)):
        return
    rows = [row[:_PROVED_TOKENS] for row in (rows[0], rows[-1])]
    plain = [target(row[None], use_cache=False).logits[0, -1].float() for row in rows]
    counts = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n, device=rows[0].device) for n in counts])
    with packed():
        logits = packed_forward(target, PackedCache(2), (0, 1), counts, positions, torch.cat(rows)).logits[0].float()
    ends = torch.tensor(counts, device=logits.device).cumsum(0) - 1
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, logits[ends]))
    if not error <= _TOLERANCE.get(target.dtype, _ROUGH):
        raise DSparkTargetError(
            f"{type(target).__name__} gives other logits for packed rows than for single ones (by {error:.1%}): its "
            "attention depends on more than the order of a row's tokens. Generate one row at a time with a draft model."
        )
    _proved[type(target)] = True
