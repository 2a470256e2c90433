"""The part of TensorRT-LLM's API that `aligner.engines.tensorrt_llm` uses; this file imports
nothing of TensorRT-LLM.

The fake has every symbol, takes its signatures from this table, and refuses other keywords. If the
package is installed, a test compares it with the table. One attribute of workers is missing,
`engine`, because it exists only on instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

VERSIONS: Final = ("1.2", "1.3")
"""Releases that the table describes."""
REQUIRED: Final = "required"
"""Marks a parameter without a default."""
UNCOMPARED: Final = "uncompared"
"""Marks a parameter whose default is not compared, because aligner does not rely on it."""


@dataclass(frozen=True)
class Parameter:
    """A keyword parameter, its default, and the releases that have it."""

    name: str
    default: Any = UNCOMPARED
    versions: tuple[str, ...] = VERSIONS


@dataclass(frozen=True)
class Symbol:
    """A class, method or attribute with its importable path, and those of its parameters that
    aligner uses."""

    path: str
    parameters: tuple[Parameter, ...] = ()
    fields: str | None = None
    """Path of the pydantic model whose fields are further keywords, if a signature ends in
    **kwargs."""
    versions: tuple[str, ...] = VERSIONS

    def keywords(self, version: str) -> Mapping[str, Parameter]:
        """The parameters of a release by name."""
        return {
            parameter.name: parameter
            for parameter in self.parameters
            if version in parameter.versions
        }


def _all(**defaults: Any) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, default) for name, default in defaults.items())


_LLM = "tensorrt_llm.AsyncLLM"
_ARGUMENTS = "tensorrt_llm.llmapi.llm_args"

SYMBOLS: Final = (
    Symbol(
        _LLM,
        (
            *_all(placement_groups=None, placement_bundle_indices=None, per_worker_gpu_share=None),
            *_all(
                model=REQUIRED, tokenizer=None, skip_tokenizer_init=False, trust_remote_code=False
            ),
            *_all(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                dtype="auto",
                load_format=UNCOMPARED,
            ),
            *_all(
                max_seq_len=None,
                max_input_len=1024,
                max_batch_size=UNCOMPARED,
                max_num_tokens=UNCOMPARED,
            ),
            *_all(
                kv_cache_config=UNCOMPARED,
                cuda_graph_config=UNCOMPARED,
                sampler_type=UNCOMPARED,
                backend=UNCOMPARED,
            ),
            *_all(enable_chunked_prefill=UNCOMPARED, stream_interval=1),
            *_all(ray_worker_extension_cls=UNCOMPARED),
            Parameter("enable_sleep", False, versions=("1.2",)),
            Parameter("sleep_config", None, versions=("1.3",)),
        ),
        fields=f"{_ARGUMENTS}.TorchLlmArgs",
    ),
    Symbol(f"{_LLM}.setup_async"),
    Symbol(f"{_LLM}.shutdown"),
    Symbol(f"{_LLM}.generate_async", _all(inputs=REQUIRED, sampling_params=None, streaming=False)),
    Symbol(f"{_LLM}.release", _all(tags=UNCOMPARED)),
    Symbol(f"{_LLM}.resume", _all(tags=UNCOMPARED)),
    Symbol(f"{_LLM}.update_weights", _all(weights=REQUIRED)),
    Symbol(
        f"{_LLM}.collective_rpc",
        _all(method=REQUIRED, args=(), kwargs=None, unique_reply_rank=None),
    ),
    Symbol(
        "tensorrt_llm.SamplingParams",
        (
            *_all(end_id=None, pad_id=None, max_tokens=32, bad_token_ids=None, stop_token_ids=None),
            *_all(
                include_stop_str_in_output=False,
                n=1,
                best_of=None,
                use_beam_search=False,
                top_k=None,
                top_p=None,
            ),
            *_all(seed=None, temperature=None, min_tokens=None, logprobs=None, detokenize=True),
        ),
    ),
    Symbol(
        "tensorrt_llm.llmapi.KvCacheConfig",
        _all(enable_block_reuse=True, max_tokens=None, free_gpu_memory_fraction=0.9),
    ),
    Symbol(
        "tensorrt_llm.llmapi.CudaGraphConfig",
        _all(batch_sizes=None, max_batch_size=UNCOMPARED, enable_padding=False),
    ),
    Symbol(f"{_ARGUMENTS}.SleepConfig", _all(restore_modes=UNCOMPARED), versions=("1.3",)),
    Symbol("tensorrt_llm._torch.virtual_memory.ExecutorMemoryType", versions=("1.2",)),
    Symbol(f"{_ARGUMENTS}.ExecutorMemoryType", versions=("1.3",)),
    Symbol("tensorrt_llm.llmapi.RequestOutput.abort"),
    Symbol("tensorrt_llm.llmapi.RequestOutput.outputs"),
    Symbol("tensorrt_llm.llmapi.RequestOutput.__anext__"),
    Symbol(
        "tensorrt_llm.executor.result.CompletionOutput",
        _all(token_ids=UNCOMPARED, logprobs=UNCOMPARED, finish_reason=UNCOMPARED),
    ),
    # Symbols of the workers.
    Symbol("tensorrt_llm.llmapi.rlhf_utils.WorkerExtension.update_weights", _all(ipc_handles=None)),
    Symbol("tensorrt_llm.executor.ray_gpu_worker.RayWorkerWrapper.report_device_id"),
    Symbol("tensorrt_llm._torch.pyexecutor.py_executor.PyExecutor.reset_prefix_cache"),
)

MEMORY_TAGS: Final = (
    *(
        "model",
        "draft_model",
        "model_extra",
        "executor_extra",
        "sampler",
        "drafter",
        "guided_decoder",
    ),
    *("spec_resource_manager", "kv_cache"),
)
"""Tags that select the memory to release and resume; releases since 1.3 also have
`WEIGHT_TAGS_SINCE_1_3`."""
KV_CACHE: Final = "kv_cache"
WEIGHT_TAGS_SINCE_1_3: Final = ("model_weights", "draft_model_weights")


def symbol(path: str) -> Symbol:
    """Return the table's symbol with this path."""
    return next(entry for entry in SYMBOLS if entry.path == path)
