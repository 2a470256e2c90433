"""Functions that worker ranks run for the tests of critic and reward model on shared devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.policy_losses import value_loss
from aligner.data.model_directory import read_shape
from aligner.megatron import world as worlds
from aligner.megatron.value_model import ValueModel
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import ScoringError
from aligner.rewards.sources import CombinedReward, ModelSource, ScoringBatch, TextSource
from aligner.schema import CriticConfig, ParallelConfig, RewardConfig
from aligner.schema.reward_sources import FunctionSource
from aligner.servers.value_models import DeviceSharing
from aligner.servers.value_models import ValueModel as Served
from tests.megatron.jobs import OPTIMIZER, make_experience


def device_bytes(model: ValueModel) -> int:
    """Return the size of the parameters and their gradients in bytes."""
    parameters = [parameter for _, parameter in model.runner.parameters()]
    gradients = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *gradients))


def services(
    critic: Served, reward: Served, vocab_size: int, directory: Path, after: Callable[[str], None]
) -> list[Tensor | dict[str, float]]:
    """Send all kinds of requests to critic and reward model alternately; return the answers.

    `after` is called with the name of the model after each request.
    """
    experience = make_experience(vocab_size)
    sequences = experience.tokens, experience.lengths
    update = *sequences[:1], experience.returns, experience.values, experience.mask
    answers: list[Tensor | dict[str, float]] = []

    def ask(model: str, answer: Any) -> None:
        answers.append(answer)
        after(model)

    ask("reward", reward.values(*sequences))
    ask("critic", critic.values(*sequences))
    ask("critic", critic.train(*update))
    ask("reward", reward.values(*sequences))
    ask("critic", critic.begin_save(directory))
    ask("reward", reward.values(*sequences))
    critic.finish_save()  # moves nothing
    ask("reward", reward.values(*sequences))
    ask("critic", critic.train(*update))
    ask("critic", critic.values(*sequences))
    ask("reward", reward.values(*sequences))
    ask("critic", critic.load(directory))
    ask("critic", critic.train(*update))
    ask("critic", critic.values(*sequences))
    return answers


def separate_and_shared(
    critic_directory: str,
    reward_directory: str,
    checkpoints: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Send the same requests to two resident models, and to two models that share the device."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    paths = Path(critic_directory), Path(reward_directory)
    precision = settings.pop("precision", "fp32")

    def models() -> tuple[ValueModel, ValueModel]:
        optimizer = type(OPTIMIZER)(**{**vars(OPTIMIZER), **settings})
        section = CriticConfig(
            parallel=world.layout, micro_batch_tokens=24, optimizer=optimizer, precision=precision
        )
        frozen = RewardConfig(parallel=world.layout, micro_batch_tokens=24, precision=precision)
        loss = functools.partial(value_loss, clip=0.2)
        return (
            ValueModel(read_shape(paths[0]), world, paths[0], section, total_updates=4, loss=loss),
            ValueModel(read_shape(paths[1]), world, paths[1], frozen),
        )

    vocab_size = read_shape(paths[0]).vocab_size
    apart = services(*models(), vocab_size, Path(checkpoints, "apart"), lambda model: None)

    critic, reward = models()
    whole = {"critic": device_bytes(critic), "reward": device_bytes(reward)}
    sharing, seen, moves = DeviceSharing(), [], []
    for model in (critic, reward):
        model.wake = _count_calls(model.wake, moves)
    models_in_turn = sharing.add("critic", critic), sharing.add("reward", reward)
    seen.append(("neither", device_bytes(critic), device_bytes(reward)))
    together = services(
        *models_in_turn,
        vocab_size,
        Path(checkpoints, "together"),
        lambda model: seen.append((model, device_bytes(critic), device_bytes(reward))),
    )
    worlds.shutdown()
    return {"apart": apart, "together": together, "seen": seen, "whole": whole, "moves": len(moves)}


def _count_calls(function: Callable[[], None], calls: list[int]) -> Callable[[], None]:
    def counted() -> None:
        calls.append(1)
        function()

    return counted


def weighted_scores(reward_directory: str, texts: list[str]) -> list[Any]:
    """Combine a model and a function into one reward on TP2.

    Returns the scores, the raw scores of each source, and the texts of two scoring errors.
    """
    world = worlds.initialize(ParallelConfig(tensor=2), seed=1, timeout_s=120)
    path = Path(reward_directory)
    model = ValueModel(read_shape(path), world, path, RewardConfig(parallel=world.layout))
    experience = make_experience(read_shape(path).vocab_size)
    requests = [ScoringRequest("a prompt", text) for text in texts]
    batch = ScoringBatch(lambda: requests, experience.tokens, experience.lengths)

    def length(asked: list[ScoringRequest]) -> list[float]:
        if world.rank:
            raise AssertionError("rank 0 calls functions, and no other")
        return [
            float("nan") if request.response == "refuse" else float(len(request.response))
            for request in asked
        ]

    def settings(name: str, **numbers: float) -> FunctionSource:
        return FunctionSource(name=name, key="reward", function="own:score", **numbers)

    sources = ModelSource("judge", model), TextSource("length", length)
    reward = CombinedReward(
        [
            (settings("judge", weight=2.0, gain=0.5, bias=1.0), sources[0]),
            (settings("length", weight=-3.0, bias=0.25), sources[1]),
        ]
    )
    scores, raw = reward(batch), [source.compute_raw_scores(batch) for source in sources]
    requests[1] = ScoringRequest("a prompt", "refuse")
    errors = ""
    try:
        reward(batch)
    except ScoringError as error:
        errors = str(error)
    with torch.no_grad():  # a model whose weights have diverged
        for _, parameter in model.runner.parameters():
            parameter.fill_(torch.nan)
    try:
        sources[0].compute_raw_scores(batch)
    except ScoringError as error:
        errors += "\n" + str(error)
    worlds.shutdown()
    return [scores, raw, errors]
