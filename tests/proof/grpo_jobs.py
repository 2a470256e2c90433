"""A GRPO step that worker ranks run: engine, advantages, and an update of the trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from aligner.algorithms.advantages import grpo
from aligner.data.types import Experience, collate
from aligner.engines.engine_protocol import SamplingOptions
from aligner.megatron import world as worlds
from aligner.proof.rank_jobs import NEW_TOKENS, build_engine, build_policy, generate
from aligner.proof.reference import TEMPERATURE, compute_loss, make_experience

GROUP_SIZE = 2


def grpo_step(directory: str, layout: dict[str, Any], tensor: int) -> dict[str, Any]:
    """Return the experience of a step, the statistics of its update, and the log-probs after it."""
    path = Path(directory)
    engine = build_engine(path, tensor)
    samples = generate(engine, GROUP_SIZE, SamplingOptions(NEW_TOKENS, temperature=TEMPERATURE))
    batch = collate(samples, pad_token_id=0)
    # the share of even tokens in the response
    is_even = (batch.tokens[:, 1:] % 2 == 0) & batch.mask
    scores = is_even.sum(1) / batch.mask.sum(1)
    experience = _build_experience(batch, scores)
    policy = build_policy(path, layout)
    stats = policy.train(experience, compute_loss)
    after = policy.logprobs(experience.tokens, experience.lengths)
    worlds.shutdown()
    return {"experience": experience, "stats": stats, "after": after}


def _build_experience(batch: Any, scores: torch.Tensor) -> Experience:
    """Return the experience of a batch, with GRPO's advantages for every token of a response."""
    advantages = torch.where(batch.mask, grpo(scores, GROUP_SIZE)[:, None], 0.0)
    zeros = torch.zeros_like(batch.engine_logprobs)
    template = make_experience(1024, batch=len(scores))
    return dataclasses.replace(
        template,
        tokens=batch.tokens,
        lengths=batch.lengths,
        mask=batch.mask,
        prompt_lengths=batch.prompt_lengths,
        engine_logprobs=batch.engine_logprobs,
        old_logprobs=batch.engine_logprobs,
        reference_logprobs=zeros,
        advantages=advantages,
        scores=scores,
        rewards=zeros,
        values=zeros,
        returns=zeros,
        weight_versions=batch.weight_versions,
        finish_reasons=batch.finish_reasons,
        groups=batch.groups,
    )
