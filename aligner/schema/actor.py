"""The policy in Megatron."""

from dataclasses import dataclass

from aligner.schema.options import option, section
from aligner.schema.trained_model import TrainedModelConfig


@dataclass
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) instead of training the weights themselves."""

    rank: int = option(
        0, "rank of the adapters; 0: none, the weights themselves are trained", minimum=0
    )
    alpha: float = option(32.0, "an adapter's product is scaled by alpha / rank", minimum=0)
    targets: list[str] = option(
        ["attention", "mlp"], "which linear layers have adapters: attention, mlp"
    )


@dataclass
class ActorConfig(TrainedModelConfig):
    """The policy, and the reference beside it, in Megatron."""

    logprob_chunk_tokens: int = option(
        1024,
        "logits exist for so many tokens at a time; more than a micro-batch's tokens costs no"
        " recomputation",
        minimum=1,
    )
    reference_on_device: bool = option(
        False,
        "the initial weights stay on the GPUs beside the policy's, instead of coming from host"
        " memory when they are asked",
        read=".lora.rank=0",
    )
    lora: LoraConfig = section(LoraConfig, read=".rank>0")
