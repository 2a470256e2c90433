"""The engine that draws responses."""

from dataclasses import dataclass

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig


@dataclass
class EngineParallelConfig:
    """The generation engine's own layout."""

    tensor: int = option(1, "tensor-parallel size of the engine (TP')", minimum=1)
    data: int = option(
        1, "engine replicas (DP'); 0: as many as fill the trainer's ranks", minimum=0
    )

    @property
    def ranks(self) -> int:
        """Number of processes that the engine spans."""
        return self.tensor * self.data


@dataclass
class TensorRTLLMConfig:
    """What only TensorRT-LLM needs to know (engine.kind=tensorrt_llm)."""

    free_memory_fraction: float = option(
        0.4,
        "share of a GPU's free memory that is taken for keys and values when engine.kv_cache_mib is"
        " null",
        minimum=0.01,
        maximum=1,
        read="engine.kind=tensorrt_llm and engine.kv_cache_mib=null",
    )
    max_num_tokens: int = option(
        8192, "tokens of one step over all sequences; longer prompts are cut into chunks", minimum=1
    )
    stream_interval: int = option(
        16,
        "tokens of a response between two messages of TensorRT-LLM's; where responses are"
        " interrupted, those since its last message are drawn again",
        minimum=1,
    )
    timeout_s: float = option(
        900.0,
        "starting, giving memory back, or no response gaining a token may take so long before the"
        " run fails",
        minimum=1,
    )


@dataclass
class VLLMConfig:
    """What only vLLM needs to know (engine.kind=vllm)."""

    python: str | None = option(
        None,
        "the Python of an environment that has vLLM; null: the one that `aligner install-vllm`"
        " makes in the cache",
    )
    memory_fraction: float = option(
        0.4,
        "share of a GPU's memory that vLLM takes in all, for the model and for keys and values",
        minimum=0.01,
        maximum=1,
    )
    stream_interval: int = option(
        16,
        "tokens of a response between two messages of vLLM's; where responses are interrupted,"
        " those since its last message are drawn again",
        minimum=1,
    )
    timeout_s: float = option(
        180.0,
        "starting, giving memory back, or no response gaining a token may take so long before the"
        " run fails",
        minimum=1,
    )


@dataclass
class SpeculationConfig:
    """Guesses at the next tokens, checked in one pass; the samples are the same, to rounding."""

    tokens: int = option(
        0,
        "next tokens that are guessed by what followed the same ones in prompt or response; 0:"
        " none",
        minimum=0,
    )
    ngram: int = option(
        3, "tokens in a row that must have come before for a guess", minimum=1, read=".tokens>0"
    )
    rows: int = option(
        4,
        "nothing is guessed while a rank has more responses under way",
        minimum=1,
        read=".tokens>0",
    )


@dataclass
class EngineConfig:
    """Generation."""

    kind: str = option(
        "embedded",
        "generation backend; embedded: a decoder in PyTorch, anywhere; tensorrt_llm: TensorRT-LLM,"
        " on GPUs; vllm: vLLM, in an environment of its own, anywhere",
        choices=("embedded", "tensorrt_llm", "vllm"),
    )
    placement: str = option(
        "colocated",
        "where the engine runs; colocated: on the trainer's ranks; server: on devices of its own,"
        " as the role generator",
        choices=("colocated", "server"),
    )
    parallel: EngineParallelConfig = section(EngineParallelConfig)
    ports: PortsConfig = section(PortsConfig, read="engine.placement=server")
    precision: str = option(
        "auto", "arithmetic; auto: bf16 on GPUs, fp32 on CPUs", choices=("auto", "fp32", "bf16")
    )
    exact: bool = option(
        False,
        "engine and trainer compute in ways that do not hang on what else is in a batch, one thread"
        " a rank, so that their log-probs are the same bits (dense models in fp32 on CPUs, whole on"
        " a rank or in pipeline stages)",
        read=".kind=embedded",
    )
    packed_weights: bool = option(
        True,
        "on CPUs the engine keeps a copy of its matrices in the order in which a few rows are"
        " multiplied fastest, made anew for every version of the weights: a sixth to a half less"
        " time for products, as much memory again",
        read=(".kind=embedded", ".exact=false"),
    )
    batch_size: int = option(
        64, "sequences that one engine rank decodes at a time, at most", minimum=1
    )
    kv_cache_mib: int | None = option(
        None,
        "memory of a rank for keys and values; fewer sequences fit when it is short; no limit when"
        " null",
        minimum=1,
    )
    cuda_graphs: bool = option(True, "replay decoding steps as CUDA graphs (GPUs only)")
    steps_per_sync: int | None = option(
        None,
        "decoding steps that a device computes between two looks of its processor at what was"
        " drawn: a response that ends between them leaves its row, and one that waits begins, at"
        " the next look; null: 8 on GPUs, 1 on CPUs",
        minimum=1,
        read=".kind=embedded",
    )
    speculation: SpeculationConfig = section(SpeculationConfig, read="engine.kind=embedded")
    sleep: bool = option(False, "free the engine's device memory while the policy trains")
    update: str = option(
        "atomic",
        "atomic: new weights arrive beside the old ones, which serve until all are there; in_place:"
        " they overwrite the old ones, and an update that fails leaves none; shared: in place, and"
        " where the layouts agree the engine uses the trainer's tensors themselves",
        choices=("atomic", "in_place", "shared"),
    )
    publish: str = option(
        "whole",
        "what new weights travel as; whole: all numbers; changes: those whose bits are others than"
        " at the publish before, of a piece of a tensor where that is less (nothing is lost; in"
        " bf16 most stay as they are)",
        choices=("whole", "changes"),
    )
    in_flight: str = option(
        "finish",
        "what new weights do to responses under way; finish: wait for them; interrupt: have them go"
        " on from the tokens that they have, under the new weights",
        choices=("finish", "interrupt"),
        read=".placement=server",
    )
    update_timeout_s: float = option(
        300.0, "an update that takes longer names the missing rank and fails", minimum=1
    )
    verify_every: int = option(
        0,
        "weights are checked by checksum at the first publish and at every N-th after it; 0: the"
        " first only",
        minimum=0,
    )
    bucket_mib: int = option(
        1024, "weights move between ranks in buckets of at most this size", minimum=1
    )
    tensorrt_llm: TensorRTLLMConfig = section(TensorRTLLMConfig, read="engine.kind=tensorrt_llm")
    vllm: VLLMConfig = section(VLLMConfig, read="engine.kind=vllm")
