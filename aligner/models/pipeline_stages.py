"""Division of a model's decoder layers into the stages of a pipeline, in the trainer and in vLLM.

With `virtual_pipeline` chunks per stage (interleaved schedule), the layers are divided into
stages x chunks parts, and chunk c of stage s is part c x stages + s (Narayanan et al. 2021,
section 2.2). A plain pipeline has one chunk per stage, and its parts are the stages.
"""

from collections.abc import Sequence
from functools import lru_cache

from aligner.models.shape import ModelShape
from aligner.schema import ParallelConfig


def stage_layers(shape: ModelShape, layout: ParallelConfig, stage: int) -> list[range]:
    """Return the decoder layers of a pipeline stage, one range for each of its model chunks."""
    sizes = count_part_layers(shape, layout)
    parts = range(stage, len(sizes), layout.pipeline)
    starts = [sum(sizes[:part]) for part in parts]
    return [range(start, start + sizes[part]) for start, part in zip(starts, parts, strict=True)]


def count_part_layers(shape: ModelShape, layout: ParallelConfig) -> tuple[int, ...]:
    """Return the number of layers of each part of a pipeline, in the order of the layers.

    The layout's `stage_layers` and `last_stage_layers` prevail. Otherwise the parts are equal if
    their number divides the number of layers. If not, the parts have about equal times, where the
    vocabulary head adds the time of several layers to the last part.
    """
    layers = shape.num_layers
    stages = layout.pipeline
    parts = stages * layout.virtual_pipeline
    if stages == 1:
        return (layers,)
    if layout.stage_layers is not None:
        return tuple(layout.stage_layers)
    if layout.last_stage_layers is not None:
        last = layout.last_stage_layers
        return (*_divide(layers - last, stages - 1, 0), last)
    if layers % parts == 0:
        return (layers // parts,) * parts
    return _divide(layers, parts, _head_cost(shape))


@lru_cache(maxsize=256)
def _divide(layers: int, parts: int, head_cost: float) -> tuple[int, ...]:
    """Divide layers into parts of at least one layer, the largest of which is as cheap as possible.

    Args:
        layers: Number of layers, at least `parts`.
        parts: Number of parts.
        head_cost: Cost of the vocabulary head on the last part, in layers.
    """
    sizes = [1] * parts

    def compute_cost(part: int) -> tuple[float, int]:
        # Among equally fast parts, the first ones get fewer layers: they hold the embedding and the
        # activations of more micro-batches.
        return sizes[part] + (head_cost if part == parts - 1 else 0), -part

    for _ in range(layers - parts):
        sizes[min(range(parts), key=compute_cost)] += 1
    return tuple(sizes)


@lru_cache(maxsize=256)
def _head_cost(shape: ModelShape) -> float:
    """Return the time of the vocabulary head in units of a layer.

    Times are proportional to the number of weights that a token is multiplied with. The lookup of
    the embedding takes almost no time.
    """
    factors = 3 if shape.gated else 2
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    experts = shape.experts
    widths = 0
    for layer in shape.layers:
        width = shape.ffn_hidden_size
        if layer.has_experts and experts is not None:
            width = experts.per_token * experts.ffn_hidden_size + experts.shared_size
        widths += attention + factors * width
    # All of these matrices, and the head, have one dimension of the hidden size.
    return shape.vocab_size * shape.num_layers / widths


def count_engine_stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage of vLLM.

    vLLM's own division: the middle stages get the remainder, then also the first one, because the
    first stage has the embedding, and the last one the head.

    Args:
        layers: Number of layers of the model.
        stages: Number of stages.
    """
    sizes = [layers // stages] * stages
    for index in range(layers % stages):
        sizes[stages - 2 - index] += 1
    return tuple(sizes)


def get_engine_stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a pipeline stage of vLLM; see `count_engine_stage_layers`."""
    sizes = count_engine_stage_layers(layers, stages)
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


_FAMILIES_WITH_OUTER_WEIGHTS = (
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)


def has_outer_weights_on_all_stages(family: str) -> bool:
    """Return whether every pipeline stage of vLLM 0.32 holds the weights outside the layers.

    The models of these families create their embedding, final norm and head on every stage,
    although only the first or the last stage computes with them. The models of other families
    create them where they are used.
    """
    return family in _FAMILIES_WITH_OUTER_WEIGHTS


def find_similar_parts(sizes: Sequence[int], max_layers: int) -> dict[int, list[int]]:
    """Return the layers of parts whose order by size is that of `sizes`, by the sum of the layers.

    Args:
        sizes: Number of layers of each part.
        max_layers: Largest sum that is enlarged further.
    """
    different_sizes = sorted(set(sizes))
    smallest = [1 + different_sizes.index(size) for size in sizes]
    found = {sum(smallest): smallest}
    for depth in range(sum(smallest), max_layers):
        if depth not in found:
            continue
        # One more layer for all parts from a size on keeps the order.
        for limit in different_sizes:
            larger = [
                layers + (size >= limit) for layers, size in zip(found[depth], sizes, strict=True)
            ]
            found.setdefault(sum(larger), larger)
    return found


def name_parts(sizes: Sequence[int]) -> list[list[str]]:
    """Return megatron-core's `pipeline_model_parallel_layout` of parts with these sizes."""
    parts = [["decoder"] * size for size in sizes]
    return [["embedding", *parts[0]], *parts[1:-1], [*parts[-1], "loss"]]
