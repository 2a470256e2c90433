"""Agents' episodes that are over, in a run's journal: one that goes on is told of them, and begins
no agent for them."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from safetensors.torch import load, save

from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.types import Sample
from aligner.engines.engine_protocol import GenerationRequest
from aligner.environments.episode_environment import Outcome
from aligner.environments.episode_journal import EpisodeJournal, digest


@dataclass(frozen=True)
class AgentJournal:
    """Samples by their requests and by what else they were drawn by, `by`: JSON, the weights'
    version among it."""

    journal: EpisodeJournal

    def told(self, request: GenerationRequest, by: Sequence[Any]) -> Sample | None:
        """The sample that was recorded; None where none was."""
        asked = digest(by)
        outcome = self.journal.told(_name(request, asked), 0, asked)
        if outcome is None or not isinstance(outcome.observation, str):
            return None
        (sample,) = samples_from_tensors(load(base64.b85decode(outcome.observation)))
        metadata, branches = request.prompt.metadata, sample.branches
        return replace(
            sample,
            metadata=metadata,
            branches=tuple(replace(each, metadata=metadata) for each in branches),
        )

    def record(self, request: GenerationRequest, by: Sequence[Any], sample: Sample) -> None:
        """Note an episode's sample, with its branches, or that it was lost. Raises OSError, which
        names the file."""
        tensors = {
            name: tensor.contiguous() for name, tensor in samples_to_tensors([sample]).items()
        }
        asked, said = digest(by), base64.b85encode(save(tensors)).decode()
        self.journal.record(_name(request, asked), 0, asked, Outcome(said, done=True))

    def forget(self, first: int) -> None:
        """Drop those of prompts before the `first` of the stream. Raises OSError."""
        self.journal.forget(
            name for name in self.journal.episodes if int(name.partition("/")[0]) < first
        )


def _name(request: GenerationRequest, asked: str) -> str:
    """An evaluation's prompts have the numbers of others; what they are drawn by tells them
    apart."""
    return f"{request.prompt.id}/{request.sample_index}/{asked}"
