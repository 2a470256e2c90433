from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.triton_cleanup import claim_triton_files, remove_triton_files

_SERVER = """
import os, sys, time
from pathlib import Path
from aligner.triton_cleanup import claim_directories, claim_triton_files
claim_triton_files()
claim_directories([Path(sys.argv[1])])
Path(f"/dev/shm/pytrtion{os.getpid()}-region").touch()
print("there", flush=True)
time.sleep(60)
"""


def server(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has shared memory and a directory as a server has, and the shared memory."""
    (directory / "model-store").mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", _SERVER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process, Path(f"/dev/shm/pytrtion{process.pid}-region")


def test_the_next_server_removes_what_killed_ones_left_and_nothing_of_any_other(tmp_path: Path) -> None:
    (killed, lost), (living, used) = server(tmp_path / "lost"), server(tmp_path / "used")
    unknown = Path("/dev/shm/pytrtion999999999-region")  # of a process that none of ours was: perhaps another container's
    try:
        unknown.touch()
        killed.kill()
        killed.wait()
        assert lost.exists()
        claim_triton_files()
        assert (lost.exists(), used.exists(), unknown.exists()) == (False, True, True)
        assert [directory.name for directory in tmp_path.iterdir()] == ["used"]
        assert not list(Path("/dev/shm").glob(f"aligner-server-*-{killed.pid}"))
    finally:
        unknown.unlink()
        for process in (killed, living):
            process.kill()
            process.wait()
            remove_triton_files(process.pid)
        remove_triton_files(os.getpid())
    assert not used.exists() and not [*tmp_path.iterdir()]


def test_an_environment_that_another_triton_has_filled_stays(tmp_path: Path) -> None:
    process, _ = server(tmp_path / "python_env_full")  # of whoever started in the same moment
    process.kill()
    process.wait()
    remove_triton_files(process.pid)
    assert [path.name for path in tmp_path.glob("python_env_full/*")] == ["model-store"]


def test_a_claim_of_another_user_names_no_directory_to_remove(tmp_path: Path) -> None:
    process, _ = server(tmp_path / "kept")
    process.kill()
    process.wait()
    (claim,) = Path("/dev/shm").glob(f"aligner-server-*-{process.pid}")
    try:
        os.chown(claim, 65534, 65534)
    except PermissionError:
        pytest.skip("only root gives a file to another user")
    remove_triton_files(process.pid)
    assert (tmp_path / "kept").exists() and not claim.exists()
