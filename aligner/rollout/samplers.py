"""Where samples come from: the engine on the trainer's ranks, or the generator role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aligner.data.collectives import broadcast_samples
from aligner.data.types import Prompt, Sample, unbegun
from aligner.engines.protocol import GenerationEngine, SamplingOptions
from aligner.engines.replicas import STEPS_A_PART, Enough, generate_in_parts, generate_shared, run_through
from aligner.rollout.services import together
from aligner.rollout.weights import Offers
from aligner.schema import EngineParallelConfig
from aligner.servers.connection import RemoteError
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RemoteFuture

_Ask = Callable[[GeneratorClient, int], RemoteFuture[list[Sample]]]
"""Asks for samples that weights of a version, or newer ones, draw."""


class Sampler(Protocol):
    """Samples by the weights that serve. Every rank of the trainer calls every method."""

    def sample(self, prompts: Sequence[Prompt], samples_per_prompt: int, options: SamplingOptions) -> list[Sample]:
        """Each prompt's samples in a row, equal on every rank. Collective."""
        ...

    def carry_on(
        self, samples: Sequence[Sample], samples_per_prompt: int, options: SamplingOptions, enough: Enough
    ) -> list[Sample]:
        """The same samples, each prompt's in a row, taken further until they are `enough`. Collective.

        Those that are unfinished go on, by the weights that serve, from the tokens that they have.
        """
        ...

    def rest(self) -> None:
        """A step has its samples; weights are published before the next ones are wanted."""
        ...

    def close(self) -> None:
        """End the processes that the engine started, if any. Collective."""
        ...


@dataclass(frozen=True)
class ColocatedSampler:
    """The engine that spans the trainer's ranks."""

    engine: GenerationEngine
    layout: EngineParallelConfig
    rank: int
    sleeps: bool = False
    """Whether the engine gives its memory back between steps."""

    def sample(self, prompts: Sequence[Prompt], samples_per_prompt: int, options: SamplingOptions) -> list[Sample]:
        """As `Sampler`."""
        return generate_shared(self.engine, self.layout, self.rank, prompts, samples_per_prompt, options)

    def carry_on(
        self, samples: Sequence[Sample], samples_per_prompt: int, options: SamplingOptions, enough: Enough
    ) -> list[Sample]:
        """As `Sampler`."""
        return run_through(
            generate_in_parts(
                self.engine,
                self.layout,
                self.rank,
                samples,
                samples_per_prompt,
                options,
                steps=STEPS_A_PART,
                enough=enough,
            )
        )

    def rest(self) -> None:
        """As `Sampler`."""
        if self.sleeps:
            self.engine.sleep(keep_weights=False)

    def close(self) -> None:
        """As `Sampler`."""
        self.engine.shutdown()


@dataclass(frozen=True)
class RemoteSampler:
    """The generator role: rank 0 asks it, every rank gets the answer."""

    client: GeneratorClient | None
    """Rank 0's."""
    weights: Offers
    is_alone: bool = False
    """Whether rank 0 asks for itself, and no other rank calls."""

    def sample(self, prompts: Sequence[Prompt], samples_per_prompt: int, options: SamplingOptions) -> list[Sample]:
        """As `Sampler`; raises the server's error on every rank."""
        samples = unbegun(prompts, samples_per_prompt)
        return self._everywhere(
            lambda client, version: client.generate(samples, samples_per_prompt, options, weight_version=version)
        )

    def carry_on(
        self, samples: Sequence[Sample], samples_per_prompt: int, options: SamplingOptions, enough: Enough
    ) -> list[Sample]:
        """As `Sampler`; raises the server's error on every rank."""
        return self._everywhere(lambda client, version: client.generate(samples, samples_per_prompt, options, enough, version))

    def _everywhere(self, ask: _Ask) -> list[Sample]:
        if self.is_alone:
            return self._drawn(ask)
        samples: list[Sample] = []
        together(lambda: samples.extend(self._drawn(ask)))
        return broadcast_samples(samples)

    def _drawn(self, ask: _Ask) -> list[Sample]:
        """The samples, on rank 0. A generator that was lost is awaited, and asked again: it draws the same ones."""
        version = self.weights.served
        while self.client is not None:
            try:
                return ask(self.client, version).result()
            except RemoteError as error:
                if error.kind != "WeightsError":
                    raise
                version = self.weights.restore()
        return []

    def rest(self) -> None:
        """Nothing: the generator's memory is its own."""

    def close(self) -> None:
        """Hang up; the launcher ends the generator."""
        self.weights.close()
