"""From the configuration to the arguments of TensorRT-LLM's client."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from aligner.engines.tensorrt_llm.features import find, known, sleep_arguments
from aligner.errors import ConfigError
from aligner.models.layouts import cache_bytes_per_token
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

WORKER_EXTENSION = "aligner.engines.tensorrt_llm.worker.AlignerWorker"
_OPTIONAL = ("sampler_type", "cuda_graph_config", "skip_tokenizer_init", "enable_chunked_prefill")


def cache_tokens(shape: ModelShape, settings: EngineConfig, dtype: torch.dtype, context: int) -> int | None:
    """Tokens whose keys and values fit into a rank's `engine.kv_cache_mib`; None without a limit.

    Raises ConfigError when the longest sequence, of `context` tokens, does not fit.
    """
    if settings.kv_cache_mib is None:
        return None
    token_bytes = cache_bytes_per_token(shape, settings.parallel.tensor, dtype.itemsize)
    tokens = (settings.kv_cache_mib << 20) // token_bytes
    if tokens < context:
        raise ConfigError(
            f"engine.kv_cache_mib={settings.kv_cache_mib}: it holds {tokens} tokens of {token_bytes} bytes a rank, the longest"
            f" sequence has {context}; at least {-(-context * token_bytes >> 20)} are needed"
        )
    return tokens


def llm_arguments(
    accepted: Collection[str], directory: Path, shape: ModelShape, settings: EngineConfig, dtype: torch.dtype, context: int
) -> dict[str, Any]:
    """Keywords for AsyncLLM, of those that this release accepts.

    Weights are not read from `directory`, which gives the configuration alone: they are published.
    Raises AlignerError for what it lacks and can not be left out, ConfigError for a cache that is too small.
    """
    tokens = cache_tokens(shape, settings, dtype, context)
    limit = (
        {"free_gpu_memory_fraction": settings.tensorrt_llm.free_memory_fraction} if tokens is None else {"max_tokens": tokens}
    )
    graphs = find("tensorrt_llm.llmapi.CudaGraphConfig")
    wanted = {
        "model": str(directory),
        "backend": "pytorch",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": settings.parallel.tensor,
        "max_seq_len": context,
        "max_batch_size": settings.batch_size,
        "max_num_tokens": settings.tensorrt_llm.max_num_tokens,
        "enable_chunked_prefill": True,
        "kv_cache_config": find("tensorrt_llm.llmapi.KvCacheConfig")(enable_block_reuse=True, **limit),
        "cuda_graph_config": graphs(max_batch_size=settings.batch_size, enable_padding=True) if settings.cuda_graphs else None,
        "sampler_type": "TRTLLMSampler",
        "ray_worker_extension_cls": WORKER_EXTENSION,
    }
    if settings.sleep:
        wanted |= sleep_arguments(accepted)
    return known("AsyncLLM", wanted, accepted, optional=_OPTIONAL)
