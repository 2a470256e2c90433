"""Checks of resources: processors, memory, shared memory, limits of processes, and the network."""

import os
import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from aligner.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from aligner.launcher.exhausted_resources import (
    RECOMMENDED_OPEN_FILES,
    SHARED_MEMORY,
    format_bytes,
    read_cpu_quota,
    read_memory_limit,
)
from aligner.launcher.rank_environment import PORTS
from aligner.placement.addresses import LOOPBACK, is_port_free

_GIB = 2**30
_MIN_MEMORY_BYTES = 8 * _GIB
_MIN_SHARED_MEMORY_BYTES = _GIB
# Below this size, not even one server can exchange tensors with its Triton.
_SMALLEST_SHARED_MEMORY_BYTES = 16 * 2**20
# A run of the tests with four servers has at most about 300 open files per process.
_MIN_OPEN_FILES = 1024
_MIN_PROCESSES = 4096
# Number of ports that are tested.
_TESTED_PORTS = 64
_NAME_LOOKUP_S = 1.0


def check_processors_and_memory() -> Iterator[Finding]:
    """Check the cores and the memory that this process may use."""
    cores = len(os.sched_getaffinity(0))
    total = psutil.virtual_memory().total
    limit = read_memory_limit()
    memory = total if limit is None else min(total, limit)
    found = f"{cores} cores, {format_bytes(memory)} of memory"
    if memory < total:
        found += f" (limit of the control group; the machine has {format_bytes(total)})"
    if (quota := read_cpu_quota()) is not None and quota < cores:
        yield Finding(
            "processors",
            WARNING,
            f"the control group limits this process to {quota:g} of its {cores} cores; the kernel"
            " suspends the ranks whenever their threads exceed this limit",
            f"set cluster.threads_per_rank so that all ranks together have {quota:g} threads, or"
            " raise the limit (docker run --cpus)",
        )
    if memory < _MIN_MEMORY_BYTES:
        yield Finding(
            "memory",
            WARNING,
            f"{found}; only small models fit",
            "`aligner validate` prints the memory that each role of a run needs",
        )
    else:
        yield Finding("memory", OK, found)


def check_shared_memory() -> Iterator[Finding]:
    """Check the size of `/dev/shm`, through which servers, NCCL and gloo exchange tensors."""
    remedy = (
        f"mount -o remount,size=8g {SHARED_MEMORY}, in a container: docker run --shm-size=8g (or"
        " --ipc=host)"
    )
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        yield Finding(
            "shared memory",
            ERROR,
            f"{SHARED_MEMORY} is missing or not writable; no server would start",
            f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {SHARED_MEMORY}",
        )
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{SHARED_MEMORY} has {format_bytes(usage.total)}, {format_bytes(usage.free)} free"
    if usage.free < _SMALLEST_SHARED_MEMORY_BYTES:
        yield Finding("shared memory", ERROR, f"{found}; no server would start", remedy)
    elif usage.free < _MIN_SHARED_MEMORY_BYTES:
        yield Finding(
            "shared memory",
            WARNING,
            f"{found}; large requests to servers, and NCCL, need more (Docker's default is 64 MB)",
            remedy,
        )
    else:
        yield Finding("shared memory", OK, found)


def check_limits() -> Iterator[Finding]:
    """Check the limits of a process (`ulimit`), and of the control group's number of processes."""
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    is_ok = True

    if soft_open_files != unlimited and soft_open_files < _MIN_OPEN_FILES:
        is_ok = False
        yield Finding(
            "open files",
            WARNING,
            f"a process may have {soft_open_files} open files (hard limit"
            f" {_format_limit(open_files)}); runs with several servers or many environments need"
            " more",
            f"ulimit -n {RECOMMENDED_OPEN_FILES}, in Docker --ulimit"
            f" nofile={RECOMMENDED_OPEN_FILES}",
        )
    processes, source = _read_process_limit()
    if processes is not None and processes < _MIN_PROCESSES:
        is_ok = False
        yield Finding(
            "processes",
            WARNING,
            f"{source} allows {processes} processes and threads; each rank has dozens of threads,"
            " and each environment a process",
            f"ulimit -u {_MIN_PROCESSES}, in Docker --pids-limit=-1",
        )
    for name, kind, consequence in (
        ("file size", resource.RLIMIT_FSIZE, "checkpoints need larger files"),
        ("address space", resource.RLIMIT_AS, "CUDA and memory-mapped data need more"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != unlimited:
            is_ok = False
            option = "-f" if kind == resource.RLIMIT_FSIZE else "-v"
            yield Finding(
                name,
                WARNING,
                f"is limited to {format_bytes(soft)}; {consequence}",
                f"ulimit {option} unlimited",
            )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != unlimited and any(Path("/sys/class/infiniband").glob("*")):
        is_ok = False
        yield Finding(
            "locked memory",
            WARNING,
            f"is limited to {format_bytes(locked)}; NCCL cannot register buffers with the"
            " InfiniBand adapters",
            "ulimit -l unlimited, in Docker --ulimit memlock=-1",
        )
    if is_ok:
        yield Finding("limits", OK, f"{_format_limit(soft_open_files)} open files per process")


def _format_limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _read_process_limit() -> tuple[int | None, str]:
    """Return the maximum number of processes and its source; None without a limit."""
    limits: list[tuple[int, str]] = []
    # The kernel does not apply this limit to root.
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append((soft, "ulimit -u"))
    try:
        text = Path("/sys/fs/cgroup/pids.max").read_text().strip()
    except OSError:
        text = "max"
    if text.isdecimal():
        limits.append((int(text), "the control group (pids.max)"))
    return min(limits, default=(None, ""))


def check_huge_pages() -> Iterator[Finding]:
    """Check transparent huge pages, in which training on CPUs allocates large tensors."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return
    if "[never]" in setting:
        yield Finding(
            "huge pages",
            NOTE,
            "transparent huge pages are off, which slows training on CPUs down",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def check_network() -> Iterator[Finding]:
    """Check the loopback interface, the ports of servers, and this machine's name."""
    ports = list(PORTS)[:: len(PORTS) // _TESTED_PORTS]
    try:
        free_count = sum(is_port_free(LOOPBACK, port) for port in ports)
    except OSError as error:
        yield Finding(
            "network",
            ERROR,
            f"cannot listen on {LOOPBACK}: {error.strerror}; ranks and servers cannot connect",
            "ip link set lo up, in Docker do not use --network=none without loopback",
        )
        return
    reserved = f"ports {PORTS.start} to {PORTS.stop - 1}"
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    if not free_count:
        yield Finding(
            "network",
            ERROR,
            f"of {len(ports)} tested {reserved}, none is free; servers would not start",
            "end the processes that use them (ss -tlnp), or set the ports (ROLE.ports)",
        )
    elif int(outgoing[0]) < PORTS.stop and int(outgoing[1]) >= PORTS.start:
        yield Finding(
            "network",
            WARNING,
            f"outgoing connections use {'-'.join(outgoing)}, which overlaps {reserved} of the"
            " servers; a connection may occupy a port before its server listens",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    else:
        yield Finding(
            "network", OK, f"{reserved}: {free_count} of {len(ports)} tested ports are free"
        )
    yield from _check_host_name()


def _check_host_name() -> Iterator[Finding]:
    """Check that this machine's name can be resolved soon; gloo and NCCL resolve it at start."""
    name = socket.gethostname()
    addresses: list[str] = []

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(name, None, socket.AF_INET)
        except OSError:
            return
        addresses.extend(str(entry[4][0]) for entry in found)

    # The resolver has no timeout, so a thread waits for it.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_NAME_LOOKUP_S)
    if not addresses:
        yield Finding(
            "host name",
            WARNING,
            f"{name} cannot be resolved within {_NAME_LOOKUP_S:g} s; gloo resolves it when ranks"
            " connect",
            f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
