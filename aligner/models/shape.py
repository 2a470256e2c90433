"""Dimensions and architecture of a transformer, and the frequencies of its rotary embeddings."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for contexts longer than those of pretraining."""

    kind: Literal["linear", "llama3"]
    factor: float
    """Number by which scaled frequencies are divided."""
    low_frequency_factor: float = 1.0
    """llama3: frequencies with fewer turns within the original context are scaled fully."""
    high_frequency_factor: float = 4.0
    """llama3: frequencies with more turns within the original context are not scaled."""
    original_positions: int = 8192
    """llama3: context length of pretraining, in tokens."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and architecture of a decoder-only transformer, independent of any framework."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Hidden size of the feed-forward network; in a mixture of experts, of each expert."""
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    family: str = "llama"
    """Key of `families.WEIGHTS`, which contains the names of the weights."""
    normalization: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    """Whether the feed-forward network multiplies an activated gate by a second projection."""
    linear_bias: bool = False
    """Whether every linear layer of a decoder layer has a bias."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether the queries and keys of each head are normalized."""
    parallel_residual: bool = False
    """Whether the feed-forward network reads the layer's input instead of attention's output."""
    position: Literal["rotary", "learned"] = "rotary"
    rotary_fraction: float = 1.0
    """Fraction of a head's dimensions that is rotated."""
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Number of tokens to which a token attends, including itself; None for all tokens before it.
    """
    num_experts: int = 0
    """Number of experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are scaled to sum to one."""


def compute_inverse_frequencies(shape: ModelShape) -> list[float]:
    """Return the frequency of each rotated pair of a head's dimensions, in radians per position.

    See Su et al. 2021, "RoFormer", section 3.2.2.
    """
    rotated = int(shape.head_dim * shape.rotary_fraction)
    # theta_i = base^(-2i / d)
    frequencies = [shape.rope_theta ** (-pair / rotated) for pair in range(0, rotated, 2)]
    scaling = shape.rope_scaling
    return frequencies if scaling is None else [_scale(item, scaling) for item in frequencies]


def _scale(frequency: float, scaling: RopeScaling) -> float:
    """Return a frequency divided by `factor`; llama3 does not scale high frequencies.

    llama3 interpolates between scaled low frequencies and unscaled high frequencies as in the model
    code of Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.4.2).
    """
    scaled = frequency / scaling.factor
    if scaling.kind == "linear":
        return scaled
    turns = scaling.original_positions * frequency / (2 * math.pi)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    unscaled_weight = min(1.0, max(0.0, (turns - low) / (high - low)))
    return unscaled_weight * frequency + (1 - unscaled_weight) * scaled
