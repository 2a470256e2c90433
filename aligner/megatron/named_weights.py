"""`NamedWeights`: this rank's slices of a megatron-core model's weights, by Hugging Face name.

megatron-core fuses query, key and value of a key/value group, and gate and up. The weight table of
the model family specifies the parameter that contains each named tensor, and the tensor's part of
the parameter. Weights are read and written in place. The import of files, resharding, checkpoints
and checksums all use this module.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from aligner.data.model_directory import read_slices
from aligner.megatron.world import World
from aligner.models.families import INTERLEAVED_PARTS, Part
from aligner.models.pipeline_stages import stage_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Slice,
    TensorSpec,
    compute_trainer_slices,
    cut_shape,
    group_by_parameter,
)

# transformer-engine's linear layers contain the preceding norm. Each pair is the name prefix of the
# norm's parameters in the linear layer, and their prefix in a separate norm module.
_FUSED_NORM_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def _shift_index(name: str, module: str, offset: int) -> str:
    """Return a parameter's name with `offset` added to the index that follows `module`."""
    return re.sub(rf"(?<=\b{module}\.)\d+", lambda match: str(int(match[0]) + offset), name)


def _global_parameters(
    chunks: Sequence[GPTModel], shape: ModelShape, world: World
) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their megatron-core names in the whole model.

    megatron-core counts layers from the first layer of a chunk, and experts from the first expert
    of the rank.
    """
    layers = stage_layers(shape, world.layout, world.coordinates.pipeline)
    first_expert = world.coordinates.expert * (shape.num_experts // world.layout.expert)
    parameters = {}
    for chunk, chunk_layers in zip(chunks, layers, strict=True):
        for local_name, parameter in chunk.named_parameters():
            name = _shift_index(
                _shift_index(local_name, "layers", chunk_layers.start),
                "local_experts",
                first_expert,
            )
            for fused, plain in _FUSED_NORM_NAMES:
                name = name.replace(fused, plain)
            parameters[name] = parameter
    return parameters


def select_part(tensor: Tensor, part: Part, shape: ModelShape, tensor_ranks: int = 1) -> Tensor:
    """Return a view of one part of a fused tensor, which has the shape of its parameter."""
    if part == "whole":
        return tensor
    if part in ("gate", "up"):
        return tensor.chunk(2)[part == "up"]
    if part not in ("query", "key", "value"):
        return _delta_net_view(tensor, part, shape)
    # linear_qkv interleaves the key/value groups: the queries of a group, its key, its value.
    queries = shape.num_heads // (tensor_ranks * shape.kv_heads_on_rank(tensor_ranks))
    if shape.attention_gate:
        # In the parameter, the gates of a group follow its queries. In files, the gate of each head
        # follows its query.
        groups = tensor.view(-1, 2 * queries + 2, shape.head_dim, *tensor.shape[1:])
        if part == "query":
            return groups[:, : 2 * queries].unflatten(1, (2, queries)).transpose(1, 2)
        return groups[:, 2 * queries + (part == "value")]
    groups = tensor.view(-1, queries + 2, shape.head_dim, *tensor.shape[1:])
    return {
        "query": groups[:, :queries],
        "key": groups[:, queries],
        "value": groups[:, queries + 1],
    }[part]


def _delta_net_view(tensor: Tensor, part: Part, shape: ModelShape) -> Tensor:
    """Return a view of one part of a parameter of a gated delta net (see `GatedDeltaNet`)."""
    net = shape.delta_net
    assert net is not None
    values_per_key = net.value_heads // net.key_heads
    key_rows, value_rows = net.key_dim, values_per_key * net.value_dim
    if part in ("delta_beta", "delta_decay"):
        return tensor.unflatten(0, (-1, 2, values_per_key))[:, int(part == "delta_decay")]
    if part in ("conv_query", "conv_key", "conv_value"):
        # the parts of all heads follow one another
        heads = len(tensor) // (2 * key_rows + value_rows)
        keys = heads * key_rows
        parts = tensor.split((keys, keys, heads * value_rows))
        return parts[("conv_query", "conv_key", "conv_value").index(part)]
    groups = tensor.unflatten(0, (-1, 2 * (key_rows + value_rows)))
    parts = groups.split((key_rows, key_rows, value_rows, value_rows), 1)
    return parts[("delta_query", "delta_key", "delta_value", "delta_gate").index(part)]


class NamedWeights:
    """This rank's slices of the weights in a table, by name, in Hugging Face orientation.

    The table describes the weights of a model or of its adapters. Iteration yields the names of the
    weights of which this rank has a slice.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        world: World,
        table: tuple[TensorSpec, ...],
    ) -> None:
        self.table = table
        self.slices: dict[str, Slice] = compute_trainer_slices(
            table, shape, world.layout, world.rank
        )
        self.specs = {spec.name: spec for spec in table}
        self.tensor_ranks = world.layout.tensor
        """Number of tensor-parallel ranks."""
        self._shape = shape
        self._parameters = _global_parameters(chunks, shape, world)
        self.finish_update: Callable[[], None] = lambda: None
        """Function that waits until the parameter all-gathers of the last update have finished."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.slices)

    def parameter(self, name: str) -> nn.Parameter:
        """Return the megatron-core parameter that contains a named weight, possibly with other
        weights."""
        self.finish_update()
        parameter_name = self.specs[name].parameter
        # In a tied model, a last stage without the embedding has a copy of the embedding as its
        # head.
        if parameter_name not in self._parameters and self._shape.tied_embeddings:
            parameter_name = "output_layer.weight"
        return self._parameters[parameter_name]

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's slice of a weight."""
        weight_slice = self.slices[name]
        return cut_shape(
            self.specs[name].shape, weight_slice.axis, weight_slice.start, weight_slice.stop
        )

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's slice of a named weight from a tensor shaped like its parameter.

        The tensor may be the parameter, its gradient or a moment, of any dtype. The result is a
        copy only if megatron-core's fused layout interleaves the weight with other weights;
        otherwise it is a view.
        """
        local = self.local_shape(name)
        view = self._view(name, tensor)
        return (
            view.reshape(local[::-1]).T if self.specs[name].is_transposed else view.reshape(local)
        )

    def scatter(self, name: str, tensor: Tensor, piece: Tensor) -> None:
        """Write this rank's slice of a named weight into a tensor shaped like its parameter.

        Args:
            name: Name of the weight.
            tensor: Destination in the parameter's shape.
            piece: Slice in Hugging Face orientation, of shape `local_shape(name)`.
        """
        view = self._view(name, tensor)
        view.copy_((piece.T if self.specs[name].is_transposed else piece).reshape(view.shape))

    def _view(self, name: str, tensor: Tensor) -> Tensor:
        """Return a view of a named weight in a tensor shaped like its parameter."""
        part = select_part(tensor, self.specs[name].part, self._shape, self.tensor_ranks)
        return self._without_padding(name, part)

    def _without_padding(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of an embedding or head that are tokens, and any other tensor unchanged.

        A vocabulary that tensor parallelism does not divide evenly is padded on the last rank.
        """
        spec = self.specs[name]
        if spec.layer is not None or spec.axis != 0 or spec.is_transposed:
            return tensor
        return tensor[: self.local_shape(name)[0]]

    def read(self, name: str) -> Tensor:
        """Return this rank's slice of a weight, a view unless the name is in `copied_names`."""
        return self.gather(name, self.parameter(name).data)

    @property
    def copied_names(self) -> frozenset[str]:
        """Names of the weights of which `read` returns a copy instead of the parameter's memory."""
        return frozenset(name for name in self if self.specs[name].part in INTERLEAVED_PARTS)

    def write(self, name: str, tensor: Tensor) -> None:
        """Set this rank's slice of a weight."""
        self.scatter(name, self.parameter(name).data, tensor)

    def parameters_with_slices(self, slices: Mapping[str, Slice]) -> dict[str, Tensor]:
        """Return the parameters whose weights have the same slices on a rank of another layout.

        Args:
            slices: Slices of the other rank, by Hugging Face name.

        Returns:
            The parameters' own memory, by megatron-core name.
        """
        return {
            name: self.parameter(specs[0].name).data
            for name, specs in group_by_parameter(self.table).items()
            if all(
                spec.name in self.slices and self.slices[spec.name] == slices.get(spec.name)
                for spec in specs
            )
        }

    def load_directory(
        self, directory: Path, *, optional: Sequence[str] = (), partial: bool = False
    ) -> None:
        """Read this rank's slices, and no others, from the safetensors files of a directory.

        Args:
            directory: Hugging Face model directory.
            optional: Names of weights that keep their values if the files do not contain them.
            partial: Whether the files may contain more weights than the model.

        Raises:
            ConfigError: If a tensor is missing, unknown, or of another shape. The message names all
                of them.
        """
        for name, tensor in read_slices(
            directory, self.table, self.slices, optional=optional, partial=partial
        ):
            self.write(name, tensor)
