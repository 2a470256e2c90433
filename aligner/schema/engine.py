"""The engine that draws responses."""

from dataclasses import dataclass

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig


@dataclass
class EngineParallelConfig:
    """Parallel layout of the generation engine."""

    tensor: int = option(1, "Tensor-parallel size of the engine (TP').", minimum=1)
    data: int = option(
        1,
        "Number of engine replicas (DP'); 0 means as many as fit on the trainer's ranks.",
        minimum=0,
    )

    @property
    def ranks(self) -> int:
        """Number of processes that the engine spans."""
        return self.tensor * self.data


@dataclass
class TensorRTLLMConfig:
    """Settings of TensorRT-LLM."""

    free_memory_fraction: float = option(
        0.4,
        "Fraction of a GPU's free memory that TensorRT-LLM uses for the KV cache.",
        minimum=0.01,
        maximum=1,
        read="engine.kind=tensorrt_llm and engine.kv_cache_mib=null",
    )
    max_num_tokens: int = option(
        8192,
        "Maximum number of tokens of all sequences in one engine step; longer prompts are"
        " prefilled in chunks.",
        minimum=1,
    )
    stream_interval: int = option(
        16,
        "Tokens of a response between two messages of TensorRT-LLM; when responses are"
        " interrupted, the tokens since the last message are generated again.",
        minimum=1,
    )
    timeout_s: float = option(
        900.0,
        "Timeout in seconds of startup, of memory release, and of the wait for a new token in any"
        " response; the run fails when it expires.",
        minimum=1,
    )


@dataclass
class VLLMConfig:
    """Settings of vLLM."""

    python: str | None = option(
        None,
        "Path of the Python interpreter of an environment with vLLM; null means the environment"
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
        "Tokens of a response between two messages of vLLM; when responses are interrupted, the"
        " tokens since the last message are generated again.",
        minimum=1,
    )
    timeout_s: float = option(
        180.0,
        "Timeout in seconds of startup, of memory release, and of the wait for a new token in any"
        " response; the run fails when it expires.",
        minimum=1,
    )


@dataclass
class SpeculationConfig:
    """Speculative decoding with prompt lookup; the samples do not change, except for rounding."""

    tokens: int = option(
        0,
        "Maximum number of draft tokens per step, found by prompt lookup: they are copied from the"
        " continuation of the same n-gram earlier in the prompt or response. 0 means no"
        " speculative decoding.",
        minimum=0,
    )
    ngram: int = option(
        3, "Length in tokens of the n-gram for prompt lookup.", minimum=1, read=".tokens>0"
    )
    rows: int = option(
        4,
        "Maximum number of responses in flight on a rank for speculative decoding; with more of"
        " them, no draft tokens are used.",
        minimum=1,
        read=".tokens>0",
    )


@dataclass
class EngineConfig:
    """Generation engine and weight sync."""

    kind: str = option(
        "embedded",
        "Generation engine. `embedded`: aligner's PyTorch decoder, for CPUs and GPUs;"
        " `tensorrt_llm`: TensorRT-LLM, for GPUs; `vllm`: vLLM, in a separate Python environment,"
        " for CPUs and GPUs.",
        choices=("embedded", "tensorrt_llm", "vllm"),
    )
    placement: str = option(
        "colocated",
        "Devices of the engine. `colocated`: those of the trainer; `server`: separate ones, as"
        " the role `generator`.",
        choices=("colocated", "server"),
    )
    parallel: EngineParallelConfig = section(EngineParallelConfig)
    ports: PortsConfig = section(PortsConfig, read="engine.placement=server")
    precision: str = option(
        "auto",
        "Precision of weights and computation; `auto` means bf16 on GPUs and fp32 on CPUs.",
        choices=("auto", "fp32", "bf16"),
    )
    exact: bool = option(
        False,
        "Whether engine and trainer use batch-invariant kernels and one thread per rank, so that"
        " their log-probs are bitwise equal. Requires a dense model in fp32 on CPUs without"
        " tensor parallelism and LoRA.",
        read=".kind=embedded",
    )
    packed_weights: bool = option(
        True,
        "Whether the engine on CPUs keeps a copy of its matrices that is packed for decode,"
        " rebuilt for every weight version: matmuls take a sixth to a half less time, weights"
        " twice the memory.",
        read=(".kind=embedded", ".exact=false"),
    )
    batch_size: int = option(
        64, "Maximum number of sequences that one engine rank decodes at a time.", minimum=1
    )
    kv_cache_mib: int | None = option(
        None,
        "Memory for the KV cache per rank in MiB; a smaller one holds fewer sequences at a time."
        " Null means no limit for the embedded engine; TensorRT-LLM and vLLM then use their"
        " memory fraction.",
        minimum=1,
    )
    cuda_graphs: bool = option(True, "Whether decode steps run as CUDA graphs; only on GPUs.")
    steps_per_sync: int | None = option(
        None,
        "Decode steps per host synchronization; finished responses are detected, and waiting"
        " ones start, only at a synchronization. Null means 8 on GPUs and 1 on CPUs.",
        minimum=1,
        read=".kind=embedded",
    )
    speculation: SpeculationConfig = section(SpeculationConfig, read="engine.kind=embedded")
    sleep: bool = option(
        False, "Whether the engine releases its device memory while the policy trains."
    )
    update: str = option(
        "atomic",
        "How new weights replace the old ones. `atomic`: loaded next to the old ones, which"
        " serve until all have arrived; `in_place`: overwrite the old ones, so a failed update"
        " leaves no usable weights; `shared`: as `in_place`, but tensors with equal layout are"
        " the trainer's own.",
        choices=("atomic", "in_place", "shared"),
    )
    publish: str = option(
        "whole",
        "Contents of a weight sync. `whole`: all weights; `changes`: elements whose bits changed"
        " since the previous weight sync (lossless; in bf16 few change), or a whole piece of a"
        " tensor if that is smaller.",
        choices=("whole", "changes"),
    )
    in_flight: str = option(
        "finish",
        "Effect of a weight sync on responses in flight. `finish`: the weight sync waits until"
        " they are complete; `interrupt`: they continue from their tokens under the new weights.",
        choices=("finish", "interrupt"),
        read=".placement=server",
    )
    update_timeout_s: float = option(
        300.0,
        "Timeout of a weight sync in seconds; it then fails with an error naming the missing rank.",
        minimum=1,
    )
    verify_every: int = option(
        0,
        "Number of weight syncs between checksum verifications of the weights; the first weight"
        " sync is always verified, and 0 means only the first.",
        minimum=0,
    )
    bucket_mib: int = option(
        1024, "Maximum size in MiB of the buckets in which weights move between ranks.", minimum=1
    )
    tensorrt_llm: TensorRTLLMConfig = section(TensorRTLLMConfig, read="engine.kind=tensorrt_llm")
    vllm: VLLMConfig = section(VLLMConfig, read="engine.kind=vllm")
