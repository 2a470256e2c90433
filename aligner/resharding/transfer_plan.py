"""Transfer plan: which rank sends which part of which weight to which rank.

The plan is a pure function of the trainer's and the engine's layout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from aligner.errors import AlignerError
from aligner.models.layouts import engine_problems, layout_problems
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Slice,
    TensorSpec,
    compute_engine_slices,
    compute_trainer_slices,
    weight_table,
)
from aligner.resharding.float32_weights import widen_specs
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineParallelConfig, ParallelConfig

Slices = Mapping[int, Mapping[str, Slice]]
"""The slices that each rank holds: rank to tensor name to slice."""


@dataclass(frozen=True)
class Transfer:
    """The range `[start, stop)` along `axis` of a tensor, sent from the rank `source` to the rank
    `target`; `axis` None means the whole tensor."""

    name: str
    source: int
    target: int
    axis: int | None
    start: int
    stop: int
    numel: int


@dataclass(frozen=True)
class TransferPlan:
    """Transfers that write every element of every target slice exactly once, in table order."""

    table: tuple[TensorSpec, ...]
    source: Slices
    target: Slices
    transfers: tuple[Transfer, ...]
    itemsize: int

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Name of each rank: "trainer rank 1" if it is a source, "engine rank 0" if it is only a
        target."""
        ranks = range(1 + max([*self.source, *self.target], default=-1))
        first_engine_rank = min(set(self.target) - set(self.source), default=0)
        return tuple(
            f"trainer rank {rank}"
            if rank in self.source
            else f"engine rank {rank - first_engine_rank}"
            for rank in ranks
        )

    def split_into_groups(self, limit_bytes: int | None) -> "tuple[TransferPlan, ...]":
        """Split the plan into plans of consecutive tensors.

        Args:
            limit_bytes: Maximum size of a group's whole tensors in bytes; a group has at least one
                tensor. None means one group.
        """
        if limit_bytes is None:
            return (self,)
        group_by_name: dict[str, int] = {}
        group = 0
        group_size = 0
        for spec in self.table:
            group_size += spec.numel * self.itemsize
            if group_size > limit_bytes and group_by_name:
                group += 1
                group_size = spec.numel * self.itemsize
            group_by_name[spec.name] = group
        return tuple(
            self._restrict_to([name for name, number in group_by_name.items() if number == index])
            for index in range(group + 1)
        )

    def _restrict_to(self, names: Sequence[str]) -> "TransferPlan":
        """Return the plan of these tensors only."""
        name_set = set(names)

        def select(slices: Slices) -> Slices:
            return {
                rank: {name: rank_slices[name] for name in names if name in rank_slices}
                for rank, rank_slices in slices.items()
            }

        return TransferPlan(
            tuple(spec for spec in self.table if spec.name in name_set),
            select(self.source),
            select(self.target),
            tuple(transfer for transfer in self.transfers if transfer.name in name_set),
            self.itemsize,
        )

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of the table by name."""
        return {spec.name: spec for spec in self.table}

    def transfers_between(self, source: int, target: int) -> tuple[Transfer, ...]:
        """Return the transfers from the rank `source` to the rank `target`."""
        return self._transfers_by_pair.get((source, target), ())

    @cached_property
    def _transfers_by_pair(self) -> Mapping[tuple[int, int], tuple[Transfer, ...]]:
        pairs: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self.transfers:
            pairs.setdefault((transfer.source, transfer.target), []).append(transfer)
        return {pair: tuple(transfers) for pair, transfers in pairs.items()}


def extent(spec: TensorSpec, piece: Slice, axis: int | None) -> tuple[int, int]:
    """Return the range of `axis` that a slice covers, as (start, stop).

    If `axis` is None, the whole tensor counts as one unit: the range is (0, 1).
    """
    if axis is None:
        return 0, 1
    return (0, spec.shape[axis]) if piece.axis is None else (piece.start, piece.stop)


def range_numel(spec: TensorSpec, axis: int | None, start: int, stop: int) -> int:
    """Return the number of elements in the range `[start, stop)` along `axis`."""
    return spec.numel if axis is None else spec.numel // spec.shape[axis] * (stop - start)


def find_sharded_axis(spec: TensorSpec, pieces: Iterable[Slice]) -> int | None:
    """Return the axis along which these slices shard a tensor; None if each slice is the whole
    tensor.

    Raises:
        AlignerError: If the slices have different axes, or a slice is outside the tensor.
    """
    axes = set()
    for piece in pieces:
        if piece.axis is None:
            continue
        axes.add(piece.axis)
        size = spec.shape[piece.axis] if piece.axis < len(spec.shape) else 0
        if not 0 <= piece.start < piece.stop <= size:
            raise AlignerError(
                f"{spec.name} {spec.shape}: slice [{piece.start}, {piece.stop}) along dimension"
                f" {piece.axis} is outside the tensor"
            )
    if len(axes) > 1:
        raise AlignerError(
            f"{spec.name} {spec.shape} is cut along different dimensions {sorted(axes)}; must be"
            " cut along one dimension"
        )
    return axes.pop() if axes else None


def split_at_boundaries(boundaries: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Return the ranges (start, stop) between neighboring boundaries, in ascending order."""
    return pairwise(sorted(set(boundaries)))


def plan_resharding(
    shape: ModelShape,
    trainer: ParallelConfig,
    engine: EngineParallelConfig,
    *,
    first_engine_rank: int = 0,
    itemsize: int = 4,
    vocabulary_multiple: int = 1,
    has_outer_weights_on_all_stages: bool = False,
) -> TransferPlan:
    """Return the plan from a trainer's layout to an engine's layout.

    Args:
        shape: The model.
        trainer: The trainer's layout; its ranks are counted from 0.
        engine: The engine's layout.
        first_engine_rank: Rank of the first engine rank in the plan: 0 if trainer and engine share
            their processes, `trainer.ranks` if they are separate worlds.
        itemsize: Bytes per element during the transfer.
        vocabulary_multiple: Multiple to which the engine pads the vocabulary; see
            `compute_engine_slices`.
        has_outer_weights_on_all_stages: Whether every pipeline stage of the engine holds the
            weights outside the layers; see `compute_engine_slices`.

    Raises:
        AlignerError: If a layout does not divide the model; the error names all such dimensions. If
            no rank of the engine holds a weight; the error names all such weights.
    """
    if problems := [
        *layout_problems("actor.parallel", trainer, shape),
        *engine_problems(engine, shape),
    ]:
        raise AlignerError(
            "the weights cannot be split by these parallel layouts:\n" + "\n".join(problems)
        )
    table = widen_specs(weight_table(shape), itemsize)
    source = {
        rank: compute_trainer_slices(table, shape, trainer, rank) for rank in range(trainer.ranks)
    }
    target = {
        first_engine_rank + rank: compute_engine_slices(
            table,
            engine,
            rank,
            vocabulary_multiple,
            has_outer_weights_on_all_stages=has_outer_weights_on_all_stages,
        )
        for rank in range(engine.ranks)
    }
    held_names = set[str]().union(*target.values())
    if dropped_names := [spec.name for spec in table if spec.name not in held_names]:
        raise AlignerError(f"no rank of the engine holds {', '.join(dropped_names)}")
    return plan_transfers(table, source, target, itemsize)


def plan_to_engine(
    shape: ModelShape,
    trainer: ParallelConfig,
    weight_format: WeightFormat,
    first_engine_rank: int = 0,
) -> TransferPlan:
    """Return the plan from a trainer's layout to an engine with this weight format.

    See `plan_resharding`.
    """
    return plan_resharding(
        shape,
        trainer,
        weight_format.layout,
        first_engine_rank=first_engine_rank,
        itemsize=weight_format.dtype.itemsize,
        vocabulary_multiple=weight_format.vocabulary_multiple,
        has_outer_weights_on_all_stages=weight_format.has_outer_weights_on_all_stages,
    )


def plan_transfers(
    table: Sequence[TensorSpec], source: Slices, target: Slices, itemsize: int = 4
) -> TransferPlan:
    """Return transfers that write every target slice from parts of the source slices.

    A rank that holds a part itself copies it. Otherwise, the holder that has the fewest elements to
    send so far sends the part, so that replicas share the work. The plan depends only on the
    arguments, so every rank computes the same plan.

    Raises:
        AlignerError: If a target needs elements that no source holds, if the slices of a tensor
            have different axes, or if the table lacks a tensor. The error names all such tensors.
    """
    known_names = {spec.name for spec in table}
    unknown_names = {
        name for side in (source, target) for slices in side.values() for name in slices
    } - known_names
    if unknown_names:
        raise AlignerError(
            f"these tensors are not in the weight table: {', '.join(sorted(unknown_names))}"
        )

    transfers: list[Transfer] = []
    sent = dict.fromkeys(source, 0)
    problems: list[str] = []
    for spec in table:
        try:
            transfers += _plan_tensor(
                spec, select_slices(source, spec), select_slices(target, spec), sent
            )
        except AlignerError as error:
            problems.append(str(error))
    if problems:
        raise AlignerError("the weights cannot be resharded:\n" + "\n".join(problems))
    return TransferPlan(tuple(table), source, target, tuple(transfers), itemsize)


def select_slices(slices: Slices, spec: TensorSpec) -> dict[int, Slice]:
    """Return the slice of a tensor by rank, for the ranks that hold one."""
    return {rank: slices[rank][spec.name] for rank in sorted(slices) if spec.name in slices[rank]}


def _plan_tensor(
    spec: TensorSpec, source: Mapping[int, Slice], target: Mapping[int, Slice], sent: dict[int, int]
) -> list[Transfer]:
    """Return the transfers of one tensor, with adjacent parts from one sender merged.

    Args:
        spec: The tensor.
        source: The source slices by rank.
        target: The target slices by rank.
        sent: Number of elements that each source rank sends so far; the function adds this
            tensor's elements.
    """
    axis = find_sharded_axis(spec, [*source.values(), *target.values()])
    held_ranges = {rank: extent(spec, piece, axis) for rank, piece in source.items()}
    holders_by_range: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
    transfers: list[Transfer] = []
    for rank, piece in target.items():
        target_range = extent(spec, piece, axis)
        if target_range not in holders_by_range:  # replicas have equal target ranges
            holders_by_range[target_range] = _find_holders(target_range, held_ranges)

        rank_transfers: list[Transfer] = []
        for (start, stop), holders in holders_by_range[target_range].items():
            if not holders:
                part = "" if axis is None else f" [{start}, {stop}) along dimension {axis}"
                raise AlignerError(
                    f"{spec.name}{part}: required by rank {rank}, but missing on all source ranks"
                )
            # The rank breaks ties, so that every rank computes the same plan.
            sender = (
                rank if rank in holders else min(holders, key=lambda holder: (sent[holder], holder))
            )
            if sender != rank:
                sent[sender] += range_numel(spec, axis, start, stop)
            if rank_transfers and rank_transfers[-1].source == sender:
                start = rank_transfers.pop().start
            rank_transfers.append(
                Transfer(
                    spec.name, sender, rank, axis, start, stop, range_numel(spec, axis, start, stop)
                )
            )
        transfers += rank_transfers
    return transfers


def _find_holders(
    target_range: tuple[int, int], held_ranges: Mapping[int, tuple[int, int]]
) -> dict[tuple[int, int], list[int]]:
    """Split a target range at the boundaries of the held ranges, and return the ranks that hold
    each part, in ascending order of the parts."""
    low, high = target_range
    inner_boundaries = {
        edge for extents in held_ranges.values() for edge in extents if low < edge < high
    }
    return {
        (start, stop): [
            rank for rank, (first, last) in held_ranges.items() if first <= start and stop <= last
        ]
        for start, stop in split_at_boundaries({low, high} | inner_boundaries)
    }
