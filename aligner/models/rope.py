"""Rotary position frequencies, for Megatron and the engines alike."""

from __future__ import annotations

import math

from aligner.models.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape) -> list[float]:
    """Radians a position, one for each rotated pair of a head's dimensions (Su et al. 2021, "RoFormer", section 3.2.2)."""
    rotated = int(shape.head_dim * shape.rotary_fraction)
    plain = [shape.rope_theta ** (-pair / rotated) for pair in range(0, rotated, 2)]
    scaling = shape.rope_scaling
    return plain if scaling is None else [_scaled(frequency, scaling) for frequency in plain]


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    """A frequency stretched by `factor`; llama3 leaves short wavelengths alone and blends in between.

    The blend is that of Llama 3.1's model code (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.4.2).
    """
    stretched = frequency / scaling.factor
    if scaling.kind == "linear":
        return stretched
    turns = scaling.original_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return share * frequency + (1 - share) * stretched
