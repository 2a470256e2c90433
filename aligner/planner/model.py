"""What the planner knows of a pipeline: its phases, who runs them and for how long, and how far generation may run ahead."""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

HOST = "host"
"""Runs what needs none of the devices, such as a reward function on CPUs."""
ROLES = ("trainer", "generator", "critic", "reward")
"""The roles that devices are split between."""

Placement = Mapping[str, int]
"""Devices by role, of the roles that have work."""


@dataclass(frozen=True)
class Kind:
    """A phase of every step."""

    runs: tuple[str, ...]
    """The roles that may run it, the usual one first."""
    meaning: str


KINDS: Mapping[str, Kind] = {
    "load": Kind(("generator", "trainer"), "the generator takes a batch's weights, and reads prompts under way anew"),
    "generate": Kind(("generator", "trainer"), "samples are drawn"),
    "score": Kind(("reward", "critic", "trainer", "generator", HOST), "samples are scored"),
    "values": Kind(("critic", "trainer"), "the critic reads the samples"),
    "logprobs": Kind(("trainer", "generator"), "the policy reads the samples"),
    "reference": Kind(("trainer", "generator"), "the reference reads the samples"),
    "train": Kind(("trainer",), "the policy's updates"),
    "critic_train": Kind(("critic", "trainer"), "the critic's updates"),
    "other": Kind(("trainer",), "what the trainer does beside: experience, metrics"),
    "publish": Kind(("trainer",), "the new weights are sent"),
}
"""In the order in which a role does them for a batch."""


@dataclass(frozen=True)
class Phase:
    """A phase's duration, a step, as it was measured."""

    name: str
    role: str
    seconds: float
    devices: int = 1
    """of its role when it was measured"""
    serial: float = 0.0
    """Share of its seconds that more devices do not shorten (Amdahl 1967), in [0, 1]"""
    varies: tuple[float, ...] = (1.0,)
    """By how much each batch's differ from these, a factor of 1 in the mean; after the last the first comes again"""

    def seconds_at(self, devices: int) -> float:
        """Its mean duration on so many devices; the host's never changes."""
        if self.role == HOST:
            return self.seconds
        return self.seconds * (self.serial + (1.0 - self.serial) * self.devices / devices)


@dataclass(frozen=True)
class Lengths:
    """Response lengths, log-normal and cut at the longest, and how many sequences are generated at a time.

    Every sequence under way grows by a token at a time, however many there are. A slot that is free takes the next one.
    """

    mean: float
    deviation: float
    """Both in tokens, before lengths are cut"""
    longest: int
    samples: int
    """of a step"""
    slots: int
    """of all the devices that `generate` was measured on; in proportion on more or fewer"""

    def draw(self, batch: int, seed: int) -> tuple[float, ...]:
        """Tokens of each of a step's responses, in order of admission; the draws repeat every `BATCHES` batches."""
        return _draw(self, batch % BATCHES, seed)

    def alone(self, batch: int, slots: int, parts: int, seed: int) -> tuple[tuple[float, float], ...]:
        """When each part of a batch that has all slots for itself begins and ends, in times of a token."""
        return _alone(self, batch % BATCHES, min(slots, self.samples), parts, seed)

    def token_seconds(self, seconds: float, seed: int) -> float:
        """A token's time with which a batch that has all slots for itself takes so many `seconds` in the mean."""
        return seconds / self.mean_alone(self.slots, seed)

    def mean_alone(self, slots: int, seed: int) -> float:
        """Token times until the last response of such a batch is there, in the mean."""
        return math.fsum(self.alone(batch, slots, 1, seed)[0][1] for batch in range(BATCHES)) / BATCHES

    def mean_filled(self, slots: int, seed: int) -> float:
        """Token times that a batch takes where no slot is ever empty, in the mean."""
        return math.fsum(math.fsum(self.draw(batch, seed)) for batch in range(BATCHES)) / BATCHES / slots


def share(drawn: tuple[float, ...], part: int, parts: int) -> tuple[float, ...]:
    """The responses of one of a batch's parts."""
    return drawn[part * len(drawn) // parts : (part + 1) * len(drawn) // parts]


BATCHES = 16
"""Batches with drawn lengths, and the fewest over which what varies is averaged"""


@functools.cache
def _draw(lengths: Lengths, batch: int, seed: int) -> tuple[float, ...]:
    variance = math.log1p((lengths.deviation / lengths.mean) ** 2)
    center, stream = math.log(lengths.mean) - variance / 2, random.Random(seed * 1_000_003 + batch)
    drawn = (stream.lognormvariate(center, math.sqrt(variance)) for _ in range(lengths.samples))
    return tuple(float(min(max(1, round(tokens)), lengths.longest)) for tokens in drawn)


@functools.cache
def _alone(lengths: Lengths, batch: int, slots: int, parts: int, seed: int) -> tuple[tuple[float, float], ...]:
    free, spans, drawn = [0.0] * slots, [], lengths.draw(batch, seed)
    for part in range(parts):
        begin, end = free[0], free[0]
        for tokens in share(drawn, part, parts):
            done = free[0] + tokens
            heapq.heapreplace(free, done)
            end = max(end, done)
        spans.append((begin, end))
    return tuple(spans)


@dataclass(frozen=True)
class Pipeline:
    """What is to be predicted; where it has devices is a `Placement`."""

    phases: tuple[Phase, ...]
    """At most one of a kind; `generate` and `train` at least"""
    micro_batches: int = 1
    """Parts of a batch: what reads or scores samples begins with a part as soon as it is generated."""
    max_staleness: int = 1
    """A batch trained at version v holds no sample admitted at a version below v minus this; 0 is synchronous."""
    interrupt: bool = False
    """New weights are taken while samples are under way; otherwise these finish first."""
    lengths: Lengths | None = None
    """Without them a part's samples all end at once, and more devices shorten generation like any phase."""
    seed: int = 1
    stepwise: bool = False
    """As runs do: the trainer takes a batch as a whole, asks for its values then, and ends its step with the critic's update
    too. Otherwise each phase begins as soon as its own inputs are there."""

    @property
    def window(self) -> int:
        """Batches over which durations are averaged, 1 where all are alike: whole rounds of what comes again."""
        rounds = math.lcm(1 if self.lengths is None else BATCHES, *(len(phase.varies) for phase in self.phases))
        return rounds * -(-BATCHES // rounds) if rounds > 1 else 1

    def measured(self, name: str) -> float:
        """Seconds of the phase of this name, as it was measured; 0 where there is none."""
        return next((phase.seconds for phase in self.phases if phase.name == name), 0.0)

    @property
    def generator(self) -> str:
        """The role that generates: the trainer where the engine is colocated."""
        return next(phase.role for phase in self.phases if phase.name == "generate")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that need devices."""
        used = {phase.role for phase in self.phases}
        return tuple(role for role in ROLES if role in used)

    @property
    def fills_slots(self) -> bool:
        """Whether a batch's samples are admitted while those of the batch before are under way."""
        alone = {phase.name for phase in self.phases if phase.role == self.generator} <= {"load", "generate"}
        return self.interrupt and self.lengths is not None and self.max_staleness > 0 and alone

    def slots(self, placement: Placement) -> int:
        """Sequences that are generated at a time, with `lengths`."""
        assert self.lengths is not None
        generate = next(phase for phase in self.phases if phase.name == "generate")
        return max(1, self.lengths.slots * placement[generate.role] // generate.devices)

    def work(self, placement: Placement) -> dict[str, float]:
        """Seconds a step for which each role is busy at least, whatever waits for what."""
        roles = dict.fromkeys((*self.roles, *(phase.role for phase in self.phases)), 0.0)
        for phase in self.phases:
            if phase.name == "generate" and self.lengths is not None:
                roles[phase.role] += self._generation(placement, phase)
            else:
                roles[phase.role] += phase.seconds_at(placement.get(phase.role, 1))
        return roles

    def _generation(self, placement: Placement, generate: Phase) -> float:
        assert self.lengths is not None
        slots, token = self.slots(placement), self.lengths.token_seconds(generate.seconds, self.seed)
        tokens = self.lengths.mean_filled if self.fills_slots else self.lengths.mean_alone
        return token * tokens(slots, self.seed)
