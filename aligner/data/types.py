"""What flows through a step: prompts, samples, experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    `id` is the prompt's place in the run's endless stream of prompts, so it is unique within a run even when the same
    text comes again: with the seed and the sample index it names a sample's random stream.
    """

    id: int
    text: str
    tokens: Tensor
    """int64 [P]"""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One generated response with its prompt."""

    prompt_id: int
    sample_index: int
    tokens: Tensor
    """int64 [T]: prompt and response, the end-of-sequence token included where there is one."""
    prompt_length: int
    engine_logprobs: Tensor
    """float32 [R]: log-probability of each response token at the sampling temperature, as the engine saw it."""
    weight_versions: Tensor
    """int64 [R]: version of the weights that drew each response token."""
    finish_reason: FinishReason
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        response = self.tokens.numel() - self.prompt_length
        if response < 1:
            raise ValueError(f"sample {self.prompt_id}/{self.sample_index} has no response token")
        if self.engine_logprobs.shape != (response,) or self.weight_versions.shape != (response,):
            raise ValueError(
                f"sample {self.prompt_id}/{self.sample_index}: {response} response tokens, but log-probs"
                f" {tuple(self.engine_logprobs.shape)} and versions {tuple(self.weight_versions.shape)}"
            )


@dataclass(frozen=True)
class Experience:
    """A step's samples as right-padded tensors. Entry t of a [B, S-1] tensor speaks of token t+1."""

    tokens: Tensor
    """int64 [B, S]"""
    lengths: Tensor
    """int64 [B]: prompt and response"""
    mask: Tensor
    """bool [B, S-1]: true where token t+1 is a response token"""
    engine_logprobs: Tensor
    """float32 [B, S-1]"""
    old_logprobs: Tensor
    """float32 [B, S-1]"""
    reference_logprobs: Tensor
    """float32 [B, S-1]"""
    values: Tensor
    """float32 [B, S-1]"""
    rewards: Tensor
    """float32 [B, S-1]: what the advantage estimator saw, KL penalty included"""
    advantages: Tensor
    """float32 [B, S-1]"""
    returns: Tensor
    """float32 [B, S-1]"""

    def __post_init__(self) -> None:
        batch, length = self.tokens.shape
        if self.lengths.shape != (batch,):
            raise ValueError(f"lengths {tuple(self.lengths.shape)} do not fit tokens {tuple(self.tokens.shape)}")
        for name in _PER_TOKEN:
            shape = tuple(getattr(self, name).shape)
            if shape != (batch, length - 1):
                raise ValueError(f"{name} is {shape}, must be {(batch, length - 1)}")

    def select(self, rows: Tensor, width: int | None = None) -> Experience:
        """The experience of some rows (int64 [N]), in that order, cut to `width` tokens."""
        length = self.tokens.shape[1] if width is None else width
        widths = {"tokens": length} | dict.fromkeys(_PER_TOKEN, length - 1)
        picked = {name: getattr(self, name)[rows, : widths[name]] for name in widths}
        return Experience(lengths=self.lengths[rows], **picked)

    def to(self, device: torch.device) -> Experience:
        """The same on a device."""
        return Experience(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


_PER_TOKEN = tuple(name for name in Experience.__dataclass_fields__ if name not in ("tokens", "lengths"))


@dataclass(frozen=True)
class SampleBatch:
    """Samples as right-padded tensors."""

    tokens: Tensor
    """int64 [B, S]"""
    lengths: Tensor
    """int64 [B]"""
    prompt_lengths: Tensor
    """int64 [B]"""
    mask: Tensor
    """bool [B, S-1]: true where token t+1 is a response token"""
    engine_logprobs: Tensor
    """float32 [B, S-1], 0 outside the mask"""
    weight_versions: Tensor
    """int64 [B, S-1], 0 outside the mask"""


def response_mask(lengths: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """bool [B, width-1]: entry t is true where token t+1 belongs to the response."""
    target = torch.arange(1, width)
    return (target >= prompt_lengths[:, None]) & (target < lengths[:, None])


def collate(samples: Sequence[Sample], pad_token_id: int) -> SampleBatch:
    """Pad samples to the longest one, on the right."""
    lengths = torch.tensor([sample.tokens.numel() for sample in samples])
    prompt_lengths = torch.tensor([sample.prompt_length for sample in samples])
    width = int(lengths.max())
    tokens = torch.full((len(samples), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(len(samples), width - 1)
    versions = torch.zeros(len(samples), width - 1, dtype=torch.int64)
    for row, sample in enumerate(samples):
        tokens[row, : sample.tokens.numel()] = sample.tokens
        logprobs[row, sample.prompt_length - 1 : sample.tokens.numel() - 1] = sample.engine_logprobs
        versions[row, sample.prompt_length - 1 : sample.tokens.numel() - 1] = sample.weight_versions
    return SampleBatch(tokens, lengths, prompt_lengths, response_mask(lengths, prompt_lengths, width), logprobs, versions)
