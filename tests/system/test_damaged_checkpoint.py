"""Runs whose newest checkpoint has been damaged: they go on from the one before, or say that there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end
from tests.system.conftest import ADAPTIVE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GIVEN = (
    "run.resume=auto",
    "checkpoint.every=6",
    "checkpoint.keep=10",
    "run.stop_after=12",
    "logging.tensorboard=false",
    *ADAPTIVE,
)


def stopped(undisturbed: Finished, directory: Path) -> Path:
    """The undisturbed run as it was after its second checkpoint; its checkpoints."""
    shutil.copytree(undisturbed.paths.root, directory, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "logs"))
    for step in (6, 12):
        shutil.copytree(undisturbed.paths.checkpoints / f"step_{step}", directory / "checkpoints" / f"step_{step}")
    (directory / "checkpoints" / "step_6").rename(directory / "checkpoints" / "step_6_backup")
    shutil.copytree(directory / "checkpoints" / "step_6_backup", directory / "checkpoints" / "step_6")
    return directory / "checkpoints"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_a_run_with_a_flipped_bit_in_its_newest_checkpoint_goes_on_from_the_one_before(
    undisturbed: Finished, tmp_path: Path, part: str
) -> None:
    checkpoints = stopped(undisturbed, tmp_path / "run")
    flip(checkpoints / "step_12" / part / "rank_0.safetensors")
    run = run_to_end(tmp_path / "run", *GIVEN)
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics[:12])
    assert checkpoint_differences(undisturbed.paths, run.paths, 12) == []
    assert f"{part}/rank_0.safetensors is damaged" in (checkpoints / "step_12.damaged" / "damage.txt").read_text()
    log = run.paths.log("trainer", 0).read_text()
    assert "DAMAGED: checkpoint step_12 is not used" in log and "Traceback" not in log
    assert "a checkpoint was damaged, and is set aside as" in run.out and "step_12.damaged" in run.out


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_each_and_nothing_is_touched(
    undisturbed: Finished, tmp_path: Path
) -> None:
    checkpoints = stopped(undisturbed, tmp_path / "run")
    flip(checkpoints / "step_12" / "manifest.json")
    flip(checkpoints / "step_6" / "critic" / "updates.json")
    with Launch(tmp_path / "run", *GIVEN) as launch:
        run = launch.finish(150)
    assert run.code == 1, run.report()
    assert "every checkpoint is damaged" in run.error and "Traceback" not in run.error, run.report()
    assert "step_12/manifest.json: damaged" in run.error and "step_6: critic/updates.json is damaged" in run.error
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_12", "step_6", "step_6_backup"]
    assert len(run.metrics) == len(undisturbed.metrics)
    json.loads((checkpoints / "step_6" / "manifest.json").read_text())
