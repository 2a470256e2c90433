"""Which slice of which weight lives where: pure functions of a model's shape and a parallel layout.

Tensors go by their Hugging Face names everywhere. The Megatron room, the resharding plan and the engines all read their
slices from here, so there is one definition of how a model is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.model_shape import ModelShape
from aligner.config.schema import EngineParallel, Parallel


@dataclass(frozen=True)
class TensorSpec:
    """A weight of the whole model: its name, its full shape, and how layouts cut it."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    """Dimension that tensor parallelism cuts evenly; None: every tensor-parallel rank holds all of it."""
    layer: int | None = None
    """Decoder layer that it belongs to; None: an embedding, final norm or head."""
    stages: tuple[str, ...] = ()
    """For a tensor outside the layers: the pipeline stages, first and/or last, that hold a copy."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True)
class Slice:
    """The part `[start, stop)` along `axis` of a named tensor; `axis` None is the whole tensor."""

    name: str
    axis: int | None
    start: int
    stop: int


def weight_table(shape: ModelShape, *, with_head: bool = True) -> tuple[TensorSpec, ...]:
    """Every weight of a Llama-family model, in checkpoint order.

    `with_head` False leaves out the language-model head (a critic or reward model has a scalar head of its own).
    """
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tied = shape.tied_embeddings and with_head
    embedding_stages = ("first", "last") if tied else ("first",)
    specs = [TensorSpec("model.embed_tokens.weight", (shape.vocab_size, hidden), 0, stages=embedding_stages)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        specs += [
            TensorSpec(prefix + "input_layernorm.weight", (hidden,), None, layer),
            TensorSpec(prefix + "self_attn.q_proj.weight", (q_rows, hidden), 0, layer),
            TensorSpec(prefix + "self_attn.k_proj.weight", (kv_rows, hidden), 0, layer),
            TensorSpec(prefix + "self_attn.v_proj.weight", (kv_rows, hidden), 0, layer),
            TensorSpec(prefix + "self_attn.o_proj.weight", (hidden, q_rows), 1, layer),
            TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), None, layer),
            TensorSpec(prefix + "mlp.gate_proj.weight", (ffn, hidden), 0, layer),
            TensorSpec(prefix + "mlp.up_proj.weight", (ffn, hidden), 0, layer),
            TensorSpec(prefix + "mlp.down_proj.weight", (hidden, ffn), 1, layer),
        ]
    specs.append(TensorSpec("model.norm.weight", (hidden,), None, stages=("last",)))
    if with_head and not shape.tied_embeddings:
        specs.append(TensorSpec("lm_head.weight", (shape.vocab_size, hidden), 0, stages=("last",)))
    return tuple(specs)


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in a layout."""

    tensor: int
    data: int
    pipeline: int


def coordinates(rank: int, layout: Parallel) -> Coordinates:
    """Place of a rank in Megatron's default order: tensor fastest, then data, pipeline slowest."""
    tensor, rest = rank % layout.tensor, rank // layout.tensor
    return Coordinates(tensor=tensor, data=rest % layout.data, pipeline=rest // layout.data)


def _cut(spec: TensorSpec, rank: int, size: int) -> Slice:
    if spec.axis is None or size == 1:
        return Slice(spec.name, None, 0, 0)
    step = spec.shape[spec.axis] // size
    return Slice(spec.name, spec.axis, rank * step, (rank + 1) * step)


def first_layers(num_layers: int, layout: Parallel) -> list[int]:
    """The first layer of each pipeline stage, and `num_layers` at the end."""
    if layout.pipeline == 1:
        return [0, num_layers]
    last = num_layers // layout.pipeline if layout.last_stage_layers is None else layout.last_stage_layers
    before = (num_layers - last) // (layout.pipeline - 1)
    return [*(stage * before for stage in range(layout.pipeline)), num_layers]


def trainer_slices(table: tuple[TensorSpec, ...], num_layers: int, layout: Parallel, rank: int) -> dict[str, Slice]:
    """The slices that a Megatron rank holds, by tensor name.

    Layers are split over the pipeline stages in order, as `first_layers` says.
    """
    place = coordinates(rank, layout)
    bounds = first_layers(num_layers, layout)
    here = {stage for stage, at in (("first", 0), ("last", layout.pipeline - 1)) if at == place.pipeline}

    def holds(spec: TensorSpec) -> bool:
        if spec.layer is not None:
            return bounds[place.pipeline] <= spec.layer < bounds[place.pipeline + 1]
        return bool(here.intersection(spec.stages))

    return {spec.name: _cut(spec, place.tensor, layout.tensor) for spec in table if holds(spec)}


def engine_slices(table: tuple[TensorSpec, ...], layout: EngineParallel, rank: int) -> dict[str, Slice]:
    """The slices that an engine rank holds, by tensor name: tensor-parallel fastest, replicas slowest."""
    return {spec.name: _cut(spec, rank % layout.tensor, layout.tensor) for spec in table}
