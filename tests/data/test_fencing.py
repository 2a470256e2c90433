"""Only the latest attempt of a run may write to its directory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from aligner.data import fencing
from aligner.errors import AlignerError, ConfigError
from aligner.paths import RunPaths
from aligner.schema import ClusterConfig, Config, RunConfig
from tests.rounds import bounds_seconds


def configured(directory: Path) -> Config:
    return Config(run=RunConfig(dir=str(directory)), cluster=ClusterConfig(stop_timeout_s=0.3))


@contextlib.contextmanager
def stopped_writer(directory: Path, where: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes the run and suspends itself, inside or outside `writing`."""
    command = [sys.executable, "-m", "tests.data.claimed_writer", str(directory), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            while psutil.Process(writer.pid).status() != psutil.STATUS_STOPPED:
                assert writer.poll() is None
                time.sleep(0.02)
            yield writer
        finally:
            writer.kill()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_suspended_writer_cannot_write_after_takeover(tmp_path: Path) -> None:
    with stopped_writer(tmp_path, "between") as old:
        assert fencing.claim_run(configured(tmp_path))["attempt"] == 1
        written = contents(tmp_path)
        old.send_signal(signal.SIGCONT)
        errors = old.communicate(timeout=20)[0].splitlines()
    why = (
        r"claim: attempt 1 \(process \d+ on .*\) has taken over the run; attempt 0 may no longer"
        r" write to the run"
    )
    assert len(errors) == 7 and all(re.search(why, line) for line in errors), errors
    assert contents(tmp_path) == written


def test_takeover_waits_for_suspended_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_WARNING_AFTER_S", 0.1)
    config = configured(tmp_path)
    with stopped_writer(tmp_path, "writing") as old:
        busy = rf"run\.dir={tmp_path}: attempt 0 \(process {old.pid} on .*\) is writing to the run"
        with pytest.raises(
            ConfigError,
            match=rf"{busy} and has not finished within 1 s; the process may be suspended: kill the process",
        ):
            fencing.claim_run(config)
        assert (
            re.search(
                rf"{busy}; waiting up to 0\.6 s until the write is finished", caplog.messages[0]
            )
            and len(caplog.messages) == 1
        )
        # On a busy machine it takes long until the killed process has released its lock.
        patient = replace(config, cluster=replace(config.cluster, stop_timeout_s=60.0))
        threading.Timer(0.3, old.kill).start()
        assert fencing.claim_run(patient)["attempt"] == 1


def test_only_current_attempt_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_writer_claim", None)
    config = configured(tmp_path)
    with fencing.fenced_write():  # without a claim, writing is allowed
        pass
    first = fencing.claim_run(config)
    fencing.set_writer_claim(config, first)
    with fencing.fenced_write(), fencing.fenced_write():
        pass
    second = fencing.claim_run(config)
    assert [first["attempt"], second["attempt"]] == [0, 1]
    assert all(f"process {os.getpid()} " in record["holder"] for record in (first, second))
    for own, is_refused in (
        (first, True),
        ({"attempt": 0}, True),
        ({"attempt": 1}, False),
        (second, False),
    ):
        fencing.set_writer_claim(config, own)
        refused = (
            pytest.raises(AlignerError, match="may no longer write to the run")
            if is_refused
            else contextlib.nullcontext()
        )
        with refused, fencing.fenced_write():
            pass


@bounds_seconds
def test_claim_check_takes_at_most_one_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_writer_claim", None)
    config = configured(tmp_path)
    fencing.set_writer_claim(config, fencing.claim_run(config))
    begun = time.perf_counter()
    for _ in range(200):
        with fencing.fenced_write():
            pass
    assert time.perf_counter() - begun < 0.2  # 1 ms each: negligible compared with a training step


def test_flipped_bit_in_claim_file_is_refused(tmp_path: Path) -> None:
    config, file = configured(tmp_path), RunPaths(tmp_path).claim
    fencing.claim_run(config)
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(
            AlignerError,
            match=r"claim: (damaged|cannot be read).*no process of the run is alive, then delete the file",
        ):
            fencing.claim_run(config)
    file.write_bytes(content)
    assert fencing.claim_run(config)["attempt"] == 1 and len(file.read_bytes()) == len(content)
