"""Pass rates of a run's examples, and the curriculum that selects prompts by them.

An example is one of the N entries of the run's data. The endless stream of prompts contains every
example once per epoch of its source. A prompt is one occurrence of an example in the stream; its id
is its position in the stream.

`PassRates` counts the samples of each example, and those that have passed. `PromptSelector` decides
from the pass rates which prompts of the stream are used.
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
_CHECKSUM_KEY = "prompts"  # in the file's metadata
# Attribute of `PassRates` by the name of its tensor in the file.
_ATTRIBUTES = {
    "drawn": "selection_counts",
    "last_pass": "last_epochs",
    "samples": "sample_counts",
    "passed": "pass_counts",
}

PromptLocator = Callable[[int], tuple[int, int]]
"""Function that returns the index of a prompt's example and the epoch of its source, from the
prompt's id (see `ExampleStream.locate`)."""


@dataclass(frozen=True)
class PromptOutcome:
    """The scores of one prompt's samples in a step."""

    position: int
    """Position of the prompt in the stream, which is its id."""
    example: int
    """Index of the prompt's example, counted over all sources."""
    epoch: int
    """Number of the epoch of the example's source, from 0."""
    sample_count: int
    """Number of samples that have a score."""
    pass_count: float
    """Number of these samples that have passed; with `data.pass_threshold=null`, the sum of their
    scores, each clamped to [0, 1]."""


@dataclass(frozen=True)
class PassRates:
    """Pass rates of a run's N examples; an instance is never changed in place."""

    selection_counts: Tensor
    """Number of times that each example was sampled, int64 [N]."""
    last_epochs: Tensor
    """Number of the last epoch in which each example was sampled, from 0, int64 [N]; -1 if it was
    not sampled yet."""
    sample_counts: Tensor
    """Number of samples of each example with a score, float64 [N]. `data.curriculum.decay`
    discounts older samples."""
    pass_counts: Tensor
    """Number of these samples that have passed, float64 [N], with the same discount."""
    checksum: int = 0
    """Checksum of the examples' texts; it detects pass rates of other data."""

    @staticmethod
    def empty(count: int, checksum: int = 0) -> "PassRates":
        """Return the pass rates of `count` examples before the first step."""
        integers = torch.zeros(count, dtype=torch.int64)
        floats = torch.zeros(count, dtype=torch.float64)
        return PassRates(integers, integers - 1, floats, floats, checksum)

    def compute_rates(self) -> Tensor:
        """Return the pass rate of each example, float64 [N] in [0, 1]; NaN without a scored sample.

        An example without a scored sample has the counts 0 and 0, and 0/0 is NaN.
        """
        return self.pass_counts / self.sample_counts

    def with_outcomes(self, outcomes: Sequence[PromptOutcome], decay: float) -> "PassRates":
        """Return the pass rates after a step.

        Args:
            outcomes: The outcomes of the step's prompts.
            decay: Factor by which the earlier counts of an example are multiplied when it gets new
                scores, 0 to 1 (`data.curriculum.decay`).
        """
        tensors = (
            self.selection_counts.clone(),
            self.last_epochs.clone(),
            self.sample_counts.clone(),
            self.pass_counts.clone(),
        )
        result = PassRates(*tensors, self.checksum)
        for outcome in outcomes:
            index = outcome.example
            result.selection_counts[index] += 1
            result.last_epochs[index] = max(int(result.last_epochs[index]), outcome.epoch)
            if outcome.sample_count:
                result.sample_counts[index] = (
                    decay * result.sample_counts[index] + outcome.sample_count
                )
                result.pass_counts[index] = decay * result.pass_counts[index] + outcome.pass_count
        return result

    def save(self, directory: Path) -> None:
        """Write the pass rates into a checkpoint's directory; `load` restores them exactly."""
        directory.mkdir(parents=True, exist_ok=True)
        write_file(
            directory / _FILE, to_bytes(self._tensors(), {_CHECKSUM_KEY: str(self.checksum)})
        )

    def load(self, directory: Path) -> "PassRates | None":
        """Return the pass rates in a checkpoint's directory; None if they belong to other data.

        Raises:
            AlignerError: The directory has no readable pass rates.
        """
        file = directory / _FILE
        try:
            with safe_open(file, "pt") as stored:
                checksum = int(stored.metadata()[_CHECKSUM_KEY])
                names = list(stored.keys())
                loaded = PassRates(
                    **{_ATTRIBUTES[name]: stored.get_tensor(name) for name in names},
                    checksum=checksum,
                )
        except (OSError, TypeError, KeyError, SafetensorError) as error:
            raise AlignerError(
                f"{file}: the prompts' pass rates cannot be read: {error}"
            ) from error
        has_same_count = len(loaded.selection_counts) == len(self.selection_counts)
        is_same_data = loaded.checksum == self.checksum and has_same_count
        return loaded if is_same_data else None

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in the file."""
        return {name: getattr(self, attribute) for name, attribute in _ATTRIBUTES.items()}


def compute_pass_fractions(scores: Tensor, threshold: float | None) -> Tensor:
    """Return 1 for each sample that passes and 0 for the others, or graded values between.

    Args:
        scores: The score of each sample, [B]; infinite or NaN for a sample without a score.
        threshold: The lowest score that passes (`data.pass_threshold`). With None the result is
            graded: it is the score itself, clamped to [0, 1].

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
    for id, fraction in zip(ids, compute_pass_fractions(scores, threshold).tolist(), strict=True):
        fractions.setdefault(id, []).append(fraction)
    outcomes = []
    for id in sorted(fractions):
        scored_fractions = [fraction for fraction in fractions[id] if not math.isnan(fraction)]
        outcomes.append(
            PromptOutcome(id, *locate(id), len(scored_fractions), sum(scored_fractions))
        )
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
        """Return the positions of the first `count` prompts that the curriculum selects.

        Args:
            locations: Position, example index and epoch of each prompt of the endless stream, from
                the position at which the search begins.
            count: The number of positions.
            rates: The pass rates of the run's examples.

        Raises:
            AlignerError: `rest_passes` is 0, and fewer than `count` examples have a pass rate in
                `between` or none yet.
        """
        pass_rates = rates.compute_rates()
        pause_epochs = self.curriculum.rest_passes
        low, high = self.curriculum.between or [0.0, 1.0]
        # Comparisons with NaN are false: examples without a pass rate are not outside the range.
        is_outside = (pass_rates < low) | (pass_rates > high)
        if pause_epochs == 0 and (remaining := int((~is_outside).sum())) < count:
            # With no such example the loop below would never end; with fewer than `count`, it
            # would select an example more than once.
            raise AlignerError(
                f"data.curriculum.between=[{low:g}, {high:g}]: {count} prompts are required, but"
                f" only {remaining} of {len(pass_rates)} have a pass rate in this range or no pass"
                " rate yet. Widen the range, or set data.curriculum.rest_passes > 0 to retry"
                " prompts outside the range"
            )

        selected: list[int] = []
        while len(selected) < count:
            position, example, epoch = next(locations)
            # An example outside the range is paused for some epochs, or forever with
            # rest_passes=0.
            is_paused = bool(is_outside[example]) and (
                pause_epochs == 0 or epoch <= int(rates.last_epochs[example]) + pause_epochs
            )
            if not is_paused and (
                (probability := self.selection_probability(float(pass_rates[example]))) >= 1
                or self._sample_uniform(position) < probability
            ):
                selected.append(position)
        return selected

    def _sample_uniform(self, position: int) -> float:
        """Return a random number in [0, 1) that depends only on the seed and the position."""
        # The spawn key makes this random stream independent of the one that shuffles the epochs.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, position], spawn_key=(2,)))
        return float(np.random.Generator(bits).random())

    def selection_probability(self, rate: float) -> float:
        """Return the probability that a prompt is selected.

        The probability is 1 if the curriculum has no target t, or the example has no pass rate p.
        Otherwise it is 1 at the target, and decreases on both sides of it:

            (p/t)^(2t) ((1-p)/(1-t))^(2(1-t)), at least `data.curriculum.min_probability`

        For t = 1/2 this is 4p(1-p), proportional to the variance p(1-p) of a sample's success,
        which Foster et al. 2025, "Learning to Reason at the Frontier of Learnability", call
        learnability. Other targets move the maximum from 1/2 to t.

        Args:
            rate: Pass rate of the prompt's example; NaN if it has none.
        """
        target = self.curriculum.target
        if target is None or math.isnan(rate):
            return 1.0
        # (p/t)^(2t) ((1-p)/(1-t))^(2(1-t))
        weight = (rate / target) ** (2 * target) * ((1 - rate) / (1 - target)) ** (2 * (1 - target))
        return max(self.curriculum.min_probability, weight)
