"""What the training loop asks of a generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aligner.data.types import Prompt, Sample


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    """Take the most probable token; log-probs are still those at `temperature`."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which it includes."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response wanted: the prompt, and which of its samples this is."""

    prompt: Prompt
    sample_index: int


class GenerationEngine(Protocol):
    """A generator of samples, one object per engine rank.

    Ownership: the caller decides which replica gets which requests; all tensor-parallel ranks of a replica are called
    with the same requests and return the same samples. Weights are written into `weight_views()` between generations and
    become the engine's with `finish_update`.
    """

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order. A sample depends on (seed, prompt id, sample index) and the weights alone."""
        ...

    def weight_views(self) -> Mapping[str, Tensor]:
        """This rank's slice of every weight by its Hugging Face name, as writable views of the engine's storage."""
        ...

    def finish_update(self, version: int) -> None:
        """All weights of `version` have been written: stamp the tokens drawn from now on with it."""
        ...
