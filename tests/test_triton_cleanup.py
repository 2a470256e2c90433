"""Removal of the files and shared memory of killed servers, also next to files of other users."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aligner.triton_cleanup import (
    claim_paths,
    claim_triton_files,
    kill_processes,
    remove_triton_files,
)
from tests import other_user

_SERVER = """
import os, sys, time
from pathlib import Path
from aligner.triton_cleanup import claim_paths, claim_triton_files
claim_triton_files()
claim_paths([Path(sys.argv[1])])
Path(f"/dev/shm/pytrtion{os.getpid()}-region").touch()
print("there", flush=True)
time.sleep(60)
"""


def server(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a directory and shared memory like a server, and return both."""
    (directory / "model-store").mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process, Path(f"/dev/shm/pytrtion{process.pid}-region")


@pytest.mark.promise("triton-directories-are-removed")
def test_only_files_of_killed_servers_are_removed(
    tmp_path: Path,
) -> None:
    (killed, lost), (living, used) = server(tmp_path / "lost"), server(tmp_path / "used")
    # A process id of no server of this machine, perhaps of another container.
    unknown = Path("/dev/shm/pytrtion999999999-region")
    try:
        unknown.touch()
        killed.kill()
        killed.wait()
        assert lost.exists()
        claim_triton_files()
        assert (lost.exists(), used.exists(), unknown.exists()) == (False, True, True)
        assert [directory.name for directory in tmp_path.iterdir()] == ["used"]
        assert not list(Path("/dev/shm").glob(f"aligner-server-*-{killed.pid}*"))
    finally:
        unknown.unlink()
        for process in (killed, living):
            process.kill()
            process.wait()
            remove_triton_files(process.pid)
        remove_triton_files(os.getpid())
    assert not used.exists() and not [*tmp_path.iterdir()]


def test_filled_python_env_directory_is_not_removed(tmp_path: Path) -> None:
    process, _ = server(
        tmp_path / "python_env_full"
    )  # filled by a server that started at the same time
    process.kill()
    process.wait()
    remove_triton_files(process.pid)
    assert [path.name for path in tmp_path.glob("python_env_full/*")] == ["model-store"]


_OWNER = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
print(segment.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.slow
def test_killed_tracker_removes_shared_memory_unless_stopped(stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        name, tracker = owner.stdout.readline().split()
        segment, tree = (
            Path("/dev/shm") / name,
            [
                psutil.Process(owner.pid),
                psutil.Process(int(tracker)),
            ],
        )
        assert segment.exists()
        while not any("multiprocessing.resource_tracker" in part for part in tree[1].cmdline()):
            time.sleep(0.01)  # until then it is a fork of its owner
        try:
            if stopped:
                tree[1].suspend()
            kill_processes(tree[::-1])
            _, alive = psutil.wait_procs(tree, timeout=5)
            assert not alive
            # A stopped tracker removes nothing, but is killed too.
            assert segment.exists() == stopped
        finally:
            segment.unlink(missing_ok=True)


_REAPER = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # orphans become children of this process, which waits for one child alone
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
"""
_KILLER = """
import subprocess, sys, time
import psutil
from aligner.triton_cleanup import kill_processes
owner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
tracker = psutil.Process(int(owner.stdout.readline().split()[1]))
while not any("multiprocessing.resource_tracker" in part for part in tracker.cmdline()):
    time.sleep(0.01)
start = time.monotonic()
kill_processes([psutil.Process(owner.pid), tracker])
print(time.monotonic() - start, tracker.status())
"""


def test_exited_tracker_is_not_waited_for() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _REAPER, _KILLER, _OWNER], capture_output=True, text=True, check=True
    )
    seconds, status = ended.stdout.split()
    assert status == psutil.STATUS_ZOMBIE
    assert float(seconds) < 2


def create_as_other_user(name: str, kind: str) -> Path:
    """Create a path in shared memory as another user; links point to a file of this user."""
    path = Path("/dev/shm") / name
    command = {"file": ["touch"], "directory": ["mkdir"], "link": ["ln", "-s", "/dev/shm/victim"]}[
        kind
    ]
    assert other_user.succeeds(*command, str(path))
    return path


@other_user.needs_root
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_files_of_other_users_are_not_changed(tmp_path: Path, kind: str) -> None:
    world = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    own, gone = os.getpid(), 999999999
    claims = (
        "",
        "x",
        "1-2-3",
        *(f"{pid}{end}" for pid in (own, gone) for end in ("", "-", "-abcdefgh")),
    )
    names = [f"aligner-server-{world}-{name}" for name in claims] + [
        f"pytrtion{pid}-region" for pid in (own, gone)
    ]
    victim = Path("/dev/shm/victim")
    planted: list[Path] = []
    try:
        victim.write_text(f"{tmp_path / 'kept'}\n")
        victim.chmod(0o666)
        planted += [create_as_other_user(name, kind) for name in names]
        (tmp_path / "kept").mkdir()
        (tmp_path / "own").mkdir()
        claim_triton_files()
        claim_paths([tmp_path / "own"])
        remove_triton_files(gone)
        remove_triton_files(own)
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        assert victim.read_text() == f"{tmp_path / 'kept'}\n"
        assert all(path.lstat().st_uid == other_user.UID for path in planted)
    finally:
        victim.unlink()
        for path in planted:
            path.rmdir() if kind == "directory" else path.unlink()


@other_user.needs_root
def test_other_user_cannot_add_directories_to_remove(tmp_path: Path) -> None:
    process, _ = server(tmp_path / "own")
    try:
        (claim,) = Path("/dev/shm").glob(f"aligner-server-*-{process.pid}-*")
        kept = (claim / "paths").read_text()
        for attempt in (
            f"echo / >> {claim}/paths",
            f"echo / > {claim}/more",
            f"cat {claim}/*",
            f"mv {claim} {claim}x",
        ):
            assert not other_user.succeeds("sh", "-c", attempt), attempt
        assert (claim / "paths").read_text() == kept == f"{tmp_path / 'own'}\n"
    finally:
        process.kill()
        process.wait()
        remove_triton_files(process.pid)
    assert not [*tmp_path.iterdir()]
