"""Samplers of the trainer: `ColocatedSampler` uses the engine on the trainer's ranks, and
`RemoteSampler` the generator role."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aligner.data.collectives import broadcast_samples
from aligner.data.types import Sample
from aligner.engines.engine_loop import SampleSource, SingleResponses, StartsSamples
from aligner.engines.engine_protocol import GenerationEngine, SamplingOptions
from aligner.engines.replicas import STEPS_A_PART, Enough, generate_in_parts, run_through
from aligner.resharding.publisher import RemotePublisher
from aligner.schema import EngineParallelConfig
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RemoteError
from aligner.training.services import together


class Sampler(Protocol):
    """Generates samples with the engine's current weights.

    Every rank of the trainer calls every method.
    """

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
    ) -> list[Sample]:
        """Continue the unfinished samples until all are complete, or until `enough` is met.
        Collective.

        Args:
            samples: Complete and unfinished samples; the samples of a prompt are adjacent. An
                unfinished sample continues from its tokens, if it has any.
            samples_per_prompt: Number of samples of each prompt.
            options: Sampling parameters.
            enough: Condition for an early stop; None: generate until all samples are complete.

        Returns:
            All samples in the given order, equal on every rank.
        """

    def rest(self) -> tuple[int, int]:
        """End the generation phase of a step: the next call of `sample` follows a weight sync.

        Returns:
            The numbers of draft tokens, and of accepted draft tokens, of this rank's engine in the
            step (`engine.speculation`); zeros if the engine is on other ranks.
        """

    def forget(self, first: int) -> None:
        """Drop the journal of the episodes of all prompts before the `first` in the stream; they
        will not be generated again."""

    def take_waits(self) -> float | None:
        """Return the mean time in seconds that an episode on this rank waited for its environment
        since the last call.

        None if there was no episode, or if the generator runs the episodes.
        """

    def close(self) -> None:
        """Stop the processes that the engine started, if any. Collective."""


@dataclass(frozen=True)
class ColocatedSampler:
    """`Sampler` that uses the engine on the trainer's ranks."""

    engine: GenerationEngine
    """This rank's part of the engine."""
    layout: EngineParallelConfig
    """Parallel sizes of the engine."""
    rank: int
    """Rank of this process."""
    sleeps: bool = False
    """Whether the engine frees its memory between steps."""
    episodes: SampleSource | None = None
    """The source of episodes; None for single responses."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
    ) -> list[Sample]:
        """See `Sampler.sample`."""
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
        """See `Sampler.rest`."""
        if self.sleeps:
            self.engine.sleep()
        return self.engine.take_guesses()

    def forget(self, first: int) -> None:
        """See `Sampler.forget`."""
        if self.episodes is not None:
            self.episodes.forget(first)

    def take_waits(self) -> float | None:
        """See `Sampler.take_waits`."""
        return None if self.episodes is None else self.episodes.take_waits()

    def close(self) -> None:
        """See `Sampler.close`."""
        if self.episodes is not None:
            self.episodes.close()
        self.engine.shutdown()


@dataclass(frozen=True)
class RemoteSampler:
    """`Sampler` that uses the generator role.

    Rank 0 sends requests to the generator, and broadcasts the samples to the other ranks.
    """

    client: GeneratorClient | None
    """Client of the generator on rank 0; None on the other ranks."""
    weights: RemotePublisher
    """Publisher that sends the weights to the generator."""
    is_alone: bool = False
    """Whether only rank 0 calls `sample`, so that the samples are not broadcast."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None = None,
    ) -> list[Sample]:
        """See `Sampler.sample`. Raises the generator's error on every rank."""
        if self.is_alone:
            return self._drawn(samples, samples_per_prompt, options, enough)
        generated: list[Sample] = []
        together(
            lambda: generated.extend(self._drawn(samples, samples_per_prompt, options, enough))
        )
        return broadcast_samples(generated)

    def _drawn(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        enough: Enough | None,
    ) -> list[Sample]:
        """Return the generator's samples on rank 0, and an empty list on the other ranks.

        If the generator was restarted and lacks the weights, wait until they are restored, and
        repeat the request: it returns the same samples.
        """
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
        """Return zeros: the generator manages its own memory, and reports its own draft tokens."""
        return 0, 0

    def forget(self, first: int) -> None:
        """See `Sampler.forget`. The next request to the generator contains `first`."""
        if self.client is not None:
            self.client.first_prompt = first

    def take_waits(self) -> float | None:
        """Return None: the generator runs the environments."""
        return None

    def close(self) -> None:
        """Close the connection for weights; the launcher stops the generator."""
        self.weights.close()
