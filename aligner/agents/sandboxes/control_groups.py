"""Control groups (cgroups) of local sandboxes, on machines where this process may create them.

A resource limit (`setrlimit`) applies to each process alone, and covers only its address space. A
control group limits the memory of all processes of a command together, with the kernel's memory for
their files, pipes and sockets. It also limits the number of processes of root.
"""

import contextlib
import functools
import itertools
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

OWN_PROCESSES = 4
"""Processes in a group besides those of the command: bubblewrap (2), the driver, its helper."""
# memory of these processes, and of the driver's files
_OWN_MEMORY_BYTES = 64 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_PREFIX = "aligner-sandbox-"
# Time in seconds after which a group of a process that does not exist is removed. The process may
# be in another container, and its command enters the group within this time.
_MIN_AGE_S = 60.0
_REMOVAL_TIMEOUT_S = 1.0
_ENTRY_TIMEOUT_S = 10.0

_numbers = itertools.count()


@contextlib.contextmanager
def create_control_groups(memory_bytes: int, processes: int) -> Iterator[list[Path]]:
    """Create the control groups of one command, and remove them after the block.

    Args:
        memory_bytes: Memory of the command, including its files in a tmpfs.
        processes: Number of its processes.

    Yields:
        The groups' directories; an empty list if this machine does not permit control groups.
    """
    limits = {"memory": memory_bytes + _OWN_MEMORY_BYTES, "pids": processes + OWN_PROCESSES}
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(_create_group(parent, {name: limits[name] for name in controllers}))
            for parent, controllers in find_parent_groups().items()
        ]
        yield groups


def enter_control_groups(groups: list[Path]) -> str:
    """Return shell commands with which a shell enters control groups."""
    return "".join(f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && " for group in groups)


@functools.cache
def find_parent_groups() -> dict[Path, tuple[str, ...]]:
    """Return the groups below which this process may create groups, with their controllers.

    The controllers are `memory` and `pids`; those that this process may not use are absent.
    """
    found: dict[Path, tuple[str, ...]] = {}
    for parent, controllers in _list_candidates():
        known = {name for names in found.values() for name in names}
        if known.intersection(controllers):
            continue
        try:
            _remove_old_groups(parent)
            limits = {"memory": _OWN_MEMORY_BYTES, "pids": OWN_PROCESSES}
            with _create_group(parent, {name: limits[name] for name in controllers}) as group:
                subprocess.run(
                    ["/bin/sh", "-c", f"{enter_control_groups([group])} true"],
                    check=True,
                    capture_output=True,
                    timeout=_ENTRY_TIMEOUT_S,
                )
        except (OSError, subprocess.SubprocessError):
            continue
        found[parent] = controllers
    return found


def _list_candidates() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield groups that may become parents of new groups, and the controllers that they offer."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        relative = path.lstrip("/")
        if controllers:
            # version 1: one hierarchy for each controller, and a group may have groups and
            # processes
            names = [name for name in ("memory", "pids") if name in controllers.split(",")]
            if names:
                yield _CGROUPS / controllers / relative, tuple(names)
            continue
        # Version 2: a group with processes cannot limit groups below it, except for the root group,
        # so the new group is beside the group of this process.
        own_group = _CGROUPS / relative
        for group in (own_group, own_group.parent):
            with contextlib.suppress(OSError):
                offered = (group / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= {*offered}:
                    yield group, ("memory", "pids")


@contextlib.contextmanager
def _create_group(parent: Path, limits: Mapping[str, int]) -> Iterator[Path]:
    """Create a group with limits by controller, and remove it after the block.

    Raises OSError if the group cannot be created.
    """
    group = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    group.mkdir()
    try:
        if "pids" in limits:
            (group / "pids.max").write_text(str(limits["pids"]))
        if "memory" in limits:
            is_version_2 = (group / "memory.max").exists()
            memory = "memory.max" if is_version_2 else "memory.limit_in_bytes"
            (group / memory).write_text(str(limits["memory"]))
            # The file is absent on a machine without swap. In version 1 the limit includes memory.
            swap = "memory.swap.max" if is_version_2 else "memory.memsw.limit_in_bytes"
            if (group / swap).exists():
                (group / swap).write_text("0" if is_version_2 else str(limits["memory"]))
        yield group
    finally:
        _remove_group(group)


def _remove_group(group: Path) -> None:
    """Remove a group, whose processes may need a moment to end."""
    end = time.monotonic() + _REMOVAL_TIMEOUT_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            # `_remove_old_groups` of another process removes it later
            if time.monotonic() > end:
                return
            time.sleep(0.005)


def _remove_old_groups(parent: Path) -> None:
    """Remove the groups of processes that were killed."""
    for group in parent.glob(f"{_PREFIX}*"):
        process = group.name.removeprefix(_PREFIX).split("-")[0]
        is_old = time.time() - group.stat().st_mtime > _MIN_AGE_S
        if is_old and not Path("/proc", process).exists():
            # a group with processes is not removed
            with contextlib.suppress(OSError):
                group.rmdir()
