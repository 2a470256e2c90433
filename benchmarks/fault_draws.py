"""Random faults: which process of a run is disturbed, how, and when."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GROUPS = {
    "critic": ("critic",),
    "reward": ("reward", "reward.1"),
    "servers": ("critic", "reward", "reward.1"),
    "generator": ("generator",),
    "trainer": ("trainer",),
    "all": ("generator", "reward", "critic", "trainer"),
    "environment": ("generator",),
    "endpoint": ("generator",),
}
"""What is disturbed for each --role."""
RANKS = {"trainer": 2, "critic": 2}
"""Of the groups that have more than one."""
_HELPERS = ("", "gateway", "tritonserver")


@dataclass(frozen=True)
class Fault:
    """Something that happens to a rank of the trainer or of a server group, to a helper of it, or
    to the launcher."""

    action: str
    """kill, stop, pause, write, or flip."""
    group: str
    """`launcher` for the launcher itself."""
    rank: int
    step: int
    """After so many steps."""
    delay_s: float
    """And so many seconds."""
    helper: str = ""
    """Part of the command line of a process that the rank has started; empty for itself."""
    draw: float = 0.5
    """Which byte, or for how long: from 0 to 1."""

    def __str__(self) -> str:
        what = self.group if self.group == "launcher" else f"{self.group} rank {self.rank}"
        return f"{self.action} {what}{f' {self.helper}' * bool(self.helper)}"


def random_faults(
    seed: int,
    groups: Sequence[str],
    steps: int,
    step_s: float,
    ranks: Mapping[str, int],
    action: str = "kill",
) -> list[Fault]:
    """One fault a group, in the order in which they come, before the last of `steps` steps of about
    `step_s` seconds.

    Successive seeds take a group's ranks in turn.
    """
    draw = random.Random(seed)
    moments = [(group, draw.randrange(1, steps - 1), draw.uniform(0, step_s)) for group in groups]
    faults = [
        Fault(action, group, seed % ranks.get(group, 1), step, delay_s)
        for group, step, delay_s in moments
    ]
    return sorted(faults, key=lambda fault: (fault.step, fault.delay_s))


def mixed_faults(seed: int, steps: int, step_s: float) -> list[Fault]:
    """Two faults of any kind."""
    draw, faults = random.Random(seed), []
    for step in sorted(draw.sample(range(1, steps - 2), 2)):
        action = draw.choice(
            ("kill", "stop", "pause", "kill", "stop", "pause", "write", "launcher", "flip")
        )
        group = draw.choice(("trainer", "critic", "reward", "reward.1", "generator"))
        rank, helper = (
            draw.randrange(RANKS.get(group, 1)),
            ("" if group == "trainer" else draw.choice(_HELPERS)),
        )
        if action == "launcher":
            action, group, rank, helper = "kill", "launcher", 0, ""
        elif action == "flip":
            group, rank, helper = "launcher", 0, ""
        elif action == "write":
            group, helper = draw.choice(("trainer", "critic")), ""
            rank = draw.randrange(RANKS[group])
        if helper:
            rank = 0
        faults.append(
            Fault(action, group, rank, step, draw.uniform(0, step_s), helper, draw.random())
        )
    return faults
