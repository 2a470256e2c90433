"""Runs on machines with few resources: a run finishes, or the first line of its error names the
exhausted resource."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.runs import Finished, Launch
from tests.other_user import needs_root
from tests.small_disk import small_disk
from tests.small_group import small_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALLEST = ("run.steps=2", "evaluation.every=0", "checkpoint.every=1", "run.max_restarts=0")


def launch(directory: Path, before: Sequence[str] = ()) -> Finished:
    """Run the smallest experiment with all roles: a policy, a critic, and a reward model."""
    with Launch(directory, *SMALLEST, before=before) as running:
        return running.finish(300)


def assert_finished_or_named(run: Finished, resource: str) -> None:
    """Assert that a run has finished, or that the first line of its error contains `resource`."""
    if run.code == 0:
        return
    first_line = run.error.splitlines()[0]
    assert resource in first_line, run.report()
    assert "Traceback" not in run.error.split("last lines of its log")[0]


def shell(commands: str) -> tuple[str, ...]:
    """Return a command that runs shell commands and then its arguments."""
    return ("sh", "-c", f'{commands} && exec "$@"', "sh")


@pytest.mark.promise("small-machine-finishes-or-names-resource")
def test_run_with_256_open_files_finishes_or_names_them(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", shell("ulimit -n 256"))
    assert_finished_or_named(run, "file descriptors are exhausted")


@pytest.mark.promise("small-machine-finishes-or-names-resource")
def test_run_with_64_mb_of_dev_shm_finishes_or_names_it(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    before = ("unshare", "-m", *shell("mount -t tmpfs -o size=64m tmpfs /dev/shm"))
    run = launch(tmp_path / "run", before)
    assert_finished_or_named(run, "shared memory is")


@pytest.mark.promise("small-machine-finishes-or-names-resource")
def test_run_in_control_group_of_1_gb_finishes_or_names_memory(tmp_path: Path) -> None:
    with small_group(10**9) as group:
        run = launch(tmp_path / "run", shell(f"echo $$ > {group}/cgroup.procs"))
    assert_finished_or_named(run, "memory is exhausted")


@pytest.mark.promise("small-machine-finishes-or-names-resource")
@pytest.mark.parametrize("size", ["64k", "1m", "4m"])
def test_run_on_full_disk_names_it(tmp_path: Path, size: str) -> None:
    with small_disk(tmp_path / "disk", size) as disk:
        run = launch(disk.directory / "run")
        assert run.code == 1
        assert_finished_or_named(run, "the disk is full: ")


@pytest.mark.promise("small-machine-finishes-or-names-resource")
@needs_root
def test_run_in_read_only_directory_names_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        read_only = ["mount", "-o", "remount,ro", str(disk.directory)]
        subprocess.run(read_only, check=True)
        run = launch(disk.directory / "run")
        assert run.code == 2
        directory = disk.directory / "run"
        assert_finished_or_named(
            run, f"run.dir={directory}: is not writable: Read-only file system; choose another"
        )
