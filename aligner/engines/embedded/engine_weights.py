"""The embedded engine's storage of weights: fused matrices, seen from outside as Hugging Face
tensors, and its updates.

The family's weight table says which tensors make up which parameter, so that no family has code
here. A parameter holds its parts below one another (query, key and value; gate and up), outputs
first; the experts of a layer are stacked.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TensorSpec, compute_engine_slices, cut_shape, weight_table
from aligner.schema import EngineParallelConfig

_ALIGNMENT = 64
"""Elements: every parameter begins on a line of any cache, and fit for any vector instruction."""


@dataclass(frozen=True)
class Part:
    """A tensor of the table as rows of a parameter, of one expert's where they are stacked."""

    spec: TensorSpec
    shape: tuple[int, ...]
    """This rank's slice, outputs first."""
    start: int
    """First row in the parameter."""


@dataclass(frozen=True)
class Parameter:
    """One of the decoder's tensors, by megatron-core's name, and the parts that it holds."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def aligned(self) -> int:
        """Elements that it takes in a storage."""
        return -(-self.numel // _ALIGNMENT) * _ALIGNMENT

    @property
    def has_padding(self) -> bool:
        """Whether it has rows that belong to no part: padding of the vocabulary."""
        last = self.parts[-1]
        return last.spec.expert is None and last.start + last.shape[0] < self.shape[0]

    @property
    def as_trained(self) -> bool:
        """Whether megatron-core holds the same parameter the same way: it interleaves query, key
        and value."""
        return all(
            part.spec.part in ("whole", "gate", "up") and part.spec.expert is None
            for part in self.parts
        )


def stacked_name(spec: TensorSpec) -> str:
    """The name of the parameter that holds a tensor, all experts' under one."""
    return (
        spec.parameter
        if spec.expert is None
        else spec.parameter.replace(f"local_experts.{spec.expert}.", "")
    )


def parameters(shape: ModelShape, tensor: int, rank: int = 0) -> tuple[Parameter, ...]:
    """What a rank of `tensor` tensor-parallel ranks stores, in the table's order.

    The parameters of all ranks are of one shape. If `tensor` does not divide the vocabulary, the
    last rank's embedding and head have more rows than tokens.
    """
    table = weight_table(shape)
    layout = EngineParallelConfig(tensor=tensor)
    slices = compute_engine_slices(table, layout, rank)
    largest = compute_engine_slices(table, layout, 0)
    parts: dict[str, list[Part]] = {}
    filled: dict[tuple[str, int | None], int] = {}
    for spec in table:
        cut, name = slices[spec.name], stacked_name(spec)
        local = cut_shape(spec.shape, cut.axis, cut.start, cut.stop)
        local = local[::-1] if spec.transposed else local
        full = largest[spec.name]
        stored = cut_shape(spec.shape, full.axis, full.start, full.stop)
        stored = stored[::-1] if spec.transposed else stored
        start = filled.get((name, spec.expert), 0)
        filled[name, spec.expert] = start + stored[0]
        parts.setdefault(name, []).append(Part(spec, local, start))
    found: list[Parameter] = []
    for name, held in parts.items():
        rows = filled[name, held[0].spec.expert]
        stacked = () if held[0].spec.expert is None else (shape.num_experts,)
        found.append(Parameter(name, (*stacked, rows, *held[0].shape[1:]), tuple(held)))
    return tuple(found)


class EngineWeights:
    """One tensor-parallel rank's share of the model: one block of memory, and names for its
    parts."""

    def __init__(
        self,
        layout: Sequence[Parameter],
        device: torch.device,
        dtype: torch.dtype,
        shared: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Uninitialised, but for `shared`: parameters that somebody else stores, and changes, by
        megatron-core's name."""
        outside = {
            parameter.name: shared[parameter.name]
            for parameter in layout
            if shared and parameter.as_trained and parameter.name in shared
        }
        size = sum(parameter.aligned for parameter in layout if parameter.name not in outside)
        self.storage = torch.empty(size, device=device, dtype=dtype)
        self.tensors: dict[str, Tensor] = {}
        """By megatron-core's name, in the decoder's shape."""
        self.views: dict[str, Tensor] = {}
        """By Hugging Face name, this rank's slice in Hugging Face's orientation; writable."""
        begin = 0
        for parameter in layout:
            whole = outside.get(parameter.name)
            if whole is None:
                whole = self.storage.narrow(0, begin, parameter.numel).view(parameter.shape)
                begin += parameter.aligned
                if parameter.has_padding:
                    whole.zero_()
            self.tensors[parameter.name] = whole
            for part in parameter.parts:
                one = whole if part.spec.expert is None else whole[part.spec.expert]
                rows = one.narrow(0, part.start, part.shape[0])
                self.views[part.spec.name] = rows.T if part.spec.transposed else rows


class EmbeddedUpdate:
    """A `WeightUpdate` whose views are the storage that will serve: nothing is held twice, nothing
    moves at the end."""

    def __init__(
        self, version: int, views: Mapping[str, Tensor], end: Callable[[bool], None]
    ) -> None:
        """`end` is told, once, whether the update succeeded."""
        self.version = version
        self._views, self._missing, self._end = views, dict.fromkeys(views), end
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Where to write these tensors: this rank's slices of those that there are."""
        self._check_open()
        return {name: self._views[name] for name in names if name in self._views}

    def load(self, names: Sequence[str]) -> None:
        """These tensors have been written."""
        self._check_open()
        for name in names:
            self._missing.pop(name, None)

    def commit(self) -> None:
        """The new weights serve. Raises AlignerError, and stays open, when some were never
        written."""
        self._check_open()
        if self._missing:
            raise AlignerError(
                f"the weight update to version {self.version} lacks {len(self._missing)} tensor(s):"
                f" {', '.join(self._missing)}"
            )
        self._open = False
        self._end(True)

    def abort(self) -> None:
        """The old weights, where they still are, go on serving."""
        if self._open:
            self._open = False
            self._end(False)

    def _check_open(self) -> None:
        if not self._open:
            raise AlignerError(f"the weight update to version {self.version} is already closed")
