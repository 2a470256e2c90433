"""Weights by their Hugging Face names: this rank's slices of a megatron-core model, read and
written in place.

megatron-core fuses query, key and value of a key/value group, and gate and up; the family's table
says which part of which parameter a named tensor is. File import, resharding, checkpoints and
checks all go through here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from aligner.data.model_directory import read_slices
from aligner.megatron.world import World
from aligner.models.families import Part
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Slice, TensorSpec, cut_shape, stage_layers, trainer_slices

# transformer-engine's linear layers hold the norm before them.
_TRANSFORMER_ENGINE = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def _count_up(name: str, what: str, first: int) -> str:
    """A parameter's name with the index behind `what` counted from `first`."""
    return re.sub(rf"(?<=\b{what}\.)\d+", lambda match: str(int(match[0]) + first), name)


def _global_parameters(
    chunks: Sequence[GPTModel], shape: ModelShape, world: World
) -> dict[str, nn.Parameter]:
    """The model's parameters by megatron-core name, layers and experts counted over the whole
    model."""
    layers = stage_layers(shape.num_layers, world.layout, world.place.pipeline)
    first_expert = world.place.expert * (shape.num_experts // world.layout.expert)
    found = {}
    for chunk, held in zip(chunks, layers, strict=True):
        for local_name, parameter in chunk.named_parameters():
            name = _count_up(
                _count_up(local_name, "layers", held.start), "local_experts", first_expert
            )
            for fused, plain in _TRANSFORMER_ENGINE:
                name = name.replace(fused, plain)
            found[name] = parameter
    return found


def _part(tensor: Tensor, part: Part, shape: ModelShape) -> Tensor:
    """The view of a fused parameter-shaped tensor that a named weight is."""
    if part == "whole":
        return tensor
    if part in ("gate", "up"):
        return tensor.chunk(2)[part == "up"]
    queries = shape.num_heads // shape.num_kv_heads
    groups = tensor.view(-1, queries + 2, shape.head_dim, *tensor.shape[1:])
    return {
        "query": groups[:, :queries],
        "key": groups[:, queries],
        "value": groups[:, queries + 1],
    }[part]


class NamedWeights:
    """This rank's slices of the weights in a table (a model's, its adapters'), by name, in Hugging
    Face orientation."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        world: World,
        table: tuple[TensorSpec, ...],
    ) -> None:
        self.table = table
        self.slices: dict[str, Slice] = trainer_slices(
            table, shape.num_layers, world.layout, world.rank
        )
        self.specs = {spec.name: spec for spec in table}
        self._shape = shape
        self._parameters = _global_parameters(chunks, shape, world)
        self.finish_update: Callable[[], None] = lambda: None
        """Returns when nothing of the last update is still on its way into the weights."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.slices)

    def parameter(self, name: str) -> nn.Parameter:
        """The megatron-core parameter that holds a named weight, and maybe others."""
        self.finish_update()
        wanted = self.specs[name].parameter
        # Without the embedding, a tied model's last stage holds a copy of it as the head.
        if wanted not in self._parameters and self._shape.tied_embeddings:
            wanted = "output_layer.weight"
        return self._parameters[wanted]

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this rank's slice of a tensor."""
        cut = self.slices[name]
        return cut_shape(self.specs[name].shape, cut.axis, cut.start, cut.stop)

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's slice of a named weight, out of a tensor shaped as its parameter: a gradient,
        a moment.

        A copy only where megatron-core's fused layout interleaves it.
        """
        local = self.local_shape(name)
        view = self._unpadded(name, _part(tensor, self.specs[name].part, self._shape))
        return view.reshape(local[::-1]).T if self.specs[name].transposed else view.reshape(local)

    def scatter(self, name: str, tensor: Tensor, piece: Tensor) -> None:
        """Write this rank's slice of a named weight into a tensor shaped as its parameter."""
        view = self._unpadded(name, _part(tensor, self.specs[name].part, self._shape))
        view.copy_((piece.T if self.specs[name].transposed else piece).reshape(view.shape))

    def _unpadded(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of an embedding or head that are tokens, and any other tensor as it is.

        A vocabulary that tensor parallelism does not divide evenly is padded on the last rank.
        """
        spec = self.specs[name]
        if spec.layer is not None or spec.axis != 0 or spec.transposed:
            return tensor
        return tensor[: self.local_shape(name)[0]]

    def read(self, name: str) -> Tensor:
        """This rank's slice of a weight."""
        return self.gather(name, self.parameter(name).data)

    @property
    def copied(self) -> frozenset[str]:
        """The weights of which `read` gives a copy and not the parameter's own memory."""
        return frozenset(
            name for name in self if self.specs[name].part in ("query", "key", "value")
        )

    def write(self, name: str, tensor: Tensor) -> None:
        """Set this rank's slice of a weight."""
        self.scatter(name, self.parameter(name).data, tensor)

    def parameters_cut_alike(self, slices: Mapping[str, Slice]) -> dict[str, Tensor]:
        """The parameters of which another layout's rank holds the same, by megatron-core's name;
        their own memory."""
        wanted: dict[str, list[TensorSpec]] = {}
        for spec in self.table:
            wanted.setdefault(spec.parameter, []).append(spec)
        return {
            name: self.parameter(specs[0].name).data
            for name, specs in wanted.items()
            if all(
                spec.name in self.slices and self.slices[spec.name] == slices.get(spec.name)
                for spec in specs
            )
        }

    def load_directory(
        self, directory: Path, *, optional: Sequence[str] = (), partial: bool = False
    ) -> None:
        """Read this rank's slices, and no others, from a Hugging Face directory's safetensors.

        `optional` weights keep their values where the files have none; `partial` lets the files
        hold more than the model. Raises ConfigError that names every tensor that is missing,
        unknown, or of another shape.
        """
        for name, tensor in read_slices(
            directory, self.table, self.slices, optional=optional, partial=partial
        ):
            self.write(name, tensor)
