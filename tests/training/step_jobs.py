"""What the worker ranks run for the tests of whole steps, whose reward is computed here."""

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
from aligner.data import claim
from aligner.data.claim import take_run, write_as
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.megatron import world as worlds
from aligner.observability.timeline import PhaseTimer
from aligner.paths import run_paths
from aligner.rollout.services import Services
from aligner.servers.critic_updates import CriticState
from aligner.training.online import OnlineTrainer
from aligner.training.run_checkpoints import TrainingState
from aligner.training.setup import build_trainer

P = ParamSpec("P")
T = TypeVar("T")


class _EvenTokens:
    """Stands for the reward servers: a response scores the share of its even tokens."""

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
    """Stands for the critic's server: of each token that comes before it a value is worth its
    hundredth."""

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


def _of_its_own(job: Callable[P, T]) -> Callable[P, T]:
    """The job in a process that goes on with other runs: whose this one is does not outlive it."""

    @functools.wraps(job)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return job(*args, **kwargs)
        finally:
            claim._own = None

    return run


@_of_its_own
def critic_warmup(
    overrides: list[str], first: int, saved_after: int | None = None
) -> list[dict[str, Any]]:
    """A run's steps from `first` on, which it resumes from: metrics, the published version if any,
    and the policy's weights.

    After `saved_after` steps a checkpoint is taken.
    """
    config = compose_config(overrides)
    prepare_model(config)
    tokenizer = Tokenizer(prepare_model(config))
    world = worlds.initialize(config.actor.parallel, config.seed, timeout_s=120)
    if world.rank == 0:
        write_as(config, take_run(config))
    critic: Any = _CountingCritic()
    reward: Any = _EvenTokens()
    reward.wait_ready = critic.wait_ready
    prompts = open_prompts(config.data, tokenizer, config.seed)
    services = Services(critic, reward) if world.rank == 0 else Services(None, None)
    trainer = build_trainer(config, world, tokenizer, prompts, services)
    assert isinstance(trainer, OnlineTrainer)
    published: list[int] = []
    publish = trainer.pipeline.publish_weights

    def noted(version: int, last: bool = False) -> None:
        published.append(version)
        publish(version, last)

    trainer.pipeline.publish_weights = noted  # type: ignore[method-assign]
    checkpoint = run_paths(config).root / "state.json"
    trainer.resume([TrainingState(**json.loads(checkpoint.read_text()))] if first else [])
    trainer.begin(first)
    found = []
    for step in range(first, config.run.steps):
        metrics = trainer.step(step, PhaseTimer()).metrics
        trainer.publish(step + 1, PhaseTimer(), last=step + 1 == config.run.steps)
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
    """Stands for the teacher's servers: the log-probs of even tokens are -1, those of odd ones
    -2."""

    def logprobs(
        self, tokens: Tensor, lengths: Tensor, prompts: Tensor, metadata: object
    ) -> Future[Tensor]:
        answer: Future[Tensor] = Future()
        places = torch.arange(1, tokens.shape[1])
        inside = (places >= prompts[:, None]) & (places < lengths[:, None])
        answer.set_result(torch.where(inside, -1.0 - tokens[:, 1:] % 2, 0.0))
        return answer

    def assert_settled(self) -> None: ...

    def close(self) -> None: ...


@_of_its_own
def steps(overrides: list[str], count: int) -> list[dict[str, float]]:
    """The metrics of a run's first steps, published and learned, on one rank."""
    config = compose_config(overrides)
    prepare_model(config)
    tokenizer = Tokenizer(prepare_model(config))
    write_as(config, take_run(config))
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
        trainer.publish(step + 1, PhaseTimer(), last=step + 1 == count)
    trainer.close()
    worlds.shutdown()
    return found
