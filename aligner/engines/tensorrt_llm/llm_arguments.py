"""Keyword arguments of TensorRT-LLM's client, adapted to the installed release.

TensorRT-LLM raises an error for keywords that it does not know, and releases differ in their
keywords.
"""

import importlib
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.models.layouts import cache_bytes_per_token
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

WORKER_EXTENSION = "aligner.engines.tensorrt_llm.worker.AlignerWorker"
# Keywords that are omitted if the installed release does not accept them.
_OPTIONAL_KEYWORDS = (
    *("max_input_len", "sampler_type", "cuda_graph_config", "skip_tokenizer_init"),
    *("enable_chunked_prefill", "stream_interval"),
)
# Memory tag of the KV cache; all other tags belong to the model and the executor.
_KV_CACHE_TAG = "kv_cache"
# Memory tags whose contents are discarded by a release. The next weight sync writes the weights.
_DISCARDED_TAGS = ("model_weights", _KV_CACHE_TAG)
# Classes for the configuration of CUDA graphs. Release 1.3.0rc27 documents the second one instead.
_CUDA_GRAPH_CONFIGS = (
    "tensorrt_llm.llmapi.CudaGraphConfig",
    "tensorrt_llm.llmapi.DecodeCudaGraphConfig",
)
# Modules that may contain `ExecutorMemoryType`, those of newer releases first.
_MEMORY_TYPE_MODULES = ("tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")


def load_package() -> ModuleType:
    """Import TensorRT-LLM.

    Raises:
        AlignerError: TensorRT-LLM cannot be imported, or has no `AsyncLLM`.
    """
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


def find_object(path: str) -> Any:
    """Return the object at a dotted path, or None if it does not exist.

    The longest prefix of the path that can be imported is the module; the other names are
    attributes.
    """
    names = path.split(".")
    for module_length in range(len(names), 0, -1):
        try:
            target: Any = importlib.import_module(".".join(names[:module_length]))
        except ImportError:
            continue
        for name in names[module_length:]:
            target = getattr(target, name, None)
        return target
    return None


def get_keywords(function: Any, kwargs_model: Any = None) -> Mapping[str, Any]:
    """Return the keyword parameters of a class or function, with their defaults.

    The default of a required parameter is `inspect.Parameter.empty`.

    Args:
        function: Class or function. If it is a pydantic model, its fields are included.
        kwargs_model: Pydantic model that validates the **kwargs of `function`; its fields are
            included too.
    """
    variadic_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in variadic_kinds and name != "self"
    }

    # The signature of a pydantic model may be just `**data`, so its fields count as keywords.
    for model in (function, kwargs_model):
        for name, field in getattr(model, "model_fields", {}).items():
            # A field without a method `is_required` counts as optional: `bool()` is False.
            is_required = getattr(field, "is_required", bool)()
            defaults[name] = inspect.Parameter.empty if is_required else field.default
    return defaults


def select_accepted(
    callable_name: str,
    arguments: Mapping[str, Any],
    accepted_keywords: Collection[str],
    *,
    optional_keywords: Collection[str],
) -> dict[str, Any]:
    """Return the arguments that the installed release accepts.

    Args:
        callable_name: Name of the class or function, for the error message.
        arguments: Arguments by keyword.
        accepted_keywords: Accepted keywords.
        optional_keywords: Keywords that may be omitted if they are not accepted.

    Raises:
        AlignerError: Arguments that are not optional are not accepted; the message names them.
    """
    unsupported_keywords = [
        name
        for name in arguments
        if name not in accepted_keywords and name not in optional_keywords
    ]
    if unsupported_keywords:
        raise AlignerError(
            f"this TensorRT-LLM release's {callable_name} does not accept"
            f" {', '.join(unsupported_keywords)}; see docs/tensorrt_llm.md for supported releases"
        )
    return {name: value for name, value in arguments.items() if name in accepted_keywords}


def get_llm_keywords() -> frozenset[str]:
    """Return the keywords that `AsyncLLM` accepts."""
    kwargs_model = find_object("tensorrt_llm.llmapi.llm_args.TorchLlmArgs")
    return frozenset(get_keywords(find_object("tensorrt_llm.AsyncLLM"), kwargs_model))


def get_sampling_keywords() -> Mapping[str, Any]:
    """Return the keywords that `SamplingParams` accepts, with their defaults."""
    return get_keywords(find_object("tensorrt_llm.SamplingParams"))


def build_logprobs_arguments(
    sampling_keywords: Mapping[str, Any], options: SamplingOptions
) -> dict[str, Any]:
    """Return the arguments for `SamplingParams` that select the log-probs to return.

    The log-probs should be those of the full distribution at the sampling temperature. Since
    release 1.3, TensorRT-LLM returns either raw log-probs, those of the full distribution at
    temperature 1, or processed log-probs. Processed log-probs are those after temperature, top-k
    and top-p, and 0 for tokens of greedy decoding.

    Args:
        sampling_keywords: Keywords that `SamplingParams` accepts, with their defaults.
        options: Sampling parameters of the request.
    """
    if "logprobs_mode" not in sampling_keywords:
        return {}
    # The module of the enumeration depends on the release, its default does not.
    mode_class = type(sampling_keywords["logprobs_mode"])
    is_raw = options.greedy or options.temperature == 1
    return {"logprobs_mode": mode_class("raw" if is_raw else "processed")}


def find_memory_types() -> Any:
    """Return the enumeration of TensorRT-LLM's memory tags, or None if it does not exist."""
    candidates = (find_object(f"{module}.ExecutorMemoryType") for module in _MEMORY_TYPE_MODULES)
    return next((candidate for candidate in candidates if candidate), None)


def build_sleep_arguments(accepted_keywords: Collection[str]) -> dict[str, Any]:
    """Return the arguments that enable the release of GPU memory.

    Args:
        accepted_keywords: Keywords that `AsyncLLM` accepts.

    Raises:
        AlignerError: The installed release cannot release GPU memory.
    """
    if "sleep_config" in accepted_keywords:
        # By default, all memory except the KV cache is copied to the host.
        restore_modes = {
            memory_type: "NONE"
            for memory_type in find_memory_types()
            if memory_type.value in _DISCARDED_TAGS
        }
        sleep_config_class = find_object("tensorrt_llm.llmapi.llm_args.SleepConfig")
        return {"sleep_config": sleep_config_class(restore_modes=restore_modes)}
    if "enable_sleep" in accepted_keywords:
        return {"enable_sleep": True}
    raise AlignerError(
        "engine.sleep=true: this release of TensorRT-LLM cannot release GPU memory; set"
        " engine.sleep=false"
    )


def get_memory_tags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tags with which TensorRT-LLM releases GPU memory.

    Returns:
        The tags of the model and the executor, and the tags of the KV cache.

    Raises:
        AlignerError: The installed release has no `ExecutorMemoryType`.
    """
    memory_types = find_memory_types()
    if memory_types is None:
        raise AlignerError(
            "engine.sleep=true: this release of TensorRT-LLM has no ExecutorMemoryType; set"
            " engine.sleep=false"
        )
    # Tags with a leading underscore are internal.
    tags = [
        memory_type.value for memory_type in memory_types if not memory_type.value.startswith("_")
    ]
    model_tags = tuple(tag for tag in tags if tag != _KV_CACHE_TAG)
    cache_tags = tuple(tag for tag in tags if tag == _KV_CACHE_TAG)
    return model_tags, cache_tags


def compute_cache_tokens(
    shape: ModelShape, settings: EngineConfig, dtype: torch.dtype
) -> int | None:
    """Return the number of tokens that fit into `engine.kv_cache_mib` on each rank.

    Returns:
        The number of tokens; None if `engine.kv_cache_mib` is not set.

    Raises:
        ConfigError: The longest sequence does not fit.
    """
    if settings.kv_cache_mib is None:
        return None
    token_bytes = cache_bytes_per_token(shape, settings.parallel.tensor, dtype.itemsize)
    tokens = (settings.kv_cache_mib << 20) // token_bytes

    longest_sequence = shape.max_positions
    if tokens < longest_sequence:
        # Rounded up to MiB.
        required_mib = -(-longest_sequence * token_bytes >> 20)
        raise ConfigError(
            f"engine.kv_cache_mib={settings.kv_cache_mib}: has room for {tokens} tokens, but the"
            f" longest sequence has {longest_sequence} tokens ({token_bytes} bytes per token on"
            f" each rank); must be at least {required_mib}"
        )
    return tokens


def build_llm_arguments(
    accepted_keywords: Collection[str],
    sampling_keywords: Collection[str],
    directory: Path,
    shape: ModelShape,
    settings: EngineConfig,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the keyword arguments for `AsyncLLM` that the installed release accepts.

    Args:
        accepted_keywords: Keywords that `AsyncLLM` accepts.
        sampling_keywords: Keywords that `SamplingParams` accepts.
        directory: Model directory, from which only the configuration is read; the weights arrive by
            weight sync.
        shape: Dimensions of the model.
        settings: Section `engine` of the configuration.
        dtype: Data type of the model.

    Raises:
        AlignerError: The installed release does not accept a required argument.
        ConfigError: The KV cache is too small for the longest sequence.
    """
    cache_tokens = compute_cache_tokens(shape, settings, dtype)
    cache_size: dict[str, Any] = {"max_tokens": cache_tokens}
    if cache_tokens is None:
        cache_size = {"free_gpu_memory_fraction": settings.tensorrt_llm.free_memory_fraction}

    kv_cache_config_class = find_object("tensorrt_llm.llmapi.KvCacheConfig")
    # Block reuse is the prefix cache: the samples of a prompt share its KV cache.
    kv_cache_config = kv_cache_config_class(enable_block_reuse=True, **cache_size)
    cuda_graph_config = None
    if settings.cuda_graphs:
        cuda_graph_classes = (find_object(path) for path in _CUDA_GRAPH_CONFIGS)
        cuda_graph_config_class: Any = next(filter(None, cuda_graph_classes))
        cuda_graph_config = cuda_graph_config_class(
            max_batch_size=settings.batch_size, enable_padding=True
        )

    arguments = {
        "model": str(directory),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": settings.parallel.tensor,
        "max_seq_len": shape.max_positions,
        # The default is 1024, but the input of a resumed response includes its generated tokens.
        "max_input_len": shape.max_positions,
        "max_batch_size": settings.batch_size,
        "max_num_tokens": settings.tensorrt_llm.max_num_tokens,
        "enable_chunked_prefill": True,
        "stream_interval": settings.tensorrt_llm.stream_interval,
        "kv_cache_config": kv_cache_config,
        "cuda_graph_config": cuda_graph_config,
        "ray_worker_extension_cls": WORKER_EXTENSION,
    }
    # Releases with `logprobs_mode` implement it in their default sampler. They deprecate this
    # sampler, or reject it.
    if "logprobs_mode" not in sampling_keywords:
        arguments["sampler_type"] = "TRTLLMSampler"
    if settings.sleep:
        arguments |= build_sleep_arguments(accepted_keywords)
    if settings.parallel.expert > 1:
        arguments["moe_expert_parallel_size"] = settings.parallel.expert
        arguments["moe_tensor_parallel_size"] = settings.parallel.expert_tensor_size
    arguments |= settings.tensorrt_llm.args
    return select_accepted(
        "AsyncLLM", arguments, accepted_keywords, optional_keywords=_OPTIONAL_KEYWORDS
    )
