"""Keys of the generation engine and of the weight sync: section `engine`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import CALLABLE, option, section
from aligner.schema.server import PortsConfig


@dataclass
class EngineParallelConfig:
    """Parallel layout of the generation engine."""

    tensor: int = option(1, "Tensor-parallel size of the engine (TP').", minimum=1)
    data: int = option(
        1,
        "Number of engine replicas (DP'); 0 means the trainer's number of ranks divided by"
        " `engine.parallel.tensor` times `engine.parallel.pipeline`, rounded down.",
        minimum=0,
    )
    expert: int = option(
        1,
        "Expert-parallel size of the engine (EP'): number of groups of tensor-parallel ranks that"
        " the experts are distributed over. The ranks of a group split each of their experts; with"
        " the value of `tensor`, each rank has whole experts. vLLM supports only 1 and the value of"
        " `tensor`.",
        minimum=1,
    )
    pipeline: int = option(
        1,
        "Pipeline-parallel size of the engine (PP'): number of stages that the layers of a replica"
        " are distributed over. Only vLLM supports more than 1.",
        minimum=1,
    )

    @property
    def replica_ranks(self) -> int:
        """Number of processes of a replica.

        Ranks of a replica are adjacent; tensor parallelism varies fastest, then the stage.
        """
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        """Number of processes that the engine spans."""
        return self.replica_ranks * self.data

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size inside an expert."""
        return self.tensor // self.expert


@dataclass
class TensorRTLLMConfig:
    """Settings of TensorRT-LLM."""

    free_memory_fraction: float = option(
        0.4,
        "Fraction of a GPU's free memory that TensorRT-LLM uses for the KV cache.",
        minimum=0.01,
        maximum=1,
        read_if="engine.kind=tensorrt_llm and engine.kv_cache_mib=null",
    )
    max_num_tokens: int = option(
        8192,
        "Maximum total number of tokens of all sequences in one engine step; longer prompts are"
        " prefilled in chunks.",
        minimum=1,
    )
    stream_interval: int = option(
        16,
        "Number of response tokens between two messages of TensorRT-LLM. When responses are"
        " interrupted, the tokens since the last message are generated again.",
        minimum=1,
    )
    timeout_s: float = option(
        900.0,
        "Timeout in seconds for startup, for the release of memory, and for the next token of"
        " any response. The run fails after a timeout.",
        minimum=1,
    )
    args: dict[str, Any] = option(
        {},
        "Further keyword arguments of TensorRT-LLM's `AsyncLLM`. aligner checks their names, types"
        " and allowed values against the installed TensorRT-LLM, and refuses arguments that it sets"
        " itself or with which weight sync, log-probs or placement would fail.",
    )


@dataclass
class VLLMConfig:
    """Settings of vLLM."""

    python: str | None = option(
        None,
        "Path of the Python interpreter in an environment with vLLM; null means the environment"
        " that `aligner install-vllm` creates in the cache.",
    )
    memory_fraction: float = option(
        0.4,
        "Fraction of a GPU's memory that vLLM uses in total, for weights and KV cache.",
        minimum=0.01,
        maximum=1,
    )
    stream_interval: int = option(
        16,
        "Number of response tokens between two messages of vLLM. When responses are"
        " interrupted, the tokens since the last message are generated again.",
        minimum=1,
    )
    timeout_s: float = option(
        180.0,
        "Timeout in seconds for startup, for the release of memory, and for the next token of"
        " any response. The run fails after a timeout.",
        minimum=1,
    )
    args: dict[str, Any] = option(
        {},
        "Further keyword arguments of vLLM's `AsyncEngineArgs`. aligner checks their names, types"
        " and allowed values against the installed vLLM, and refuses arguments that it sets itself"
        " or with which weight sync, log-probs or placement would fail.",
    )
    env: dict[str, Any] = option(
        {},
        "Environment variables of vLLM's processes. aligner checks the names and values of"
        " variables `VLLM_…` against the installed vLLM.",
    )


@dataclass
class SpeculationConfig:
    """Speculative decoding with prompt lookup; the samples do not change, except for rounding."""

    tokens: int = option(
        0,
        "Maximum number of draft tokens per step. Prompt lookup copies the draft tokens from"
        " the continuation of an earlier occurrence of the same n-gram in the prompt or"
        " response. 0 means no speculative decoding.",
        minimum=0,
    )
    ngram: int = option(
        3, "Length in tokens of the n-gram for prompt lookup.", minimum=1, read_if=".tokens>0"
    )
    rows: int = option(
        4,
        "Maximum number of responses in flight on a rank for speculative decoding. With more"
        " responses in flight, the rank uses no draft tokens.",
        minimum=1,
        read_if=".tokens>0",
    )


@dataclass
class EngineConfig:
    """Generation engine and weight sync."""

    kind: str = option(
        "embedded",
        "Generation engine. `embedded`: aligner's PyTorch decoder, for CPUs and GPUs;"
        " `tensorrt_llm`: TensorRT-LLM, for GPUs; `vllm`: vLLM, in a separate Python environment,"
        " for CPUs and GPUs; `module:Class`: your own engine, a subclass of"
        " `aligner.engines.engine_protocol.GenerationEngine`.",
        choices=("embedded", "tensorrt_llm", "vllm", CALLABLE),
    )
    arguments: dict[str, Any] = option(
        {}, "Further keyword arguments of your own engine class.", read_if=".kind=*:*"
    )
    placement: str = option(
        "colocated",
        "Devices of the engine. `colocated`: the trainer's devices; `server`: separate devices,"
        " as the role `generator`.",
        choices=("colocated", "server"),
    )
    parallel: EngineParallelConfig = section(EngineParallelConfig)
    ports: PortsConfig = section(PortsConfig, read_if="engine.placement=server")
    precision: str = option(
        "auto",
        "Precision of weights and computation; `auto` means bf16 on GPUs and fp32 on CPUs.",
        choices=("auto", "fp32", "bf16"),
    )
    exact: bool = option(
        False,
        "Whether the engine and the trainer use batch-invariant kernels and one thread per"
        " rank, so that engine and trainer log-probs are bitwise equal. Requires a dense model"
        " in fp32 on CPUs, without tensor parallelism and without LoRA.",
        read_if=".kind=embedded",
    )
    packed_weights: bool = option(
        True,
        "Whether the engine on CPUs keeps a packed copy of its matrices for decode and rebuilds"
        " the copy for every weight version. The copy reduces the time of matmuls by 15% to 48%"
        " and doubles the memory for weights.",
        read_if=(".kind=embedded", ".exact=false"),
    )
    batch_size: int = option(
        64, "Maximum number of sequences that one engine rank decodes at the same time.", minimum=1
    )
    kv_cache_mib: int | None = option(
        None,
        "Memory for the KV cache per rank in MiB; less memory allows fewer tokens in flight at the"
        " same time. Null means no limit for the embedded engine, the engine's memory fraction for"
        " TensorRT-LLM and for vLLM on GPUs, and `engine.batch_size` sequences of the maximum"
        " length for vLLM on CPUs.",
        minimum=1,
    )
    cuda_graphs: bool = option(True, "Whether decode steps run as CUDA graphs; only on GPUs.")
    steps_per_sync: int | None = option(
        None,
        "Number of decode steps per host synchronization. The engine detects finished responses"
        " and starts waiting responses only at a synchronization. Null means 8 on GPUs and 1 on"
        " CPUs.",
        minimum=1,
        read_if=".kind=embedded",
    )
    speculation: SpeculationConfig = section(SpeculationConfig, read_if="engine.kind=embedded")
    sleep: bool = option(
        False, "Whether the engine releases its device memory while the policy trains."
    )
    update: str = option(
        "atomic",
        "How a weight sync replaces the old weights. `atomic`: new weights are loaded into"
        " separate memory, and generation uses the old weights until the transfer is complete."
        " `in_place`: new weights overwrite the old weights, so a failed weight sync leaves no"
        " usable weights. `shared`: as `in_place`, but tensors with the same layout use the"
        " trainer's memory.",
        choices=("atomic", "in_place", "shared"),
    )
    publish: str = option(
        "whole",
        "Contents of a weight sync. `whole`: all weights; `changes`: only elements whose bits"
        " changed since the previous weight sync (lossless; in bf16, few elements change). A"
        " tensor shard is sent in full if the full shard is smaller than its changes.",
        choices=("whole", "changes"),
    )
    in_flight: str = option(
        "finish",
        "Effect of a weight sync on responses in flight. `finish`: the weight sync waits until"
        " these responses are complete; `interrupt`: these responses continue from their"
        " existing tokens with the new weights.",
        choices=("finish", "interrupt"),
        read_if=".placement=server",
    )
    update_timeout_s: float = option(
        300.0,
        "Timeout of a weight sync in seconds. After a timeout, the weight sync fails with an"
        " error that names the missing rank.",
        minimum=1,
    )
    verify: str = option(
        "sync",
        "Weight syncs after which the engine proves that it holds the trainer's weights: by"
        " checksums of its parameters, and by the log-probs of a probe sequence. `sync`: every"
        " weight sync; `first`: the first one to each start of the engine; `never`: none.",
        choices=("sync", "first", "never"),
    )
    bucket_mib: int = option(
        1024,
        "Maximum size in MiB of the buckets in which weights are transferred between ranks.",
        minimum=1,
    )
    tensorrt_llm: TensorRTLLMConfig = section(TensorRTLLMConfig, read_if="engine.kind=tensorrt_llm")
    vllm: VLLMConfig = section(VLLMConfig, read_if="engine.kind=vllm")
