"""LoRA adapters (Hu et al. 2021) for megatron-core's linear layers, sharded like these layers.

An adapter is a submodule of its linear layer. A forward hook adds its output to the layer's output,
so the model's own parameters keep their names. They are frozen and have no gradient buffer.
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
from aligner.megatron.linear_layers import ReplicatedLinear
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.world import World
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Adapter,
    Head,
    Slice,
    TensorSpec,
    build_adapter_map,
    build_adapter_table,
    compute_trainer_slices,
    cut_shape,
    weight_table,
)
from aligner.schema import LoraConfig

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear


class _LayerAdapter(nn.Module):
    """The adapters of one linear layer, whose weight may be fused from several named weights."""

    def __init__(
        self,
        linear: Linear,
        adapters: Sequence[Adapter],
        slices: dict[str, Slice],
        lora: LoraConfig,
        groups: int,
        gated_queries: int = 0,
    ) -> None:
        """Create the adapters' parameters, all zero.

        Args:
            linear: The linear layer.
            adapters: Adapters of the named weights that form the layer's weight, in the same order.
            slices: This rank's slices of the adapters' weights.
            lora: Configuration section of the adapters.
            groups: Number of times that the named weights repeat in the layer's output: the local
                key/value groups for linear_qkv, otherwise 1.
            gated_queries: Number of queries of a group if the first named weight has a gate after
                the query of each head; otherwise 0.
        """
        super().__init__()
        self.enabled = True
        # A tuple hides the layer from torch, which would register it as a child of this module too.
        self._linear = (linear,)
        self._scale = lora.alpha / lora.rank
        self._groups = groups
        self._gated_queries = gated_queries
        self._keys = [(_key(adapter.down), _key(adapter.up)) for adapter in adapters]
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for adapter in adapters:
            for spec, parameters in ((adapter.down, self.down), (adapter.up, self.up)):
                if _key(spec) not in parameters:
                    parameters[_key(spec)] = _zero_parameter(spec, slices[spec.name], linear)
        if linear.sequence_parallel:
            # These weights see only this tensor rank's part of the tokens. The attribute makes
            # megatron-core's finalize_model_grads sum their gradients over the tensor ranks.
            partial_factors = []
            if not isinstance(linear, RowParallelLinear):
                partial_factors.append(self.down)
            if not isinstance(linear, ColumnParallelLinear):
                partial_factors.append(self.up)
            for factor in partial_factors:
                for parameter in factor.values():
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the adapters' contribution to the layer's output, sharded like that output.

        Args:
            inputs: The layer's input, [T, 1, in].

        Returns:
            [T, 1, out].
        """
        linear = self._linear[0]
        hidden = F.linear(inputs, torch.cat(tuple(self.down.values()))) * self._scale
        # The adapter's collectives transfer the low-rank activations, T x rank, whereas the layer's
        # own collectives transfer T x hidden.
        if isinstance(linear, RowParallelLinear):
            reduce = reduce_from_tensor_model_parallel_region
            if linear.sequence_parallel:
                reduce = reduce_scatter_to_sequence_parallel_region
            hidden = reduce(hidden, group=linear.tp_group)
        elif isinstance(linear, ReplicatedLinear):
            pass  # input and output are divided over the ranks in the same way
        elif linear.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=linear.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=linear.tp_group)
        pieces = dict(zip(self.down, hidden.chunk(len(self.down), -1), strict=True))
        outputs = [F.linear(pieces[down], self.up[up]) for down, up in self._keys]
        if len(outputs) == 1:
            return outputs[0]
        # Interleave the outputs as the fused layer does: group by group.
        parts = [output.unflatten(-1, (self._groups, -1)) for output in outputs]
        if self._gated_queries:
            # In the fused layer, the gates of a group follow all its queries.
            heads = parts[0].unflatten(-1, (self._gated_queries, 2, -1))
            parts[0] = heads.transpose(-3, -2).flatten(-3)
        return torch.cat(parts, -1).flatten(-2)

    def add_to_output(
        self, _: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        """Return the layer's output plus the adapters' output.

        This is the layer's forward hook; megatron-core's linear layers return (output, bias).
        """
        return (output[0] + self(inputs[0]), output[1]) if self.enabled else output


def _key(spec: TensorSpec) -> str:
    return spec.parameter.rsplit(".", 1)[-1]


def _zero_parameter(spec: TensorSpec, weight_slice: Slice, linear: Linear) -> nn.Parameter:
    """Return a parameter of zeros for this rank's slice of an adapter's weight."""
    sizes = cut_shape(spec.shape, weight_slice.axis, weight_slice.start, weight_slice.stop)
    parameter = nn.Parameter(
        torch.zeros(sizes, dtype=linear.weight.dtype, device=linear.weight.device)
    )
    # The gradient norm counts a sharded weight on every tensor rank, and any other weight only on
    # the first tensor rank.
    if spec.axis is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def initialize_lora_a(spec: TensorSpec, seed: int) -> Tensor:
    """Return the whole lora_A weight of an adapter before training, float32 [rank, in].

    It is uniform in ±1/sqrt(in), which is PEFT's and torch's Kaiming initialization with
    a = sqrt(5). It depends only on the seed and the weight's name, so every layout starts from the
    same values.
    """
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(spec.shape[1])
    return torch.empty(spec.shape).uniform_(-bound, bound, generator=generator)


class LoraWeights(NamedWeights):
    """Named weights of a model with adapters.

    `write` and `load_directory` set the frozen weights; `read` returns them merged with the
    adapters.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shape: ModelShape,
        world: World,
        head: Head,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """Freeze the model and attach adapters, which initially add nothing, to its linear layers.

        Args:
            chunks: This rank's model chunks.
            shape: Dimensions of the model.
            world: This rank's view of the role's ranks.
            head: Vocabulary head or scalar head.
            lora: Configuration section of the adapters.
            seed: Seed of the adapters' initial weights.

        Raises:
            AlignerError: If a linear layer is not megatron-core's own. transformer-engine's linear
                layers may contain the preceding norm. Their weight is then multiplied with the
                norm's output, not with the layer's input.
        """
        super().__init__(chunks, shape, world, weight_table(shape, head))
        self._map = build_adapter_map(self.table, lora)
        self._scale = lora.alpha / lora.rank
        groups = shape.kv_heads_on_rank(world.layout.tensor)
        self._gated_queries = 0
        if shape.attention_gate:
            self._gated_queries = shape.num_heads // (world.layout.tensor * groups)
        table = build_adapter_table(self._map)
        slices = compute_trainer_slices(table, shape, world.layout, world.rank)
        for chunk in chunks:
            chunk.requires_grad_(False)
        self._layers = self._attach_adapters(chunks, slices, lora, groups=groups)
        self.adapters = NamedWeights(chunks, shape, world, table)
        """The adapters' weights by their PEFT names, `<weight>.lora_A.weight` and
        `<weight>.lora_B.weight`."""
        for spec in table:
            if spec.name in slices and spec.name.endswith(".lora_A.weight"):
                weight_slice = slices[spec.name]
                whole = initialize_lora_a(spec, seed)
                self.adapters.write(
                    spec.name,
                    whole
                    if weight_slice.axis is None
                    else whole[:, weight_slice.start : weight_slice.stop],
                )

    def _attach_adapters(
        self, chunks: Sequence[GPTModel], slices: dict[str, Slice], lora: LoraConfig, groups: int
    ) -> list[_LayerAdapter]:
        """Attach adapters to the linear layers and return them, one for each layer."""
        modules = {
            id(module.weight): module
            for chunk in chunks
            for module in chunk.modules()
            if hasattr(module, "weight")
        }
        layer_adapters: dict[int, list[Adapter]] = {}
        for name in self:
            if name in self._map:
                layer_adapters.setdefault(id(self.parameter(name)), []).append(self._map[name])
        layers = []
        for identity, adapters in layer_adapters.items():
            linear = modules[identity]
            weight = adapters[0].weight
            if not isinstance(linear, Linear):
                raise AlignerError(
                    f"{weight.name}: LoRA adapters require megatron-core's linear layers, got"
                    f" {type(linear).__name__}"
                )
            is_query = weight.part == "query"
            linear.adapter = _LayerAdapter(
                linear,
                adapters,
                slices,
                lora,
                groups if is_query else 1,
                self._gated_queries if is_query else 0,
            )
            linear.register_forward_hook(linear.adapter.add_to_output)
            layers.append(linear.adapter)
        return layers

    def read(self, name: str) -> Tensor:
        """Return this rank's slice of a weight, merged with its adapter in float32.

        The result has the weight's dtype. The weight itself does not change.
        """
        weight = super().read(name)
        if name not in self._map:
            return weight
        adapter = self._map[name]
        up, down = (self.adapters.read(spec.name).float() for spec in (adapter.up, adapter.down))
        # W + alpha / rank * B A
        merged = torch.addmm(
            weight.T.float() if adapter.weight.is_transposed else weight.float(),
            up,
            down,
            alpha=self._scale,
        )
        return (merged.T if adapter.weight.is_transposed else merged).to(weight.dtype)

    @property
    def copied_names(self) -> frozenset[str]:
        """Names of the weights of which `read` returns a copy, including the weights with
        adapters."""
        return super().copied_names.union(self._map.keys() & self.slices.keys())

    @contextlib.contextmanager
    def disable_adapters(self) -> Iterator[None]:
        """Run the model without its adapters, as it was before training, within the context."""
        for layer in self._layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enabled = True
