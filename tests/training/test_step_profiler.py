"""Profiles of training steps on CPUs: which steps are recorded, and what their traces contain."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.observability.timeline import PhaseTimer
from aligner.schema import Config
from aligner.training.step_profiler import StepProfiler


def compose(directory: Path, *overrides: str) -> Config:
    return compose_config(
        ["experiment=tiny_ppo", f"run.dir={directory}", "run.steps=9", *overrides]
    )


def run_steps(config: Config, rank: int) -> None:
    profiler = StepProfiler(config, rank)
    timer = PhaseTimer(open_range=profiler.open_range)
    for step in range(1, 5):
        with profiler.profile(step), timer.phase("train"):
            torch.ones(step, 100) @ torch.ones(100, 3)


def test_trace_has_operations_and_phases_of_its_step(tmp_path: Path) -> None:
    config = compose(tmp_path, "profile.steps=[2,3]", "profile.ranks=[1]")
    run_steps(config, rank=0)
    assert list(tmp_path.iterdir()) == []
    run_steps(config, rank=1)
    files = sorted((tmp_path / "profile").iterdir())
    assert [file.name for file in files] == [
        "trainer-1-step_000002.json.gz",
        "trainer-1-step_000003.json.gz",
    ]
    for step, file in zip((2, 3), files, strict=True):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        (product,) = [event for event in events if event["name"] == "aten::mm"]
        assert product["args"]["Input Dims"] == [[step, 100], [100, 3]]
        (phase,) = [
            event
            for event in events
            if event["name"] == "train" and event["cat"] == "user_annotation"
        ]
        assert phase["ts"] <= product["ts"] <= phase["ts"] + phase["dur"]


def test_failed_step_raises_its_own_error(tmp_path: Path) -> None:
    profiler = StepProfiler(compose(tmp_path, "profile.steps=[1]"), 0)
    with pytest.raises(ZeroDivisionError), profiler.profile(1):
        _ = 1 / 0
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("profile.steps=[0,9,10]",), r"profile.steps: got 0, 10, must be from 1 to run.steps=9"),
        (("profile.steps=[1]", "profile.ranks=[0,1]"), "profile.ranks: got 1, must be from 0 to 0"),
        (("profile.steps=[1]", "profile.tool=nsys"), "profile.tool=nsys: marks the work of GPUs"),
        (("profile.steps=[1]", "profile.memory=true"), "set profile.memory=false"),
    ],
)
def test_impossible_profile_is_refused(
    overrides: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "0")
    with pytest.raises(ConfigError, match=message):
        check(compose(tmp_path / "run", *overrides))


def test_memory_and_nsys_are_accepted_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "8")
    overrides = ("profile.steps=[1]", "profile.tool=nsys", "profile.memory=true")
    check(compose(tmp_path / "run", *overrides, "cluster.device_memory_gib=80"))
