"""Which slice of which weight lives where: pure functions of a model's shape and a parallel layout.

Tensors go by their Hugging Face names and in their orientation everywhere. The Megatron room, the
resharding plan and the engines all read their slices from here, so there is one definition of how a
model is cut.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from aligner.errors import ConfigError
from aligner.models.families import SCALAR_HEAD, WEIGHTS, Part, Weight
from aligner.models.shape import ModelShape
from aligner.schema import EngineParallelConfig, LoraConfig, ParallelConfig

Head = Literal["vocabulary", "scalar"]


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the tensor of a file: a range of one dimension, or all of it."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    start: int = 0


@dataclass(frozen=True)
class TensorSpec:
    """A weight of the whole model: its name, its full shape, and how layouts cut it."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    """Dimension that tensor parallelism cuts evenly; None: every tensor-parallel rank holds all of
    it."""
    unit: int = 1
    """How much of that dimension belongs together, so that no cut goes through it: an attention
    head."""
    layer: int | None = None
    """Decoder layer that it belongs to; None: an embedding, final norm or head."""
    stages: tuple[str, ...] = ()
    """For a tensor outside the layers: the pipeline stages, first and/or last, that hold a copy."""
    expert: int | None = None
    """Expert that it belongs to, in a mixture of experts."""
    parameter: str = ""
    """megatron-core's parameter, with layers and experts counted over the whole model."""
    part: Part = "whole"
    """Which part of that parameter."""
    transposed: bool = False
    """Whether megatron-core's orientation is the other one."""
    fused: Stored | None = None
    """Where it lies in the file's tensor, when it is only a part of one."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def stored(self) -> Stored:
        """Where it lies in a file."""
        return self.fused or Stored(self.name, self.shape)


@dataclass(frozen=True)
class Slice:
    """The part `[start, stop)` along `axis` of a named tensor; `axis` None is the whole tensor."""

    name: str
    axis: int | None
    start: int
    stop: int


def cut_shape(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> tuple[int, ...]:
    """Shape of the part `[start, stop)` along `axis` of a tensor; `axis` None is the whole
    tensor."""
    return tuple(stop - start if at == axis else size for at, size in enumerate(shape))


def stored_tensors(table: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """The tensors of a file by name, each with those of the table that lie in it, in their order
    there."""
    tensors: dict[str, list[TensorSpec]] = {}
    for spec in table:
        tensors.setdefault(spec.stored.name, []).append(spec)
    return tensors


def weight_table(shape: ModelShape, head: Head = "vocabulary") -> tuple[TensorSpec, ...]:
    """Every weight of a model, in checkpoint order.

    The head is the language model's (none of its own when it is tied to the embedding), or one
    number a token.
    """
    sizes = {
        "one": 1,
        "hidden": shape.hidden_size,
        "head": shape.head_dim,
        "query": shape.num_heads * shape.head_dim,
        "key": shape.num_kv_heads * shape.head_dim,
        "qkv": (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
        "ffn": shape.ffn_hidden_size,
        "vocabulary": shape.vocab_size,
        "positions": shape.max_positions,
        "experts": shape.num_experts,
    }
    weights = [
        weight for weight in WEIGHTS[shape.family] if not weight.when or getattr(shape, weight.when)
    ]
    in_layer = [weight for weight in weights if "{layer}" in weight.name]
    outside = [weight for weight in weights if "{layer}" not in weight.name]
    tied = shape.tied_embeddings and head == "vocabulary"
    if tied or head == "scalar":
        outside = [weight for weight in outside if not weight.parameter.startswith("output_layer.")]
    if head == "scalar":
        outside.append(SCALAR_HEAD)
    before = [weight for weight in outside if weight.parameter.startswith("embedding.")]
    after = [weight for weight in outside if not weight.parameter.startswith("embedding.")]
    embedding_stages = ("first", "last") if tied else ("first",)
    return (
        *(
            _spec(weight, sizes, stages=embedding_stages if weight.cut == 0 else ("first",))
            for weight in before
        ),
        *(
            spec
            for layer in range(shape.num_layers)
            for spec in _layer_specs(in_layer, sizes, layer, shape.num_experts)
        ),
        *(_spec(weight, sizes, stages=("last",)) for weight in after),
    )


def _layer_specs(
    weights: Iterable[Weight], sizes: dict[str, int], layer: int, experts: int
) -> Iterator[TensorSpec]:
    of_experts = [weight for weight in weights if "{expert}" in weight.name]
    yield from (_spec(weight, sizes, layer) for weight in weights if weight not in of_experts)
    for expert in range(experts):
        yield from (_spec(weight, sizes, layer, expert) for weight in of_experts)


def _spec(
    weight: Weight,
    sizes: dict[str, int],
    layer: int | None = None,
    expert: int | None = None,
    stages: tuple[str, ...] = (),
) -> TensorSpec:
    shape = tuple(sizes[size] for size in weight.sizes)
    axis = weight.cut
    units = {
        "query": sizes["head"],
        "key": sizes["head"],
        "qkv": sizes["head"] * sizes["qkv"] // sizes["key"],
    }
    unit = 1 if axis is None else units.get(weight.sizes[axis], 1)
    if weight.transposed:
        shape = shape[::-1]
        axis = None if axis is None else 1 - axis
    fused = None
    if weight.fused_in is not None:
        assert axis is not None
        parts = ("query", "key", "value")
        whole = tuple(size * len(parts) if at == axis else size for at, size in enumerate(shape))
        fused = Stored(
            weight.fused_in.format(layer=layer), whole, axis, parts.index(weight.part) * shape[axis]
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
        transposed=weight.transposed,
        fused=fused,
    )


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in a layout. The expert dimensions cut the same ranks of a pipeline stage in
    their own way."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int


def coordinates(rank: int, layout: ParallelConfig) -> Coordinates:
    """Place of a rank in Megatron's default order: tensor fastest, then context, data, and pipeline
    slowest.

    For experts: the expert's tensor ranks fastest, then experts, then their data-parallel replicas.
    """
    tensor, rest = rank % layout.tensor, rank // layout.tensor
    context, rest = rest % layout.context, rest // layout.context
    return Coordinates(
        tensor=tensor,
        context=context,
        data=rest % layout.data,
        pipeline=rest // layout.data,
        expert_tensor=rank % layout.expert_tensor_size,
        expert=rank // layout.expert_tensor_size % layout.expert,
    )


def vocabulary_rows(vocab_size: int, size: int, multiple: int = 1) -> int:
    """Return the rows of an embedding or head on each of `size` tensor-parallel ranks.

    All ranks have equally many: the vocabulary is padded to a multiple of `multiple`, and then of
    `size`. The last ranks hold the padding, which is not a token.
    """
    padded = -(-vocab_size // multiple) * multiple
    return -(-padded // size)


def tensor_slice(spec: TensorSpec, rank: int, size: int, multiple: int = 1) -> Slice:
    """What a tensor-parallel rank, of so many, holds of a tensor that is cut as if it had the next
    `multiple` of entries, and of `size`."""
    if spec.axis is None or size == 1:
        return Slice(spec.name, None, 0, 0)
    entries = spec.shape[spec.axis]
    step = vocabulary_rows(entries, size, multiple)
    start, stop = (min(at * step, entries) for at in (rank, rank + 1))
    # Padding alone has no slice.
    return (
        Slice(spec.name, None, 0, 0) if start == stop else Slice(spec.name, spec.axis, start, stop)
    )


def stage_layers(num_layers: int, layout: ParallelConfig, stage: int) -> list[range]:
    """The decoder layers of a pipeline stage, one range for each of its model chunks.

    Plain pipelines have one chunk a stage, and the last stage may have fewer layers. With
    `virtual_pipeline` chunks, chunk c of stage s is the (c x stages + s)-th of equal parts
    (Narayanan et al. 2021, section 2.2).
    """
    stages, chunks = layout.pipeline, layout.virtual_pipeline
    if chunks > 1:
        size = num_layers // (stages * chunks)
        return [
            range((chunk * stages + stage) * size, (chunk * stages + stage + 1) * size)
            for chunk in range(chunks)
        ]
    if stages == 1:
        return [range(num_layers)]
    last = num_layers // stages if layout.last_stage_layers is None else layout.last_stage_layers
    size = (num_layers - last) // (stages - 1)
    return [range(stage * size, num_layers if stage == stages - 1 else (stage + 1) * size)]


def trainer_slices(
    table: tuple[TensorSpec, ...], num_layers: int, layout: ParallelConfig, rank: int
) -> dict[str, Slice]:
    """The slices that a Megatron rank holds, by tensor name."""
    place = coordinates(rank, layout)
    layers = {
        layer for chunk in stage_layers(num_layers, layout, place.pipeline) for layer in chunk
    }
    here = {
        stage for stage, at in (("first", 0), ("last", layout.pipeline - 1)) if at == place.pipeline
    }
    experts = 1 + max((spec.expert for spec in table if spec.expert is not None), default=-1)

    def holds(spec: TensorSpec) -> bool:
        if spec.layer is None:
            return bool(here.intersection(spec.stages))
        return spec.layer in layers and (
            spec.expert is None or spec.expert * layout.expert // experts == place.expert
        )

    def piece(spec: TensorSpec) -> Slice:
        if spec.expert is not None:
            return tensor_slice(spec, place.expert_tensor, layout.expert_tensor_size)
        return tensor_slice(spec, place.tensor, layout.tensor)

    return {spec.name: piece(spec) for spec in table if holds(spec)}


def engine_slices(
    table: tuple[TensorSpec, ...],
    layout: EngineParallelConfig,
    rank: int,
    vocabulary_multiple: int = 1,
) -> dict[str, Slice]:
    """The slices that an engine rank holds, by tensor name: tensor-parallel fastest, replicas
    slowest.

    An engine that pads the vocabulary cuts it as if it had the next multiple of
    `vocabulary_multiple` entries.
    """
    return {
        spec.name: tensor_slice(
            spec,
            rank % layout.tensor,
            layout.tensor,
            vocabulary_multiple if spec.layer is None else 1,
        )
        for spec in table
    }


TARGETS = {"attention": "self_attention", "mlp": "mlp"}
"""A target of the configuration to the part of megatron-core's layer that holds its linear layers.
"""


@dataclass(frozen=True)
class Adapter:
    """The factors of what is added to a weight W [out, in]: (alpha / rank) x up [out, rank] x down
    [rank, in]."""

    weight: TensorSpec
    down: TensorSpec
    """PEFT's lora_A. Weights that lie in one tensor of the file (GPT-2's query, key, value) share
    it, as they do in PEFT."""
    up: TensorSpec
    """PEFT's lora_B."""


def adapter_map(table: Iterable[TensorSpec], lora: LoraConfig) -> dict[str, Adapter]:
    """The adapters of a model by the name of their weight, in the table's order; none when the rank
    is 0."""
    if not lora.rank:
        return {}
    modules = tuple(f".{TARGETS[target]}.linear_" for target in lora.targets)
    return {
        spec.name: _adapter(spec, lora.rank)
        for spec in table
        if spec.parameter.endswith(".weight")
        and any(module in spec.parameter for module in modules)
    }


def adapter_table(adapters: Mapping[str, Adapter]) -> tuple[TensorSpec, ...]:
    """Every tensor of the adapters once."""
    return tuple(
        dict.fromkeys(spec for adapter in adapters.values() for spec in (adapter.down, adapter.up))
    )


def _adapter(weight: TensorSpec, rank: int) -> Adapter:
    outputs, inputs = weight.shape[::-1] if weight.transposed else weight.shape
    cuts_outputs = weight.axis == (1 if weight.transposed else 0)
    linear = weight.parameter.removesuffix(".weight")
    name, stored = weight.name.removesuffix(".weight"), weight.stored.name.removesuffix(".weight")
    fused = None
    if weight.fused is not None and weight.fused.axis is not None:
        whole = weight.fused.shape[weight.fused.axis]
        fused = Stored(f"{stored}.lora_B.weight", (whole, rank), 0, weight.fused.start)
    down = TensorSpec(
        name=f"{stored}.lora_A.weight",
        shape=(rank, inputs),
        axis=None if cuts_outputs else 1,
        layer=weight.layer,
        parameter=f"{linear}.adapter.down.{stored.rsplit('.', 1)[-1]}",
    )
    up = TensorSpec(
        name=f"{name}.lora_B.weight",
        shape=(outputs, rank),
        axis=0 if cuts_outputs else None,
        layer=weight.layer,
        parameter=f"{linear}.adapter.up.{name.rsplit('.', 1)[-1]}",
        fused=fused,
    )
    return Adapter(weight, down, up)


def is_layer_matrix(spec: TensorSpec) -> bool:
    """Whether Muon updates a weight: a matrix of a decoder layer. Embeddings, heads, norms and
    biases are Adam's."""
    return spec.layer is not None and len(spec.shape) == 2


def frozen_names(
    table: Iterable[TensorSpec], patterns: Sequence[str], key: str = "frozen"
) -> frozenset[str]:
    """The names of the weights that the patterns freeze; `key` names the setting in errors.

    A pattern is a shell's (`*`, `?`, `[0-7]`, as in fnmatch) over Hugging Face names, and matches a
    weight by its own name or by that of the file's tensor that it is a part of. Raises ConfigError
    for a pattern that matches nothing, for a parameter of which only a part would be frozen, and
    when nothing is left to train.
    """
    specs = tuple(table)
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {
            spec.name
            for spec in specs
            if fnmatchcase(spec.name, pattern) or fnmatchcase(spec.stored.name, pattern)
        }
        if not matched:
            raise ConfigError(
                f"{key}: the pattern {pattern!r} matches no weight; examples of weight names:"
                f" {_examples(specs)}"
            )
        frozen |= matched
    if frozen and len(frozen) == len(specs):
        raise ConfigError(
            f"{key}: {', '.join(patterns)} freeze all {len(specs)} weights of the model; at least"
            " one weight must be trained"
        )
    _check_whole_parameters(specs, frozen, key)
    return frozenset(frozen)


def _examples(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in (specs[0], specs[len(specs) // 2], specs[-1]))


def _check_whole_parameters(specs: Sequence[TensorSpec], frozen: Collection[str], key: str) -> None:
    fused: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        fused.setdefault(spec.parameter, []).append(spec)
    for parameter, parts in fused.items():
        chosen = [spec.name for spec in parts if spec.name in frozen]
        left = [spec.name for spec in parts if spec.name not in frozen]
        if chosen and left:
            raise ConfigError(
                f"{key}: {', '.join(chosen)} would be frozen, but {', '.join(left)} would be"
                " trained. All of these weights are parts of one parameter; freeze all of them or"
                " none of them"
            )
        # megatron-core's product with a frozen weight gives the bias that it adds no gradient.
        bias = fused.get(parameter.removesuffix("weight") + "bias", [])
        if (
            chosen
            and parameter.endswith("linear_qkv.weight")
            and any(spec.name not in frozen for spec in bias)
        ):
            raise ConfigError(
                f"{key}: {', '.join(chosen)} would be frozen, but"
                f" {', '.join(spec.name for spec in bias)} would be trained; freeze the biases of"
                " query, key and value together with the weights"
            )
