"""What other systems have published of asynchronous steps, beside what is predicted:
docs/planning.md has the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.planner.phases import Phase, PipelineModel
from aligner.planner.simulation import forecast

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
# Of verl's 7B runs: devices of trainer and generator, seconds of a step; and of the synchronous run
# that predicts it devices, seconds of `generate` and of `train`.
VERL = (
    ((16, 16), 294.77, 32, 357.41, 313.81),
    ((32, 32), 189.26, 32, 357.41, 313.81),
    ((64, 64), 150.63, 64, 150.72, 133.41),
    ((64, 64), 150.63, 128, 177.85, 113.81),
)
# Of NeMo-RL's runs: seconds of a synchronous step, of one that is one step off, and how many times
# the devices the latter has.
NEMO_RL = (
    ("DeepSeek-V3", 111, 64.1, 2),
    ("Qwen3-235B", 312, 231, 2),
    ("Qwen3-30B-A3B", 192, 152, 1),
)


def step_s(generate: float, train: float, measured_on: int, trainer: int, generator: int) -> float:
    """Of a run that is one step ahead, from phases of a colocated one."""
    phases = (
        Phase("generate", "generator", generate, measured_on),
        Phase("train", "trainer", train, measured_on),
    )
    return forecast(PipelineModel(phases), {"trainer": trainer, "generator": generator}).step_s


@pytest.mark.parametrize(("devices", "published", "colocated", "generate", "train"), VERL)
def test_the_pages_predictions_of_runs_with_phases_are_the_simulations(
    devices: tuple[int, int], published: float, colocated: int, generate: float, train: float
) -> None:
    predicted = step_s(generate, train, colocated, *devices)
    row = f"| {devices[0]} + {devices[1]} | {published} | {colocated} | {generate} | {train} |"
    assert f"{row} {predicted:.1f} ({predicted / published - 1:+.0%}) |" in PAGE.read_text()


@pytest.mark.parametrize(("model", "synchronous", "published", "times"), NEMO_RL)
def test_the_pages_bounds_of_runs_without_phases_are_those_of_all_splits(
    model: str, synchronous: float, published: float, times: int
) -> None:
    """Whatever share of a step generation takes; half of the devices generate."""
    shares = [
        step_s(synchronous * share / 100, synchronous * (100 - share) / 100, 2, times, times)
        for share in range(1, 100)
    ]
    row = (
        f"| {model} | {synchronous} | {published} | {times}x | {min(shares):.1f} to"
        f" {2 / times * synchronous:.1f} |"
    )
    assert max(shares) == pytest.approx(2 / times * synchronous, rel=0.02)
    assert row in PAGE.read_text()
