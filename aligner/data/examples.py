"""What the offline trainers learn from, as tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, which ends with an end-of-sequence token unless data.end_of_sequence=false."""

    tokens: Tensor
    """int64 [T]: prompt and response"""
    prompt_length: int
    """In tokens, at least 1, as the response has."""


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt, of which one is better."""

    chosen: Demonstration
    rejected: Demonstration
    margin: float | None
    """By how much the chosen one is better, at least 0; None where the data does not say."""


@dataclass(frozen=True)
class LabeledSteps:
    """A response in steps, each with a label; no end-of-sequence token is added."""

    tokens: Tensor
    """int64 [T]: prompt and steps"""
    prompt_length: int
    positions: Tensor
    """int64 [K]: the place in `tokens` of each step's last token, ascending"""
    labels: Tensor
    """float32 [K]: 1 for a step that is right, 0 for one that is not"""

    def __post_init__(self) -> None:
        if self.positions.shape != self.labels.shape or self.labels.dtype != torch.float32:
            raise ValueError(f"labels {tuple(self.labels.shape)} must be float32 {tuple(self.positions.shape)}")
