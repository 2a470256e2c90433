from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aligner.config.leftovers import claim_shared_memory, remove_shared_memory

_SERVER = """
import os, sys, time
from pathlib import Path
from aligner.config.leftovers import claim_shared_memory
claim_shared_memory()
Path(f"/dev/shm/pytrtion{os.getpid()}-region").touch()
print("there", flush=True)
time.sleep(60)
"""


def server() -> tuple[subprocess.Popen[str], Path]:
    """A process that has shared memory as a server has, and what it has."""
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process, Path(f"/dev/shm/pytrtion{process.pid}-region")


def test_the_next_server_frees_the_shared_memory_of_killed_ones_and_of_no_other() -> None:
    (killed, lost), (living, used) = server(), server()
    unknown = Path("/dev/shm/pytrtion999999999-region")  # of a process that none of ours was: perhaps another container's
    try:
        unknown.touch()
        killed.kill()
        killed.wait()
        assert lost.exists()
        claim_shared_memory()
        assert (lost.exists(), used.exists(), unknown.exists()) == (False, True, True)
        assert not list(Path("/dev/shm").glob(f"aligner-server-*-{killed.pid}"))
    finally:
        unknown.unlink()
        for process in (killed, living):
            process.kill()
            process.wait()
            remove_shared_memory(process.pid)
        remove_shared_memory(os.getpid())
    assert not used.exists()
