"""Pass rates of a run's prompts, and the curriculum that selects prompts by them.

`PassRates` accumulates how often the samples of each prompt have passed; `PromptSelector` decides
from the pass rates which prompts of the stream are generated for.
"""

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

_FILE = "pass_rates.safetensors"
_CHECKSUM = "prompts"  # key of the file's metadata

PromptLocator = Callable[[int], tuple[int, int]]
"""Maps a prompt's id to the index of the example and the epoch (see `ExampleStream.locate`)."""


@dataclass(frozen=True)
class PromptOutcome:
    """The scores of one prompt's samples in a step."""

    position: int
    """Position of the prompt in the stream, which is its id."""
    example: int
    """Index of the example among the run's prompts."""
    epoch: int
    """Number of the epoch of the prompt's source, from 0."""
    samples: int
    """Number of samples that have a score."""
    passed: float
    """Number of these samples that have passed; for graded scores, the sum of the scores."""


@dataclass(frozen=True)
class PassRates:
    """Pass rates of a run's N prompts; an instance is never changed in place.

    The names of the tensors are also the names in the checkpoint file.
    """

    drawn: Tensor
    """Number of times that each prompt was selected, int64 [N]."""
    last_pass: Tensor
    """Number of the last epoch in which each prompt was selected, from 0, int64 [N]; -1 if it was
    not selected yet."""
    samples: Tensor
    """Number of samples with a score, float64 [N]. `data.curriculum.decay` discounts older
    samples."""
    passed: Tensor
    """Number of these samples that have passed, float64 [N], with the same discount."""
    checksum: int = 0
    """Checksum of the prompts; it detects pass rates of other prompts."""

    @staticmethod
    def empty(count: int, checksum: int = 0) -> "PassRates":
        """Return the pass rates of `count` prompts before the first step."""
        numbers = torch.zeros(count, dtype=torch.int64)
        sums = torch.zeros(count, dtype=torch.float64)
        return PassRates(numbers, numbers - 1, sums, sums, checksum)

    def compute_rates(self) -> Tensor:
        """Return the pass rate of each prompt, float64 [N] in [0, 1]; NaN without a scored sample.

        A prompt without a scored sample has 0 passed of 0 samples, and 0/0 is NaN.
        """
        return self.passed / self.samples

    def with_outcomes(self, outcomes: Sequence[PromptOutcome], memory: float) -> "PassRates":
        """Return the pass rates after a step.

        Args:
            outcomes: The outcomes of the step's prompts.
            memory: The factor on a prompt's earlier samples when it gets new scores, 0 to 1
                (`data.curriculum.decay`).
        """
        tensors = (
            self.drawn.clone(),
            self.last_pass.clone(),
            self.samples.clone(),
            self.passed.clone(),
        )
        result = PassRates(*tensors, self.checksum)
        for outcome in outcomes:
            index = outcome.example
            result.drawn[index] += 1
            result.last_pass[index] = max(int(result.last_pass[index]), outcome.epoch)
            if outcome.samples:
                result.samples[index] = memory * result.samples[index] + outcome.samples
                result.passed[index] = memory * result.passed[index] + outcome.passed
        return result

    def save(self, directory: Path) -> None:
        """Write the pass rates into a checkpoint's directory; `load` restores them exactly."""
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / _FILE, to_bytes(self._tensors(), {_CHECKSUM: str(self.checksum)}))

    def load(self, directory: Path) -> "PassRates | None":
        """Return the pass rates in a checkpoint's directory; None if they are of other prompts.

        Raises:
            AlignerError: The directory has no readable pass rates.
        """
        file = directory / _FILE
        try:
            with safe_open(file, "pt") as stored:
                checksum = int(stored.metadata()[_CHECKSUM])
                names = list(stored.keys())
                loaded = PassRates(
                    **{name: stored.get_tensor(name) for name in names}, checksum=checksum
                )
        except (OSError, TypeError, KeyError, SafetensorError) as error:
            raise AlignerError(
                f"{file}: the prompts' pass rates cannot be read: {error}"
            ) from error
        return (
            loaded
            if (loaded.checksum, len(loaded.drawn)) == (self.checksum, len(self.drawn))
            else None
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def compute_pass_fractions(scores: Tensor, threshold: float | None) -> Tensor:
    """Return to what degree each sample passes.

    Args:
        scores: The score of each sample, [B]; infinite or NaN for a sample without a score.
        threshold: The least score that passes. None uses the score itself, clamped to [0, 1].

    Returns:
        float64 [B] in [0, 1]; NaN for a sample without a score.
    """
    finite_scores = torch.where(scores.isfinite(), scores.double(), torch.nan)
    return (
        finite_scores.clamp(0, 1)
        if threshold is None
        # A comparison with NaN is false, so NaN is kept explicitly.
        else torch.where(
            finite_scores.isnan(), finite_scores, (finite_scores >= threshold).double()
        )
    )


def collect_outcomes(
    ids: Sequence[int], scores: Tensor, locate: PromptLocator, threshold: float | None
) -> list[PromptOutcome]:
    """Return the outcomes of a step's prompts, in the stream's order.

    Args:
        ids: The prompt id of each sample.
        scores: The score of each sample, [B]. Samples without a score do not count.
        locate: Returns the example and the epoch of a prompt id.
        threshold: See `compute_pass_fractions`.
    """
    fractions: dict[int, list[float]] = {}
    for id, passed in zip(ids, compute_pass_fractions(scores, threshold).tolist(), strict=True):
        fractions.setdefault(id, []).append(passed)
    outcomes = []
    for id in sorted(fractions):
        scored = [passed for passed in fractions[id] if not math.isnan(passed)]
        outcomes.append(PromptOutcome(id, *locate(id), len(scored), sum(scored)))
    return outcomes


@dataclass(frozen=True)
class PromptSelector:
    """The curriculum's rule for the selection of prompts (`data.curriculum`).

    The selection is a pure function of the pass rates, the seed and the position in the stream.
    """

    curriculum: CurriculumConfig
    seed: int

    def select(
        self, locations: Iterator[tuple[int, int, int]], count: int, rates: PassRates
    ) -> list[int]:
        """Return the first `count` positions that are selected.

        Args:
            locations: Position, example index and epoch of each prompt of the endless stream.
            count: The number of positions.
            rates: The pass rates of the run's prompts.

        Raises:
            AlignerError: Fewer than `count` prompts are not excluded forever.
        """
        known_rates = rates.compute_rates()
        rest_epochs = self.curriculum.rest_passes
        low, high = self.curriculum.between or [0.0, 1.0]
        # Comparisons with NaN are false: prompts without a pass rate are not outside the range.
        is_outside = (known_rates < low) | (known_rates > high)
        if rest_epochs == 0 and (remaining := int((~is_outside).sum())) < count:
            # The loop below would search the endless stream forever.
            raise AlignerError(
                f"data.curriculum.between=[{low:g}, {high:g}]: {count} prompts are required, but"
                f" only {remaining} of {len(known_rates)} have a pass rate in this range or no pass"
                " rate yet. Widen the range, or set data.curriculum.rest_passes > 0 to retry"
                " prompts outside the range"
            )

        selected: list[int] = []
        while len(selected) < count:
            position, example, epoch = next(locations)
            # A prompt outside the range rests for some epochs, or forever with rest_passes=0.
            is_resting = bool(is_outside[example]) and (
                rest_epochs == 0 or epoch <= int(rates.last_pass[example]) + rest_epochs
            )
            if not is_resting and (
                (probability := self.selection_probability(float(known_rates[example]))) >= 1
                or self._sample_uniform(position) < probability
            ):
                selected.append(position)
        return selected

    def _sample_uniform(self, position: int) -> float:
        """Return the random number in [0, 1) of a position."""
        # The spawn key makes this random stream independent of the orders of the epochs.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, position], spawn_key=(2,)))
        return float(np.random.Generator(bits).random())

    def selection_probability(self, rate: float) -> float:
        """Return the probability that a prompt with a pass rate is selected.

        It is 1 without a target, without a pass rate, and at the target t, and decreases on both
        sides of the target:

            (p/t)^(2t) ((1-p)/(1-t))^(2(1-t)), at least `data.curriculum.min_probability`

        For t = 1/2 this is 4p(1-p), which is proportional to the learnability p(1-p) of Foster et
        al. 2025, "Learning to Reason at the Frontier of Learnability", the variance of the event
        that a sample passes. Other targets move the maximum from 1/2 to t.
        """
        target = self.curriculum.target
        if target is None or math.isnan(rate):
            return 1.0
        # (p/t)^(2t) ((1-p)/(1-t))^(2(1-t))
        weight = (rate / target) ** (2 * target) * ((1 - rate) / (1 - target)) ** (2 * (1 - target))
        return max(self.curriculum.min_probability, weight)
