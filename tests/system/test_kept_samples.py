"""Tests of the sample files, which contain each sample of a killed run exactly once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from aligner.observability.sample_files import read_samples, sample_steps
from aligner.paths import find_complete_steps
from benchmarks.faults import BESIDE
from benchmarks.runs import Finished, Launch, run_to_end
from tests.system.test_agents import OVERRIDES as EPISODES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 7
COMMON = (
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "logging.tensorboard=false",
    "evaluation.every=0",
)
TWO_SOURCES = (
    "reward.kind=combined",
    "+reward.sources.digits={kind: function, function: digit_fraction, weight: 2}",
    "+reward.sources.fewer={kind: function, function: digit_fraction, weight: -1, bias: 1}",
)
RUNS = {
    "grpo on two pipeline stages": (
        "tiny_ppo",
        ("algorithm=grpo", "actor.parallel.pipeline=2", "engine.parallel.data=2"),
    ),
    "dapo with samples one version old": (
        "tiny_ppo",
        (
            *BESIDE,
            "algorithm=dapo",
            "rollout.max_response_tokens=2",
            *TWO_SOURCES,
        ),
    ),
    "ppo on two data ranks with a critic that serves the reward": (
        "tiny_ppo",
        (
            "actor.parallel.data=2",
            "engine.parallel.data=2",
            "critic.with_reward=true",
            *TWO_SOURCES,
        ),
    ),
    "episodes of an environment, of a run that begins anew": ("calculator", EPISODES),
}


@pytest.mark.promise("killed-run-stores-samples-once")
@pytest.mark.parametrize("name", RUNS)
def test_repeatedly_killed_run_stores_each_sample_once(name: str, tmp_path: Path) -> None:
    experiment, overrides = RUNS[name]
    expected = run_to_end(tmp_path / "whole", *overrides, *COMMON, experiment=experiment)
    assert_files_match_metrics(expected)
    part_names = {
        tuple(dict(parts or ()))
        for parts in read_samples(tmp_path / "whole")["score_parts"].to_pylist()
    }
    assert part_names == {("digits", "fewer") if overrides.count(TWO_SOURCES[0]) else ()}
    assert ("dapo" in name) == any(step["rollout/kept_fraction"] < 1 for step in expected.metrics)
    killed = tmp_path / "killed"
    if "begins anew" in name:
        with Launch(killed, *overrides, *COMMON, experiment=experiment) as launch:
            launch.wait_for_step(1, 300)  # before the first checkpoint
    with Launch(killed, *overrides, *COMMON, "run.resume=auto", experiment=experiment) as launch:
        launch.wait_for_step(4, 300)
        time.sleep(0.05)  # the trainer is writing a checkpoint
        launch.rank("trainer", 0).send_signal(signal.SIGKILL)
    done = find_complete_steps(killed / "checkpoints")
    assert set(range(1, max(done, default=0) + 1)) <= set(sample_steps(killed))
    run = run_to_end(killed, *overrides, *COMMON, "run.resume=auto", experiment=experiment)
    assert run.code == 0, run.report()
    for tokens in (False, True):
        assert read_samples(killed, tokens=tokens).equals(
            read_samples(tmp_path / "whole", tokens=tokens)
        )


def assert_files_match_metrics(run: Finished) -> None:
    """Assert that each sample is stored once, and that the sample files agree with the metrics."""
    table, tokens = read_samples(run.paths.root), read_samples(run.paths.root, tokens=True)
    places = ["step", "group", "sample", "branch"]
    rows, of_tokens = table.to_pylist(), tokens.to_pylist()
    assert [[row[name] for name in places] for row in rows] == [
        [row[name] for name in places] for row in of_tokens
    ]
    assert len({tuple(row[name] for name in places) for row in rows}) == len(rows)
    for step in run.metrics:
        every = [
            (row, lists)
            for row, lists in zip(rows, of_tokens, strict=True)
            if row["step"] == step["step"]
        ]
        assert np.mean([row["score"] for row, _ in every]) == pytest.approx(
            step["reward/mean"], abs=1e-5
        )
        # dynamic sampling replaced the samples without an advantage
        own = [(row, lists) for row, lists in every if row["advantage"] is not None]
        assert len(own) / len(every) == pytest.approx(step["rollout/kept_fraction"])
        assert np.mean([row["drawn_tokens"] for row, _ in own]) == pytest.approx(
            step["response/length"], abs=1e-5
        )
        assert np.mean([not row["cut"] for row, _ in own]) == pytest.approx(
            step["response/ended_fraction"], abs=1e-5
        )
        engine, trainer, versions = (
            generated_values(own, name) for name in ("engine_logprob", "trainer_logprob", "version")
        )
        assert np.abs(engine - trainer).mean() == pytest.approx(
            step["mismatch/logprob_abs"], abs=1e-6
        )
        assert (step["step"] - 1 - versions).mean() == pytest.approx(
            step["staleness/mean"], abs=1e-6
        )
        # The metric is a mean over minibatches.
        assert generated_values(own, "entropy").mean() == pytest.approx(
            step["policy/entropy"], rel=0.02
        )
        assert (
            len(generated_values(own, "advantage"))
            == len(generated_values(own, "reference_logprob"))
            == len(engine)
        )
    for row, lists in zip(rows, of_tokens, strict=True):
        assert {len(values) for name, values in lists.items() if isinstance(values, list)} == {
            row["response_tokens"]
        }
        assert sum(lists["drawn"]) == row["drawn_tokens"]
        own_advantages = [value for value in lists["advantage"] if value is not None]
        assert own_advantages == [] or row["advantage"] == pytest.approx(
            np.mean(own_advantages), abs=1e-5
        )
        assert row["score_parts"] is None or sum(
            dict(row["score_parts"]).values()
        ) == pytest.approx(row["score"], abs=1e-5)
        text = "".join(lists["text"])
        assert text.replace("<pad>", "").replace("<eos>", "") == row["response"]


def generated_values(rows: list[tuple[dict, dict]], name: str) -> np.ndarray:
    """Return a column at the generated tokens, after checking that no other token has a value."""
    for _, lists in rows:
        assert [value is not None for value in lists[name]] == lists["drawn"]
    return np.array([value for _, lists in rows for value in lists[name] if value is not None])
