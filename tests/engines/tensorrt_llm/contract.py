"""The part of TensorRT-LLM's API that `aligner.engines.tensorrt_llm` uses; this file imports
nothing of TensorRT-LLM.

Each entry names, for each release, the release and the files that it was read from. The fake has
every symbol, takes its signatures from this table, and refuses other keywords. If the package is
installed, a test compares it with the table. `python -m benchmarks.tensorrt_llm_drift PATH` compares
a source tree or an installed package with the table, without importing TensorRT-LLM. One attribute
of workers is missing, `engine`, because it exists only on instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

VERSIONS: Final = ("1.2", "1.3", "1.4")
"""Releases that the table describes."""
REQUIRED: Final = "required"
"""Marks a parameter without a default."""
UNCOMPARED: Final = "uncompared"
"""Marks a parameter whose default is not compared, because aligner does not rely on it."""

_SINCE_1_3: Final = ("1.3", "1.4")

READ_FROM: Final[Mapping[str, str]] = {
    "1.2.0": "source pages of the documentation of release 1.2.0, built from commit dbdb13b",
    "1.2.0rc": "commits 65b31db and 0acd798 of main, release candidates of 1.2.0",
    "1.3.0rc24": "source pages of the documentation of 1.3.0rc24, built from commit 1cef02e",
    "1.3.0rc27": "API reference in the documentation of 1.3.0rc27",
    "main 04762f3": "commit 04762f3 of main, between 1.2.0 and 1.3.0rc24",
    "main 1f064c4": "commit 1f064c4 of main, between 1.3.0rc24 and 1.4.0rc1",
    "main a3dfe26": "commit a3dfe26 of main, after workers moved to tensorrt_llm/executor/ray",
    "main 0004396": "commit 0004396 of main, after `sampler_type` was removed",
    "main after 1f064c4": "states of main after commit 1f064c4 whose commit is not known; 1.4.0rc1"
    " documents the same `AsyncLLM`",
    "1.4.0rc4": "API reference in the documentation of 1.4.0rc4",
}
"""What the releases in `Source.release` refer to. All of it is in the repository
NVIDIA/TensorRT-LLM and in its published documentation."""


@dataclass(frozen=True)
class Source:
    """Where an entry was read."""

    release: str
    """Key of `READ_FROM`."""
    files: tuple[str, ...]
    """Files that define the entry, relative to the repository; those of its base classes follow."""


def _read(release: str, *files: str) -> Source:
    return Source(release, tuple(f"tensorrt_llm/{file}" for file in files))


@dataclass(frozen=True)
class Parameter:
    """A keyword parameter, its default, and the releases that have it."""

    name: str
    default: Any = UNCOMPARED
    versions: tuple[str, ...] = VERSIONS


@dataclass(frozen=True)
class Symbol:
    """A class, method, attribute or enumeration with its importable path, and those of its
    parameters or members that aligner uses."""

    path: str
    sources: Mapping[str, Source]
    """Source by release; a release without a source does not have the symbol."""
    parameters: tuple[Parameter, ...] = ()
    fields: str | None = None
    """Path of the pydantic model whose fields are further keywords, if a signature ends in
    **kwargs."""
    field_sources: Mapping[str, Source] | None = None
    """Source of `fields` by release."""
    members: Mapping[str, str] | None = None
    """Values by name, for an enumeration."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Releases that have the symbol."""
        return tuple(version for version in VERSIONS if version in self.sources)

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

_LLM_FILES = ("_torch/async_llm.py", "llmapi/llm.py")
_LLM_SOURCES = {
    "1.2": _read("1.2.0", *_LLM_FILES),
    "1.3": _read("1.3.0rc24", *_LLM_FILES),
    "1.4": _read("main after 1f064c4", *_LLM_FILES),
}
_FIELDS = {
    "1.2": _read("1.2.0", "llmapi/llm_args.py"),
    "1.3": _read("main 1f064c4", "llmapi/llm_args.py"),
    "1.4": _read("main 0004396", "llmapi/llm_args.py"),
}
_CONFIGURATIONS = {
    "1.2": _read("1.2.0", "llmapi/llm_args.py"),
    "1.3": _read("1.3.0rc27", "llmapi/llm_args.py"),
    "1.4": _read("1.4.0rc4", "llmapi/llm_args.py"),
}
_SAMPLING = {
    "1.2": _read("1.2.0", "sampling_params.py"),
    # The module moved in main; the old module still exists as a shim.
    "1.3": _read("main 1f064c4", "sampling_params.py", "executor/params/sampling.py"),
    "1.4": _read("main 1f064c4", "sampling_params.py", "executor/params/sampling.py"),
}
_RESULTS = {
    "1.2": _read("1.2.0", "llmapi/llm.py", "executor/result.py"),
    "1.3": _read("main 1f064c4", "llmapi/llm.py", "executor/result.py"),
    "1.4": _read("main 1f064c4", "llmapi/llm.py", "executor/result.py"),
}
EXTENSION_SOURCES: Final = {
    "1.2": _read("1.2.0rc", "llmapi/rlhf_utils.py"),
    "1.3": _read("main 04762f3", "llmapi/rlhf_utils.py"),
    "1.4": _read("main after 1f064c4", "llmapi/rlhf_utils.py"),
}
_RAY_WORKERS = ("executor/ray_gpu_worker.py", "executor/ray/gpu_worker.py")
_WORKERS = {
    "1.2": _read("1.2.0rc", *_RAY_WORKERS),
    "1.3": _read("main 1f064c4", *_RAY_WORKERS),
    "1.4": _read("main a3dfe26", *reversed(_RAY_WORKERS)),
}
_EXECUTORS = {
    version: _read(source.release, "_torch/pyexecutor/py_executor.py")
    for version, source in _WORKERS.items()
}

MEMORY_TYPES: Final[Mapping[str, str]] = {
    "SAMPLER": "sampler",
    "DRAFTER": "drafter",
    "GUIDED_DECODER": "guided_decoder",
    "SPEC_RESOURCES": "spec_resource_manager",
    "INIT_KV_CACHE": "_no_capture_init_kv_cache",
    "INIT_EXTRA_RESOURCES": "_no_capture_init_extra_resources",
    "MODEL_EXTRA": "model_extra",
    "EXTRA_RESOURCES": "executor_extra",
    "KV_CACHE": "kv_cache",
    "MODEL_ENGINE_MAIN": "model",
    "MODEL_ENGINE_DRAFT": "draft_model",
}
"""Members of `ExecutorMemoryType` in release 1.2: tags that select the memory to release and
resume. Tags with a leading underscore cannot be selected."""
MEMORY_TYPES_SINCE_1_3: Final[Mapping[str, str]] = {
    **MEMORY_TYPES,
    "MODEL_WEIGHTS_MAIN": "model_weights",
    "MODEL_WEIGHTS_DRAFT": "draft_model_weights",
}
KV_CACHE: Final = "kv_cache"
LOGPROB_MODES: Final[Mapping[str, str]] = {"RAW": "raw", "PROCESSED": "processed"}
"""Members of `LogprobMode`. `RAW` is the log-prob of the model's logits; `PROCESSED` is that after
temperature, top-k and top-p, which is 0 for a greedy token."""

_GRAPH_PARAMETERS = _all(batch_sizes=None, max_batch_size=UNCOMPARED, enable_padding=False)

SYMBOLS: Final = (
    Symbol(
        _LLM,
        _LLM_SOURCES,
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
            *_all(kv_cache_config=UNCOMPARED, cuda_graph_config=UNCOMPARED),
            # 1.3 deprecates it; main has removed it and rejects the value `TRTLLMSampler`.
            Parameter("sampler_type", UNCOMPARED, versions=("1.2", "1.3")),
            *_all(enable_chunked_prefill=UNCOMPARED, stream_interval=1),
            *_all(ray_worker_extension_cls=UNCOMPARED),
            *_all(moe_tensor_parallel_size=None, moe_expert_parallel_size=None),
            Parameter("enable_sleep", False, versions=("1.2",)),
            Parameter("sleep_config", None, versions=_SINCE_1_3),
        ),
        fields=f"{_ARGUMENTS}.TorchLlmArgs",
        field_sources=_FIELDS,
    ),
    Symbol(f"{_LLM}.setup_async", _LLM_SOURCES),
    Symbol(f"{_LLM}.shutdown", _LLM_SOURCES),
    Symbol(
        f"{_LLM}.generate_async",
        _LLM_SOURCES,
        _all(inputs=REQUIRED, sampling_params=None, streaming=False),
    ),
    Symbol(f"{_LLM}.release", _LLM_SOURCES, _all(tags=UNCOMPARED)),
    Symbol(f"{_LLM}.resume", _LLM_SOURCES, _all(tags=UNCOMPARED)),
    Symbol(f"{_LLM}.update_weights", _LLM_SOURCES, _all(weights=REQUIRED)),
    Symbol(
        f"{_LLM}.collective_rpc",
        _LLM_SOURCES,
        _all(method=REQUIRED, args=(), kwargs=None, unique_reply_rank=None),
    ),
    Symbol(
        "tensorrt_llm.SamplingParams",
        _SAMPLING,
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
            # The default is `LogprobMode.RAW`; only its type is used.
            Parameter("logprobs_mode", UNCOMPARED, versions=_SINCE_1_3),
        ),
    ),
    Symbol(
        "tensorrt_llm.sampling_params.LogprobMode",
        {version: _SAMPLING[version] for version in _SINCE_1_3},
        members=LOGPROB_MODES,
    ),
    Symbol(
        "tensorrt_llm.llmapi.KvCacheConfig",
        _CONFIGURATIONS,
        _all(enable_block_reuse=True, max_tokens=None, free_gpu_memory_fraction=0.9),
    ),
    Symbol(
        "tensorrt_llm.llmapi.CudaGraphConfig",
        {"1.2": _CONFIGURATIONS["1.2"], "1.3": _read("main 1f064c4", "llmapi/llm_args.py")},
        _GRAPH_PARAMETERS,
    ),
    # The documentation calls it so since 1.3.0rc27, which may still accept the old name.
    Symbol(
        "tensorrt_llm.llmapi.DecodeCudaGraphConfig",
        {"1.4": _read("1.3.0rc27", "llmapi/llm_args.py")},
        _GRAPH_PARAMETERS,
    ),
    Symbol(
        f"{_ARGUMENTS}.SleepConfig",
        {version: _CONFIGURATIONS[version] for version in _SINCE_1_3},
        _all(restore_modes=UNCOMPARED),
    ),
    Symbol(
        "tensorrt_llm._torch.virtual_memory.ExecutorMemoryType",
        {"1.2": _read("1.2.0rc", "_torch/virtual_memory.py")},
        members=MEMORY_TYPES,
    ),
    Symbol(
        f"{_ARGUMENTS}.ExecutorMemoryType",
        {version: _CONFIGURATIONS[version] for version in _SINCE_1_3},
        members=MEMORY_TYPES_SINCE_1_3,
    ),
    Symbol("tensorrt_llm.llmapi.RequestOutput.abort", _RESULTS),
    Symbol("tensorrt_llm.llmapi.RequestOutput.outputs", _RESULTS),
    Symbol("tensorrt_llm.llmapi.RequestOutput.__anext__", _RESULTS),
    Symbol(
        "tensorrt_llm.executor.result.CompletionOutput",
        _RESULTS,
        _all(token_ids=UNCOMPARED, logprobs=UNCOMPARED, finish_reason=UNCOMPARED),
    ),
    # Symbols of the workers.
    Symbol(
        "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension.update_weights",
        EXTENSION_SOURCES,
        _all(ipc_handles=None),
    ),
    Symbol(
        "tensorrt_llm.executor.ray_gpu_worker.RayWorkerWrapper.report_device_id",
        {version: _WORKERS[version] for version in ("1.2", "1.3")},
    ),
    Symbol(
        "tensorrt_llm.executor.ray.gpu_worker.RayWorkerWrapper.report_device_id",
        {"1.4": _WORKERS["1.4"]},
    ),
    Symbol("tensorrt_llm._torch.pyexecutor.py_executor.PyExecutor.reset_prefix_cache", _EXECUTORS),
)


@dataclass(frozen=True)
class WeightUpdates:
    """What a worker does when it receives weights, and when that fails.

    In every release, the first bucket of an update calls `pre_reload_weights` of all modules and
    sets `LATCH` on the model. Further buckets skip the call while the latch is set, and the end of
    the update deletes it. A worker that did not fail keeps the latch after another worker's failure.
    """

    source: Source
    clears_latch_on_failure: bool
    """Whether a worker that fails deletes its own latch."""
    has_loader_state: bool = False
    """Whether the model loader has `begin_update_weights`, `finalize_update_weights` and
    `abort_update_weights`."""
    has_abort: bool = False
    """Whether the extension has `abort_update_weights`, which must be called on every worker after
    a failure."""
    refused_imports: Mapping[str, tuple[str, ...]] | None = None
    """Names by module that the unpickler of IPC handles refuses, even if they match
    `ALLOWED_MODULES`."""


LATCH: Final = "first_pre_reload_weights"
"""Attribute of the model that is set between the first bucket of an update and its end."""
ALLOWED_MODULES: Final = r"^torch.*"
"""Pattern of the modules that IPC handles may import, besides `ALLOWED_BUILTINS`."""
ALLOWED_BUILTINS: Final = frozenset(
    ["list", "tuple", "str", "int", "float", "bool", "bytes", "dict", "NoneType", "type"]
)
_REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "torch.storage": ("_load_from_bytes",),
    "torch.hub": ("_load_local",),
    "torch": ("save",),
}
DEVICE_ARGUMENT: Final = 6
"""Index of the argument of a handle's function that the worker replaces by its own device."""

WEIGHT_UPDATES: Final[Mapping[str, WeightUpdates]] = {
    "1.2": WeightUpdates(EXTENSION_SOURCES["1.2"], clears_latch_on_failure=False),
    "1.3": WeightUpdates(
        EXTENSION_SOURCES["1.3"], clears_latch_on_failure=False, refused_imports=_REFUSED
    ),
    "1.4": WeightUpdates(
        EXTENSION_SOURCES["1.4"],
        clears_latch_on_failure=True,
        has_loader_state=True,
        refused_imports=_REFUSED,
    ),
    # A state of rlhf_utils.py in 2026 that could not be assigned to a release.
    "abort on all workers": WeightUpdates(
        EXTENSION_SOURCES["1.4"],
        clears_latch_on_failure=True,
        has_abort=True,
        refused_imports=_REFUSED,
    ),
}
"""By release, and one further state of the file."""


def symbol(path: str) -> Symbol:
    """Return the table's symbol with this path."""
    return next(entry for entry in SYMBOLS if entry.path == path)
