"""What the worker ranks run for the tests of whole steps, whose reward is computed here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from aligner.config.compose import compose_config
from aligner.data.claim import take_run, write_as
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.megatron import world as worlds
from aligner.observability.timeline import PhaseTimer
from aligner.rollout.services import Services
from aligner.training.online import OnlineTrainer
from aligner.training.setup import build_trainer


class _EvenTokens:
    """Stands for the reward servers: a response scores the share of its even tokens."""

    def score(self, tokens: Tensor, lengths: Tensor, prompts: Tensor, *_: Any) -> Future[Tensor]:
        answer: Future[Tensor] = Future()
        rows = zip(tokens, lengths.tolist(), prompts.tolist(), strict=True)
        answer.set_result(torch.stack([(row[first:end] % 2 == 0).float().mean() for row, end, first in rows]))
        return answer

    def assert_settled(self) -> None: ...

    def close(self) -> None: ...


def steps(overrides: list[str], count: int) -> list[dict[str, float]]:
    """The metrics of a run's first steps, published and learned, on one rank."""
    config = compose_config(overrides)
    prepare_model(config)
    tokenizer = Tokenizer(prepare_model(config))
    write_as(config, take_run(config))
    world = worlds.initialize(config.actor.parallel, config.seed, timeout_s=120)
    services: Any = Services(None, _EvenTokens())  # type: ignore[arg-type]
    trainer = build_trainer(config, world, tokenizer, open_prompts(config.data, tokenizer, config.seed), services)
    assert isinstance(trainer, OnlineTrainer)
    trainer.begin(0)
    found = []
    for step in range(count):
        found.append(trainer.step(step, PhaseTimer()).metrics)
        trainer.publish(step + 1, PhaseTimer(), last=step + 1 == count)
    trainer.close()
    worlds.shutdown()
    return found
