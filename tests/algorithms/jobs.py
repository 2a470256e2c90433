"""Functions that worker ranks run for the tests of the algorithms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.online_algorithm import build_online_algorithm
from aligner.algorithms.policy_losses import LossContext, clipped_surrogate
from aligner.data.model_directory import read_shape
from aligner.data.types import Experience, Stats
from aligner.megatron import world as worlds
from aligner.megatron.policy import FrozenPolicy
from aligner.schema import AlgorithmConfig, Config, TeacherConfig
from tests.megatron.jobs import TEMPERATURE, make_experience, policy

STILL = {"learning_rate": 1e-30, "weight_decay": 0.0}
"""Optimizer settings that do not change the weights, so that one policy serves many algorithms."""


def corrected_loss(
    logprobs: Tensor, entropy: Tensor, rows: Experience, denominator: float, *, level: str
) -> tuple[Tensor, Stats]:
    settings = AlgorithmConfig(truncated_importance=level, truncated_importance_cap=1.5)
    return clipped_surrogate(logprobs, rows, LossContext(settings, 0.0, denominator, weights=None))


def stale_experience(vocab_size: int) -> Experience:
    """Return an experience whose engine log-probs differ from the trainer's."""
    experience = make_experience(vocab_size)
    noise = torch.randn(experience.old_logprobs.shape, generator=torch.Generator().manual_seed(6))
    return dataclasses.replace(experience, engine_logprobs=experience.old_logprobs + 0.3 * noise)


def corrected_update(
    directory: str, layout: dict[str, Any], level: str
) -> tuple[Tensor, dict[str, float]]:
    """Return the policy's log-probs and the statistics of one update."""
    actor = policy(directory, layout)
    experience = stale_experience(actor.runner.shape.vocab_size)
    logprobs = actor.logprobs(experience.tokens, experience.lengths)
    stats = actor.train(experience, functools.partial(corrected_loss, level=level))
    worlds.shutdown()
    return logprobs, stats


def taught_updates(
    directory: str,
    teacher: str,
    layout: dict[str, Any],
    micro_batch_tokens: int,
    configs: Mapping[str, Config],
) -> dict[str, dict[str, float]]:
    """Update the policy with the teacher divergence of each configuration.

    Policy and teacher have the same layout. Return the statistics of each update.
    """
    settings = {
        "micro_batch_tokens": micro_batch_tokens,
        "optimizer": STILL,
        "logprob_chunk_tokens": 5,
    }
    actor = policy(directory, layout, settings)
    of_teacher = TeacherConfig(parallel=actor.world.layout, micro_batch_tokens=micro_batch_tokens)
    frozen = FrozenPolicy(
        read_shape(Path(teacher)), actor.world, of_teacher, Path(teacher), chunk_tokens=7
    )
    experience = make_experience(actor.runner.shape.vocab_size)
    of, inside = (
        (experience.tokens, experience.lengths),
        {
            "mask": experience.mask,
            "temperature": TEMPERATURE,
        },
    )
    found = {}
    for name, config in configs.items():
        taught = frozen.top_k_logprobs(
            *of, config.teacher.top_k, actor.runner.shape.vocab_size, **inside
        )
        rows = dataclasses.replace(
            experience,
            advantages=torch.zeros_like(experience.advantages),
            candidates=taught.ids,
            candidate_targets=taught.outcomes,
        )
        algorithm = build_online_algorithm(config)
        found[name] = actor.train(
            rows, algorithm.build_loss(rows, 0.0), denominator=algorithm.loss_denominator(rows)
        )
    worlds.shutdown()
    return found


def updates(
    directory: str, layout: dict[str, Any], micro_batch_tokens: int, configs: Mapping[str, Config]
) -> dict[str, dict[str, float]]:
    """Update the same policy on the same rows with each algorithm; return the statistics.

    Each prompt has two samples.
    """
    actor = policy(
        directory, layout, {"micro_batch_tokens": micro_batch_tokens, "optimizer": STILL}
    )
    experience = stale_experience(actor.runner.shape.vocab_size)
    found = {}
    for name, config in configs.items():
        algorithm = build_online_algorithm(config)
        loss = algorithm.build_loss(experience, kl_coefficient=0.05)
        before = torch.full_like(experience.engine_logprobs, torch.nan)
        found[name] = actor.train(
            experience,
            loss,
            denominator=algorithm.loss_denominator(experience),
            group_size=algorithm.group_size,
            logprobs_out=before,
        )
        expected = torch.where(
            experience.mask, actor.logprobs(experience.tokens, experience.lengths), 0.0
        )
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=0)
    worlds.shutdown()
    return found
