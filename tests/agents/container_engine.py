"""A container engine and an image for tests, without a registry."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

IMAGE = "aligner-test"
_BUSYBOX = Path("/bin/busybox")
# Without CAP_SYS_RESOURCE, podman cannot raise limits; with cgroups v1 and v2 together, crun refuses
# to start a container unless the mount of version 2 is hidden.
_PODMAN = """#!/bin/sh
if [ "$1" = run ]; then shift; set -- run --ulimit host "$@"; fi
exec unshare --mount sh -c 'umount /sys/fs/cgroup/unified 2>/dev/null; exec {podman} "$@"' podman "$@"
"""
_STORAGE = """[storage]
driver = "{driver}"
graphroot = "{directory}/graph"
runroot = "{directory}/run"
"""
_CONTAINERS = """[containers]
default_ulimits = []
cgroups = "disabled"
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
"""


def write_engine_settings(directory: Path, driver: str) -> dict[str, str]:
    """Write settings with which podman and buildah keep everything in a directory.

    Args:
        directory: The directory.
        driver: Storage driver of the images.

    Returns:
        The environment variables that select the settings.
    """
    storage, containers = directory / "storage.conf", directory / "containers.conf"
    storage.write_text(_STORAGE.format(directory=directory, driver=driver))
    containers.write_text(_CONTAINERS)
    return {"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(containers)}


@contextlib.contextmanager
def container_engine(directory: Path) -> Iterator[None]:
    """Make an engine with the image `IMAGE` available, or skip the test with the reason."""
    podman = shutil.which("podman")
    if podman is None or not _BUSYBOX.exists():
        pytest.skip("requires podman, crun and busybox-static")
    settings = write_engine_settings(directory, "vfs")
    program = directory / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(_PODMAN.format(podman=podman))
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        archive = directory / "image.tar"
        _write_image(archive)
        run("import", str(archive), IMAGE)
        started = run("run", "--rm", "--network", "none", IMAGE, "true", check=False)
        if started.returncode:
            pytest.skip(f"this machine cannot start containers: {started.stderr.strip()}")
        yield
        run("rmi", "--all", "--force", check=False)


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of the container engine."""
    command = ["podman", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=check)


def _write_image(path: Path) -> None:
    """Write a root file system that contains only busybox."""
    applets = subprocess.run(
        [_BUSYBOX, "--list"], capture_output=True, text=True, check=True
    ).stdout
    with tarfile.open(path, "w") as archive:
        for name in ("bin", "tmp", "proc", "dev", "etc"):
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        archive.add(_BUSYBOX, "bin/busybox")
        for name in [*applets.split(), "bash"]:
            if name != "busybox":
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type = tarfile.SYMTYPE
                entry.linkname = "sh" if name == "bash" else "busybox"
                archive.addfile(entry)
