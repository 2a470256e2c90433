"""Choose random faults: the process of a run, the fault, and the time."""

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
"""Groups of processes that each value of --role disturbs."""
RANKS = {"trainer": 2, "critic": 2}
"""Number of ranks of the groups that have more than one."""
_HELPERS = ("", "gateway", "tritonserver")


@dataclass(frozen=True)
class Fault:
    """A fault of a rank of the trainer or of a server group, of a helper process of a rank, or of
    the launcher."""

    action: str
    """One of kill, stop, pause, write and flip."""
    group: str
    """Group of the rank, or `launcher`."""
    rank: int
    step: int
    """Number of completed steps after which the fault is due."""
    delay_s: float
    """Delay after that step in seconds."""
    helper: str = ""
    """Part of the command line of a helper process that the rank has started; empty for the rank
    itself."""
    draw: float = 0.5
    """Random number from 0 to 1 that selects the byte to flip, or the duration of a pause."""

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
    """Return one random fault per group, in the order of their times.

    All faults are due before the last step. Successive seeds select the ranks of a group in turn.

    Args:
        seed: Seed of the random times.
        groups: Groups to disturb.
        steps: Number of steps of the run.
        step_s: Approximate time of a step in seconds.
        ranks: Number of ranks of the groups that have more than one.
        action: Action of all faults.
    """
    draw = random.Random(seed)
    moments = [(group, draw.randrange(1, steps - 1), draw.uniform(0, step_s)) for group in groups]
    faults = [
        Fault(action, group, seed % ranks.get(group, 1), step, delay_s)
        for group, step, delay_s in moments
    ]
    return sorted(faults, key=lambda fault: (fault.step, fault.delay_s))


def mixed_faults(seed: int, steps: int, step_s: float) -> list[Fault]:
    """Return two faults of random actions and processes."""
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
