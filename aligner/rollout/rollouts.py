"""From prompts to samples, with scores and values on their way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aligner.config.schema import EngineParallel
from aligner.config.schema import Rollout as Settings
from aligner.data.collectives import gather_samples
from aligner.data.prompts import PromptStream
from aligner.data.types import Prompt, Sample, SampleBatch, collate
from aligner.engines.protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.rollout.services import PendingRows, Services
from aligner.servers.client import RemoteFuture


@dataclass(frozen=True)
class Rollout:
    """A step's samples; scores [B] and values [B, S] arrive while other work goes on."""

    prompts: list[Prompt]
    """One a sample."""
    samples: list[Sample]
    batch: SampleBatch
    scores: PendingRows
    values: PendingRows


class Rollouts:
    """Takes each step's samples from a colocated engine: synchronous, so every sample is of the newest weights.

    Generation is cut into micro-batches, and a micro-batch's scores and values are asked for before the next one is
    generated.
    """

    def __init__(
        self,
        prompts: PromptStream,
        engine: GenerationEngine,
        services: Services,
        settings: Settings,
        layout: EngineParallel,
        rank: int,
        options: SamplingOptions,
        pad_token_id: int,
        engine_sleeps: bool = False,
    ) -> None:
        """With `engine_sleeps` the engine drops its memory once it has generated a step's samples."""
        self._prompts, self._engine, self._services = prompts, engine, services
        self._settings, self._layout, self._options = settings, layout, options
        self._replica = rank // layout.tensor
        self._pad_token_id, self._engine_sleeps = pad_token_id, engine_sleeps

    def take(self, step: int) -> Rollout:
        """The samples of a training step, each prompt's in a row, equal on every rank. Collective."""
        settings = self._settings
        prompts = self._prompts.take(step, settings.prompts_per_step)
        size = settings.prompts_per_step // settings.micro_batches
        samples: list[Sample] = []
        scores: list[RemoteFuture[Tensor]] = []
        values: list[RemoteFuture[Tensor]] = []
        for start in range(0, settings.prompts_per_step, size):
            part = self._generate(prompts[start : start + size])
            batch = collate(part, self._pad_token_id)
            of_prompts = prompts[start : start + size]
            metadata = [prompt.metadata for prompt in of_prompts for _ in range(settings.samples_per_prompt)]
            asked = self._services.ask(batch.tokens, batch.lengths, batch.prompt_lengths, metadata)
            scores += asked[0]
            values += asked[1]
            samples += part
        if self._engine_sleeps:
            self._engine.sleep(keep_weights=False)  # new ones come before the next step
        return Rollout(
            prompts=[prompt for prompt in prompts for _ in range(settings.samples_per_prompt)],
            samples=samples,
            batch=collate(samples, self._pad_token_id),
            scores=PendingRows(tuple(scores)),
            values=PendingRows(tuple(values)),
        )

    def close(self) -> None:
        """Shut the engine down. Collective."""
        self._engine.shutdown()

    def _generate(self, prompts: list[Prompt]) -> list[Sample]:
        requests = [
            GenerationRequest(prompt, index) for prompt in prompts for index in range(self._settings.samples_per_prompt)
        ]
        share = len(requests) // self._layout.data
        mine = requests[self._replica * share : (self._replica + 1) * share]
        speakers = [replica * self._layout.tensor for replica in range(self._layout.data)]
        return gather_samples(self._engine.generate(mine, self._options), speakers)
