"""The reward's sources against the model, the layout and the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.layouts import layout_problems
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, directory_shape
from aligner.models.normalization import read_normalization
from aligner.schema import Config, ParallelConfig
from aligner.schema.reward_sources import ModelSource, RemoteSource, Source, model_sources, reward_sources


def reward_problems(config: Config, coming: ExpectedInputs = NOTHING_EXPECTED) -> Iterator[str]:
    """One line for each thing that is wrong with the reward's sources and where they run."""
    try:
        sources = reward_sources(config.reward)
    except ConfigError as error:
        yield str(error)
        return
    yield from _place_problems(config, model_sources(sources))
    layout_key, layout = _layout(config)
    if layout.ranks > 1:
        yield from _patience_problems(config, sources)
    for source in model_sources(sources):
        try:
            shape = directory_shape(Path(source.path), f"{source.key}.path", coming)
            yield from layout_problems(layout_key, layout, shape)
            read_normalization(Path(source.path))
        except ConfigError as error:
            yield str(error)


def _layout(config: Config) -> tuple[str, ParallelConfig]:
    """The layout at which reward models run, and its key."""
    if config.critic.with_reward:
        return "critic.parallel", config.critic.parallel
    return "reward.parallel", config.reward.parallel


def _place_problems(config: Config, models: tuple[ModelSource, ...]) -> Iterator[str]:
    reward, own = config.reward, config.reward.parallel
    if config.critic.with_reward:
        if own not in (ParallelConfig(), config.critic.parallel):
            yield "reward.parallel: critic.with_reward=true runs the reward at critic.parallel; leave it out, or give the same"
        if reward.replicas != 1:
            yield f"reward.replicas={reward.replicas}: must be 1 with critic.with_reward=true, which has no server of its own"
    elif own.ranks != 1 and not models:
        yield f"reward.parallel: {own.ranks} ranks, must be 1: no source of the reward is a model (reward.kind={reward.kind})"


def _patience_problems(config: Config, sources: tuple[Source, ...]) -> Iterator[str]:
    limit = config.cluster.collective_timeout_s
    for source in sources:
        if isinstance(source, RemoteSource) and source.timeout_s >= limit:
            yield (
                f"{source.key}.timeout_s={source.timeout_s:g}: must be below cluster.collective_timeout_s={limit:g}, for the"
                " other ranks wait no longer"
            )
