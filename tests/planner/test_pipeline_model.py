"""The simulated pipeline: dependencies between phases, step times, and candidate splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.planner.pipeline_model import (
    DEVICE_ROLES,
    HOST,
    Phase,
    PipelineModel,
    StepPredictor,
    candidate_splits,
    predict_step_seconds,
)

ROLES = {
    "load": "generator",
    "generate": "generator",
    "score": "reward",
    "values": "critic",
    "teacher_logprobs": "teacher",
    "logprobs": "trainer",
    "train": "trainer",
    "critic_train": "critic",
    "other": "trainer",
    "publish": "trainer",
}
EXAMPLES = settings(max_examples=20, deadline=None, derandomize=True)
SLACK = 1.03
"""A mean over batches of different durations depends a little on where it begins."""


def pipeline(max_staleness: int = 0, micro_batches: int = 1, **seconds: float) -> PipelineModel:
    """Phases with equal seconds in every step, each on one device of its usual role."""
    phases = [Phase(name, ROLES[name], (each,), devices=1) for name, each in seconds.items()]
    return PipelineModel(tuple(phases), micro_batches, max_staleness)


def one_device_each(pipeline: PipelineModel) -> dict[str, int]:
    return {phase.role: 1 for phase in pipeline.phases if phase.role != HOST}


def step_seconds(pipeline: PipelineModel) -> float:
    return predict_step_seconds(pipeline, one_device_each(pipeline))


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineModel:
    """A pipeline with all phases, whose durations differ from step to step."""
    steps = draw(st.integers(1, 5))
    durations = st.lists(st.floats(0.01, 50), min_size=steps, max_size=steps)
    phases = [Phase(name, role, tuple(draw(durations)), 1) for name, role in ROLES.items()]
    micro_batches = draw(st.integers(1, 3))
    return PipelineModel(tuple(phases), micro_batches, max_staleness=draw(st.integers(0, 3)))


@EXAMPLES
@given(st.tuples(*[st.floats(0.01, 50)] * 9))
def test_synchronous_step_is_the_sum_of_dependent_phases(seconds: tuple[float, ...]) -> None:
    names = (
        "load",
        "generate",
        "score",
        "values",
        "logprobs",
        "train",
        "critic_train",
        "other",
        "publish",
    )
    load, generate, score, values, logprobs, train, critic_train, other, publish = seconds
    synchronous = pipeline(0, **dict(zip(names, seconds, strict=True)))
    experience = load + generate + max(score, values, logprobs)
    expected = experience + max(train, critic_train) + other + publish
    assert step_seconds(synchronous) == pytest.approx(expected)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize(("generate", "train"), [(10, 10), (21, 33), (33, 21), (1, 30)])
def test_asynchronous_step_is_the_slowest_of_roles_and_bound(
    generate: float, train: float, max_staleness: int
) -> None:
    asynchronous = pipeline(max_staleness, generate=generate, train=train, publish=3, load=2)
    # K + 1 batches share one round trip of generation, training and weight sync.
    round_trip = (generate + train + 3 + 2) / (max_staleness + 1)
    expected = max(generate + 2, train + 3, round_trip)
    assert step_seconds(asynchronous) == pytest.approx(expected)


def test_micro_batches_are_scored_during_generation() -> None:
    whole = pipeline(0, micro_batches=1, generate=8, score=8, train=1)
    parts = pipeline(0, micro_batches=4, generate=8, score=8, train=1)
    assert step_seconds(whole) == pytest.approx(8 + 8 + 1)
    assert step_seconds(parts) == pytest.approx(8 + 2 + 1)


def test_values_are_requested_when_the_trainer_takes_the_batch() -> None:
    synchronous = pipeline(0, 2, generate=8, values=6, logprobs=6, train=1)
    assert step_seconds(synchronous) == pytest.approx(8 + 6 + 1)
    asynchronous = pipeline(1, 2, generate=2, values=6, logprobs=5, train=1, critic_train=4)
    assert step_seconds(asynchronous) == pytest.approx(6 + 4)


def test_durations_that_differ_between_steps_delay_the_pipeline() -> None:
    phases = (
        Phase("generate", "generator", (1.0, 9.0), 1),
        Phase("train", "trainer", (1.0, 9.0), 1),
    )
    uneven = PipelineModel(phases, micro_batches=1, max_staleness=1)
    # Generation of the next batch overlaps training: 9 s of generation with 1 s of training, and
    # the reverse.
    assert step_seconds(uneven) == pytest.approx(9)
    assert step_seconds(pipeline(1, generate=5, train=5)) == pytest.approx(5)


@EXAMPLES
@given(pipelines())
def test_step_is_no_faster_than_its_busiest_role(made: PipelineModel) -> None:
    work = dict.fromkeys(DEVICE_ROLES, 0.0)
    for phase in made.phases:
        work[phase.role] += phase.mean_seconds
    assert step_seconds(made) * SLACK >= max(work.values())


@EXAMPLES
@given(pipelines(), st.sampled_from(DEVICE_ROLES))
def test_more_devices_never_slow_a_step_down(made: PipelineModel, role: str) -> None:
    placement = one_device_each(made)
    more = {**placement, role: 2}
    before = predict_step_seconds(made, placement)
    assert predict_step_seconds(made, more) <= before * SLACK


def test_host_phases_do_not_depend_on_devices() -> None:
    phases = (
        Phase("generate", "generator", (4.0,), 2),
        Phase("score", HOST, (3.0,), 1),
        Phase("train", "trainer", (2.0,), 2),
    )
    made = PipelineModel(phases, micro_batches=1, max_staleness=0)
    assert predict_step_seconds(made, {"trainer": 2, "generator": 2}) == pytest.approx(9)
    assert predict_step_seconds(made, {"trainer": 4, "generator": 4}) == pytest.approx(2 + 3 + 1)


def test_candidate_splits_move_one_or_two_units() -> None:
    placement = {"trainer": 4, "generator": 4}
    units = {"trainer": 1, "generator": 1}
    found = list(candidate_splits(placement, units, limiting_role="trainer"))
    assert sorted((split["trainer"], split["generator"]) for split in found) == [
        (2, 6),
        (3, 5),
        (5, 3),
        (5, 4),
        (6, 2),
    ]


def test_candidate_splits_keep_units_whole() -> None:
    placement = {"trainer": 16, "generator": 8}
    units = {"trainer": 8, "generator": 2}
    found = list(candidate_splits(placement, units, limiting_role="generator"))
    # The trainer can only give a whole replica, which is more than the generator may double by.
    assert found == [{"trainer": 8, "generator": 16}, {"trainer": 16, "generator": 10}]


@EXAMPLES
@given(
    st.dictionaries(st.sampled_from(DEVICE_ROLES), st.integers(1, 8), min_size=1),
    st.fixed_dictionaries({role: st.sampled_from((1, 2, 3, 4)) for role in DEVICE_ROLES}),
    st.sampled_from((*DEVICE_ROLES, HOST)),
)
def test_candidate_splits_change_roles_by_a_factor_of_two(
    replicas: dict[str, int], units: dict[str, int], limiting_role: str
) -> None:
    placement = {role: count * units[role] for role, count in replicas.items()}
    allowed = sum(placement.values()) + units.get(limiting_role, 0)
    for split in candidate_splits(placement, units, limiting_role):
        assert sum(split.values()) <= allowed
        for role, devices in split.items():
            assert devices % units[role] == 0
            assert placement[role] / 2 <= devices <= placement[role] * 2


def test_prediction_scales_the_measured_step() -> None:
    synchronous = pipeline(0, generate=4, train=4)
    predictor = StepPredictor(synchronous, {"trainer": 1, "generator": 1}, measured_step_s=10)
    assert predictor.model_error == pytest.approx(-0.2)
    split = predictor.predict_split({"trainer": 2, "generator": 1})
    assert split.change == pytest.approx(-0.25)
    assert split.step_s == pytest.approx(7.5)
    asynchronous = predictor.predict_asynchronous()
    assert asynchronous.change == pytest.approx(-0.5)
    assert asynchronous.placement == {"trainer": 1, "generator": 1}
