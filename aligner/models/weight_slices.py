"""Which slice of which weight lives where: pure functions of a model's shape and a parallel layout.

Tensors go by their Hugging Face names and in their orientation everywhere. The Megatron room, the
resharding plan and the engines all read their slices from here, so there is one definition of how a
model is cut.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from aligner.models.families import SCALAR_HEAD, WEIGHTS, Part, Weight
from aligner.models.shape import ModelShape
from aligner.schema import EngineParallelConfig, ParallelConfig

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
