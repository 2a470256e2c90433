"""Tests of errors that name exhausted shared memory, memory or file descriptors."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.launcher import exhausted_resources as module
from aligner.launcher.exhausted_resources import (
    count_oom_kills,
    exhausted_resources,
    full_shared_memory,
)
from aligner.launcher.failure import build_rank_error
from aligner.launcher.ranks import Rank
from tests.launcher.test_launch import finish, start
from tests.small_group import small_group

SHARED = "--shm-size=8g"
MEMORY = "memory is exhausted"
FILES = "file descriptors are exhausted: a process may have"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            "Internal: Unable to initialize shared memory key 'pytrtion1-0' to requested size",
            SHARED,
        ),
        ("RuntimeError: unable to write to file </torch_12_345>: No space left on device", SHARED),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1a2b'", SHARED),
        ("Error while creating shared memory segment /dev/shm/nccl-abc (size 33030528)", SHARED),
        ("DataLoader worker is killed by signal: Bus error. out of shared memory (shm)", SHARED),
        ("MemoryError", MEMORY),
        ("terminate called after throwing an instance of 'std::bad_alloc'", MEMORY),
        ("OSError: [Errno 12] Cannot allocate memory", MEMORY),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes", MEMORY),
        ("srun: error: node1: task 0: Out Of Memory", MEMORY),
        ("OSError: [Errno 24] Too many open files: '/data/a.jsonl'", FILES),
        ("unable to open shared memory object </torch_1> : Too many open files (24)", FILES),
        ("OSError: [Errno 23] Too many open files in system", "fs.file-max"),
    ],
)
def test_library_error_names_exhausted_resource(line: str, remedy: str) -> None:
    assert any(remedy in sentence for sentence in exhausted_resources(["before", line], 1))


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "OSError: [Errno 28] No space left on device: '/data/run/metrics.jsonl'",
        "ValueError: the reward is nan",
        "shared memory of 64 MiB is used",
    ],
)
def test_other_errors_name_no_resource(line: str) -> None:
    assert exhausted_resources([line], 1) == []


def test_error_of_oom_killed_rank_names_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    group.mkdir()
    monkeypatch.setattr(module, "_memory_groups", lambda: iter([group]))
    events = group / "memory.events"
    events.write_text("low 0\nmax 7\noom 1\noom_kill 4\n")
    (group / "memory.max").write_text("4294967296\n")
    (log := tmp_path / "trainer-0.log").write_text("step 3\n")
    rank = Rank("trainer", 0, log, 0, 0)
    rank.record_exit(-signal.SIGKILL, 1.0)
    assert MEMORY not in str(build_rank_error("trainer rank 0 was killed by SIGKILL", rank))
    events.write_text("low 0\nmax 9\noom 2\noom_kill 5\n")
    error = build_rank_error("trainer rank 0 was killed by SIGKILL", rank)
    expected = (
        "memory is exhausted: the kernel killed 1 process for lack of memory; the limit of the"
        " control group (container or job) is 4.0 GiB"
    )
    assert expected in str(error)
    assert expected in error.summary


def test_oom_kills_are_counted_in_cgroup_v1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    monkeypatch.setattr(module, "_memory_groups", lambda: iter([tmp_path]))
    assert count_oom_kills() == 3
    assert module.read_memory_limit() is None


@pytest.mark.promise("exhausted-resource-is-named")
@pytest.mark.slow
def test_run_without_file_descriptors_names_their_limit(run: Path) -> None:
    limited = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
    code, _, error = finish(start(run, {"trainer": "open_files"}, before=limited), run)
    assert code == 1
    assert "file descriptors are exhausted: a process may have 128 open files" in error
    assert "ulimit -n" in error


@pytest.mark.promise("exhausted-resource-is-named")
@pytest.mark.slow
def test_run_with_full_dev_shm_names_its_size(run: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    small = 'mount -t tmpfs -o size=8m tmpfs /dev/shm; exec "$@"'
    launcher = start(
        run,
        {"trainer": "fill_shared_memory"},
        "run.max_restarts=0",
        before=("unshare", "-m", "sh", "-c", small, "sh"),
    )
    code, _, error = finish(launcher, run)
    assert code == 1
    assert "trainer rank 0 was killed by SIGBUS" in error
    assert "exhausted: /dev/shm has 8.0 MiB" in error and "--shm-size" in error


@pytest.mark.promise("exhausted-resource-is-named")
@pytest.mark.slow
def test_run_without_memory_names_cgroup_limit(run: Path) -> None:
    with small_group(300 << 20) as group:
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        launcher = start(
            run,
            {"trainer": "fill_memory"},
            "run.max_restarts=0",
            before=("sh", "-c", join, "sh"),
        )
        code, _, error = finish(launcher, run)
    assert code == 1, error
    assert "trainer rank 0 was killed by SIGKILL" in error
    assert "the limit of the control group (container or job) is 300.0 MiB" in error


def test_file_descriptor_error_of_launcher_names_resource(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40));"
        "from aligner.cli import _report_error;"
        "import argparse\n"
        "try:\n"
        "    files = [open('/dev/null') for _ in range(40)]\n"
        "except OSError as error:\n"
        "    files = []\n"
        "    _report_error(error, argparse.Namespace())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Too many open files: '/dev/null'; file descriptors are exhausted" in done.stderr
    assert "Traceback" not in done.stderr


def test_error_of_rank_with_full_disk_names_file_in_first_line(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("step 1\naligner: error: /data/model.safetensors: No space left on device\n")
    rank = Rank("trainer", 0, log, 0, 0)
    rank.record_exit(1, 1.0)
    first_line = str(build_rank_error("trainer rank 0 failed", rank)).splitlines()[0]
    assert "the disk is full: /data/model.safetensors: No space left on device" in first_line


def test_memory_of_another_node_is_not_reported() -> None:
    (sentence,) = exhausted_resources(["srun: error: n1: task 0: Out Of Memory"], is_local=False)
    assert "sbatch --mem" in sentence and "the machine has" not in sentence


@pytest.mark.parametrize(
    ("file", "free", "is_shared_memory"),
    [
        ("/dev/shm/aligner-server-1/paths.new", 2**30, True),
        (None, 0, True),
        (None, 2**30, False),
        ("/data/run/metrics.jsonl", 0, False),
    ],
)
def test_full_shared_memory_is_not_reported_as_full_disk(
    monkeypatch: pytest.MonkeyPatch, file: str | None, free: int, is_shared_memory: bool
) -> None:
    monkeypatch.setattr(module, "_free_shared_memory_bytes", lambda: free)
    message = full_shared_memory(OSError(errno.ENOSPC, "No space left on device", file))
    assert (message is not None and SHARED in message) == is_shared_memory
