"""Weight storage of the embedded engine, and its weight updates.

The engine stores fused matrices: query, key and value in one parameter, gate and up projection in
another, and the experts of a layer stacked. For weight updates, it exposes the parts of these
parameters as views with the names and orientation of the Hugging Face checkpoint.

The weight table of the model family defines which tensors form which parameter. This module
therefore contains no code for individual families. A parameter has the shape [outputs, inputs], and
its parts are concatenated along the outputs.
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

# Alignment of a parameter in the storage, in elements. It aligns parameters to the cache lines and
# vector instructions of all processors.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """Tensor of the weight table as a range of rows of a parameter.

    If the parameter stacks experts, the rows belong to the tensor's expert.
    """

    spec: TensorSpec
    """Entry of the tensor in the weight table."""
    shape: tuple[int, ...]
    """Shape of this rank's slice, outputs first."""
    start: int
    """Index of the first row in the parameter."""


@dataclass(frozen=True)
class Parameter:
    """One of the decoder's tensors on one rank, and the parts that it consists of."""

    name: str
    """megatron-core name of the parameter, without the expert's index."""
    shape: tuple[int, ...]
    """Shape on this rank, including padding; the first dimension of stacked experts is the expert.
    """
    parts: tuple[Part, ...]
    """Parts of the parameter, in the order of the weight table."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def aligned(self) -> int:
        """Return the number of elements in the storage, rounded up to the alignment."""
        return -(-self.numel // _ALIGNMENT) * _ALIGNMENT

    @property
    def has_padding(self) -> bool:
        """Return whether the parameter has rows of vocabulary padding, which belong to no part."""
        last = self.parts[-1]
        return last.spec.expert is None and last.start + last.shape[0] < self.shape[0]

    @property
    def as_trained(self) -> bool:
        """Return whether megatron-core stores the parameter with the same layout.

        This is false for query, key and value from separate tensors, which megatron-core
        interleaves by KV head, and for stacked experts.
        """
        return all(
            part.spec.part in ("whole", "gate", "up") and part.spec.expert is None
            for part in self.parts
        )


def stacked_name(spec: TensorSpec) -> str:
    """Return the name of the parameter that contains a tensor.

    All experts of a layer share one name, without the expert's index.
    """
    return (
        spec.parameter
        if spec.expert is None
        else spec.parameter.replace(f"local_experts.{spec.expert}.", "")
    )


def parameters(shape: ModelShape, tensor: int, rank: int = 0) -> tuple[Parameter, ...]:
    """Return the parameters that one rank stores, in the order of the weight table.

    A parameter has the same shape on all ranks. If the number of ranks does not divide the
    vocabulary, the embedding and the output layer of the last ranks have padding rows.

    Args:
        shape: Dimensions of the model.
        tensor: Number of tensor-parallel ranks.
        rank: Index of the rank among them.
    """
    table = weight_table(shape)
    layout = EngineParallelConfig(tensor=tensor)
    slices = compute_engine_slices(table, layout, rank)
    largest = compute_engine_slices(table, layout, 0)

    parts: dict[str, list[Part]] = {}
    # Number of rows that the parts so far occupy, by parameter and expert.
    row_counts: dict[tuple[str, int | None], int] = {}
    for spec in table:
        cut = slices[spec.name]
        name = stacked_name(spec)
        local = cut_shape(spec.shape, cut.axis, cut.start, cut.stop)
        local = local[::-1] if spec.transposed else local
        # The slice of rank 0 is the largest; every rank reserves as many rows.
        full = largest[spec.name]
        stored = cut_shape(spec.shape, full.axis, full.start, full.stop)
        stored = stored[::-1] if spec.transposed else stored
        start = row_counts.get((name, spec.expert), 0)
        row_counts[name, spec.expert] = start + stored[0]
        parts.setdefault(name, []).append(Part(spec, local, start))

    rank_parameters: list[Parameter] = []
    for name, name_parts in parts.items():
        rows = row_counts[name, name_parts[0].spec.expert]
        stacked = () if name_parts[0].spec.expert is None else (shape.num_experts,)
        rank_parameters.append(
            Parameter(name, (*stacked, rows, *name_parts[0].shape[1:]), tuple(name_parts))
        )
    return tuple(rank_parameters)


class EngineWeights:
    """Weights of one tensor-parallel rank: one block of memory, and named views of it.

    Attributes:
        storage: Memory of all parameters that are not shared, in one dimension.
    """

    def __init__(
        self,
        layout: Sequence[Parameter],
        device: torch.device,
        dtype: torch.dtype,
        shared: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Allocate uninitialized memory for the parameters; padding is filled with zeros.

        Args:
            layout: Parameters of this rank (see `parameters`).
            device: Device of the memory.
            dtype: Data type of the memory.
            shared: Parameters that another object owns and updates, by their megatron-core names. A
                shared parameter takes no memory here if megatron-core stores it with the same
                layout.
        """
        external = {
            parameter.name: shared[parameter.name]
            for parameter in layout
            if shared and parameter.as_trained and parameter.name in shared
        }
        size = sum(parameter.aligned for parameter in layout if parameter.name not in external)
        self.storage = torch.empty(size, device=device, dtype=dtype)
        self.tensors: dict[str, Tensor] = {}
        """Parameters by their megatron-core names, in the decoder's shape."""
        self.views: dict[str, Tensor] = {}
        """Writable views of this rank's slices by their Hugging Face names.

        Each view has the orientation of the Hugging Face tensor.
        """

        begin = 0
        for parameter in layout:
            whole = external.get(parameter.name)
            if whole is None:
                whole = self.storage.narrow(0, begin, parameter.numel).view(parameter.shape)
                begin += parameter.aligned
                if parameter.has_padding:
                    whole.zero_()
            self.tensors[parameter.name] = whole
            for part in parameter.parts:
                matrix = whole if part.spec.expert is None else whole[part.spec.expert]
                rows = matrix.narrow(0, part.start, part.shape[0])
                self.views[part.spec.name] = rows.T if part.spec.transposed else rows


class EmbeddedUpdate:
    """Weight update that writes directly into the engine's storage (see `WeightUpdate`).

    The update needs no second copy of the weights, and `commit` moves no data.
    """

    def __init__(
        self, version: int, views: Mapping[str, Tensor], end: Callable[[bool], None]
    ) -> None:
        """Open an update.

        Args:
            version: Version of the new weights.
            views: Writable views of the engine's weights by their Hugging Face names.
            end: Callback that is called once, with whether the update succeeded.
        """
        self.version = version
        self._views = views
        # A dictionary is used as an ordered set.
        self._missing = dict.fromkeys(views)
        self._end = end
        self._open = True

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return writable views of this rank's slices of the named tensors.

        Names of tensors that the engine does not have are omitted.

        Raises:
            AlignerError: The update is closed.
        """
        self._check_open()
        return {name: self._views[name] for name in names if name in self._views}

    def load(self, names: Sequence[str]) -> None:
        """Mark tensors as written.

        Raises:
            AlignerError: The update is closed.
        """
        self._check_open()
        for name in names:
            self._missing.pop(name, None)

    def commit(self) -> None:
        """Close the update and put the new weights into use.

        Raises:
            AlignerError: Some tensors were never written, and the update stays open; or the update
                is already closed.
        """
        self._check_open()
        if self._missing:
            raise AlignerError(
                f"the weight update to version {self.version} lacks {len(self._missing)} tensor(s):"
                f" {', '.join(self._missing)}"
            )
        self._open = False
        self._end(True)

    def abort(self) -> None:
        """Close the update without the new weights; do nothing if it is already closed.

        The engine continues to use the old weights, except where the update has overwritten them.
        """
        if self._open:
            self._open = False
            self._end(False)

    def _check_open(self) -> None:
        """Raise AlignerError if the update is closed."""
        if not self._open:
            raise AlignerError(f"the weight update to version {self.version} is already closed")
