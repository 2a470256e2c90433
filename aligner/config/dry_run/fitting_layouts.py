"""The layouts of a dry run: a configuration's own, or smaller ones where their ranks are too many for one machine."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from aligner.errors import ConfigError
from aligner.placement.roles import has_generator, role_ranks
from aligner.schema import Config, EngineParallelConfig, ParallelConfig
from aligner.schema.keys import value_at, with_values
from aligner.schema.reward_sources import has_reward_model

Sizes = Mapping[str, int]
"""Sizes that a role's ranks are the product of, by key."""

_KINDS: tuple[tuple[str, ...], ...] = (("replicas", "data"), ("pipeline",), ("context",), ("tensor",))
"""In the order in which they are made smaller."""

_LAST_RESORT = (("reward", "critic"), ("engine",), ("actor",))
"""Whose sizes become 1, in this order, where all of them at 2 are still too many."""


def with_fitting_layouts(config: Config) -> Config:
    """The configuration with layouts of at most `dry_run.max_ranks` ranks together; unchanged where they are no more.

    Data parallelism and reward replicas become 2 first; then pipeline, context and tensor parallelism are halved in turn, of
    all roles at once, down to 2. If that is not enough sizes become 1 in the same order, one by one: those of reward and
    critic first, then the generator's, the trainer's last. What depends on a layout's sizes, such as expert parallelism,
    follows them. Raises ConfigError where not even one rank a role fits.
    """
    limit, smaller = config.dry_run.max_ranks, config
    for sizes in _ever_smaller(_sizes(config)):
        smaller = with_values(config, sizes)
        if sum(role_ranks(smaller).values()) <= limit:
            break
    if (least := sum(role_ranks(smaller).values())) > limit:
        raise ConfigError(f"dry_run.max_ranks={limit}: one rank a role is {least} ranks; give {least} or more")
    if smaller == config:
        return config
    for section in layout_sections(config):
        smaller = with_values(smaller, _dependent(section, value_at(config, section), value_at(smaller, section)))
    if config.algorithm.generates and config.engine.placement == "colocated":
        smaller = with_values(smaller, {"engine.parallel": _colocated(config, smaller.actor.parallel)})
    if config.critic_scores and config.reward.parallel == config.critic.parallel:
        smaller = with_values(smaller, {"reward.parallel": smaller.critic.parallel})
    return smaller


def layout_sections(config: Config) -> tuple[str, ...]:
    """The keys of the Megatron layouts that the run uses."""
    sections = ["actor.parallel"]
    if config.algorithm.has_critic:
        sections.append("critic.parallel")
    if config.algorithm.generates and not config.critic_scores and has_reward_model(config.reward):
        sections.append("reward.parallel")
    return tuple(sections)


def _sizes(config: Config) -> Sizes:
    keys = [f"{section}.{name}" for section in layout_sections(config) for name in ("data", "pipeline", "context", "tensor")]
    if config.algorithm.generates and not config.critic_scores:
        keys.append("reward.replicas")
    if has_generator(config):
        keys += ["engine.parallel.data", "engine.parallel.tensor"]
    return {key: value_at(config, key) for key in keys}


def _ever_smaller(sizes: Sizes) -> Iterator[Sizes]:
    yield sizes
    for kinds in _KINDS:
        while large := [key for key in _of_kind(sizes, kinds) if sizes[key] > 2]:
            sizes = {**sizes, **{key: 2 if "data" in kinds else max(2, sizes[key] // 2) for key in large}}
            yield sizes
    for sections in _LAST_RESORT:
        for kinds, section in product(_KINDS, sections):
            for key in _of_kind(sizes, kinds):
                if key.partition(".")[0] == section and sizes[key] > 1:
                    sizes = {**sizes, key: 1}
                    yield sizes


def _of_kind(sizes: Sizes, kinds: tuple[str, ...]) -> list[str]:
    return [key for key in sizes if key.rpartition(".")[2] in kinds]


def _dependent(key: str, given: ParallelConfig, smaller: ParallelConfig) -> dict[str, Any]:
    """What of a layout goes with its sizes."""
    stage_ranks = smaller.tensor * smaller.context * smaller.data
    inside = given.expert_tensor
    if inside is not None and inside > 1:
        inside = _smallest_part(stage_ranks)
    shared = stage_ranks // (inside or smaller.tensor)
    return {
        f"{key}.sequence": given.sequence and smaller.tensor > 1,
        f"{key}.virtual_pipeline": min(given.virtual_pipeline, 2) if smaller.pipeline > 1 else 1,
        f"{key}.expert_tensor": inside,
        f"{key}.expert": _smallest_part(shared) if given.expert > 1 else 1,
    }


def _smallest_part(ranks: int) -> int:
    """The smallest size above 1 that divides so many ranks; 1 where they are one."""
    return next((size for size in range(2, ranks + 1) if ranks % size == 0), 1)


def _colocated(config: Config, trainer: ParallelConfig) -> EngineParallelConfig:
    """The engine's layout over the smaller trainer's ranks: as the given one in what is cut, and cut more or less finely."""
    given, ranks = config.engine.parallel, trainer.ranks

    def strangeness(tensor: int) -> tuple[int, bool, int]:
        lost = ((tensor > 1) != (given.tensor > 1)) + ((ranks // tensor > 1) != (given.data > 1))
        return lost, _order(tensor, trainer.tensor) != _order(given.tensor, config.actor.parallel.tensor), tensor

    tensor = min((size for size in range(1, ranks + 1) if ranks % size == 0), key=strangeness)
    return EngineParallelConfig(tensor=tensor, data=ranks // tensor)


def _order(one: int, other: int) -> int:
    return (one > other) - (one < other)
