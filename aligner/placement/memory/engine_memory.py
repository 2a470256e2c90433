"""What the generation engine holds on a device: weights, what an update needs, and keys and values."""

import math
from dataclasses import dataclass

from aligner.models.layouts import cache_bytes_per_token
from aligner.models.shape import ModelShape
from aligner.placement.memory.activations import forward_work
from aligner.placement.memory.model_states import engine_weights, largest_tensor, shared_weights
from aligner.placement.roles import device_of
from aligner.schema import Config

_PROMPT_TOKENS = 8192
"""Of prompts that the embedded engine runs in one pass: `engines/embedded/generation.py`."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one of its devices."""

    weights: int
    """With the spare copy of update=atomic."""
    transfer: int
    """While new weights arrive: buckets, and what TensorRT-LLM takes whole."""
    cache: int
    work: int
    """Of a pass over prompts, or of drawing tokens."""


def engine_memory(config: Config, shape: ModelShape, *, stage: int = 0, beside: int = 0) -> EngineMemory:
    """Of a rank of the engine, on a device where `beside` bytes are held by others.

    Of a colocated engine `stage` is the trainer's pipeline stage on that device.
    """
    engine = config.engine
    device = device_of(config, engine.precision)
    tensor, itemsize, bucket = engine.parallel.tensor, device.itemsize, engine.bucket_mib << 20
    weights = itemsize * engine_weights(shape, tensor)
    if engine.update == "shared":
        weights -= itemsize * shared_weights(shape, config.actor.parallel, stage, tensor)
    # An engine that sleeps drops its weights, and what comes next has nothing to be atomic with.
    if engine.update == "atomic" and not engine.sleep:
        weights *= 2
    tokens, transfer = min(_PROMPT_TOKENS, rows_at_once(config) * config.data.max_prompt_tokens), min(bucket, weights)
    if engine.kind == "tensorrt_llm":
        tokens = engine.tensorrt_llm.max_num_tokens
        transfer += max(bucket, itemsize * largest_tensor(shape))
    logits = rows_at_once(config) * shape.vocab_size * (4 + itemsize / tensor)
    work = int(max(forward_work(shape, tensor, tokens, itemsize), logits))
    held = weights + transfer + work + beside
    return EngineMemory(weights, transfer, _cache(config, shape, itemsize, held), work)


def _cache(config: Config, shape: ModelShape, itemsize: int, held: int) -> int:
    """Keys and values: as many as are used, or as TensorRT-LLM takes in advance, beside so many bytes held."""
    engine, memory = config.engine, config.cluster.device_memory_gib
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens - 1
    row = longest * cache_bytes_per_token(shape, engine.parallel.tensor, itemsize)
    limit = None if engine.kv_cache_mib is None else engine.kv_cache_mib << 20
    if engine.kind == "tensorrt_llm" and limit is not None:
        return limit
    if engine.kind == "tensorrt_llm" and memory is not None:
        return max(row, int((memory * 2**30 - held) * engine.tensorrt_llm.free_memory_fraction))
    used = rows_at_once(config) * row
    return used if limit is None else min(used, limit)


def rows_at_once(config: Config) -> int:
    """Sequences that a rank decodes at a time: of one rollout micro-batch, as one is drawn after another, ahead or in turn."""
    rollout = config.rollout
    samples = (rollout.prompts_per_micro_batch + rollout.spare_prompts) * rollout.samples_per_prompt
    if config.evaluation.every:  # how many prompts it has is not known here
        return config.engine.batch_size
    return min(config.engine.batch_size, math.ceil(samples / config.engine.parallel.data))
