"""Weight tables and weight slices: the weights of a model, and the slice that each rank holds.

All functions are pure functions of a model's shape and a parallel layout. Tensors have their
Hugging Face names and orientation everywhere. The package `megatron`, the transfer plan and the
engines get their slices from this module, so that there is a single definition of how a model is
sharded.

The module also defines the LoRA adapters of a model (Hu et al. 2021), the weights that patterns
freeze, and the weights that Muon updates.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from aligner.errors import ConfigError
from aligner.models.families import FUSED_PARTS, SCALAR_HEAD, WEIGHTS, Part, Weight
from aligner.models.pipeline_stages import get_engine_stage_layers, stage_layers
from aligner.models.shape import DeltaNet, LayerShape, ModelShape
from aligner.schema import EngineParallelConfig, LoraConfig, ParallelConfig

# Sizes of the parts of a fused parameter whose parts differ in size, by the names of
# `weight_table`.
_PART_SIZES: Mapping[Part, str] = {
    "query": "query",
    "key": "key",
    "value": "key",
    "delta_query": "delta_key",
    "delta_key": "delta_key",
    "delta_value": "delta_value",
    "conv_query": "delta_key",
    "conv_key": "delta_key",
    "conv_value": "delta_value",
}
Head = Literal["vocabulary", "scalar"]
"""Head of a model: `vocabulary` is a language model's head, `scalar` returns one number per token.
"""


@dataclass(frozen=True)
class StoredRange:
    """Position of a weight in a tensor of a file.

    It is a range of one dimension of the tensor, or of one of the matrices or vectors that the
    tensor stacks. The number of indices of the range is the weight's size along this dimension.
    """

    name: str
    """Name of the file's tensor."""
    shape: tuple[int, ...]
    """Shape of the file's tensor."""
    axis: int | None = None
    """Dimension of the weight along which it is a range; None if it has all indices."""
    start: int = 0
    """First index of the range."""
    step: int = 1
    """Distance of consecutive indices of the range; above 1 if the tensor alternates weights."""
    expert: int | None = None
    """Index of the first dimension of a tensor that stacks the weights of all experts; None for
    other tensors, which have the dimensions of the weight."""

    def locate(self, shape: Sequence[int], piece: "Slice | None" = None) -> tuple[int | slice, ...]:
        """Return the index of a weight in the file's tensor.

        Args:
            shape: Shape of the weight.
            piece: Part of the weight; None for the whole weight.
        """
        ranges = [slice(0, size) for size in shape]
        if piece is not None and piece.axis is not None:
            ranges[piece.axis] = slice(piece.start, piece.stop)
        if self.axis is not None:
            start, stop = ranges[self.axis].start, ranges[self.axis].stop
            last = self.start + self.step * (stop - 1)
            ranges[self.axis] = slice(self.start + self.step * start, last + 1, self.step)
        return tuple(ranges) if self.expert is None else (self.expert, *ranges)


@dataclass(frozen=True)
class TensorSpec:
    """A weight of the whole model: its name, its full shape, and how layouts shard it."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    """Dimension that tensor parallelism splits evenly; None if every tensor-parallel rank holds the
    whole weight."""
    unit: int = 1
    """Number of consecutive indices of that dimension that a split must not separate, such as the
    rows of an attention head.

    If there are more tensor-parallel ranks than units, several consecutive ranks hold the same
    unit. `layouts.tensor_problems` reports sizes that do not divide the heads evenly.
    """
    layer: int | None = None
    """Index of the decoder layer; None for an embedding, final norm or head."""
    stages: tuple[str, ...] = ()
    """For a weight outside the layers, the pipeline stages that hold a copy: first, last or both.
    """
    expert: int | None = None
    """Index of the expert in a mixture of experts; None for other weights."""
    parameter: str = ""
    """Name of megatron-core's parameter, with layers and experts numbered over the whole model."""
    part: Part = "whole"
    """Part of that parameter which is this weight."""
    is_transposed: bool = False
    """Whether megatron-core stores the transposed matrix."""
    fused_range: StoredRange | None = None
    """Position in the file's tensor, if that tensor contains other weights too; otherwise None."""
    is_trained: bool = True
    """Whether gradients train the weight."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole weight."""
        return math.prod(self.shape)

    @property
    def stored_range(self) -> StoredRange:
        """Position of the weight in the tensors of a file."""
        return self.fused_range or StoredRange(self.name, self.shape)

    def count_copies(self, size: int) -> int:
        """Return the number of tensor-parallel ranks that hold the same slice of a split weight.

        It is above 1 only for the weights of KV heads, with more ranks than KV heads.

        Args:
            size: Number of tensor-parallel ranks.
        """
        if self.axis is None or self.unit == 1:
            return 1
        return max(1, size // (self.shape[self.axis] // self.unit))


@dataclass(frozen=True)
class Slice:
    """The range `[start, stop)` of the dimension `axis` of a named tensor."""

    name: str
    axis: int | None
    """None if the slice is the whole tensor; then `start` and `stop` have no meaning."""
    start: int
    stop: int


def cut_shape(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> tuple[int, ...]:
    """Return the shape of the range `[start, stop)` of `axis`; None selects the whole tensor."""
    return tuple(
        stop - start if dimension == axis else size for dimension, size in enumerate(shape)
    )


def group_by_stored_tensor(table: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Group weights by the tensor of a file that contains them.

    Returns:
        The weights of each tensor by the tensor's name, in the order in which the tensor contains
        them.
    """
    tensors: dict[str, list[TensorSpec]] = {}
    for spec in table:
        tensors.setdefault(spec.stored_range.name, []).append(spec)
    return tensors


def group_by_parameter(table: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Group weights by megatron-core's parameter that contains them, by its name."""
    parameters: dict[str, list[TensorSpec]] = {}
    for spec in table:
        parameters.setdefault(spec.parameter, []).append(spec)
    return parameters


def weight_table(shape: ModelShape, head: Head = "vocabulary") -> tuple[TensorSpec, ...]:
    """Return every weight of a model, in checkpoint order.

    Args:
        shape: The model's shape.
        head: Head of the model. A language model whose embeddings are tied has no weight for its
            head.
    """
    sizes = {
        "one": 1,
        "hidden": shape.hidden_size,
        "head": shape.head_dim,
        "heads": shape.num_heads,
        "query": shape.num_heads * shape.head_dim,
        "gated_query": 2 * shape.num_heads * shape.head_dim,
        "key": shape.num_kv_heads * shape.head_dim,
        "qkv": (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
        "ffn": shape.ffn_hidden_size,
        "expert_ffn": 0 if shape.experts is None else shape.experts.ffn_hidden_size,
        "shared_ffn": 0 if shape.experts is None else shape.experts.shared_size,
        "vocabulary": shape.vocab_size,
        "positions": shape.max_positions,
        "experts": shape.num_experts,
        **_delta_net_sizes(shape.delta_net),
    }
    latent = shape.latent_attention
    if latent is not None:
        sizes |= {
            "query_latent": latent.q_lora_rank or 0,
            "key_latent": latent.kv_lora_rank,
            "key_latent_and_rope": latent.cached_dim,
            "key_and_value": shape.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim),
            "attended": shape.num_heads * latent.v_head_dim,
        }
    weights = [
        weight
        for weight in WEIGHTS[shape.family]
        if not weight.requires or getattr(shape, weight.requires)
    ]
    layer_weights = [weight for weight in weights if "{layer}" in weight.name]
    outer_weights = [weight for weight in weights if "{layer}" not in weight.name]

    is_tied = shape.tied_embeddings and head == "vocabulary"
    if is_tied or head == "scalar":
        outer_weights = [
            weight for weight in outer_weights if not weight.parameter.startswith("output_layer.")
        ]
    if head == "scalar":
        outer_weights.append(SCALAR_HEAD)
    embeddings = [weight for weight in outer_weights if weight.parameter.startswith("embedding.")]
    final_weights = [
        weight for weight in outer_weights if not weight.parameter.startswith("embedding.")
    ]

    # With tied embeddings the last stage needs a copy of the word embedding for its head. Position
    # embeddings, which tensor parallelism does not split, are only in the first stage.
    embedding_stages = ("first", "last") if is_tied else ("first",)
    return (
        *(
            _spec(weight, sizes, stages=embedding_stages if weight.split_axis == 0 else ("first",))
            for weight in embeddings
        ),
        *(
            spec
            for layer in range(shape.num_layers)
            for spec in _layer_specs(
                [weight for weight in layer_weights if _is_in_layer(weight, shape.layers[layer])],
                sizes,
                layer,
                shape.num_experts,
            )
        ),
        *(_spec(weight, sizes, stages=("last",)) for weight in final_weights),
    )


def _delta_net_sizes(net: DeltaNet | None) -> dict[str, int]:
    """Return the sizes of the dimensions of a gated delta net; none without one."""
    if net is None:
        return {}
    return {
        "delta_key": net.key_heads * net.key_dim,
        "delta_value": net.value_heads * net.value_dim,
        "delta_heads": net.value_heads,
        "delta_head": net.value_dim,
        "delta_conv": net.conv_width,
        "delta_input": net.channels + net.value_heads * net.value_dim,
        "delta_gates": 2 * net.value_heads,
        "delta_groups": net.key_heads,
    }


def _is_in_layer(weight: Weight, layer: LayerShape) -> bool:
    """Return whether a layer has a weight of the family's table."""
    return weight.layer_requires is None or bool(getattr(layer, weight.layer_requires))


def _layer_specs(
    weights: Iterable[Weight], sizes: dict[str, int], layer: int, experts: int
) -> Iterator[TensorSpec]:
    """Yield the weights of a layer: first those outside the experts, then those of each expert."""
    expert_weights = [weight for weight in weights if "{expert}" in weight.name]
    yield from (_spec(weight, sizes, layer) for weight in weights if weight not in expert_weights)
    for expert in range(experts):
        yield from (_spec(weight, sizes, layer, expert) for weight in expert_weights)


def _spec(
    weight: Weight,
    sizes: dict[str, int],
    layer: int | None = None,
    expert: int | None = None,
    stages: tuple[str, ...] = (),
) -> TensorSpec:
    """Return the spec of one weight of a model.

    Args:
        weight: The kind of weight, from the family's table.
        sizes: Size of each dimension of `weight.sizes` in this model.
        layer: Index of the decoder layer; None for a weight outside the layers.
        expert: Index of the expert; None for a weight outside the experts.
        stages: For a weight outside the layers, the pipeline stages that hold a copy.
    """
    shape = tuple(sizes[size] for size in weight.sizes)
    axis = weight.split_axis
    # A split must not separate the rows of a head. A unit of fused QKV is a KV group: the rows of a
    # key head, its value head and all its query heads.
    units = {
        "query": sizes["head"],
        "key": sizes["head"],
        "gated_query": 2 * sizes["head"],
        "qkv": sizes["head"] * sizes["qkv"] // sizes["key"],
    }
    heads = sizes["query"] // sizes["head"]
    for name in ("key_and_value", "attended"):
        units[name] = sizes.get(name, 0) // heads
    # A unit of a delta net has the rows of a key head and of its value heads.
    for size in ("delta_key", "delta_value", "delta_heads", "delta_input", "delta_gates"):
        if size in sizes:
            units[size] = sizes[size] // sizes["delta_groups"]
    unit = 1 if axis is None else units.get(weight.sizes[axis], 1)
    if weight.is_transposed:
        shape = shape[::-1]
        axis = None if axis is None else 1 - axis

    fused_range = None
    if weight.fused_in is not None:
        name = weight.fused_in.format(layer=layer)
        fused_range = _fuse(StoredRange(name, shape), weight, axis, sizes)
        if expert is not None:
            fused_range = replace(
                fused_range, shape=(sizes["experts"], *fused_range.shape), expert=expert
            )
    return TensorSpec(
        name=weight.name.format(layer=layer, expert=expert),
        shape=shape,
        axis=axis,
        unit=unit,
        layer=layer,
        stages=stages,
        expert=expert,
        parameter=weight.parameter.format(layer=layer, expert=expert),
        part=weight.part,
        is_transposed=weight.is_transposed,
        fused_range=fused_range,
        is_trained=weight.is_trained,
    )


def _fuse(
    whole: StoredRange, weight: Weight, axis: int | None, sizes: Mapping[str, int]
) -> StoredRange:
    """Return the position of a part in a tensor that contains all parts of a fused parameter.

    Args:
        whole: The tensor, with the shape of the part.
        weight: The kind of weight.
        axis: Dimension along which the tensor contains the parts.
        sizes: Size of each dimension of the weights in this model.
    """
    if weight.part == "whole":
        return whole
    assert axis is not None
    parts = next(parts for parts in FUSED_PARTS if weight.part in parts)
    own_size = whole.shape[axis]
    part_sizes = [sizes[_PART_SIZES[part]] if part in _PART_SIZES else own_size for part in parts]
    index = parts.index(weight.part)
    shape = tuple(
        sum(part_sizes) if dimension == axis else size for dimension, size in enumerate(whole.shape)
    )
    if weight.is_interleaved:
        return replace(whole, shape=shape, axis=axis, start=index, step=len(parts))
    return replace(whole, shape=shape, axis=axis, start=sum(part_sizes[:index]))


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank in a layout.

    The ranks of a pipeline stage have two decompositions: tensor, context and data parallelism for
    dense weights; expert-tensor and expert parallelism for experts.
    """

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int


def compute_coordinates(rank: int, layout: ParallelConfig) -> Coordinates:
    """Return the coordinates of a rank in Megatron's default order.

    Tensor parallelism varies fastest, then context and data parallelism; pipeline parallelism
    varies slowest. For experts, expert-tensor parallelism varies fastest, then expert parallelism,
    then data parallelism of the experts.
    """
    tensor = rank % layout.tensor
    rest = rank // layout.tensor
    context, rest = rest % layout.context, rest // layout.context
    return Coordinates(
        tensor=tensor,
        context=context,
        data=rest % layout.data,
        pipeline=rest // layout.data,
        expert_tensor=rank % layout.expert_tensor_size,
        expert=rank // layout.expert_tensor_size % layout.expert,
    )


def compute_shard_size(total: int, size: int, multiple: int = 1) -> int:
    """Return the size of each tensor-parallel rank's shard of a dimension, including padding.

    All shards have the same size: the dimension is padded to a multiple of `multiple`, and then of
    `size`. The padding is in the last shards. Only the vocabulary needs padding.

    Args:
        total: Size of the dimension without padding.
        size: Number of tensor-parallel ranks.
        multiple: Number of which the padded dimension is a multiple before it is split.
    """
    padded = -(-total // multiple) * multiple
    return -(-padded // size)


def compute_tensor_slice(spec: TensorSpec, rank: int, size: int, multiple: int = 1) -> Slice:
    """Return the slice of a weight that a tensor-parallel rank holds.

    With more ranks than KV heads, consecutive ranks hold the same slice of a KV head's weights.

    A rank whose shard is only padding gets the whole weight, because a slice is never empty.
    This can happen only if `multiple` exceeds 1 and the vocabulary is tiny; `layouts` reports the
    other cases.

    Args:
        spec: The weight.
        rank: Tensor-parallel rank.
        size: Number of tensor-parallel ranks.
        multiple: The split dimension is padded to a multiple of this number, and then of `size`.
            Padding is not part of a slice.
    """
    if spec.axis is None or size == 1:
        return Slice(spec.name, None, 0, 0)
    total = spec.shape[spec.axis]
    copies = spec.count_copies(size)
    shard = rank // copies
    shard_size = compute_shard_size(total, size // copies, multiple)
    start, stop = (min(index * shard_size, total) for index in (shard, shard + 1))
    is_whole = start == stop or (start, stop) == (0, total)
    return Slice(spec.name, None, 0, 0) if is_whole else Slice(spec.name, spec.axis, start, stop)


def compute_trainer_slices(
    table: tuple[TensorSpec, ...], shape: ModelShape, layout: ParallelConfig, rank: int
) -> dict[str, Slice]:
    """Return the slices that a rank of the trainer holds, by the name of the weight.

    Args:
        table: The weights of the model or of its adapters.
        shape: The model's shape.
        layout: Layout of the trainer.
        rank: Rank of the trainer.
    """
    rank_coordinates = compute_coordinates(rank, layout)
    layers = {
        layer for chunk in stage_layers(shape, layout, rank_coordinates.pipeline) for layer in chunk
    }
    stage_names = _name_stage(rank_coordinates.pipeline, layout.pipeline)
    experts = _count_experts(table)

    def holds(spec: TensorSpec) -> bool:
        if spec.layer is None:
            return bool(stage_names.intersection(spec.stages))
        # Each expert-parallel rank holds consecutive experts.
        return spec.layer in layers and (
            spec.expert is None or spec.expert * layout.expert // experts == rank_coordinates.expert
        )

    def rank_slice(spec: TensorSpec) -> Slice:
        if spec.expert is not None:
            return compute_tensor_slice(
                spec, rank_coordinates.expert_tensor, layout.expert_tensor_size
            )
        return compute_tensor_slice(spec, rank_coordinates.tensor, layout.tensor)

    return {spec.name: rank_slice(spec) for spec in table if holds(spec)}


def compute_engine_slices(
    table: tuple[TensorSpec, ...],
    layout: EngineParallelConfig,
    rank: int,
    vocabulary_multiple: int = 1,
    *,
    has_outer_weights_on_all_stages: bool = False,
) -> dict[str, Slice]:
    """Return the slices that a rank of the engine holds, by the name of the weight.

    Tensor parallelism varies fastest, then the pipeline stage; replicas vary slowest. Consecutive
    tensor-parallel ranks split the same experts.

    Args:
        table: The model's weight table.
        layout: Layout of the engine.
        rank: Rank of the engine.
        vocabulary_multiple: The engine pads the vocabulary to a multiple of this number before
            splitting it.
        has_outer_weights_on_all_stages: Whether every pipeline stage holds the weights outside the
            layers; otherwise only the stages that use them.
    """
    tensor_rank = rank % layout.tensor
    stage = rank // layout.tensor % layout.pipeline
    expert_rank, expert_tensor_rank = divmod(tensor_rank, layout.expert_tensor_size)
    experts = _count_experts(table)
    stage_names = _name_stage(stage, layout.pipeline)
    layers = get_engine_stage_layers(_count_layers(table), layout.pipeline, stage)

    def holds(spec: TensorSpec) -> bool:
        if spec.layer is None:
            return has_outer_weights_on_all_stages or bool(stage_names.intersection(spec.stages))
        return spec.layer in layers and (
            spec.expert is None or spec.expert * layout.expert // experts == expert_rank
        )

    def rank_slice(spec: TensorSpec) -> Slice:
        if spec.expert is not None:
            return compute_tensor_slice(spec, expert_tensor_rank, layout.expert_tensor_size)
        multiple = vocabulary_multiple if spec.layer is None else 1
        return compute_tensor_slice(spec, tensor_rank, layout.tensor, multiple)

    return {spec.name: rank_slice(spec) for spec in table if holds(spec)}


def _name_stage(stage: int, stages: int) -> set[str]:
    """Return the names of a stage in `TensorSpec.stages`; none for a middle stage."""
    # A pipeline with one stage is both first and last.
    return {name for name, index in (("first", 0), ("last", stages - 1)) if index == stage}


def _count_layers(table: Iterable[TensorSpec]) -> int:
    """Return the number of layers of a model."""
    return 1 + max((spec.layer for spec in table if spec.layer is not None), default=-1)


def _count_experts(table: Iterable[TensorSpec]) -> int:
    """Return the number of experts of a layer; 0 without experts."""
    return 1 + max((spec.expert for spec in table if spec.expert is not None), default=-1)


TARGETS = {"attention": "self_attention", "mlp": "mlp"}
"""For each value of `lora.targets`, the submodule of megatron-core's layer whose linear layers get
adapters."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the low-rank factors of the update of a weight W [out, in].

    The update is (alpha / rank) × up [out, rank] × down [rank, in] (Hu et al. 2021).
    """

    weight: TensorSpec
    down: TensorSpec
    """PEFT's lora_A. Weights that are stored in one tensor of the file (GPT-2's query, key and
    value) share this factor, as they do in PEFT."""
    up: TensorSpec
    """PEFT's lora_B."""


def build_adapter_map(table: Iterable[TensorSpec], lora: LoraConfig) -> dict[str, Adapter]:
    """Return the adapters of a model by the name of their weight, in the order of the table.

    There are no adapters if the rank is 0.
    """
    if not lora.rank:
        return {}
    modules = tuple(f".{TARGETS[target]}.linear_" for target in lora.targets)
    return {
        spec.name: _adapter(spec, lora.rank)
        for spec in table
        if spec.parameter.endswith(".weight")
        and any(module in spec.parameter for module in modules)
    }


def build_adapter_table(adapters: Mapping[str, Adapter]) -> tuple[TensorSpec, ...]:
    """Return every tensor of the adapters once; adapters can share a factor."""
    return tuple(
        dict.fromkeys(spec for adapter in adapters.values() for spec in (adapter.down, adapter.up))
    )


def _adapter(weight: TensorSpec, rank: int) -> Adapter:
    outputs, inputs = weight.shape[::-1] if weight.is_transposed else weight.shape
    # A column-parallel layer splits its outputs, a row-parallel layer its inputs. The adapter
    # splits the factor that has the same dimension. A layer that is not split splits neither.
    splits_outputs = weight.axis == (1 if weight.is_transposed else 0)
    splits_inputs = weight.axis == (0 if weight.is_transposed else 1)
    linear = weight.parameter.removesuffix(".weight")
    name = weight.name.removesuffix(".weight")
    stored_name = weight.stored_range.name.removesuffix(".weight")
    fused_range = None
    if weight.fused_range is not None and weight.fused_range.axis is not None:
        fused_size = weight.fused_range.shape[weight.fused_range.axis]
        fused_range = StoredRange(
            f"{stored_name}.lora_B.weight", (fused_size, rank), 0, weight.fused_range.start
        )
    down = TensorSpec(
        name=f"{stored_name}.lora_A.weight",
        shape=(rank, inputs),
        axis=1 if splits_inputs else None,
        layer=weight.layer,
        parameter=f"{linear}.adapter.down.{stored_name.rsplit('.', 1)[-1]}",
    )
    up = TensorSpec(
        name=f"{name}.lora_B.weight",
        shape=(outputs, rank),
        axis=0 if splits_outputs else None,
        unit=weight.unit if splits_outputs else 1,
        layer=weight.layer,
        parameter=f"{linear}.adapter.up.{name.rsplit('.', 1)[-1]}",
        fused_range=fused_range,
    )
    return Adapter(weight, down, up)


def is_layer_matrix(spec: TensorSpec) -> bool:
    """Return whether Muon updates a weight: whether it is a matrix of a decoder layer.

    Adam updates embeddings, heads, norms and biases.
    """
    return spec.layer is not None and len(spec.shape) == 2


def frozen_names(
    table: Iterable[TensorSpec], patterns: Sequence[str], key: str = "frozen"
) -> frozenset[str]:
    """Return the names of the weights that patterns freeze.

    Args:
        table: The model's weight table.
        patterns: Shell patterns (`*`, `?`, `[0-7]`, see fnmatch) of Hugging Face names. A pattern
            matches a weight by its own name or by the name of the file's tensor that contains it.
        key: Configuration key of the patterns, for errors.

    Raises:
        ConfigError: A pattern matches no weight, only a part of a parameter would be frozen, or no
            weight would be trained.
    """
    specs = tuple(table)
    frozen: set[str] = set()
    for pattern in patterns:
        matches = {
            spec.name
            for spec in specs
            if fnmatchcase(spec.name, pattern) or fnmatchcase(spec.stored_range.name, pattern)
        }
        if not matches:
            raise ConfigError(
                f"{key}: the pattern {pattern!r} matches no weight; examples of weight names:"
                f" {_examples(specs)}"
            )
        frozen |= matches
    if frozen and all(spec.name in frozen for spec in specs if spec.is_trained):
        raise ConfigError(
            f"{key}: {', '.join(patterns)} freeze all {len(specs)} weights of the model; at least"
            " one weight must be trained"
        )
    _check_whole_parameters(specs, frozen, key)
    return frozenset(frozen)


def _examples(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in (specs[0], specs[len(specs) // 2], specs[-1]))


def _check_whole_parameters(specs: Sequence[TensorSpec], frozen: Collection[str], key: str) -> None:
    """Raise ConfigError if a parameter is partly frozen, or a QKV weight without its bias."""
    parameters = group_by_parameter(specs)
    for parameter, parts in parameters.items():
        frozen_parts = [spec.name for spec in parts if spec.name in frozen]
        trained_parts = [spec.name for spec in parts if spec.name not in frozen]
        if frozen_parts and trained_parts:
            raise ConfigError(
                f"{key}: {', '.join(frozen_parts)} would be frozen, but"
                f" {', '.join(trained_parts)} would be trained. All of these weights are parts of"
                " one parameter; freeze all of them or none of them"
            )
        # megatron-core's matmul with a frozen weight computes no gradient of the bias that it adds.
        bias = parameters.get(parameter.removesuffix("weight") + "bias", [])
        if (
            frozen_parts
            and parameter.endswith("linear_qkv.weight")
            and any(spec.name not in frozen for spec in bias)
        ):
            raise ConfigError(
                f"{key}: {', '.join(frozen_parts)} would be frozen, but"
                f" {', '.join(spec.name for spec in bias)} would be trained; freeze the biases of"
                " query, key and value together with the weights"
            )
