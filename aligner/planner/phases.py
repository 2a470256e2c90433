"""The pipeline that is to be predicted: its phases, which role runs each for how long, and how far
generation runs ahead."""

import functools
import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HOST = "host"
"""Runs what needs none of the devices, such as a reward function on CPUs."""
ROLES = ("trainer", "generator", "critic", "reward", "teacher")
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
    "load": Kind(
        ("generator", "trainer"),
        "the generator takes a batch's weights, and reads prompts under way anew",
    ),
    "generate": Kind(("generator", "trainer"), "samples are drawn"),
    "score": Kind(("reward", "critic", "trainer", "generator", HOST), "samples are scored"),
    "values": Kind(("critic", "trainer"), "the critic reads the samples"),
    "teacher_logprobs": Kind(("teacher", "trainer"), "the teacher reads the samples"),
    "logprobs": Kind(("trainer", "generator"), "the policy reads the samples"),
    "reference": Kind(("trainer", "generator"), "the reference reads the samples"),
    "train": Kind(("trainer",), "the policy's updates"),
    "critic_train": Kind(("critic", "trainer"), "the critic's updates"),
    "other": Kind(("trainer",), "what the trainer does beside: experience, metrics"),
    "publish": Kind(("trainer",), "the new weights are sent"),
}
"""In the order in which a role does them for a batch."""
CRITIC = ("values", "critic_train")
"""Phases of the critic's weights, which are in one place: the same role runs both."""


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
    """By how much each batch's differ from these, a factor of 1 in the mean; after the last the
    first comes again"""

    def seconds_at(self, devices: int) -> float:
        """Its mean duration on so many devices; the host's never changes."""
        if self.role == HOST:
            return self.seconds
        return self.seconds * (self.serial + (1.0 - self.serial) * self.devices / devices)


BATCHES = 16
"""Batches with drawn lengths, and the fewest over which what varies is averaged"""


@dataclass(frozen=True)
class Lengths:
    """Response lengths, log-normal and cut at the longest, and how many sequences are generated at
    a time.

    Every sequence under way grows by a token at a time, however many there are. A slot that is free
    takes the next one.
    """

    mean: float
    deviation: float
    """Both in tokens, before lengths are cut"""
    longest: int
    samples: int
    """of a step"""
    slots: int
    """of all the devices that `generate` was measured on; in proportion on more or fewer"""
    seed: int = 1

    @functools.cached_property
    def drawn(self) -> tuple[tuple[float, ...], ...]:
        """Tokens of the responses of `BATCHES` batches, in order of admission; after the last the
        first comes again."""
        variance = math.log1p((self.deviation / self.mean) ** 2)
        center, spread = math.log(self.mean) - variance / 2, math.sqrt(variance)
        batches = []
        for batch in range(BATCHES):
            stream = random.Random(self.seed * 1_000_003 + batch)
            tokens = (stream.lognormvariate(center, spread) for _ in range(self.samples))
            batches.append(tuple(float(min(max(1, round(each)), self.longest)) for each in tokens))
        return tuple(batches)

    def mean_alone(self, slots: int) -> float:
        """Token times until the last response of a batch that has all slots for itself is there, in
        the mean."""
        return (
            math.fsum(parts[0][1] for parts in generated_alone(self, min(slots, self.samples), 1))
            / BATCHES
        )

    def token_seconds(self, seconds: float) -> float:
        """A token's time with which such a batch takes so many `seconds` in the mean."""
        return seconds / self.mean_alone(self.slots)


@functools.cache
def generated_alone(
    lengths: Lengths, slots: int, parts: int
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """When each part of each batch that has all slots for itself begins and ends, in times of a
    token."""
    batches = []
    for drawn in lengths.drawn:
        free = [0.0] * slots
        batches.append(
            tuple(fill_slots(free, part_of(drawn, part, parts)) for part in range(parts))
        )
    return tuple(batches)


def fill_slots(free: list[float], seconds: Iterable[float]) -> tuple[float, float]:
    """When the first of some responses begins and the last ends; each takes the first slot of a
    heap, which is updated."""
    begin = end = free[0]
    for each in seconds:
        done = free[0] + each
        heapq.heapreplace(free, done)
        end = max(end, done)
    return begin, end


def part_of(drawn: Sequence[float], part: int, parts: int) -> Sequence[float]:
    """The responses of one of a batch's parts."""
    return drawn[part * len(drawn) // parts : (part + 1) * len(drawn) // parts]


@dataclass(frozen=True)
class PipelineModel:
    """What is to be predicted; where it has devices is a `Placement`."""

    phases: tuple[Phase, ...]
    """At most one of a kind; `generate` and `train` at least"""
    micro_batches: int = 1
    """Parts of a batch: what reads or scores samples begins with a part as soon as it is generated.
    """
    max_staleness: int = 1
    """A batch trained at version v holds no sample admitted at a version below v minus this; 0 is
    synchronous."""
    interrupt: bool = False
    """New weights are taken while samples are under way; otherwise these finish first."""
    lengths: Lengths | None = None
    """Without them a part's samples all end at once, and more devices shorten generation like any
    phase."""
    stepwise: bool = False
    """As runs do: the trainer takes a batch as a whole, asks for its values then, and ends its step
    with the critic's update too. Otherwise each phase begins as soon as its own inputs are there.
    """

    @property
    def window(self) -> int:
        """Batches over which durations are averaged, 1 where all are alike: whole rounds of what
        comes again."""
        rounds = math.lcm(
            1 if self.lengths is None else BATCHES, *(len(phase.varies) for phase in self.phases)
        )
        return rounds * -(-BATCHES // rounds) if rounds > 1 else 1

    @property
    def generate(self) -> Phase:
        """The phase in which samples are drawn; its role is the trainer where the engine is
        colocated."""
        return next(phase for phase in self.phases if phase.name == "generate")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that need devices."""
        used = {phase.role for phase in self.phases}
        return tuple(role for role in ROLES if role in used)

    @property
    def fills_slots(self) -> bool:
        """Whether a batch's samples are admitted while those of the batch before are under way."""
        alone = {phase.name for phase in self.phases if phase.role == self.generate.role} <= {
            "load",
            "generate",
        }
        return self.interrupt and self.lengths is not None and self.max_staleness > 0 and alone

    def slots(self, lengths: Lengths, placement: Placement) -> int:
        """Sequences that are generated at a time."""
        return max(1, lengths.slots * placement[self.generate.role] // self.generate.devices)

    def work(self, placement: Placement) -> dict[str, float]:
        """Seconds a step for which each role is busy at least, whatever waits for what."""
        roles = dict.fromkeys((*self.roles, *(phase.role for phase in self.phases)), 0.0)
        for phase in self.phases:
            if phase.name == "generate" and self.lengths is not None:
                slots, token_s = (
                    self.slots(self.lengths, placement),
                    self.lengths.token_seconds(phase.seconds),
                )
                # tokens of a batch, in the mean
                drawn = math.fsum(map(math.fsum, self.lengths.drawn)) / BATCHES
                roles[phase.role] += token_s * (
                    drawn / slots if self.fills_slots else self.lengths.mean_alone(slots)
                )
            else:
                roles[phase.role] += phase.seconds_at(placement.get(phase.role, 1))
        return roles
