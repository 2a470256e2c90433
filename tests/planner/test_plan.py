from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aligner.errors import ConfigError
from aligner.planner.phases import ROLES, Phase, PipelineModel
from aligner.planner.plan import fastest_placement, fastest_split, proportional_split
from aligner.planner.simulation import forecast
from tests.planner.pipelines import pipeline, pipelines

UNITS = st.fixed_dictionaries({role: st.sampled_from((1, 1, 2, 3)) for role in ROLES})


@settings(max_examples=12, deadline=None, derandomize=True)
@given(pipelines(even=True), UNITS, st.integers(6, 14))
def test_the_split_that_is_found_from_a_coarse_grid_is_the_best_of_all(
    placed: tuple[PipelineModel, dict[str, int]], all_units: dict[str, int], devices: int
) -> None:
    made = replace(placed[0], max_staleness=placed[0].max_staleness % 3)
    units = {role: all_units[role] for role in made.roles}
    assume(sum(units.values()) <= devices)

    def cost(placement: dict[str, int]) -> tuple[float, float]:
        return forecast(made, placement).step_s, sum(made.work(placement).values())

    counts = itertools.product(*(range(size, devices + 1, size) for size in units.values()))
    splits = [
        dict(zip(units, split, strict=True))
        for split in counts
        if devices - 3 < sum(split) <= devices
    ]
    found = fastest_split(cost, units, devices, exhaustive=1)
    assert sum(found.values()) <= devices and all(
        found[role] % size == 0 for role, size in units.items()
    )
    assert cost(found)[0] == pytest.approx(min(cost(split)[0] for split in splits), rel=1e-9)


def test_a_thousand_devices_are_split_best() -> None:
    """With a loose bound the busiest role alone counts, and the best split is found by counting."""
    made = pipeline(4, generate=2100, train=3300, values=400, critic_train=2000)
    work, units = (
        {"trainer": 3300, "generator": 2100, "critic": 2400},
        {
            "trainer": 8,
            "generator": 4,
            "critic": 4,
        },
    )

    def fits(step_s: float) -> bool:
        return (
            sum(
                size * math.ceil(work[role] / size / step_s * (1 - 1e-12))
                for role, size in units.items()
            )
            <= 1024
        )

    steps = {
        work[role] / devices for role, size in units.items() for devices in range(size, 1025, size)
    }
    found = fastest_placement(made, units, 1024)
    assert sum(found.values()) <= 1024
    assert forecast(made, found).step_s == pytest.approx(
        min(step_s for step_s in steps if fits(step_s)), rel=1e-9
    )


def test_devices_that_would_not_help_are_left_over() -> None:
    phases = (Phase("generate", "generator", 10.0, serial=1.0), Phase("train", "trainer", 20.0))
    found = fastest_placement(PipelineModel(phases), {"trainer": 1, "generator": 1}, 16)
    assert found == {"trainer": 2, "generator": 1}
    # Together with the host's 1 s generation must fit into two steps: fewer for one role would take
    # more for another.
    made = pipeline(1, generate=20, score_at_host=1, train=30)
    found = fastest_placement(made, {"trainer": 1, "generator": 1}, 500)
    enough = [
        (trainer + generator, trainer, generator)
        for trainer, generator in itertools.product(range(30, 70), range(20, 60))
        if forecast(made, {"trainer": trainer, "generator": generator}).step_s <= 1 + 1e-9
    ]
    assert sum(found.values()) == min(enough)[0] and forecast(made, found).step_s == pytest.approx(
        1
    )


@settings(deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.sampled_from(("trainer", "generator", "critic")), st.integers(1, 9), min_size=1
    ),
    UNITS,
    st.integers(9, 200),
)
def test_a_proportional_split_keeps_units_whole_and_wastes_less_than_the_smallest(
    placement: dict[str, int], all_units: dict[str, int], devices: int
) -> None:
    units = {role: all_units[role] for role in placement}
    split = proportional_split(placement, units, devices)
    assert all(split[role] >= size and split[role] % size == 0 for role, size in units.items())
    assert devices - min(units.values()) < sum(split.values()) <= devices
    if devices % sum(placement.values()) == 0 and set(units.values()) == {1}:
        assert split == {
            role: count * devices // sum(placement.values()) for role, count in placement.items()
        }


def test_too_few_devices_are_refused_with_what_is_needed() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--devices 3: too few, at least 5 are needed \(trainer 4 \+ generator 1\)",
    ):
        fastest_placement(pipeline(1, generate=1, train=1), {"trainer": 4, "generator": 1}, 3)
