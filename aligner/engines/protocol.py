"""What the training loop asks of a generation engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from aligner.data.types import Prompt, Sample
from aligner.errors import AlignerError
from aligner.resharding.update import WeightUpdate
from aligner.schema import EngineParallelConfig

InFlight = Literal["finish", "interrupt"]
"""What becomes of responses that an update finds half-way: they are finished under the old weights, or continued under
the new ones from the tokens they have."""
SpanListener = Callable[[str, float, float], None]
"""Told what an engine did, by name, from when to when in seconds of `time.perf_counter`."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn. Log-probs are always those of the whole distribution at `temperature`."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """Draw among the k most probable tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest most probable tokens whose probabilities sum to at least this."""
    min_new_tokens: int = 0
    """No stop token is drawn before so many tokens."""
    greedy: bool = False
    """Take the most probable token."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which it includes."""

    def __post_init__(self) -> None:
        wrong = [
            text
            for good, text in (
                (self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: must be at least 1"),
                (
                    0 <= self.min_new_tokens <= self.max_new_tokens,
                    f"min_new_tokens={self.min_new_tokens}: must be within 0 and max_new_tokens={self.max_new_tokens}",
                ),
                (self.temperature > 0, f"temperature={self.temperature}: must be above 0; for the likeliest token: greedy"),
                (self.top_k >= 0, f"top_k={self.top_k}: must be at least 0, which keeps all tokens"),
                (0 < self.top_p <= 1, f"top_p={self.top_p}: must be above 0 and at most 1"),
            )
            if not good
        ]
        if wrong:
            raise AlignerError("\n".join(wrong))


@dataclass(frozen=True)
class GenerationRequest:
    """One response wanted: the prompt, and which of its samples this is."""

    prompt: Prompt
    sample_index: int
    max_new_tokens: int | None = None
    """A limit of this response's own, below the options'."""
    begun: Sample | None = None
    """This sample, unfinished: its response goes on, with the random numbers that would have come next."""


def response_limit(request: GenerationRequest, options: SamplingOptions) -> int:
    """Most tokens of one response."""
    limit = options.max_new_tokens
    return limit if request.max_new_tokens is None else min(request.max_new_tokens, limit)


class Generation(Protocol):
    """Responses under way. Between two steps the weights may change."""

    @property
    def done(self) -> bool:
        """Whether every response is complete."""
        ...

    def step(self) -> list[tuple[int, Sample]]:
        """Go on; returns the responses that are complete now, each with its place among the requests.

        May return none. Raises AlignerError when the engine has no weights, or sleeps.
        """
        ...

    def unfinished(self) -> list[tuple[int, Sample]]:
        """The responses that are not complete as they are now, each with its place among the requests.

        Raises AlignerError where the engine cannot tell.
        """
        ...

    def cancel(self) -> None:
        """Drop what is not complete."""
        ...


def advance(generation: Generation, steps: int | None = None) -> dict[int, Sample]:
    """Take `steps`, or all that there are; the responses that they completed, by their places among the requests."""
    samples: dict[int, Sample] = {}
    for _ in itertools.count() if steps is None else range(steps):
        if generation.done:
            break
        samples |= generation.step()
    return samples


def run(generation: Generation, count: int) -> list[Sample]:
    """Step until every one of `count` requests is answered; their samples, in order. A failure drops the rest."""
    try:
        samples = advance(generation)
    finally:
        generation.cancel()
    return [samples[index] for index in range(count)]


class GenerationEngine(Protocol):
    """A generator of samples, one object per engine rank.

    Ownership: the caller decides which replica gets which requests; all tensor-parallel ranks of a replica make the same
    calls in the same order and return the same samples.
    """

    @property
    def weight_layout(self) -> EngineParallelConfig:
        """The layout to publish weights to, over the engine's ranks."""
        ...

    @property
    def weight_dtype(self) -> torch.dtype:
        """What its weights are."""
        ...

    @property
    def group_bytes(self) -> int | None:
        """Most bytes of tensors that an update takes at a time; None: all its views exist at once."""
        ...

    @property
    def version(self) -> int | None:
        """Version of the weights that serve; None before the first update, while they are overwritten, after that failed,
        and after a sleep that dropped them."""
        ...

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Generation:
        """Begin one sample per request. A sample depends on (seed, prompt id, sample index) and the weights alone.

        Raises AlignerError, before anything is generated, naming every request that can not be served; or while an
        earlier generation is neither done nor cancelled.
        """
        ...

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """`start`, and step until done: one sample per request, in order."""
        ...

    def begin_update(self, version: int, in_flight: InFlight = "finish") -> WeightUpdate:
        """Open an update to new weights; they serve, and stamp the tokens drawn, from its `commit` on.

        Until then, and after an `abort`, the engine keeps its version if it holds both; an engine that overwrites its
        weights has none from the first one on until a commit. Raises AlignerError when another update is open or
        the engine sleeps.
        """
        ...

    def sleep(self, keep_weights: bool = True) -> None:
        """Free the device memory of keys and values, and of the weights: kept in host memory, or dropped.

        Raises AlignerError while responses are under way. Sleeping twice is sleeping.
        """
        ...

    def wake(self) -> None:
        """Take the memory back. Weights that were dropped have to be published again."""
        ...

    def shutdown(self) -> None:
        """End the processes that the engine started, if any; it is not used again."""
        ...
