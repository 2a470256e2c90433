"""Test of a run that fails on a full disk and resumes after the disk is enlarged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.paths import find_complete_steps
from benchmarks.runs import Launch, checkpoint_differences, repeatable, run_to_end
from tests.small_disk import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
EXPERIMENT = "arithmetic_sft"
GIVEN = (
    *(f"run.steps={STEPS}", "run.name=small", "checkpoint.every=1", "checkpoint.keep=20"),
    *("evaluation.every=0", "actor.optimizer.warmup_steps=0"),
)


@pytest.mark.promise("full-disk-names-file-and-resumes")
def test_full_disk_stops_the_run_and_it_resumes(tmp_path: Path) -> None:
    sums = [
        {"prompt": f"{left}+{right}=", "response": str(left + right)}
        for left in range(20)
        for right in range(20)
    ]
    (data := tmp_path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sums))
    # Reading the experiment's 37,952 records would take longer than the run.
    given = (*GIVEN, f"data.path={data}")
    undisturbed = run_to_end(tmp_path / "undisturbed", *given, experiment=EXPERIMENT)
    with small_disk(tmp_path / "disk", "20m") as disk:
        directory = disk.directory / "run"
        with Launch(directory, *given, experiment=EXPERIMENT) as launch:
            run = launch.finish(300)
        assert run.code == 1, run.report()
        assert "no space left on device" in run.error.lower() and str(directory) in run.error, (
            run.report()
        )
        assert "Traceback" not in run.error, run.report()
        complete = find_complete_steps(run.paths.checkpoints)
        assert complete and complete[-1] < STEPS, "the disk was to be full after some checkpoints"
        disk.enlarge("200m")
        resumed = run_to_end(directory, *given, "run.resume=true", experiment=EXPERIMENT)
        assert repeatable(resumed.metrics) == repeatable(undisturbed.metrics)
        for step in (*complete, STEPS):
            assert checkpoint_differences(undisturbed.paths, resumed.paths, step) == []
