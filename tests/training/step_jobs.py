"""Functions that worker ranks run for the tests of whole steps, with fake servers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from aligner.config.compose import compose_config
from aligner.data import fencing
from aligner.data.fencing import claim_run, set_writer_claim
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.megatron import world as worlds
from aligner.observability.timeline import PhaseTimer
from aligner.paths import get_run_paths
from aligner.servers.critic_client import CriticState
from aligner.training.online import OnlineTrainer
from aligner.training.run_checkpoints import TrainingState
from aligner.training.services import Services
from aligner.training.setup import build_trainer

P = ParamSpec("P")
T = TypeVar("T")


class _EvenTokens:
    """Fake reward servers: the score of a response is its share of even token ids."""

    def score(self, tokens: Tensor, lengths: Tensor, prompts: Tensor, *_: Any) -> Future[Tensor]:
        answer: Future[Tensor] = Future()
        rows = zip(tokens, lengths.tolist(), prompts.tolist(), strict=True)
        answer.set_result(
            torch.stack([(row[first:end] % 2 == 0).float().mean() for row, end, first in rows])
        )
        return answer

    def assert_settled(self) -> None: ...

    def close(self) -> None: ...


class _CountingCritic(_EvenTokens):
    """Fake critic server: the value at a position is the position divided by 100."""

    def __init__(self) -> None:
        self.updates = 0

    def wait_ready(self, timeout_s: float) -> None: ...

    def start(self, states: Sequence[CriticState]) -> None:
        self.updates = states[-1].updates

    def keep(self, states: Sequence[CriticState]) -> None: ...

    def values(self, tokens: Tensor, lengths: Tensor) -> Future[Tensor]:
        answer: Future[Tensor] = Future()
        answer.set_result(torch.arange(tokens.shape[1]).repeat(len(tokens), 1) / 100)
        return answer

    def train(self, *_: Tensor) -> Future[dict[str, float]]:
        self.updates += 1
        answer: Future[dict[str, float]] = Future()
        answer.set_result({"loss": float(self.updates)})
        return answer

    def begin_checkpoint(self, step: int) -> CriticState:
        return CriticState(step, self.updates)

    def finish_checkpoint(self) -> None: ...


def _reset_claim_afterwards(job: Callable[P, T]) -> Callable[P, T]:
    """Reset the process's claim on the run after the job, because later jobs start other runs."""

    @functools.wraps(job)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return job(*args, **kwargs)
        finally:
            fencing._writer_claim = None

    return run


@_reset_claim_afterwards
def critic_warmup(
    overrides: list[str], first: int, saved_after: int | None = None
) -> list[dict[str, Any]]:
    """Run the steps of a run with a fake critic.

    Returns for each step the metrics, the published weight versions, the policy's weights, and the
    number of critic updates.

    Args:
        first: Number of completed steps to resume from.
        saved_after: Number of steps after which a checkpoint is saved.
    """
    config = compose_config(overrides)
    prepare_model(config)
    tokenizer = Tokenizer(prepare_model(config))
    world = worlds.initialize(config.actor.parallel, config.seed, timeout_s=120)
    if world.rank == 0:
        set_writer_claim(config, claim_run(config))
    critic: Any = _CountingCritic()
    reward: Any = _EvenTokens()
    reward.wait_ready = critic.wait_ready
    prompts = open_prompts(config.data, tokenizer, config.seed)
    services = Services(critic, reward) if world.rank == 0 else Services(None, None)
    trainer = build_trainer(config, world, tokenizer, prompts, services)
    assert isinstance(trainer, OnlineTrainer)
    published: list[int] = []
    publish = trainer.pipeline.publish_weights

    def record_version(version: int, is_last: bool = False) -> None:
        published.append(version)
        publish(version, is_last)

    trainer.pipeline.publish_weights = record_version  # type: ignore[method-assign]
    checkpoint = get_run_paths(config).root / "state.json"
    trainer.resume([TrainingState(**json.loads(checkpoint.read_text()))] if first else [])
    trainer.begin(first)
    found = []
    for step in range(first, config.run.steps):
        metrics = trainer.step(step, PhaseTimer()).metrics
        trainer.publish(step + 1, PhaseTimer(), is_last=step + 1 == config.run.steps)
        weights = {
            name: parameter.detach().clone()
            for name, parameter in trainer.policy.runner.parameters()
        }
        found.append(
            {
                "metrics": metrics,
                "published": published[:],
                "weights": weights,
                "critic": critic.updates,
            }
        )
        published.clear()
        if step + 1 == saved_after:
            checkpoint.write_text(
                json.dumps(asdict(trainer.finish_save(trainer.begin_save(saved_after))))
            )
    trainer.close()
    worlds.shutdown()
    return found


class _Halves:
    """Fake teacher servers: log-probs are -1 for even token ids and -2 for odd ones."""

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompts: Tensor,
        metadata: object,
        guided_tokens: object,
    ) -> Future[Tensor]:
        answer: Future[Tensor] = Future()
        places = torch.arange(1, tokens.shape[1])
        inside = (places >= prompts[:, None]) & (places < lengths[:, None])
        answer.set_result(torch.where(inside, -1.0 - tokens[:, 1:] % 2, 0.0))
        return answer

    def assert_settled(self) -> None: ...

    def close(self) -> None: ...


@_reset_claim_afterwards
def steps(overrides: list[str], count: int) -> list[dict[str, float]]:
    """Run the first steps of a run on one rank, with weight syncs; return their metrics."""
    config = compose_config(overrides)
    prepare_model(config)
    tokenizer = Tokenizer(prepare_model(config))
    set_writer_claim(config, claim_run(config))
    world = worlds.initialize(config.actor.parallel, config.seed, timeout_s=120)
    teacher = _Halves() if config.has_teacher else None
    services: Any = Services(None, _EvenTokens(), teacher=teacher)  # type: ignore[arg-type]
    trainer = build_trainer(
        config, world, tokenizer, open_prompts(config.data, tokenizer, config.seed), services
    )
    assert isinstance(trainer, OnlineTrainer)
    trainer.begin(0)
    found = []
    for step in range(count):
        found.append(trainer.step(step, PhaseTimer()).metrics)
        trainer.publish(step + 1, PhaseTimer(), is_last=step + 1 == count)
    trainer.close()
    worlds.shutdown()
    return found
