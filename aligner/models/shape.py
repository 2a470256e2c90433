"""A transformer's dimensions and architecture, and the frequencies of its rotary positions."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the ones first trained on."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """What a decoder-only transformer looks like, independent of any framework."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Of each expert, in a mixture of experts."""
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    family: str = "llama"
    """Key into `families.FAMILIES`, which names the weights."""
    normalization: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    """Whether the feed-forward network multiplies an activated gate with a second projection."""
    linear_bias: bool = False
    """Whether every linear layer of a decoder layer has a bias."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have one."""
    qk_norm: bool = False
    """Whether queries and keys are normalized, head by head."""
    parallel_residual: bool = False
    """Whether attention and feed-forward network both start from the layer's input."""
    position: Literal["rotary", "learned"] = "rotary"
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that is rotated."""
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Tokens that a token sees, itself included; all before it when None."""
    num_experts: int = 0
    """0: a dense model."""
    experts_per_token: int = 0
    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are scaled to sum to one."""


def inverse_frequencies(shape: ModelShape) -> list[float]:
    """Radians a position, one for each rotated pair of a head's dimensions (Su et al. 2021,
    "RoFormer", section 3.2.2)."""
    rotated = int(shape.head_dim * shape.rotary_fraction)
    plain = [shape.rope_theta ** (-pair / rotated) for pair in range(0, rotated, 2)]
    scaling = shape.rope_scaling
    return plain if scaling is None else [_scaled(frequency, scaling) for frequency in plain]


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    """A frequency stretched by `factor`; llama3 leaves short wavelengths alone and blends in
    between.

    The blend is that of Llama 3.1's model code (Grattafiori et al. 2024, "The Llama 3 Herd of
    Models", section 3.4.2).
    """
    stretched = frequency / scaling.factor
    if scaling.kind == "linear":
        return stretched
    turns = scaling.original_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return share * frequency + (1 - share) * stretched
