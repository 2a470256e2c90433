"""Which rows of a batch begin alike, so that what they share is computed once."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_FEWEST = 4
"""A shared beginning of fewer tokens costs attention more than it saves."""


@dataclass(frozen=True)
class Bundle:
    """Rows that are computed together, whose first `shared` tokens are the same, and computed
    once."""

    rows: tuple[int, ...]
    shared: int
    tokens: int
    """how many are computed"""


def alone(lengths: Tensor, group: int = 1) -> list[Bundle]:
    """Every `group` rows in a row, with nothing shared; lengths int64 [B]."""
    rows = range(len(lengths))
    return [
        Bundle(tuple(rows[start : start + group]), 0, int(lengths[start : start + group].sum()))
        for start in range(0, len(rows), group)
    ]


def bundles(tokens: Tensor, lengths: Tensor, most: int, group: int = 1) -> list[Bundle]:
    """The rows of right-padded tokens int64 [B, S] with lengths int64 [B], bundled so that the
    fewest tokens are computed.

    A row keeps one token of its own at least. No bundle computes more than `most` tokens, but where
    `group` rows in a row, which stay together and in their order, have more. Any rows may be
    bundled where `group` is 1.
    """
    if not len(tokens):
        return []
    data, counts = tokens.numpy(), lengths.numpy()
    order = np.arange(len(data))
    if group == 1:
        # Rows that begin alike follow each other in the order of their bytes.
        comparable = data.astype(">i8")
        order = np.array(
            sorted(range(len(data)), key=lambda row: comparable[row, : counts[row]].tobytes())
        )
    alike = _common_beginnings(data[order], counts[order])
    sums = np.concatenate([[0], counts[order].cumsum()])
    cheapest, cut = (
        np.full(len(data) + 1, np.iinfo(np.int64).max),
        np.zeros(len(data) + 1, dtype=np.int64),
    )
    cheapest[0] = 0
    for start in range(0, len(data), group):
        # Bundles of the rows from `start`, which end with each of the following groups.
        ends = np.arange(start + group, len(data) + 1, group)
        shared = np.minimum.accumulate(np.append(alike[start:], 0))[np.maximum(ends - start - 2, 0)]
        shared = np.where((ends - start > 1) & (shared >= _FEWEST), shared, 0)
        computed = sums[ends] - sums[start] - (ends - start - 1) * shared
        allowed = (ends == start + group) | ((shared > 0) & (computed <= most))
        better = allowed & (cheapest[start] + computed < cheapest[ends])
        cheapest[ends[better]], cut[ends[better]] = cheapest[start] + computed[better], start
    found, end = [], len(data)
    while end:
        start = int(cut[end])
        shared = int(alike[start : end - 1].min()) if end - start > 1 else 0
        shared = shared if shared >= _FEWEST else 0
        computed = int(sums[end] - sums[start]) - (end - start - 1) * shared
        found.append(Bundle(tuple(order[start:end].tolist()), shared, computed))
        end = start
    return found[::-1]


def _common_beginnings(data: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many first tokens a row [B, S] has in common with the next, [B-1]; a token of each is
    left out."""
    limit = np.minimum(counts[1:], counts[:-1]) - 1
    inside = np.arange(data.shape[1]) < limit[:, None]
    return np.logical_and.accumulate((data[1:] == data[:-1]) & inside, axis=1).sum(1)


_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _no_places() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Block:
    """Runs of packed tokens as rows, N of L places."""

    rows: int
    width: int
    tokens: Tensor | slice
    """The packed token at each place, int64 [N·L], any at padding; a slice where they follow each
    other without padding"""
    padding: Tensor = field(default_factory=_no_places)
    """int64: the places that are padding, where there is any"""
    held: Tensor = field(default_factory=_no_places)
    """int64: then the places that are not, in the order of `owners`"""
    owners: Tensor = field(default_factory=_no_places)
    """int64: then the tokens that have them"""

    @classmethod
    def build(cls, starts: Tensor, lengths: Tensor, device: torch.device) -> "Block":
        """The runs of `lengths` [N] tokens from `starts` [N] on."""
        rows, width, first = len(lengths), int(lengths.max()), int(starts[0])
        if bool((lengths == width).all()) and torch.equal(
            starts, first + width * torch.arange(rows)
        ):
            return cls(rows, width, slice(first, first + rows * width))
        inside = torch.arange(width) < lengths[:, None]
        tokens = torch.where(inside, starts[:, None] + torch.arange(width), 0).flatten()
        padding, held = (~inside).flatten().nonzero()[:, 0], inside.flatten().nonzero()[:, 0]
        return cls(
            rows,
            width,
            tokens.to(device),
            padding.to(device),
            held.to(device),
            tokens[held].to(device),
        )

    def take(self, values: Tensor, fill: float | None = None) -> Tensor:
        """Values [T, heads, …] of tokens as [N, heads, L, …]; at padding `fill`, or those of any
        token."""
        if isinstance(self.tokens, slice):
            taken = values[self.tokens]
        else:
            taken = values.index_select(0, self.tokens)
            if fill is not None:
                taken.index_fill_(0, self.padding, fill)
        return taken.unflatten(0, (self.rows, self.width)).transpose(1, 2)

    def put(self, values: Tensor, rows: Tensor, *, add: bool = False) -> None:
        """Write [N, heads, L, …] where their tokens are in values [T, heads, …], or add it to what
        is there."""
        flat = rows.transpose(1, 2).flatten(0, 1)
        if isinstance(self.tokens, slice):
            place = values[self.tokens]
            place.add_(flat) if add else place.copy_(flat)
        elif add:
            values.index_add_(0, self.owners, flat[self.held])
        else:
            values.index_copy_(0, self.owners, flat[self.held])


@dataclass(frozen=True)
class AttentionTree:
    """What attends to what in a packed micro-batch."""

    own: tuple[Block, ...]
    """Segments: each token is in one, and sees it up to itself"""
    shared: tuple[tuple[Block, Block], ...]
    """Queries, a row a shared segment, and that segment's keys: every query sees all of them. A
    token is in one at most"""

    @classmethod
    def build(
        cls, starts: Tensor, padded: Tensor, lengths: Tensor, stems: Tensor, device: torch.device
    ) -> "AttentionTree":
        """From where segments start and how long they are, int64 [M or more], and how much of that
        is tokens, int64 [M].

        `stems`, int64 [N], is the segment with which each of the last N of the M begins; -1 for
        none. Those with the same one follow each other.
        """
        # Rows of about the same length: no kernel runs over much padding.
        classes = (padded - 1).clamp(min=0).log2().floor().clamp(min=3)
        own = [
            Block.build(starts[classes == size], padded[classes == size], device)
            for size in classes.unique()
        ]
        shared = []
        if len(stems) and int(stems.max()) >= 0:
            numbers, branches = stems[stems >= 0].unique(return_counts=True)
            first = (stems[:, None] == numbers).int().argmax(0) + len(lengths) - len(stems)
            last = first + branches - 1
            begin, extent = starts[first], starts[last] + padded[last] - starts[first]
            # Of one length, so that no key has to be hidden.
            for length in lengths[numbers].unique():
                alike = lengths[numbers] == length
                keys = Block.build(starts[numbers[alike]], lengths[numbers[alike]], device)
                shared.append((Block.build(begin[alike], extent[alike], device), keys))
        return cls(tuple(own), tuple(shared))


def attend(
    query: Tensor, key: Tensor, value: Tensor, tree: AttentionTree, scale: float | None
) -> Tensor:
    """Attention of queries [T, heads, dim] over keys and values [T, key/value heads, dim], [T,
    heads, dim], on a CPU.

    `scale` is 1/√dim where None. Differentiable, once.
    """
    return _Attend.apply(query, key, value, tree, scale)


class _Attend(Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: AttentionTree,
        scale: float | None,
    ) -> Tensor:
        """As `attend`."""
        attended = torch.empty_like(query)
        normalizer = query.new_empty(query.shape[:2], dtype=_at_least_float32(query))
        for block in tree.own:
            rows, sums = _kernel(
                *(block.take(each) for each in (query, key, value)), is_causal=True, scale=scale
            )
            block.put(attended, rows)
            block.put(normalizer, sums)
        for queries, keys in tree.shared:
            rows, sums = _kernel(queries.take(query), keys.take(key), keys.take(value), scale=scale)
            before = queries.take(normalizer)
            total = torch.logaddexp(before, sums)
            rows = rows * (sums - total).exp_()[..., None].to(rows.dtype)
            rows.addcmul_(queries.take(attended), (before - total).exp_()[..., None].to(rows.dtype))
            queries.put(attended, rows)
            queries.put(normalizer, total)
        context.save_for_backward(query, key, value, attended, normalizer)
        context.tree, context.scale = tree, scale
        return attended

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        query, key, value, attended, normalizer = context.saved_tensors
        # The kernel's backward pass in bfloat16 is up to twenty times slower.
        exact = _at_least_float32(query)
        for_query, for_key, for_value = (
            torch.empty_like(each, dtype=exact) for each in (query, key, value)
        )
        tree: AttentionTree = context.tree
        for queries, keys in (*((block, block) for block in tree.own), *tree.shared):
            # A padded query has no gradient, and its scores no share.
            found = _kernel_backward(
                queries.take(gradient, 0.0).to(exact),
                queries.take(query).to(exact),
                keys.take(key).to(exact),
                keys.take(value).to(exact),
                queries.take(attended).to(exact),
                queries.take(normalizer, torch.inf),
                0.0,
                queries is keys,
                scale=context.scale,
            )
            again = queries is not keys
            queries.put(for_query, found[0], add=again)
            keys.put(for_key, found[1], add=again)
            keys.put(for_value, found[2], add=again)
        dtype = query.dtype
        return for_query.to(dtype), for_key.to(dtype), for_value.to(dtype), None, None
