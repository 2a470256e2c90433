"""Whether a model can be cut as a layout says, before any process starts."""

from collections.abc import Iterator

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import vocabulary_rows
from aligner.schema import EngineParallelConfig, ParallelConfig


def cache_bytes_per_token(shape: ModelShape, tensor: int, itemsize: int) -> int:
    """Memory of one token's keys and values on one of `tensor` tensor-parallel ranks, at so many
    bytes a number."""
    return 2 * shape.num_layers * (shape.num_kv_heads // tensor) * shape.head_dim * itemsize


def layout_problems(key: str, layout: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    """One line for each thing that keeps a model from running at a layout; `key` is the layout's
    key."""
    yield from tensor_problems(key, layout.tensor, shape)
    if layout.sequence and layout.tensor == 1:
        yield f"{key}.sequence=true: requires {key}.tensor above 1"
    yield from _stages(key, layout, shape)
    yield from _experts(key, layout, shape)


def engine_problems(layout: EngineParallelConfig, shape: ModelShape) -> Iterator[str]:
    """The same for an engine, whose tensor-parallel ranks cut experts like everything else."""
    yield from tensor_problems("engine.parallel", layout.tensor, shape)
    if shape.num_experts and shape.ffn_hidden_size % layout.tensor:
        yield (
            f"engine.parallel.tensor={layout.tensor}: must divide the {shape.ffn_hidden_size}"
            " feed-forward rows of each expert"
        )


def tensor_sizes(shape: ModelShape, limit: int) -> list[int]:
    """Tensor-parallel sizes up to `limit` that cut the model: every weight evenly, but for the
    vocabulary, which is padded."""
    sizes = _cut_dimensions(shape).values()
    return [
        size
        for size in range(1, limit + 1)
        if all(total % size == 0 for total in sizes) and not _leaves_rank_empty(shape, size)
    ]


def _leaves_rank_empty(shape: ModelShape, size: int) -> bool:
    """Return whether a rank would hold padding of the vocabulary only."""
    return (size - 1) * vocabulary_rows(shape.vocab_size, size) >= shape.vocab_size


def _cut_dimensions(shape: ModelShape) -> dict[str, int]:
    dimensions = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
    }
    # Experts have a tensor-parallel size of their own.
    return (
        dimensions
        if shape.num_experts
        else dimensions | {"feed-forward rows": shape.ffn_hidden_size}
    )


def tensor_problems(key: str, size: int, shape: ModelShape) -> Iterator[str]:
    """What does not divide by a tensor-parallel size."""
    uneven = [f"{total} {what}" for what, total in _cut_dimensions(shape).items() if total % size]
    fitting = ", ".join(map(str, tensor_sizes(shape, shape.num_heads)))
    if _leaves_rank_empty(shape, size):
        yield (
            f"{key}.tensor={size}: too large for a vocabulary of {shape.vocab_size}; valid sizes:"
            f" {fitting}"
        )
    if uneven:
        yield (
            f"{key}.tensor={size}: must divide the model's {', '.join(uneven)}; valid sizes:"
            f" {fitting}"
        )


def _stages(key: str, layout: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    layers, stages, chunks = shape.num_layers, layout.pipeline, layout.virtual_pipeline
    if chunks > 1:
        if stages == 1:
            yield f"{key}.virtual_pipeline={chunks}: requires {key}.pipeline above 1"
        elif layers % (stages * chunks):
            yield (
                f"{key}.virtual_pipeline={chunks}: the model's {layers} layers must be a multiple"
                f" of {stages} stages x {chunks} chunks"
            )
        if layout.last_stage_layers is not None:
            yield (
                f"{key}.last_stage_layers={layout.last_stage_layers}: is not supported with"
                f" {key}.virtual_pipeline={chunks}, which requires chunks of equal size"
            )
    elif layout.last_stage_layers is not None and stages > 1:
        before, earlier = layers - layout.last_stage_layers, stages - 1
        if before < earlier or before % earlier:
            yield (
                f"{key}.last_stage_layers={layout.last_stage_layers}: leaves {before} of the"
                f" model's {layers} layers, which cannot be split evenly over the {earlier}"
                " earlier stages"
            )
    elif layers % stages:
        fitting = ", ".join(str(size) for size in range(1, layers + 1) if layers % size == 0)
        yield (
            f"{key}.pipeline={stages}: must divide the model's {layers} layers; valid sizes:"
            f" {fitting}"
        )


def _experts(key: str, layout: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    if not shape.num_experts:
        for name in ("expert", "expert_tensor"):
            if (size := getattr(layout, name) or 1) > 1:
                yield (
                    f"{key}.{name}={size}: requires a mixture-of-experts model, but the model has"
                    " no experts"
                )
        return
    size, inside = layout.expert, layout.expert_tensor_size
    if shape.num_experts % size:
        yield f"{key}.expert={size}: must divide the model's {shape.num_experts} experts"
    if shape.ffn_hidden_size % inside:
        yield (
            f"{key}.expert_tensor={inside}: must divide the {shape.ffn_hidden_size} feed-forward"
            " rows of each expert"
        )
    ranks = layout.tensor * layout.context * layout.data
    if ranks % (size * inside):
        yield (
            f"{key}.expert={size} x expert_tensor={inside}: must divide the {ranks} ranks of a"
            f" pipeline stage (tensor {layout.tensor} x context {layout.context} x data"
            f" {layout.data})"
        )
    if layout.tensor > 1 and not layout.sequence:
        yield (
            f"{key}.tensor={layout.tensor}: requires {key}.sequence=true for a mixture-of-experts"
            " model"
        )
