"""How often the samples of each of a run's prompts have passed, and which prompts are drawn again
for it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from aligner.errors import AlignerError
from aligner.files import write_file
from aligner.schema import CurriculumConfig

_FILE, _CHECKSUM = "pass_rates.safetensors", "prompts"
Origin = Callable[[int], tuple[int, int]]
"""Of a prompt's id which of the run's prompts it is, and in which pass over them it was taken."""


@dataclass(frozen=True)
class Draw:
    """A prompt that was drawn, and what came of it."""

    position: int
    """In the stream: its id."""
    example: int
    """Which of the run's prompts it is."""
    number: int
    """The pass over its source, from 0."""
    samples: int
    """That have a score."""
    passed: float
    """How many of these have passed; of graded scores their sum."""


@dataclass(frozen=True)
class PassRates:
    """What is known of each of N prompts from the samples of the steps before; never changed in
    place."""

    drawn: Tensor
    """int64 [N]: how often the prompt was drawn"""
    last_pass: Tensor
    """int64 [N]: the pass over its source in which that was last, from 0; -1 before the first"""
    samples: Tensor
    """float64 [N]: its samples that have a score, earlier ones by what `data.curriculum.decay`
    leaves of them"""
    passed: Tensor
    """float64 [N]: of these, those that have passed"""
    checksum: int = 0
    """Of the prompts: others have another one."""

    @staticmethod
    def none(count: int, checksum: int = 0) -> "PassRates":
        """Those of so many prompts, none of which was drawn."""
        numbers, sums = (
            torch.zeros(count, dtype=torch.int64),
            torch.zeros(count, dtype=torch.float64),
        )
        return PassRates(numbers, numbers - 1, sums, sums, checksum)

    def rates(self) -> Tensor:
        """float64 [N], 0 to 1; not a number for prompts without a scored sample."""
        return self.passed / self.samples

    def after(self, draws: Sequence[Draw], memory: float) -> "PassRates":
        """With a step's draws; `memory` is the share of what was known of their prompts that still
        counts."""
        tensors = (
            self.drawn.clone(),
            self.last_pass.clone(),
            self.samples.clone(),
            self.passed.clone(),
        )
        now = PassRates(*tensors, self.checksum)
        for draw in draws:
            place = draw.example
            now.drawn[place] += 1
            now.last_pass[place] = max(int(now.last_pass[place]), draw.number)
            if draw.samples:
                now.samples[place] = memory * now.samples[place] + draw.samples
                now.passed[place] = memory * now.passed[place] + draw.passed
        return now

    def save(self, directory: Path) -> None:
        """Write them into a checkpoint's directory, exactly."""
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / _FILE, to_bytes(self._tensors(), {_CHECKSUM: str(self.checksum)}))

    def load(self, directory: Path) -> "PassRates | None":
        """Those that a directory holds; None where they are of other prompts. Raises AlignerError
        where it holds none."""
        file = directory / _FILE
        try:
            with safe_open(file, "pt") as stored:
                checksum = int(stored.metadata()[_CHECKSUM])
                names = list(stored.keys())
                found = PassRates(
                    **{name: stored.get_tensor(name) for name in names}, checksum=checksum
                )
        except (OSError, TypeError, KeyError, SafetensorError) as error:
            raise AlignerError(
                f"{file}: the prompts' pass rates cannot be read: {error}"
            ) from error
        return (
            found
            if (found.checksum, len(found.drawn)) == (self.checksum, len(self.drawn))
            else None
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def passes(scores: Tensor, threshold: float | None) -> Tensor:
    """How far each sample passes, float64 [B], 0 to 1, by its score [B]; NaN for a sample without
    a score.

    It passes with `threshold` or more; where that is None, as far as its score, cut to 0 and 1,
    says.
    """
    numbers = torch.where(scores.isfinite(), scores.double(), torch.nan)
    return (
        numbers.clamp(0, 1)
        if threshold is None
        else torch.where(numbers.isnan(), numbers, (numbers >= threshold).double())
    )


def draws(
    ids: Sequence[int], scores: Tensor, origin: Origin, threshold: float | None
) -> list[Draw]:
    """What came of a step's prompts, in the stream's order, from the ids and scores [B] of all
    samples.

    A sample without a score does not count; the others as `passes` has it.
    """
    found: dict[int, list[float]] = {}
    for id, passed in zip(ids, passes(scores, threshold).tolist(), strict=True):
        found.setdefault(id, []).append(passed)
    told = []
    for id in sorted(found):
        known = [passed for passed in found[id] if not math.isnan(passed)]
        told.append(Draw(id, *origin(id), len(known), sum(known)))
    return told


@dataclass(frozen=True)
class DrawRule:
    """Which prompts are drawn, by their pass rates: a pure function of these, the seed and the
    position in the stream."""

    curriculum: CurriculumConfig
    seed: int

    def chosen(
        self, places: Iterator[tuple[int, int, int]], count: int, rates: PassRates
    ) -> list[int]:
        """The first `count` positions to be drawn; of endless (position, example, pass over its
        source).

        Raises AlignerError where fewer prompts are left that are not left out for good.
        """
        known, rest, (low, high) = (
            rates.rates(),
            self.curriculum.rest_passes,
            self.curriculum.between or [0.0, 1.0],
        )
        outside = (known < low) | (known > high)
        if rest == 0 and (left := int((~outside).sum())) < count:
            raise AlignerError(
                f"data.curriculum.between=[{low:g}, {high:g}]: {count} prompts are required, but"
                f" only {left} of {len(known)} have a pass rate in this range or no pass rate yet."
                " Widen the range, or set data.curriculum.rest_passes > 0 to retry prompts outside"
                " the range"
            )
        found: list[int] = []
        while len(found) < count:
            position, example, number = next(places)
            rests = bool(outside[example]) and (
                rest == 0 or number <= int(rates.last_pass[example]) + rest
            )
            if not rests and (
                (chance := self.chance(float(known[example]))) >= 1 or self._lot(position) < chance
            ):
                found.append(position)
        return found

    def _lot(self, position: int) -> float:
        """Drawn for a position, from 0 to 1, which is left out."""
        # The key makes it another draw than those of the order.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, position], spawn_key=(2,)))
        return float(np.random.Generator(bits).random())

    def chance(self, rate: float) -> float:
        """Of a prompt to be drawn where the stream comes to it: 1 at the target or before it has a
        rate, less on either side.

        (p/t)^2t ((1-p)/(1-t))^2(1-t), at t = 1/2 4p(1-p): the learnability of Foster et al. 2025,
        "Learning to Reason at the Frontier of Learnability", the variance of a passing sample, with
        its greatest value at the target.
        """
        target = self.curriculum.target
        if target is None or math.isnan(rate):
            return 1.0
        near = (rate / target) ** (2 * target) * ((1 - rate) / (1 - target)) ** (2 * (1 - target))
        return max(self.curriculum.min_probability, near)
