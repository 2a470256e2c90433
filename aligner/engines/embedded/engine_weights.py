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
    expert: int | None
    """Index of the expert among those of this rank; None for other tensors."""


@dataclass(frozen=True)
class Parameter:
    """One of the decoder's tensors on one rank, and the parts that it consists of."""

    name: str
    """megatron-core name of the parameter, without the expert's index."""
    shape: tuple[int, ...]
    """Shape on this rank, including padding; the first dimension of stacked experts is the expert,
    for the experts of this rank."""
    parts: tuple[Part, ...]
    """Parts of the parameter, in the order of the weight table."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def aligned_numel(self) -> int:
        """Number of elements in the storage, rounded up to the alignment."""
        return -(-self.numel // _ALIGNMENT) * _ALIGNMENT

    @property
    def keeps_float32(self) -> bool:
        """Whether the parameter is in float32 whatever the dtype of the others."""
        return not self.parts[0].spec.is_trained

    @property
    def has_padding(self) -> bool:
        """Whether the parameter has rows of vocabulary padding, which belong to no part."""
        last_part = self.parts[-1]
        end = last_part.start + last_part.shape[0]
        return last_part.spec.expert is None and end < self.shape[0]

    @property
    def has_megatron_layout(self) -> bool:
        """Whether megatron-core stores the parameter with the same layout.

        This is false for query, key and value from separate tensors, which megatron-core
        interleaves by KV head, and for stacked experts.
        """
        return all(
            part.spec.part in ("whole", "gate", "up") and part.spec.expert is None
            for part in self.parts
        )


def get_stacked_name(spec: TensorSpec) -> str:
    """Return the name of the parameter that contains a tensor.

    All experts of a layer share one name, without the expert's index.
    """
    if spec.expert is None:
        return spec.parameter
    return spec.parameter.replace(f"local_experts.{spec.expert}.", "")


def compute_parameters(
    shape: ModelShape, layout: EngineParallelConfig, rank: int = 0
) -> tuple[Parameter, ...]:
    """Return the parameters that one rank stores, in the order of the weight table.

    A parameter has the same shape on all ranks. If the number of ranks does not divide the
    vocabulary, the embedding and the output layer of the last ranks have padding rows.

    Args:
        shape: Dimensions of the model.
        layout: Layout of the engine.
        rank: Index of the rank in the engine.
    """
    table = weight_table(shape)
    slices = compute_engine_slices(table, layout, rank)
    largest_slices = compute_engine_slices(table, layout, 0)
    rank_experts = shape.num_experts // layout.expert

    parts: dict[str, list[Part]] = {}
    # Number of rows that the parts so far occupy, by parameter and expert.
    row_counts: dict[tuple[str, int | None], int] = {}
    for spec in table:
        rank_slice = slices.get(spec.name)
        if rank_slice is None:  # another rank's expert
            continue
        rank_shape = cut_shape(spec.shape, rank_slice.axis, rank_slice.start, rank_slice.stop)
        # The slice of rank 0 is the largest; every rank reserves as many rows. Rank 0 may not have
        # this expert, but all slices of experts have the same size.
        largest_slice = largest_slices.get(spec.name, rank_slice)
        reserved_shape = cut_shape(
            spec.shape, largest_slice.axis, largest_slice.start, largest_slice.stop
        )
        # GPT-2 stores its matrices as [inputs, outputs]; a parameter is [outputs, inputs].
        if spec.is_transposed:
            rank_shape = rank_shape[::-1]
            reserved_shape = reserved_shape[::-1]

        name = get_stacked_name(spec)
        start = row_counts.get((name, spec.expert), 0)
        row_counts[name, spec.expert] = start + reserved_shape[0]
        expert = None if spec.expert is None else spec.expert % rank_experts
        parts.setdefault(name, []).append(Part(spec, rank_shape, start, expert))

    rank_parameters: list[Parameter] = []
    for name, name_parts in parts.items():
        first_part = name_parts[0]
        rows = row_counts[name, first_part.spec.expert]
        expert_dims = () if first_part.spec.expert is None else (rank_experts,)
        parameter_shape = (*expert_dims, rows, *first_part.shape[1:])
        rank_parameters.append(Parameter(name, parameter_shape, tuple(name_parts)))
    return tuple(rank_parameters)


class EngineWeights:
    """Weights of one tensor-parallel rank: one block of memory, and named views of it.

    Attributes:
        storage: Memory of all parameters that are not shared, in one dimension, except for those
            that keep float32.
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
            layout: Parameters of this rank (see `compute_parameters`).
            device: Device of the memory.
            dtype: Data type of the memory.
            shared: Parameters that another object owns and updates, by their megatron-core names. A
                shared parameter takes no memory here if megatron-core stores it with the same
                layout.
        """
        shared_parameters = {
            parameter.name: shared[parameter.name]
            for parameter in layout
            if shared and parameter.has_megatron_layout and parameter.name in shared
        }
        own_parameters = [each for each in layout if each.name not in shared_parameters]

        def allocate(dtype: torch.dtype, *, keeps_float32: bool) -> Tensor:
            sizes = (
                parameter.aligned_numel
                for parameter in own_parameters
                if parameter.keeps_float32 is keeps_float32
            )
            return torch.empty(sum(sizes), device=device, dtype=dtype)

        self.storage = allocate(dtype, keeps_float32=False)
        self._float32_storage = allocate(torch.float32, keeps_float32=True)
        self.tensors: dict[str, Tensor] = {}
        """Parameters by their megatron-core names, in the decoder's shape."""
        self.views: dict[str, Tensor] = {}
        """Writable views of this rank's slices by their Hugging Face names.

        Each view has the orientation of the Hugging Face tensor.
        """
        self.shared_names = frozenset(
            part.spec.name
            for parameter in layout
            if parameter.name in shared_parameters
            for part in parameter.parts
        )
        """Hugging Face names of the slices in shared parameters."""

        # Number of elements that the parameters so far occupy, by whether they keep float32.
        offsets = {False: 0, True: 0}
        for parameter in layout:
            tensor = shared_parameters.get(parameter.name)
            if tensor is None:
                keeps_float32 = parameter.keeps_float32
                storage = self._float32_storage if keeps_float32 else self.storage
                offset = offsets[keeps_float32]
                tensor = storage.narrow(0, offset, parameter.numel).view(parameter.shape)
                offsets[keeps_float32] += parameter.aligned_numel
                # No weight update writes the padding, and uninitialized memory may contain NaN.
                if parameter.has_padding:
                    tensor.zero_()
            self.tensors[parameter.name] = tensor

            for part in parameter.parts:
                matrix = tensor if part.expert is None else tensor[part.expert]
                rows = matrix.narrow(0, part.start, part.shape[0])
                self.views[part.spec.name] = rows.T if part.spec.is_transposed else rows

    def copy_from(self, other: "EngineWeights") -> None:
        """Copy the values of all parameters that are not shared from weights of the same layout."""
        self.storage.copy_(other.storage)
        self._float32_storage.copy_(other._float32_storage)


class EmbeddedUpdate:
    """Weight update that writes directly into the engine's storage (see `WeightUpdate`).

    The update needs no second copy of the weights, and `commit` moves no data.
    """

    def __init__(
        self, version: int, views: Mapping[str, Tensor], on_close: Callable[[bool], None]
    ) -> None:
        """Open an update.

        Args:
            version: Version of the new weights.
            views: Writable views of the engine's weights by their Hugging Face names.
            on_close: Callback that is called once, with whether the update succeeded.
        """
        self.version = version
        self._views = views
        # A dictionary is used as an ordered set.
        self._missing_names = dict.fromkeys(views)
        self._on_close = on_close
        self._is_open = True

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
            self._missing_names.pop(name, None)

    def commit(self) -> None:
        """Close the update and put the new weights into use.

        Raises:
            AlignerError: Some tensors were never written, and the update stays open; or the update
                is already closed.
        """
        self._check_open()
        if self._missing_names:
            raise AlignerError(
                f"the weight update to version {self.version} lacks {len(self._missing_names)}"
                f" tensor(s): {', '.join(self._missing_names)}"
            )
        self._is_open = False
        self._on_close(True)

    def abort(self) -> None:
        """Close the update without the new weights; do nothing if it is already closed.

        The engine continues to use the old weights, except where the update has overwritten them.
        """
        if self._is_open:
            self._is_open = False
            self._on_close(False)

    def _check_open(self) -> None:
        """Raise AlignerError if the update is closed."""
        if not self._is_open:
            raise AlignerError(f"the weight update to version {self.version} is already closed")
