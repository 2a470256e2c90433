"""Test of a trainer that is suspended, and continues after another trainer took over the run."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aligner.config.compose import load_config, save_config
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, find_complete_steps
from benchmarks.runs import REPOSITORY, checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
STEPS = 40


@contextlib.contextmanager
def trainer(paths: RunPaths, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer rank without a launcher, which would kill it. Its output is in the file `log`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "aligner", "train", "--config", str(paths.config)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool], *processes: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)


def stop_between_writes(process: subprocess.Popen[bytes], paths: RunPaths) -> None:
    """Suspend a trainer outside a write, because no other trainer can take over during a write."""
    while True:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        with paths.claim.open("r+b") as claim, contextlib.suppress(BlockingIOError):
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.002)  # without this pause the write makes no progress between the signals


@pytest.mark.promise("fenced-trainer-writes-nothing")
def test_fenced_trainer_writes_nothing(
    tmp_path: Path,
) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(
        "".join(f'{{"prompt": "{left}+1=", "response": "{left + 1}"}}\n' for left in range(8))
    )
    overrides = (
        *(
            "algorithm=sft",
            f"data.path={data}",
            "data.max_prompt_tokens=4",
            "data.max_response_tokens=3",
            "data.batch_size=4",
        ),
        *(
            f"run.steps={STEPS}",
            "run.name=run",
            "checkpoint.every=2",
            "checkpoint.keep=3",
            "logging.tensorboard=false",
        ),
    )
    (tmp_path / "undisturbed").mkdir()
    expected = run_to_end(tmp_path / "undisturbed" / "run", *overrides)
    paths = run_to_end(tmp_path / "run", *overrides, "run.stop_after=2").paths
    config = load_config(paths.config)
    resumed = dataclasses.replace(
        config, run=dataclasses.replace(config.run, stop_after=None, resume="true")
    )
    save_config(resumed, paths.config)
    old_log = tmp_path / "old.log"
    with trainer(paths, old_log) as old:
        wait_for(lambda: len(read_metrics(paths.metrics)) >= 5, old)
        stop_between_writes(old, paths)
        reached = len(read_metrics(paths.metrics))
        assert reached < STEPS - 10
        with trainer(paths, tmp_path / "new.log") as new:
            # The new trainer has removed the checkpoints of the old trainer.
            wait_for(lambda: min(find_complete_steps(paths.checkpoints)) > reached, new)
            old.send_signal(signal.SIGCONT)
            assert old.wait(timeout=60) == 1
            assert new.wait(timeout=60) == 0
    error = old_log.read_text()
    assert (
        "has taken over the run; attempt 1 may no longer write to the run" in error
        and "Traceback" not in error
    )
    assert repeatable(read_metrics(paths.metrics)) == repeatable(expected.metrics)
    assert find_complete_steps(paths.checkpoints) == [STEPS - 4, STEPS - 2, STEPS]
    assert checkpoint_differences(expected.paths, paths, STEPS, "policy") == []
    assert not [path for path in paths.root.rglob("*") if path.name.endswith(".tmp")]
