"""Function that a worker rank runs for the tests of the teacher."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from aligner.data.model_directory import read_shape
from aligner.megatron import world as worlds
from aligner.megatron.policy import FrozenPolicy
from aligner.schema import TeacherConfig


def frozen_logprobs(directory: str, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return the log-probs of the model in a directory, on one rank, at temperature 1."""
    settings = TeacherConfig()
    world = worlds.initialize(settings.parallel, 1, timeout_s=60)
    model = FrozenPolicy(
        read_shape(Path(directory)), world, settings, Path(directory), chunk_tokens=7
    )
    found = model.logprobs(tokens, lengths)
    worlds.shutdown()
    return found
