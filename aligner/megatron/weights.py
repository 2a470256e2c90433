"""Weights by their Hugging Face names: this rank's slices of a megatron-core model, read and written in place.

megatron-core fuses query, key and value of a key/value group, and gate and up; the table below says where each named
tensor lies inside the fused one. File import, resharding and checks all go through it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.weights import Slice, TensorSpec, first_layers, trainer_slices, weight_table
from aligner.data.weight_files import read_slices
from aligner.megatron.world import World

# How a named tensor is cut out of the megatron-core parameter: a view of the parameter, given the model's shape.
View = Callable[[Tensor, ModelShape], Tensor]


def _whole(parameter: Tensor, shape: ModelShape) -> Tensor:
    return parameter


def _of_group(part: str) -> View:
    def view(parameter: Tensor, shape: ModelShape) -> Tensor:
        queries = shape.num_heads // shape.num_kv_heads
        groups = parameter.view(-1, queries + 2, shape.head_dim, *parameter.shape[1:])
        return {"query": groups[:, :queries], "key": groups[:, queries], "value": groups[:, queries + 1]}[part]

    return view


def _half(index: int) -> View:
    def view(parameter: Tensor, shape: ModelShape) -> Tensor:
        return parameter.chunk(2)[index]

    return view


# Hugging Face suffix -> (megatron-core suffix, view).
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight", _whole),
    "self_attn.q_proj.weight": ("self_attention.linear_qkv.weight", _of_group("query")),
    "self_attn.k_proj.weight": ("self_attention.linear_qkv.weight", _of_group("key")),
    "self_attn.v_proj.weight": ("self_attention.linear_qkv.weight", _of_group("value")),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", _whole),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", _whole),
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight", _half(0)),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight", _half(1)),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", _whole),
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


class NamedWeights:
    """This rank's slices of the model's weights, by Hugging Face name."""

    def __init__(self, model: GPTModel, shape: ModelShape, world: World, *, with_head: bool = True) -> None:
        self.table: tuple[TensorSpec, ...] = weight_table(shape, with_head=with_head)
        self.slices: dict[str, Slice] = trainer_slices(self.table, shape.num_layers, world.layout, world.rank)
        self._shape = shape
        self._specs = {spec.name: spec for spec in self.table}
        self._parameters = dict(model.named_parameters())
        self._first_layer = first_layers(shape.num_layers, world.layout)[world.place.pipeline]
        self._tied_copy = shape.tied_embeddings and not world.is_first_stage

    def __iter__(self) -> Iterator[str]:
        return iter(self.slices)

    def _view(self, name: str) -> Tensor:
        if match := _LAYER_NAME.fullmatch(name):
            suffix, view = _LAYER[match[2]]
            parameter = self._parameters[f"decoder.layers.{int(match[1]) - self._first_layer}.{suffix}"]
            return view(parameter.data, self._shape)
        return self._parameters[self._outside_layers(name)].data

    def _outside_layers(self, name: str) -> str:
        if name == "model.norm.weight":
            return "decoder.final_layernorm.weight"
        # The last stage of a tied model holds its copy of the embedding as the head.
        if name == "lm_head.weight" or self._tied_copy:
            return "output_layer.weight"
        return "embedding.word_embeddings.weight"

    def _local_shape(self, name: str) -> tuple[int, ...]:
        cut, sizes = self.slices[name], list(self._specs[name].shape)
        if cut.axis is not None:
            sizes[cut.axis] = cut.stop - cut.start
        return tuple(sizes)

    def read(self, name: str) -> Tensor:
        """This rank's slice of a tensor; a copy only where megatron-core's fused layout interleaves it."""
        return self._view(name).reshape(self._local_shape(name))

    def write(self, name: str, tensor: Tensor) -> None:
        """Set this rank's slice of a tensor."""
        view = self._view(name)
        view.copy_(tensor.reshape(view.shape))

    def load_directory(self, directory: Path) -> None:
        """Read this rank's slices, and no others, from a Hugging Face directory's safetensors.

        Raises ConfigError that names every tensor that is missing or of another shape.
        """
        for name, tensor in read_slices(directory, self.table, self.slices):
            self.write(name, tensor)
