"""Which rows of a batch begin alike, so that what they share is computed once."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

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
