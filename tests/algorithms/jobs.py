"""What the worker ranks run for the tests of this room."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.ppo import TruncatedImportance, ppo_loss
from aligner.data.types import Experience
from aligner.megatron import world as worlds
from tests.megatron.jobs import make_experience, policy

LOSS = functools.partial(ppo_loss, clip_low=0.2, clip_high=0.2, truncated_importance_cap=1.5)


def stale_experience(vocab_size: int) -> Experience:
    """Drawn by an engine whose log-probs are not the trainer's."""
    experience = make_experience(vocab_size)
    noise = torch.randn(experience.old_logprobs.shape, generator=torch.Generator().manual_seed(6))
    return dataclasses.replace(experience, engine_logprobs=experience.old_logprobs + 0.3 * noise)


def corrected_update(directory: str, layout: dict[str, Any], level: TruncatedImportance) -> tuple[Tensor, dict[str, float]]:
    """The policy's log-probs, and the statistics of an update of it."""
    actor = policy(directory, layout)
    experience = stale_experience(actor.runner.shape.vocab_size)
    logprobs = actor.logprobs(experience.tokens, experience.lengths)
    stats = actor.train(experience, functools.partial(LOSS, truncated_importance=level))
    worlds.shutdown()
    return logprobs, stats
