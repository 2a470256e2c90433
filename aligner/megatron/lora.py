"""Low-rank adapters (Hu et al. 2021) on megatron-core's linear layers, cut with the layers that
they belong to.

An adapter is a submodule of its layer and adds to the layer's output through a hook, so that the
model's own parameters keep their names. They are frozen, and lie in no gradient buffer.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from aligner.errors import AlignerError
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.world import World
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Adapter,
    Head,
    Slice,
    TensorSpec,
    adapter_map,
    adapter_table,
    cut_shape,
    trainer_slices,
    weight_table,
)
from aligner.schema import LoraConfig

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear


class _LayerAdapter(nn.Module):
    """The adapters of one linear layer, whose weight may be fused of several named ones."""

    def __init__(
        self,
        linear: Linear,
        adapters: Sequence[Adapter],
        slices: dict[str, Slice],
        lora: LoraConfig,
        groups: int,
    ) -> None:
        """`groups`: how often the parts of the layer's output repeat, one after another."""
        super().__init__()
        self.enabled = True
        # in a tuple, which keeps it from being this module's child as well
        self._linear = (linear,)
        self._scale, self._groups = lora.alpha / lora.rank, groups
        self._keys = [(_key(adapter.down), _key(adapter.up)) for adapter in adapters]
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for adapter in adapters:
            for spec, owner in ((adapter.down, self.down), (adapter.up, self.up)):
                if _key(spec) not in owner:
                    owner[_key(spec)] = _empty(spec, slices[spec.name], linear)
        if linear.sequence_parallel:
            # Each tensor rank sees part of the tokens here, so megatron-core has to add these
            # gradients up.
            for parameter in (
                self.down if isinstance(linear, ColumnParallelLinear) else self.up
            ).values():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """What is added to the layer's output: [T, 1, in] to [T, 1, out], cut as the layer's
        own."""
        linear = self._linear[0]
        hidden = F.linear(inputs, torch.cat(tuple(self.down.values()))) * self._scale
        # Only the few hidden numbers of a token travel: T x rank, where the layer's own collectives
        # move T x hidden.
        if isinstance(linear, RowParallelLinear):
            reduce = reduce_from_tensor_model_parallel_region
            if linear.sequence_parallel:
                reduce = reduce_scatter_to_sequence_parallel_region
            hidden = reduce(hidden, group=linear.tp_group)
        elif linear.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=linear.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=linear.tp_group)
        pieces = dict(zip(self.down, hidden.chunk(len(self.down), -1), strict=True))
        outputs = [F.linear(pieces[down], self.up[up]) for down, up in self._keys]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(
            [output.unflatten(-1, (self._groups, -1)) for output in outputs], -1
        ).flatten(-2)

    def add_to(
        self, _: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        """The layer's forward hook; megatron-core's layers return (output, bias)."""
        return (output[0] + self(inputs[0]), output[1]) if self.enabled else output


def _key(spec: TensorSpec) -> str:
    return spec.parameter.rsplit(".", 1)[-1]


def _empty(spec: TensorSpec, cut: Slice, linear: Linear) -> nn.Parameter:
    sizes = cut_shape(spec.shape, cut.axis, cut.start, cut.stop)
    parameter = nn.Parameter(
        torch.zeros(sizes, dtype=linear.weight.dtype, device=linear.weight.device)
    )
    # counted on every tensor rank in the gradients' norm, others on the first alone
    if spec.axis is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def initial_down(spec: TensorSpec, seed: int) -> Tensor:
    """The whole lora_A of an adapter before training, float32: as a linear layer's weight, from the
    seed and its name alone.

    Uniform in +-1 / sqrt(in), which is PEFT's and torch's Kaiming with a = sqrt(5). Every layout
    starts from the same.
    """
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(spec.shape[1])
    return torch.empty(spec.shape).uniform_(-bound, bound, generator=generator)


class LoraWeights(NamedWeights):
    """A model's weights with adapters: `write` and `load_directory` set the frozen ones, `read`
    gives them merged."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        world: World,
        head: Head,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """Freeze the model and give its linear layers adapters, which at first add nothing.

        Raises AlignerError where a layer is not megatron-core's own: transformer-engine's may hold
        the norm before it, and then what goes into the layer is not what goes into its weight.
        """
        super().__init__(chunks, shape, world, weight_table(shape, head))
        self._map = adapter_map(self.table, lora)
        self._scale = lora.alpha / lora.rank
        table = adapter_table(self._map)
        slices = trainer_slices(table, shape.num_layers, world.layout, world.rank)
        for chunk in chunks:
            chunk.requires_grad_(False)
        self._layers = self._attach(
            chunks, slices, lora, groups=shape.num_kv_heads // world.layout.tensor
        )
        self.adapters = NamedWeights(chunks, shape, world, table)
        """By their names in PEFT: `<weight>.lora_A.weight` and `<weight>.lora_B.weight`."""
        for spec in table:
            if spec.name in slices and spec.name.endswith(".lora_A.weight"):
                cut, whole = slices[spec.name], initial_down(spec, seed)
                self.adapters.write(
                    spec.name, whole if cut.axis is None else whole[:, cut.start : cut.stop]
                )

    def _attach(
        self, chunks: Sequence[GPTModel], slices: dict[str, Slice], lora: LoraConfig, groups: int
    ) -> list[_LayerAdapter]:
        holders = {
            id(module.weight): module
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "weight")
        }
        fused: dict[int, list[Adapter]] = {}
        for name in self:
            if name in self._map:
                fused.setdefault(id(self.parameter(name)), []).append(self._map[name])
        layers = []
        for identity, adapters in fused.items():
            linear, weight = holders[identity], adapters[0].weight
            if not isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
                raise AlignerError(
                    f"{weight.name}: LoRA adapters require megatron-core's linear layers, got"
                    f" {type(linear).__name__}"
                )
            linear.adapter = _LayerAdapter(
                linear, adapters, slices, lora, groups if weight.part == "query" else 1
            )
            linear.register_forward_hook(linear.adapter.add_to)
            layers.append(linear.adapter)
        return layers

    def read(self, name: str) -> Tensor:
        """This rank's slice of a weight with its adapter's product added to it, in float32; the
        weight itself stays."""
        weight = super().read(name)
        if name not in self._map:
            return weight
        adapter = self._map[name]
        up, down = (self.adapters.read(spec.name).float() for spec in (adapter.up, adapter.down))
        product = torch.addmm(
            weight.T.float() if adapter.weight.transposed else weight.float(),
            up,
            down,
            alpha=self._scale,
        )
        return (product.T if adapter.weight.transposed else product).to(weight.dtype)

    @property
    def copied(self) -> frozenset[str]:
        """The weights of which `read` gives a copy: those with adapters too."""
        return super().copied.union(self._map.keys() & self.slices.keys())

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Run as the model was before training, whose weights never change."""
        for layer in self._layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enabled = True
