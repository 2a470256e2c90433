"""Tests of the launcher's processes on this machine: the kill of one rank spares the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Each rank starts a helper in its own session, like tritonserver.
LAUNCHER = """
import json, os, sys, time
from contextlib import closing
from pathlib import Path

import psutil

from aligner.launcher.processes import Processes
from aligner.observability.log_files import LogLimit

root = Path(sys.argv[1])
command = ["bash", "-c", "setsid sleep 60 & echo $! > helper.new; mv helper.new helper-$RANK; wait"]


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


with closing(Processes(0, LogLimit(root, 1, "text"))) as processes:
    os.chdir(root)
    ranks, helpers = [], []
    for number in (0, 1):
        rank = processes.spawn("critic", number, command, {"RANK": str(number)}, root / "log")
        file = root / f"helper-{number}"
        while not file.exists():
            time.sleep(0.01)
        ranks.append(rank)
        helpers.append(int(file.read_text()))
    while not processes.kill([ranks[0]]):
        pass
    running = {
        "ranks": [is_running(rank.process.pid) for rank in ranks],
        "helpers": [is_running(helper) for helper in helpers],
    }
print(json.dumps(running))
"""


def test_killing_a_rank_kills_its_helpers_and_no_other_rank(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    running = json.loads(finished.stdout)
    assert running == {"ranks": [False, True], "helpers": [False, True]}
