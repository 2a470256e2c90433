"""The arguments of TensorRT-LLM's client, by what the installed release knows: it refuses keywords
that it does not know."""

import importlib
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from aligner.errors import AlignerError, ConfigError
from aligner.models.layouts import cache_bytes_per_token
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

WORKER_EXTENSION = "aligner.engines.tensorrt_llm.worker.AlignerWorker"
_OPTIONAL = (
    *("max_input_len", "sampler_type", "cuda_graph_config", "skip_tokenizer_init"),
    *("enable_chunked_prefill", "stream_interval"),
)
_KV_CACHE = "kv_cache"
"""The tag of the memory of keys and values; the others are the model's and the executor's."""
_MEMORY_TYPES = ("tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")
"""Where releases keep `ExecutorMemoryType`, newer ones first."""


def load_package() -> ModuleType:
    """TensorRT-LLM. Raises AlignerError where it is not installed, or has no `AsyncLLM`."""
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise AlignerError(
            f"engine.kind=tensorrt_llm: TensorRT-LLM cannot be imported ({error}); run in a"
            " TensorRT-LLM release image, see docs/tensorrt_llm.md"
        ) from error
    if not hasattr(package, "AsyncLLM"):
        raise AlignerError(
            f"engine.kind=tensorrt_llm: TensorRT-LLM {getattr(package, '__version__', '')} has no"
            " AsyncLLM; requires release 1.2 or newer"
        )
    return package


def find(path: str) -> Any:
    """The object at a dotted path: attributes of the longest prefix that is a module. None where
    there is none."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:end]))
        except ImportError:
            continue
        for name in names[end:]:
            found = getattr(found, name, None)
        return found
    return None


def keywords(call: Any, fields: Any = None) -> Mapping[str, Any]:
    """The keywords that a class or function takes, with their defaults (`inspect.Parameter.empty`:
    none).

    The fields of a pydantic model count, its own and those of `fields`, the model that **kwargs are
    checked with.
    """
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind not in several and name != "self"
    }
    for model in (call, fields):
        for name, field in getattr(model, "model_fields", {}).items():
            required = getattr(field, "is_required", bool)()
            found[name] = inspect.Parameter.empty if required else field.default
    return found


def known(
    what: str, arguments: Mapping[str, Any], accepted: Collection[str], *, optional: Collection[str]
) -> dict[str, Any]:
    """The arguments that are accepted. Raises AlignerError naming those that are not, unless they
    are `optional`."""
    missing = [name for name in arguments if name not in accepted and name not in optional]
    if missing:
        raise AlignerError(
            f"this TensorRT-LLM release's {what} does not accept {', '.join(missing)}; see"
            " docs/tensorrt_llm.md for supported releases"
        )
    return {name: value for name, value in arguments.items() if name in accepted}


def llm_keywords() -> frozenset[str]:
    """What `AsyncLLM` accepts; `backend` is, although it is no field."""
    fields = find("tensorrt_llm.llmapi.llm_args.TorchLlmArgs")
    return frozenset(keywords(find("tensorrt_llm.AsyncLLM"), fields)) | {"backend"}


def sleep_arguments(accepted: Collection[str]) -> dict[str, Any]:
    """What lets this release give memory back. Raises AlignerError where nothing does."""
    if "sleep_config" in accepted:
        return {"sleep_config": find("tensorrt_llm.llmapi.llm_args.SleepConfig")()}
    if "enable_sleep" in accepted:
        return {"enable_sleep": True}
    raise AlignerError(
        "engine.sleep=true: this release of TensorRT-LLM cannot release GPU memory; set"
        " engine.sleep=false"
    )


def memory_tags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What memory is released by: the tags of the model and the executor, and those of keys and
    values."""
    kinds = next(
        (kinds for path in _MEMORY_TYPES if (kinds := find(f"{path}.ExecutorMemoryType"))), None
    )
    if kinds is None:
        raise AlignerError(
            "engine.sleep=true: this release of TensorRT-LLM has no ExecutorMemoryType; set"
            " engine.sleep=false"
        )
    tags = [kind.value for kind in kinds if not kind.value.startswith("_")]
    return tuple(tag for tag in tags if tag != _KV_CACHE), tuple(
        tag for tag in tags if tag == _KV_CACHE
    )


def cache_tokens(shape: ModelShape, settings: EngineConfig, dtype: torch.dtype) -> int | None:
    """Tokens whose keys and values fit into a rank's `engine.kv_cache_mib`; None without a limit.

    Raises ConfigError when the longest sequence does not fit.
    """
    if settings.kv_cache_mib is None:
        return None
    token_bytes = cache_bytes_per_token(shape, settings.parallel.tensor, dtype.itemsize)
    tokens, context = (settings.kv_cache_mib << 20) // token_bytes, shape.max_positions
    if tokens < context:
        raise ConfigError(
            f"engine.kv_cache_mib={settings.kv_cache_mib}: has room for {tokens} tokens, but the"
            f" longest sequence has {context} tokens ({token_bytes} bytes per token on each rank);"
            " must be at least"
            f" {-(-context * token_bytes >> 20)}"
        )
    return tokens


def llm_arguments(
    accepted: Collection[str],
    directory: Path,
    shape: ModelShape,
    settings: EngineConfig,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Keywords for AsyncLLM, of those that this release accepts.

    Weights are not read from `directory`, which gives the configuration alone: they are published.
    Raises AlignerError for what it lacks and can not be left out, ConfigError for a cache that is
    too small.
    """
    tokens = cache_tokens(shape, settings, dtype)
    limit = (
        {"free_gpu_memory_fraction": settings.tensorrt_llm.free_memory_fraction}
        if tokens is None
        else {"max_tokens": tokens}
    )
    graphs = find("tensorrt_llm.llmapi.CudaGraphConfig")
    wanted = {
        "model": str(directory),
        "backend": "pytorch",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": settings.parallel.tensor,
        "max_seq_len": shape.max_positions,
        # else 1024: an interrupted response is sent again behind its prompt
        "max_input_len": shape.max_positions,
        "max_batch_size": settings.batch_size,
        "max_num_tokens": settings.tensorrt_llm.max_num_tokens,
        "enable_chunked_prefill": True,
        "stream_interval": settings.tensorrt_llm.stream_interval,
        "kv_cache_config": find("tensorrt_llm.llmapi.KvCacheConfig")(
            enable_block_reuse=True, **limit
        ),
        "cuda_graph_config": (
            graphs(max_batch_size=settings.batch_size, enable_padding=True)
            if settings.cuda_graphs
            else None
        ),
        "sampler_type": "TRTLLMSampler",
        "ray_worker_extension_cls": WORKER_EXTENSION,
    }
    if settings.sleep:
        wanted |= sleep_arguments(accepted)
    return known("AsyncLLM", wanted, accepted, optional=_OPTIONAL)
