"""The run's steps against its schedules."""

from __future__ import annotations

from collections.abc import Iterator

from aligner.schema import Config, OptimizerConfig
from aligner.schema.derived import policy_updates


def schedule_problems(config: Config) -> Iterator[str]:
    """Warm-up, decay and early stops against the run's steps."""
    updates, critic_updates = policy_updates(config), config.run.steps * config.algorithm.epochs * config.algorithm.minibatches
    optimizers: dict[str, OptimizerConfig] = {"actor": config.actor.optimizer}
    if config.algorithm.has_critic:
        optimizers["critic"] = config.critic.optimizer
    for role, optimizer in optimizers.items():
        steps = updates if role == "actor" else critic_updates
        if optimizer.warmup_steps >= max(steps, 1):
            yield f"{role}.optimizer.warmup_steps={optimizer.warmup_steps}: the run has {steps} optimizer steps"
        if optimizer.min_learning_rate > optimizer.learning_rate:
            yield (
                f"{role}.optimizer.min_learning_rate={optimizer.min_learning_rate}: it is above"
                f" {role}.optimizer.learning_rate={optimizer.learning_rate}"
            )
        if optimizer.offload_fraction and not optimizer.distributed:
            yield f"{role}.optimizer.offload_fraction={optimizer.offload_fraction}: needs {role}.optimizer.distributed=true"
    stop, steps = config.run.stop_after, config.run.steps
    if stop is not None and stop > steps:
        yield f"run.stop_after={stop}: the run has {steps} steps (run.steps)"
