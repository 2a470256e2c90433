"""Where samples come from: the engine on the trainer's ranks, or the generator role."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aligner.data.collectives import broadcast_samples
from aligner.data.types import Sample
from aligner.engines.engine_loop import SampleSource, SingleResponses, StartsSamples
from aligner.engines.engine_protocol import GenerationEngine, SamplingOptions
from aligner.engines.replicas import STEPS_A_PART, Enough, generate_in_parts, run_through
from aligner.resharding.publisher import RemotePublisher
from aligner.rollout.services import together
from aligner.schema import EngineParallelConfig
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RemoteError


class Sampler(Protocol):
    """Samples by the weights that serve. Every rank of the trainer calls every method."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
    ) -> list[Sample]:
        """The same samples, each prompt's in a row, taken further until all are complete, or
        `enough`; equal on every rank.

        Those that are unfinished go on from the tokens that they have, if any. Collective.
        """

    def rest(self) -> tuple[int, int]:
        """A step has its samples; weights are published before the next ones are wanted.

        Returns how many tokens this rank's engine has guessed for them (`engine.speculation`), and
        how many it has drawn of those; of an engine elsewhere nothing is known.
        """

    def forget(self, first: int) -> None:
        """No episode of a prompt before the `first` of the stream is begun again."""

    def take_waits(self) -> float | None:
        """Seconds that an episode waited for its environment, in the mean of this rank's since the
        call before.

        None without any, or where they are drawn elsewhere.
        """

    def close(self) -> None:
        """End the processes that the engine started, if any. Collective."""


@dataclass(frozen=True)
class ColocatedSampler:
    """The engine that spans the trainer's ranks."""

    engine: GenerationEngine
    layout: EngineParallelConfig
    rank: int
    sleeps: bool = False
    """Whether the engine gives its memory back between steps."""
    episodes: SampleSource | None = None
    """The source of episodes; None for single responses."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
    ) -> list[Sample]:
        """As `Sampler`."""
        steps = None if enough is None else STEPS_A_PART
        source: StartsSamples = self.episodes or SingleResponses(self.engine)
        parts = generate_in_parts(
            source,
            self.layout,
            self.rank,
            samples,
            samples_per_prompt,
            options,
            steps=steps,
            enough=enough,
        )
        return run_through(parts)

    def rest(self) -> tuple[int, int]:
        """As `Sampler`."""
        if self.sleeps:
            self.engine.sleep()
        return self.engine.take_guesses()

    def forget(self, first: int) -> None:
        """As `Sampler`."""
        if self.episodes is not None:
            self.episodes.forget(first)

    def take_waits(self) -> float | None:
        """As `Sampler`."""
        return None if self.episodes is None else self.episodes.take_waits()

    def close(self) -> None:
        """As `Sampler`."""
        if self.episodes is not None:
            self.episodes.close()
        self.engine.shutdown()


@dataclass(frozen=True)
class RemoteSampler:
    """The generator role: rank 0 asks it, every rank gets the answer."""

    client: GeneratorClient | None
    """Rank 0's."""
    weights: RemotePublisher
    is_alone: bool = False
    """Whether rank 0 asks for itself, and no other rank calls."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
    ) -> list[Sample]:
        """As `Sampler`; raises the server's error on every rank."""
        if self.is_alone:
            return self._drawn(samples, samples_per_prompt, options, enough)
        drawn: list[Sample] = []
        together(lambda: drawn.extend(self._drawn(samples, samples_per_prompt, options, enough)))
        return broadcast_samples(drawn)

    def _drawn(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None,
    ) -> list[Sample]:
        """The samples, on rank 0. A generator that was lost is awaited, and asked again: it draws
        the same ones."""
        version = self.weights.served
        while self.client is not None:
            try:
                return self.client.generate(
                    samples, samples_per_prompt, options, enough, version
                ).result()
            except RemoteError as error:
                if error.kind != "WeightsError":
                    raise
                version = self.weights.restore()
        return []

    def rest(self) -> tuple[int, int]:
        """Nothing: the generator's memory is its own."""
        return 0, 0

    def forget(self, first: int) -> None:
        """As `Sampler`; the generator hears of it with the next request."""
        if self.client is not None:
            self.client.first_prompt = first

    def take_waits(self) -> float | None:
        """Not known: the generator's environments are its own."""
        return None

    def close(self) -> None:
        """Hang up; the launcher ends the generator."""
        self.weights.close()
