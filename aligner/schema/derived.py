"""Quantities that follow from several keys."""

from __future__ import annotations

from aligner.schema import Config, EvaluationConfig


def overlong_buffer(config: Config) -> int:
    """Tokens before `rollout.max_response_tokens` over which a response loses score; 0: it loses none."""
    share, longest = config.algorithm.overlong_fraction, config.rollout.max_response_tokens
    return max(1, round(share * longest)) if share else 0


def policy_updates(config: Config) -> int:
    """Optimizer steps of the policy, or of what else is trained, over the whole run."""
    settings = config.algorithm
    if settings.trainer != "online":
        return config.run.steps
    return (config.run.steps - settings.critic_warmup_steps) * settings.epochs * settings.minibatches


def rows_together(config: Config) -> int:
    """How many rows of a minibatch must be in one micro-batch: a pair, or all of a prompt's samples."""
    if config.algorithm.trainer in ("dpo", "reward_model"):
        return 2
    if config.algorithm.trainer != "online":
        return 1
    return {"dpo": 2, "copg": config.rollout.samples_per_prompt}.get(config.algorithm.loss, 1)


def draws_greedily(settings: EvaluationConfig) -> bool:
    """Whether responses are the most probable tokens."""
    return settings.samples == 1 if settings.greedy is None else settings.greedy
