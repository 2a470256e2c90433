"""Test of the detection of files that a killed run leaves on a machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from benchmarks.leftovers import Leftovers
from benchmarks.runs import MARKER

USES_A_FILE = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.write(b"x" * 4096)
    file.flush()
    used = mmap.mmap(file.fileno(), 4096)
    time.sleep(60)
"""


def test_leftovers_are_only_files_of_the_run(tmp_path: Path) -> None:
    files = {run: Path(f"/dev/shm/psm_{uuid.uuid4().hex[:8]}") for run in ("own", "another")}
    processes = []
    try:
        with Leftovers(tmp_path / "own") as leftovers:
            for run, file in files.items():
                environment = {**os.environ, MARKER: str(tmp_path / run)}
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", USES_A_FILE, str(file)], env=environment
                    )
                )
            end = time.monotonic() + 60
            while str(files["own"]) not in leftovers.left() and time.monotonic() < end:
                time.sleep(0.1)
            for process in processes:
                process.kill()
                process.wait()
        assert leftovers.left() == [str(files["own"])]
        files["own"].unlink()
        assert leftovers.left() == []
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for file in files.values():
            file.unlink(missing_ok=True)
