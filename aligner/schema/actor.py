"""Keys of the policy in Megatron: section `actor`."""

from dataclasses import dataclass

from aligner.schema.options import option, section
from aligner.schema.trained_model import TrainedModelConfig


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021) trained instead of the weights."""

    rank: int = option(
        0,
        "Rank of the adapters; 0 means that the weights themselves are trained, without adapters.",
        minimum=0,
    )
    alpha: float = option(
        32.0,
        "Scale of the adapters: the output of an adapter is multiplied by `alpha` / `rank`.",
        minimum=0,
    )
    targets: list[str] = option(
        ["attention", "mlp"], "Linear layers with adapters: `attention`, `mlp` or both."
    )


@dataclass
class ActorConfig(TrainedModelConfig):
    """Policy and reference in Megatron."""

    logprob_chunk_tokens: int = option(
        1024,
        "Number of tokens whose logits are in memory at the same time. A number above the"
        " number of tokens in a micro-batch avoids recomputation.",
        minimum=1,
    )
    reference_on_device: bool = option(
        False,
        "Whether the reference weights stay in GPU memory. False copies the reference weights"
        " from host memory each time the reference is used.",
        read_if=".lora.rank=0",
    )
    lora: LoraConfig = section(LoraConfig, read_if=".rank>0")
