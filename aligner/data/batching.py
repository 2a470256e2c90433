"""Sequences into micro-batches by token budget, and over data-parallel ranks.

Both are longest-processing-time greedy (Graham 1969): longest sequence first, each to whoever has the fewest tokens.
Ties go to the lower index, so equal lengths give equal answers on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def token_budget_batches(lengths: Sequence[int], budget: int, count: int | None = None) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: balanced, none empty, none above `budget` tokens.

    As few batches as the greedy fits, or exactly `count` of them; a `count` at or above the fewest always fits, so
    ranks agree by taking the largest of their fewest. Raises ValueError for a length outside [1, budget], and for a
    count that the sequences cannot fill or the budget does not allow.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= budget:
            raise ValueError(f"sequence {index} has {length} tokens; allowed: 1 to micro_batch_tokens={budget}")
    if count is not None:
        if not min(1, len(lengths)) <= count <= len(lengths):
            raise ValueError(f"{len(lengths)} sequences cannot fill exactly {count} micro-batches")
        batches = _least_loaded(lengths, count)
        if not _fits(batches, lengths, budget):
            raise ValueError(f"{sum(lengths)} tokens do not fit into {count} micro-batches of {budget}")
        return batches
    fewest = -(-sum(lengths) // budget)
    # With as many batches as sequences each is alone, which fits.
    return next(
        batches
        for candidate in range(fewest, len(lengths) + 1)
        if _fits(batches := _least_loaded(lengths, candidate), lengths, budget)
    )


def data_parallel_share(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of each rank's sequences: equally many a rank, or one less, in ascending order, with balanced token totals.

    Of every `ranks` sequences in order of length, the rank with the fewest tokens takes the longest: where the count
    divides, totals differ by at most the longest minus the shortest length. Rank 0 has a sequence if there is one.
    """
    order = _longest_first(lengths)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        emptiest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, index in zip(emptiest_first, order[start : start + ranks], strict=False):
            shares[rank].append(index)
            totals[rank] += lengths[index]
    return [sorted(share) for share in shares]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _least_loaded(lengths: Sequence[int], count: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, batch) for batch in range(count)]
    for index in _longest_first(lengths):
        load, batch = loads[0]
        batches[batch].append(index)
        heapq.heapreplace(loads, (load + lengths[index], batch))
    return [sorted(batch) for batch in batches]


def _fits(batches: list[list[int]], lengths: Sequence[int], budget: int) -> bool:
    return all(sum(lengths[index] for index in batch) <= budget for batch in batches)
