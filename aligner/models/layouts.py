"""Checks that a model can run with a parallel layout, made before any process starts."""

import dataclasses
from collections.abc import Iterator

from aligner.models.pipeline_stages import get_engine_stage_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import compute_shard_size
from aligner.schema import EngineParallelConfig, ParallelConfig, SpeculationConfig

# Tokens of a block of the KV cache. Blocks of short sequences are smaller, so that their last block
# wastes little memory; kernels are faster with large blocks.
_SHORT_SEQUENCE_TOKENS = 128
_SHORT_BLOCK_TOKENS = 16
_LONG_BLOCK_TOKENS = 32
_GPU_BLOCK_TOKENS = 128


def choose_block_tokens(max_tokens: int, *, is_gpu: bool) -> int:
    """Return the number of tokens of a block of the embedded engine's KV cache.

    Args:
        max_tokens: Maximum number of tokens of a sequence in the cache.
        is_gpu: Whether the engine runs on GPUs.
    """
    if is_gpu:
        return _GPU_BLOCK_TOKENS
    is_short = max_tokens <= _SHORT_SEQUENCE_TOKENS
    return min(max_tokens, _SHORT_BLOCK_TOKENS if is_short else _LONG_BLOCK_TOKENS)


def count_blocks(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks of the KV cache that hold a number of tokens."""
    return -(-tokens // block_tokens)


def cache_bytes_per_token(shape: ModelShape, tensor: int, itemsize: int) -> int:
    """Return the size in bytes of one token's KV cache on a tensor-parallel rank.

    Args:
        shape: The model's shape.
        tensor: Tensor-parallel size.
        itemsize: Bytes per element of the cache.
    """
    if shape.latent_attention is not None:
        # Every rank caches the latent and the rotated key, which all heads share.
        return shape.num_layers * shape.latent_attention.cached_dim * itemsize
    layers = shape.num_attention_layers
    # The factor 2 counts keys and values.
    return 2 * layers * shape.kv_heads_on_rank(tensor) * shape.head_dim * itemsize


def state_bytes_per_row(shape: ModelShape, tensor: int, itemsize: int) -> int:
    """Return the size in bytes of a sequence's states of delta nets on a tensor-parallel rank.

    Args:
        shape: The model's shape.
        tensor: Tensor-parallel size.
        itemsize: Bytes per element of the cache.
    """
    net = shape.delta_net
    if net is None:
        return 0
    # The last inputs of the convolution have the dtype of the cache, the other state is float32.
    conv = net.channels * (net.conv_width - 1) * itemsize
    recurrent = net.value_heads * net.key_dim * net.value_dim * 4
    layers = shape.num_layers - shape.num_attention_layers
    return layers * (conv + recurrent) // tensor


def cache_bytes_per_sequence(
    shape: ModelShape, tensor: int, itemsize: int, tokens: int, block_tokens: int
) -> int:
    """Return the size in bytes of a sequence's KV cache and states on a tensor-parallel rank.

    Args:
        shape: The model's shape.
        tensor: Tensor-parallel size.
        itemsize: Bytes per element of the cache.
        tokens: Number of tokens of the sequence in the cache.
        block_tokens: Number of tokens of a block of the cache.
    """
    block_bytes = block_tokens * cache_bytes_per_token(shape, tensor, itemsize)
    blocks = count_blocks(tokens, block_tokens)
    return blocks * block_bytes + state_bytes_per_row(shape, tensor, itemsize)


def iterate_engine_stages(shape: ModelShape, pipeline: int) -> Iterator[ModelShape]:
    """Yield the shape of each pipeline stage of vLLM: the model's shape with the stage's layers."""
    for stage in range(pipeline):
        layers = get_engine_stage_layers(shape.num_layers, pipeline, stage)
        yield dataclasses.replace(shape, layers=shape.layers[layers.start : layers.stop])


def layout_problems(key: str, layout: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a message for each reason why a model cannot run with a layout.

    Args:
        key: Configuration key of the layout.
        layout: The layout of the trainer or a server.
        shape: The model's shape.
    """
    yield from tensor_problems(key, layout.tensor, shape)
    if layout.sequence and layout.tensor == 1:
        yield f"{key}.sequence=true: requires {key}.tensor above 1"
    if shape.delta_net is not None and layout.context > 1:
        yield (
            f"{key}.context={layout.context}: must be 1 for a model with gated delta nets, whose"
            " states pass through all tokens of a sequence in order; use tensor, pipeline or data"
            " parallelism instead"
        )
    yield from _pipeline_problems(key, layout, shape)
    yield from _expert_problems(key, layout, shape)


def engine_problems(layout: EngineParallelConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a message for each reason why an engine cannot run a model with a layout.

    Unlike in the trainer, expert parallelism divides the tensor-parallel ranks.
    """
    yield from tensor_problems("engine.parallel", layout.tensor, shape)
    if layout.pipeline > shape.num_layers:
        yield (
            f"engine.parallel.pipeline={layout.pipeline}: must be at most the model's"
            f" {shape.num_layers} layers, because each stage needs at least one layer"
        )
    key = f"engine.parallel.expert={layout.expert}"
    experts = shape.experts
    if experts is None:
        if layout.expert > 1:
            yield f"{key}: requires a mixture-of-experts model, but the model has no experts"
        return
    if layout.tensor % layout.expert:
        yield f"{key}: must divide engine.parallel.tensor={layout.tensor}"
        return
    if experts.count % layout.expert:
        yield f"{key}: must divide the model's {experts.count} experts"
    if experts.ffn_hidden_size % layout.expert_tensor_size:
        divisor = f" / expert={layout.expert}" if layout.expert > 1 else ""
        yield (
            f"engine.parallel.tensor={layout.tensor}{divisor}: must divide the"
            f" {experts.ffn_hidden_size} feed-forward rows of each expert"
        )


def speculation_problems(speculation: SpeculationConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a message if the embedded engine cannot verify draft tokens of a model."""
    if speculation.tokens and shape.delta_net is not None:
        yield (
            f"engine.speculation.tokens={speculation.tokens}: must be 0 for a model with gated"
            " delta nets, whose states would include rejected draft tokens"
        )


def tensor_sizes(shape: ModelShape, limit: int) -> list[int]:
    """Return the tensor-parallel sizes up to `limit` with which the model can run.

    They split every weight evenly, except the vocabulary, which is padded, and KV heads, of which
    several ranks may have a copy.
    """
    totals = _split_dimensions(shape).values()
    return [
        size
        for size in range(1, limit + 1)
        if all(total % size == 0 for total in totals)
        and _splits_kv_heads(shape, size)
        and not _leaves_rank_empty(shape, size)
    ]


def _splits_kv_heads(shape: ModelShape, size: int) -> bool:
    """Return whether each rank gets whole KV heads, or each KV head is on equally many ranks."""
    return shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0


def _leaves_rank_empty(shape: ModelShape, size: int) -> bool:
    """Return whether a rank would hold only padding of the vocabulary."""
    return (size - 1) * compute_shard_size(shape.vocab_size, size) >= shape.vocab_size


def _split_dimensions(shape: ModelShape) -> dict[str, int]:
    """Return the dimensions that a tensor-parallel size must divide, by their names in messages."""
    dimensions = {"attention heads": shape.num_heads}
    if shape.delta_net is not None:
        dimensions["key heads of delta nets"] = shape.delta_net.key_heads
    # Experts have a tensor-parallel size of their own.
    if any(layer.is_dense for layer in shape.layers):
        dimensions["feed-forward rows"] = shape.ffn_hidden_size
    if shape.experts is not None and shape.experts.shared_size:
        dimensions["feed-forward rows of shared experts"] = shape.experts.shared_size
    return dimensions


def tensor_problems(key: str, size: int, shape: ModelShape) -> Iterator[str]:
    """Yield a message for each reason why a model cannot run with a tensor-parallel size.

    Args:
        key: Configuration key of the layout.
        size: The tensor-parallel size.
        shape: The model's shape.
    """
    uneven = [f"{total} {name}" for name, total in _split_dimensions(shape).items() if total % size]
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
    if not _splits_kv_heads(shape, size):
        yield (
            f"{key}.tensor={size}: must divide the model's {shape.num_kv_heads} key-value heads or"
            f" be a multiple of them; valid sizes: {fitting}"
        )


def _pipeline_problems(key: str, layout: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    layers = shape.num_layers
    stages = layout.pipeline
    chunks = layout.virtual_pipeline
    if stages == 1:
        if chunks > 1:
            yield f"{key}.virtual_pipeline={chunks}: requires {key}.pipeline above 1"
        return
    parts = stages * chunks
    if parts > layers:
        stages_text = f"{key}.pipeline={stages}"
        if chunks > 1:
            stages_text += f" x virtual_pipeline={chunks}"
        yield (
            f"{stages_text}: must be at most the model's {layers} layers, because each stage or"
            " chunk needs at least one layer"
        )
    if layout.stage_layers is not None:
        yield from _stage_layers_problems(key, layout, layers)
    elif layout.last_stage_layers is not None:
        yield from _last_stage_problems(key, layout, layers)


def _stage_layers_problems(key: str, layout: ParallelConfig, layers: int) -> Iterator[str]:
    """Yield a message for each reason why `stage_layers` does not fit the model."""
    sizes = layout.stage_layers or []
    text = f"{key}.stage_layers={sizes}"
    parts = layout.pipeline * layout.virtual_pipeline
    if layout.last_stage_layers is not None:
        yield (
            f"{text}: cannot be combined with {key}.last_stage_layers={layout.last_stage_layers};"
            " remove one of them"
        )
    if len(sizes) != parts:
        chunks = f" x {layout.virtual_pipeline} chunks" if layout.virtual_pipeline > 1 else ""
        yield f"{text}: must have {parts} numbers, for {layout.pipeline} stages{chunks}"
    if any(size < 1 for size in sizes):
        yield f"{text}: each number must be at least 1"
    if sum(sizes) != layers:
        yield f"{text}: the sum is {sum(sizes)}, but must be the model's {layers} layers"


def _last_stage_problems(key: str, layout: ParallelConfig, layers: int) -> Iterator[str]:
    """Yield a message for each reason why `last_stage_layers` does not fit the model."""
    last = layout.last_stage_layers or 0
    text = f"{key}.last_stage_layers={last}"
    earlier = layout.pipeline - 1
    if layout.virtual_pipeline > 1:
        yield (
            f"{text}: is not supported with {key}.virtual_pipeline={layout.virtual_pipeline}; set"
            f" {key}.stage_layers instead"
        )
    elif layers - last < earlier:
        yield (
            f"{text}: leaves {layers - last} of the model's {layers} layers, but each of the"
            f" {earlier} earlier stages needs at least one; must be at most {layers - earlier}"
        )


def _expert_problems(key: str, layout: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    experts = shape.experts
    if experts is None:
        for name in ("expert", "expert_tensor"):
            if (size := getattr(layout, name) or 1) > 1:
                yield (
                    f"{key}.{name}={size}: requires a mixture-of-experts model, but the model has"
                    " no experts"
                )
        return
    size = layout.expert
    tensor_size = layout.expert_tensor_size
    if experts.count % size:
        yield f"{key}.expert={size}: must divide the model's {experts.count} experts"
    if experts.ffn_hidden_size % tensor_size:
        yield (
            f"{key}.expert_tensor={tensor_size}: must divide the {experts.ffn_hidden_size}"
            " feed-forward rows of each expert"
        )
    if experts.has_biases and tensor_size > 1:
        yield (
            f"{key}.expert_tensor={tensor_size}: must be 1 for a model whose experts have biases;"
            f" set {key}.expert_tensor=1"
        )
    ranks = layout.tensor * layout.context * layout.data
    if ranks % (size * tensor_size):
        yield (
            f"{key}.expert={size} x expert_tensor={tensor_size}: must divide the {ranks} ranks of a"
            f" pipeline stage (tensor {layout.tensor} x context {layout.context} x data"
            f" {layout.data})"
        )
    if layout.tensor > 1 and not layout.sequence:
        yield (
            f"{key}.tensor={layout.tensor}: requires {key}.sequence=true for a mixture-of-experts"
            " model"
        )
