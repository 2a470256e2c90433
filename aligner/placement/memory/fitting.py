"""What does not fit into a device's memory, and the cheapest changes by which it would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.placement.memory.candidates import Changes, layout_changes, small_changes
from aligner.placement.memory.role_memory import GIB, RoleMemory, describe_phase, memory_needs, section_shapes
from aligner.schema import Config, ParallelConfig
from aligner.schema.keys import with_values

_SECTIONS = {"trainer": "actor", "critic": "critic", "reward": "reward", "generator": "engine"}
IsValid = Callable[[Config], bool]
"""Whether a run may have a configuration, whatever memory it needs."""


def memory_problems(config: Config, shape: ModelShape, coming: ExpectedInputs, is_valid: IsValid) -> Iterator[str]:
    """One line for each role that needs more than `cluster.device_memory_gib`; nothing where that is not given.

    Each tells changes by which the role would fit and the configuration be valid, together with those of the lines before.
    """
    limit = config.cluster.device_memory_gib
    if limit is None:
        return
    advised = config
    for role in memory_needs(config, shape, coming):
        if role.peak.total <= limit * GIB or "." in role.role:  # replicas of the reward are alike
            continue
        advice = "no layout within a node would fit; give devices with more memory, or a smaller model"
        search = _Search(advised, shape, coming, role, limit, is_valid)
        if (changes := search.cheapest()) is not None:
            advised = with_values(advised, changes)
            advice = f"it fits with {_written(changes)}, {search.needed(advised) / GIB:.1f} GiB"
        where = f" (pipeline stage {role.stage})" if role.stages > 1 else ""
        yield (
            f"cluster.device_memory_gib={limit:g}: {role.role} needs {role.peak.total / GIB:.1f} GiB a device"
            f" in {role.peak.name}{where}: {describe_phase(role.peak)}; {advice}"
        )


def _written(changes: Changes) -> str:
    """As on the command line."""
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items())


@dataclass(frozen=True)
class _Search:
    """For the cheapest changes by which a role fits."""

    config: Config
    shape: ModelShape
    coming: ExpectedInputs
    role: RoleMemory
    limit: float
    is_valid: IsValid

    def cheapest(self) -> Changes | None:
        """All that has to be changed: small things, one or several, then layouts with none, one or several of them."""
        section = _SECTIONS[self.role.role]
        small = [change for change in small_changes(self.config, section) if self._is_valid(change)]
        together = [_merged(small[:count]) for count in range(2, len(small) + 1)]
        shapes = section_shapes(self.config, self.shape, self.coming, section)
        for layout in ({}, *layout_changes(self.config, shapes, section)):
            if layout and not self._has_room(_merged([*small, layout])):
                continue  # with fewer of the small ones it would have less
            for changes in ({}, *small, *together):
                if self._fits(candidate := {**changes, **layout}):
                    return self._with_company(self._necessary(candidate, _merged(small)))
        return None

    def needed(self, config: Config) -> int:
        """Bytes that the role needs in another configuration."""
        roles = memory_needs(config, self.shape, self.coming)
        return next(role for role in roles if role.role == self.role.role).peak.total

    def _fits(self, changes: Changes) -> bool:
        return self._has_room(changes) and self._is_valid(changes)

    def _has_room(self, changes: Changes) -> bool:
        return self.needed(self._changed(changes)) <= self.limit * GIB

    def _is_valid(self, changes: Changes) -> bool:
        return self.is_valid(self._changed(changes))

    def _changed(self, changes: Changes) -> Config:
        return with_values(self.config, self._with_company(changes))

    def _with_company(self, changes: Changes) -> Changes:
        """With what has to change along: a colocated engine goes on filling the trainer's ranks, and where reward.parallel
        repeats critic.parallel it goes on doing so.
        """
        changed = with_values(self.config, changes)
        engine, ranks = changed.engine, changed.actor.parallel.ranks
        along: dict[str, Any] = {}
        if changed.algorithm.generates and engine.placement == "colocated" and engine.parallel.ranks != ranks:
            along["engine.parallel.data"] = max(1, ranks // engine.parallel.tensor)
        if changed.critic.with_reward and self.config.reward.parallel == self.config.critic.parallel != ParallelConfig():
            own = "critic.parallel."
            along |= {f"reward.{key.removeprefix('critic.')}": new for key, new in changes.items() if key.startswith(own)}
        return {**changes, **along}

    def _necessary(self, changes: Changes, small: Changes) -> Changes:
        """Without those of the small ones that it does not take, the costliest left out first."""
        for key in reversed(list(small)):
            fewer = {name: value for name, value in changes.items() if name != key}
            if key in changes and self._fits(fewer):
                changes = fewer
        return changes


def _merged(changes: Iterable[Changes]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.items()}
