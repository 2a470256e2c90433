"""Which piece of which weight goes from which rank to which: a pure function of two layouts."""

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
    engine_slices,
    trainer_slices,
    weight_table,
)
from aligner.resharding.weight_update import WeightFormat
from aligner.schema import EngineParallelConfig, ParallelConfig

Slices = Mapping[int, Mapping[str, Slice]]
"""What every rank holds: rank, tensor name, slice."""


@dataclass(frozen=True)
class Transfer:
    """The part `[start, stop)` along `axis` of a tensor, from one rank to another; `axis` None is
    the whole tensor."""

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
        """What each rank is called: "trainer rank 1" when it is a source, and "engine rank 0" when
        it is only a target."""
        ranks = range(1 + max([*self.source, *self.target], default=-1))
        first = min(set(self.target) - set(self.source), default=0)
        return tuple(
            f"trainer rank {at}" if at in self.source else f"engine rank {at - first}"
            for at in ranks
        )

    def groups(self, limit_bytes: int | None) -> "tuple[TransferPlan, ...]":
        """The plan cut into plans of consecutive tensors, of at most so many bytes each (at least
        one tensor)."""
        if limit_bytes is None:
            return (self,)
        numbers: dict[str, int] = {}
        number, filled = 0, 0
        for spec in self.table:
            filled += spec.numel * self.itemsize
            if filled > limit_bytes and numbers:
                number, filled = number + 1, spec.numel * self.itemsize
            numbers[spec.name] = number
        return tuple(
            self._part([name for name, at in numbers.items() if at == group])
            for group in range(number + 1)
        )

    def _part(self, names: Sequence[str]) -> "TransferPlan":
        part = set(names)

        def chosen(side: Slices) -> Slices:
            return {
                rank: {name: slices[name] for name in names if name in slices}
                for rank, slices in side.items()
            }

        return TransferPlan(
            tuple(spec for spec in self.table if spec.name in part),
            chosen(self.source),
            chosen(self.target),
            tuple(transfer for transfer in self.transfers if transfer.name in part),
            self.itemsize,
        )

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The table by tensor name."""
        return {spec.name: spec for spec in self.table}

    def between(self, source: int, target: int) -> tuple[Transfer, ...]:
        """What one rank gives to another."""
        return self._by_pair.get((source, target), ())

    @cached_property
    def _by_pair(self) -> Mapping[tuple[int, int], tuple[Transfer, ...]]:
        pairs: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in self.transfers:
            pairs.setdefault((transfer.source, transfer.target), []).append(transfer)
        return {pair: tuple(transfers) for pair, transfers in pairs.items()}


def extent(spec: TensorSpec, piece: Slice, axis: int | None) -> tuple[int, int]:
    """The range of `axis` that a slice covers; (0, 1) where `axis` is None: the whole tensor is one
    unit."""
    if axis is None:
        return 0, 1
    return (0, spec.shape[axis]) if piece.axis is None else (piece.start, piece.stop)


def numel_of(spec: TensorSpec, axis: int | None, start: int, stop: int) -> int:
    """Number of elements in the part `[start, stop)` along `axis`."""
    return spec.numel if axis is None else spec.numel // spec.shape[axis] * (stop - start)


def cut_axis(spec: TensorSpec, pieces: Iterable[Slice]) -> int | None:
    """The one axis along which these slices of a tensor are cut; None when each is the whole.

    Raises AlignerError when there is more than one, or a slice lies outside the tensor.
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


def atoms(boundaries: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The ranges between neighboring boundaries, in order."""
    return pairwise(sorted(set(boundaries)))


def plan_resharding(
    shape: ModelShape,
    trainer: ParallelConfig,
    engine: EngineParallelConfig,
    *,
    first_engine_rank: int = 0,
    itemsize: int = 4,
    vocabulary_multiple: int = 1,
) -> TransferPlan:
    """The plan from a trainer's layout to an engine's; elements travel as `itemsize` bytes.

    Trainer ranks are counted from 0 and engine ranks from `first_engine_rank`: 0 where both share
    their processes, `trainer.ranks` where they are worlds of their own; `vocabulary_multiple` as in
    `engine_slices`. Raises AlignerError naming everything of the model that does not divide as a
    layout says.
    """
    if problems := [
        *layout_problems("actor.parallel", trainer, shape),
        *engine_problems(engine, shape),
    ]:
        raise AlignerError(
            "the weights cannot be split by these parallel layouts:\n" + "\n".join(problems)
        )
    table = weight_table(shape)
    return plan_transfers(
        table,
        {
            rank: trainer_slices(table, shape.num_layers, trainer, rank)
            for rank in range(trainer.ranks)
        },
        {
            first_engine_rank + rank: engine_slices(table, engine, rank, vocabulary_multiple)
            for rank in range(engine.ranks)
        },
        itemsize,
    )


def plan_to_engine(
    shape: ModelShape, trainer: ParallelConfig, to: WeightFormat, first_engine_rank: int = 0
) -> TransferPlan:
    """`plan_resharding` to an engine that takes its weights so."""
    return plan_resharding(
        shape,
        trainer,
        to.layout,
        first_engine_rank=first_engine_rank,
        itemsize=to.dtype.itemsize,
        vocabulary_multiple=to.vocabulary_multiple,
    )


def plan_transfers(
    table: Sequence[TensorSpec], source: Slices, target: Slices, itemsize: int = 4
) -> TransferPlan:
    """Cover every target slice with pieces of the source slices.

    A rank that holds a piece itself copies it; otherwise the holder with the fewest bytes to send
    so far sends it, so that replicas share the work. The plan depends on the arguments alone: every
    rank computes the same one.

    Raises AlignerError naming every tensor that a target needs and no source holds in full, that is
    cut along different dimensions, or that the table does not list.
    """
    known = {spec.name for spec in table}
    unknown = {
        name for side in (source, target) for slices in side.values() for name in slices
    } - known
    if unknown:
        raise AlignerError(
            f"these tensors are not in the weight table: {', '.join(sorted(unknown))}"
        )
    transfers: list[Transfer] = []
    sent = dict.fromkeys(source, 0)
    problems: list[str] = []
    for spec in table:
        try:
            transfers += _plan_tensor(spec, slices_of(source, spec), slices_of(target, spec), sent)
        except AlignerError as error:
            problems.append(str(error))
    if problems:
        raise AlignerError("the weights cannot be resharded:\n" + "\n".join(problems))
    return TransferPlan(tuple(table), source, target, tuple(transfers), itemsize)


def slices_of(slices: Slices, spec: TensorSpec) -> dict[int, Slice]:
    """What each rank holds of a tensor, of those that hold any."""
    return {rank: slices[rank][spec.name] for rank in sorted(slices) if spec.name in slices[rank]}


def _plan_tensor(
    spec: TensorSpec, source: Mapping[int, Slice], target: Mapping[int, Slice], sent: dict[int, int]
) -> list[Transfer]:
    """One tensor's transfers, adjacent pieces of one sender merged; adds to `sent`, the elements
    each rank sends."""
    axis = cut_axis(spec, [*source.values(), *target.values()])
    held = {rank: extent(spec, piece, axis) for rank, piece in source.items()}
    holders_of: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
    transfers: list[Transfer] = []
    for rank, piece in target.items():
        wanted = extent(spec, piece, axis)
        if wanted not in holders_of:  # replicas want the same
            holders_of[wanted] = _holders_of_atoms(wanted, held)
        mine: list[Transfer] = []
        for (start, stop), holders in holders_of[wanted].items():
            if not holders:
                part = "" if axis is None else f" [{start}, {stop}) along dimension {axis}"
                raise AlignerError(
                    f"{spec.name}{part}: required by rank {rank}, but missing on all source ranks"
                )
            sender = (
                rank if rank in holders else min(holders, key=lambda holder: (sent[holder], holder))
            )
            if sender != rank:
                sent[sender] += numel_of(spec, axis, start, stop)
            if mine and mine[-1].source == sender:
                start = mine.pop().start
            mine.append(
                Transfer(
                    spec.name, sender, rank, axis, start, stop, numel_of(spec, axis, start, stop)
                )
            )
        transfers += mine
    return transfers


def _holders_of_atoms(
    wanted: tuple[int, int], held: Mapping[int, tuple[int, int]]
) -> dict[tuple[int, int], list[int]]:
    """The parts of a range that the held ranges cut it into, in order, each with the ranks that
    hold it."""
    low, high = wanted
    inside = {edge for extents in held.values() for edge in extents if low < edge < high}
    return {
        (start, stop): [
            rank for rank, (first, last) in held.items() if first <= start and stop <= last
        ]
        for start, stop in atoms({low, high} | inside)
    }
