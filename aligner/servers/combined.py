"""The reward served from the critic's processes, at the critic's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from numpy.typing import NDArray
from torch import Tensor

from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model
from aligner.servers.backend import ValueModel
from aligner.servers.host import Serve
from aligner.servers.protocol import CRITIC_INFER, CRITIC_INFER_WITH_REWARD, REWARD_MODEL, EndpointSpec
from aligner.servers.scoring import Scoring, build_scoring
from aligner.servers.serving import Caller

Endpoints = Callable[[Caller], Mapping[EndpointSpec, Serve]]


class OffloadableModel(ValueModel, Protocol):
    """A value model that can wait in host memory."""

    def sleep(self) -> None:
        """Free the device's memory, until `wake`."""
        ...

    def wake(self) -> None:
        """Be as before."""
        ...


class Turns:
    """Groups of models that share their ranks' devices: the weights of one group are there, the others' in host memory.

    A group that is asked for anything takes the device and keeps it until another is, so that nothing moves while requests
    of one kind follow each other.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[OffloadableModel]] = {}
        self._awake: str | None = None

    def join(self, group: str, model: OffloadableModel) -> ValueModel:
        """The model, to be used in its place; it sleeps until it is used."""
        model.sleep()
        self._groups.setdefault(group, []).append(model)
        return _TakingTurns(model, lambda: self._take(group))

    def _take(self, group: str) -> None:
        if group == self._awake:
            return
        for model in self._groups.get(self._awake or "", ()):
            model.sleep()
        for model in self._groups[group]:
            model.wake()
        self._awake = group


@dataclass(frozen=True)
class _TakingTurns:
    """A value model whose weights are on the device when they are needed."""

    model: OffloadableModel
    take: Callable[[], None]

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        self.take()
        return self.model.values(tokens, lengths)

    def train(self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> dict[str, float]:
        self.take()
        return self.model.train(tokens, returns, old_values, mask)

    def begin_save(self, directory: Path) -> None:
        self.take()
        self.model.begin_save(directory)

    def finish_save(self) -> None:
        self.model.finish_save()  # from the copy that `begin_save` took

    def load(self, directory: Path) -> None:
        self.take()
        self.model.load(directory)


def build_with_reward(
    config: Config, build_critic: Callable[[], OffloadableModel], build_reward_model: Callable[[Path], OffloadableModel]
) -> tuple[ValueModel, Scoring]:
    """The critic and what scores beside it, taking turns on the device where there is a reward model."""
    turns = Turns()
    scoring = build_scoring(config, lambda directory: turns.join("reward", build_reward_model(directory)))
    critic = build_critic()
    return turns.join("critic", critic) if has_reward_model(config.reward) else critic, scoring


def with_rewards(critic: Endpoints, scoring: Scoring) -> Endpoints:
    """The critic's endpoints with `rewards` beside the values, and `reward_model` beside them."""

    def endpoints(call: Caller) -> Mapping[EndpointSpec, Serve]:
        served, rewards = dict(critic(call)), scoring.endpoints(call)
        infer, score = served.pop(CRITIC_INFER), rewards[REWARD_MODEL]

        def infer_with_reward(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            asked = {spec.name for spec in REWARD_MODEL.inputs}
            # First, because metadata is read there: what is refused costs the ranks nothing.
            scores = score({name: array for name, array in arrays.items() if name in asked})
            return infer(arrays) | scores

        return {CRITIC_INFER_WITH_REWARD: infer_with_reward, **served, **rewards}

    return endpoints
