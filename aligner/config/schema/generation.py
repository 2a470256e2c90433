"""How responses are drawn, and the engine that draws them."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.schema.options import option, section
from aligner.config.schema.servers import Ports


@dataclass
class Rollout:
    """How many samples a step takes, and how they are drawn."""

    prompts_per_step: int = option(8, "prompts a training step", minimum=1)
    samples_per_prompt: int = option(8, "samples a prompt", minimum=1)
    micro_batches: int = option(2, "generation is cut into so many parts, each scored while the next is generated", minimum=1)
    max_staleness: int = option(
        0,
        "samples are drawn by weights so many versions older, while the steps before theirs train; 0: by the newest, in turn",
        minimum=0,
    )
    max_skipped_prompts: int = option(
        8,
        "a step leaves out so many prompts at most that can not be drawn or scored, also not alone; 0: the first ends the run",
        minimum=0,
    )
    spare_prompts: int = option(
        0,
        "so many prompts more than a step takes are under way; those that are not complete by then go on with the next step's",
        minimum=0,
    )
    max_deferrals: int = option(
        1, "a prompt is left behind by so many steps at most, and then waited for (spare_prompts above 0)", minimum=1
    )
    max_response_tokens: int = option(16, "longest response, in tokens", minimum=1)
    min_response_tokens: int = option(0, "no end-of-sequence token is drawn before so many tokens", minimum=0)
    temperature: float = option(1.0, "sampling temperature; log-probs are taken at it everywhere", minimum=1e-3)
    top_k: int = option(0, "draw among the k most probable tokens; 0: among all, which is what the losses assume", minimum=0)
    top_p: float = option(
        1.0,
        "draw among the fewest tokens whose probabilities reach this; below 1 the losses' ratios are biased",
        minimum=0,
        maximum=1,
    )
    stop_at_eos: bool = option(True, "a response ends at an end-of-sequence token")
    truncate_token: str | None = option(
        None, 'a response is cut behind this token, such as ".", before it is scored; one without it has no end; null: none is'
    )
    truncate_after: int = option(16, "response tokens in which truncate_token does not count yet", minimum=0)

    @property
    def prompts_per_micro_batch(self) -> int:
        """Prompts that are drawn together, beside the spare ones."""
        return self.prompts_per_step // self.micro_batches

    @property
    def steps_ahead(self) -> int:
        """A batch is begun when weights so many versions older serve than those which its step trains.

        A prompt that is left behind grows older by a version each time, and is at most `max_staleness` old in the end.
        """
        return self.max_staleness - (self.max_deferrals if self.spare_prompts else 0)


@dataclass
class EngineParallel:
    """The generation engine's own layout."""

    tensor: int = option(1, "tensor-parallel size of the engine (TP')", minimum=1)
    data: int = option(1, "engine replicas (DP'); 0: as many as fill the trainer's ranks", minimum=0)

    @property
    def ranks(self) -> int:
        """Number of processes that the engine spans."""
        return self.tensor * self.data


@dataclass
class TensorRTLLM:
    """What only TensorRT-LLM needs to know (engine.kind=tensorrt_llm)."""

    free_memory_fraction: float = option(
        0.4,
        "share of a GPU's free memory that is taken for keys and values when engine.kv_cache_mib is null",
        minimum=0.01,
        maximum=1,
    )
    max_num_tokens: int = option(8192, "tokens of one step over all sequences; longer prompts are cut into chunks", minimum=1)
    timeout_s: float = option(
        900.0, "starting, giving memory back, or no response gaining a token may take so long before the run fails", minimum=1
    )


@dataclass
class Engine:
    """Generation."""

    kind: str = option(
        "embedded",
        "generation backend; embedded: a decoder in PyTorch, anywhere; tensorrt_llm: TensorRT-LLM, on GPUs",
        choices=("embedded", "tensorrt_llm"),
    )
    placement: str = option(
        "colocated",
        "where the engine runs; colocated: on the trainer's ranks; server: on devices of its own, as the role generator",
        choices=("colocated", "server"),
    )
    parallel: EngineParallel = section(EngineParallel)
    ports: Ports = section(Ports)
    precision: str = option("auto", "arithmetic; auto: bf16 on GPUs, fp32 on CPUs", choices=("auto", "fp32", "bf16"))
    batch_size: int = option(64, "sequences that one engine rank decodes at a time, at most", minimum=1)
    kv_cache_mib: int | None = option(
        None, "memory of a rank for keys and values; fewer sequences fit when it is short; no limit when null", minimum=1
    )
    cuda_graphs: bool = option(True, "replay decoding steps as CUDA graphs (GPUs only)")
    sleep: bool = option(False, "free the engine's device memory while the policy trains")
    update: str = option(
        "atomic",
        "atomic: new weights arrive beside the old ones, which serve until all are there; in_place: they overwrite the old"
        " ones, and an update that fails leaves none; shared: in place, and where the layouts agree the engine uses the"
        " trainer's tensors themselves",
        choices=("atomic", "in_place", "shared"),
    )
    in_flight: str = option(
        "finish",
        "what new weights do to responses under way (placement=server); finish: wait for them; interrupt: have them go on from"
        " the tokens that they have, under the new weights",
        choices=("finish", "interrupt"),
    )
    update_timeout_s: float = option(300.0, "an update that takes longer names the missing rank and fails", minimum=1)
    verify_every: int = option(
        0, "weights are checked by checksum at the first publish and at every N-th after it; 0: the first only", minimum=0
    )
    bucket_mib: int = option(64, "weights move between ranks in buckets of this size", minimum=1)
    tensorrt_llm: TensorRTLLM = section(TensorRTLLM)
