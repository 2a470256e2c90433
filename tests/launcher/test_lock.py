"""Tests of the lock that allows one launch at a time on a directory."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.launcher.run_directory import LockedError, lock_directory, require_unlocked
from tests.launcher.test_launch import finish, processes_of, start, wait_for

HOLD = """import sys, time
from pathlib import Path
from aligner.launcher.run_directory import lock_directory
with lock_directory(Path(sys.argv[1])):
    print("held", flush=True); time.sleep(60)"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """Start another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_locked_directory_is_refused_with_its_holder(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "run"
    other = holder(directory)
    message = (
        rf"run\.dir={directory}: in use by process {other.pid} on {socket.gethostname()} since"
        r" 20\d\d-\S+ \S+ \S+; wait"
    )
    try:
        for attempt in (
            lambda: lock_directory(directory).__enter__(),
            lambda: require_unlocked(directory),
        ):
            with pytest.raises(LockedError, match=message):
                attempt()
        assert json.loads((directory / "lock").read_text())["pid"] == other.pid, (
            "who is refused changes nothing"
        )
    finally:
        other.kill()
        other.communicate()
    assert (directory / "lock").is_file(), "a killed process leaves the file"
    require_unlocked(directory)
    with lock_directory(directory):
        assert json.loads((directory / "lock").read_text())["pid"] == os.getpid()
    assert list(directory.iterdir()) == []


def test_directory_created_for_lock_is_removed(
    tmp_path: Path,
) -> None:
    with lock_directory(tmp_path / "a" / "run"):
        pass
    assert not (tmp_path / "a" / "run").exists()
    with lock_directory(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_waiting_launch_locks_the_current_lock_file(tmp_path: Path) -> None:
    """The holder removes its lock file at exit, so a lock on the removed file would be useless."""
    other = holder(tmp_path)
    waited: list[LockedError] = []

    def wait(error: LockedError) -> None:
        waited.append(error)
        other.send_signal(signal.SIGINT)
        other.communicate()

    with lock_directory(tmp_path, wait):
        assert len(waited) == 1 and f"process {other.pid}" in str(waited[0].holder)
        with pytest.raises(LockedError):
            lock_directory(tmp_path).__enter__()


def test_local_lock_holder_is_detected_without_flock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A filesystem without locks cannot be mounted here, so `flock` is replaced by its error."""
    other = holder(tmp_path / "run")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(LockedError, match=rf"in use by process {other.pid} on"):
        lock_directory(tmp_path / "run").__enter__()
    other.kill()
    other.communicate()
    with lock_directory(tmp_path / "run"):
        assert (
            "so simultaneous launches on two machines are not detected\n" in capsys.readouterr().err
        )
    (tmp_path / "lock").write_text(
        json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday"})
    )
    with lock_directory(tmp_path):
        assert (
            "; aligner assumes that process 1 on elsewhere since yesterday has ended\n"
            in capsys.readouterr().err
        )


@pytest.mark.slow
def test_second_launch_on_a_run_directory_is_refused(run: Path) -> None:
    first = start(run, {"trainer": "train_slowly"})
    wait_for((run / "metrics.jsonl").exists, "training step")
    for overrides in ((), ("run.resume=true",), ("run.resume=auto",)):
        second = start(run, None, *overrides)
        _, error = second.communicate(timeout=30)
        assert second.returncode == 2
        assert re.match(
            rf"run\.dir={run}: in use by process {first.pid} on \S+ since .+; wait until the"
            r" other launch ends or stop that launch",
            error,
        )
    assert processes_of(run), "the first goes on"
    first.kill()
    first.communicate()
    wait_for(lambda: len(processes_of(run)) == 0, "end of the orphaned ranks", timeout_s=10)
    code, _, error = finish(start(run, None, "run.resume=auto"), run)
    assert code == 0, error
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 8)), "what the first had done was removed: it had no checkpoint"
    assert not (run / "lock").exists()
