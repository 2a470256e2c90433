"""Samplers of the trainer: `ColocatedSampler` uses the engine on the trainer's ranks, and
`RemoteSampler` the generator role."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aligner.data.collectives import broadcast_samples
from aligner.data.types import Sample
from aligner.engines.engine_loop import EpisodeSource, SampleStarter, SingleResponses
from aligner.engines.engine_protocol import (
    GenerationCounts,
    GenerationEngine,
    SamplingOptions,
)
from aligner.engines.replicas import (
    STEPS_PER_PART,
    EarlyStopCondition,
    generate_in_parts,
    run_to_completion,
)
from aligner.resharding.publisher import RemotePublisher
from aligner.schema import EngineConfig
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import RemoteError
from aligner.training.services import run_and_broadcast_result


class Sampler(Protocol):
    """Generates samples with the engine's current weights.

    Every rank of the trainer calls every method.
    """

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        early_stop: EarlyStopCondition | None = None,
    ) -> list[Sample]:
        """Continue the unfinished samples until all are complete, or until `early_stop` is met.
        Collective.

        Args:
            samples: Complete and unfinished samples; the samples of a prompt are adjacent. An
                unfinished sample continues from its tokens, if it has any.
            samples_per_prompt: Number of samples of each prompt.
            options: Sampling parameters.
            early_stop: Condition for an early stop; None: generate until all samples are complete.

        Returns:
            All samples in the given order, equal on every rank.
        """

    def end_generation(self) -> GenerationCounts:
        """End the generation phase of a step: the next call of `sample` follows a weight sync.

        Returns:
            The counts of this rank's engine in the step; zeros if the engine is on other ranks.
        """

    def drop_journal_before(self, first_prompt: int) -> None:
        """Drop the journal of the episodes of all prompts before position `first_prompt` of the
        stream, which will not be generated again."""

    def take_environment_wait_s(self) -> float | None:
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
    settings: EngineConfig
    """Section `engine` of the configuration."""
    rank: int
    """Rank of this process."""
    episodes: EpisodeSource | None = None
    """The source of episodes; None for single responses."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        early_stop: EarlyStopCondition | None = None,
    ) -> list[Sample]:
        """See `Sampler.sample`."""
        # Without an early stop, the replicas have nothing to agree on before the end.
        steps = None if early_stop is None else STEPS_PER_PART
        source: SampleStarter = self.episodes or SingleResponses(self.engine)
        parts = generate_in_parts(
            self.engine,
            source,
            self.settings,
            self.rank,
            samples,
            samples_per_prompt,
            options,
            steps=steps,
            early_stop=early_stop,
        )
        return run_to_completion(parts)

    def end_generation(self) -> GenerationCounts:
        """See `Sampler.end_generation`."""
        if self.settings.sleep:
            self.engine.sleep()
        return self.engine.take_counts()

    def drop_journal_before(self, first_prompt: int) -> None:
        """See `Sampler.drop_journal_before`."""
        if self.episodes is not None:
            self.episodes.drop_journal_before(first_prompt)

    def take_environment_wait_s(self) -> float | None:
        """See `Sampler.take_environment_wait_s`."""
        return None if self.episodes is None else self.episodes.take_environment_wait_s()

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
    is_rank0_only: bool = False
    """Whether only rank 0 calls `sample`, so that the samples are not broadcast."""

    def sample(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        early_stop: EarlyStopCondition | None = None,
    ) -> list[Sample]:
        """See `Sampler.sample`. Raises the generator's error on every rank."""
        if self.is_rank0_only:
            return self._generate(samples, samples_per_prompt, options, early_stop)
        generated: list[Sample] = []

        def generate() -> None:
            generated.extend(self._generate(samples, samples_per_prompt, options, early_stop))

        # This shares an error of the generator; the samples are broadcast as tensors.
        run_and_broadcast_result(generate)
        return broadcast_samples(generated)

    def _generate(
        self,
        samples: Sequence[Sample],
        samples_per_prompt: int,
        options: SamplingOptions,
        early_stop: EarlyStopCondition | None,
    ) -> list[Sample]:
        """Return the generator's samples on rank 0, and an empty list on the other ranks.

        If the generator was restarted and lacks the weights, wait until they are restored, and
        repeat the request: it returns the same samples.
        """
        # The request names the version, so that a generator without these weights refuses it.
        version = self.weights.served
        while self.client is not None:
            try:
                return self.client.generate(
                    samples, samples_per_prompt, options, early_stop, version
                ).result()
            except RemoteError as error:
                if error.kind != "WeightsError":
                    raise
                # `restore` may send a newer version than the one that the generator lost.
                version = self.weights.restore()
        return []

    def end_generation(self) -> GenerationCounts:
        """Return zeros: the generator manages its own memory, and reports its own counts."""
        return GenerationCounts()

    def drop_journal_before(self, first_prompt: int) -> None:
        """See `Sampler.drop_journal_before`. The next request to the generator contains the
        position."""
        if self.client is not None:
            self.client.first_prompt = first_prompt

    def take_environment_wait_s(self) -> float | None:
        """Return None: the generator runs the environments."""
        return None

    def close(self) -> None:
        """Close the connection for weights; the launcher stops the generator."""
        self.weights.close()
