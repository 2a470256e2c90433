"""Script that attempts to violate each limit of a local sandbox, from inside of the sandbox.

It imports only the standard library, and its text is passed to `python3 -c`. Its argument is a JSON
object (see `main`). It prints the names of the violated limits as a JSON list; `sandbox_limits`
describes them. Without a sandbox the attempts do no harm: what they create is removed.
"""

import contextlib
import ctypes
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_MIB = 2**20
# constants of the kernel's interfaces, which Python does not name
_IPC_CREATE = 0o1600
_IPC_REMOVE = 0
_CLONE_NEW_MOUNTS = 0x20000
_CLONE_NEW_USER = 0x10000000
_SIGCHLD = 17
_PTRACE_SEIZE = 0x4206
_PTRACE_DETACH = 17
_EPERM_AND_ENOSYS = (1, 38)
# numbers of system calls for which not every C library has functions
_NUMBERS = {
    "x86_64": {
        "add_key": 248,
        "bpf": 321,
        "clone": 56,
        "mq_open": 240,
        "mq_unlink": 241,
        "userfaultfd": 323,
    },
    "aarch64": {
        "add_key": 217,
        "bpf": 280,
        "clone": 220,
        "mq_open": 180,
        "mq_unlink": 181,
        "userfaultfd": 282,
    },
}.get(os.uname().machine, {})
_CLONE3 = 435
_IO_URING_SETUP = 425
# Sockets that are no part of a network namespace, or are not needed: NETLINK, PACKET, ALG, VSOCK
_FORBIDDEN_FAMILIES = (16, 17, 38, 40)
# processes in the sandbox: bubblewrap, the driver, and this script
_OWN_PROCESSES = 3
# tolerance of the process limit, see `control_groups`
_SPARE_PROCESSES = 8


def has_network(settings: Mapping[str, Any]) -> bool:
    """Return whether there are network interfaces other than the loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return any(line.split(":")[0].strip() != "lo" for line in lines)


def reads_files(settings: Mapping[str, Any]) -> bool:
    """Return whether a file of the user who runs aligner exists here."""
    return Path(settings["witness"]).exists()


def writes_files(settings: Mapping[str, Any]) -> bool:
    """Return whether a directory other than the scratch directory is writable."""
    for directory in ("/", "/usr", "/etc", "/dev/shm", "/var/tmp", sys.prefix):
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory):
            return True
    return False


def sees_processes(settings: Mapping[str, Any]) -> bool:
    """Return whether processes outside of the sandbox are visible."""
    return sum(path.name.isdigit() for path in Path("/proc").iterdir()) > _OWN_PROCESSES


def controls_parent(settings: Mapping[str, Any]) -> bool:
    """Return whether the memory or the files of the parent process, the sandbox's driver, are
    accessible."""
    parent = os.getppid()
    # unlike PTRACE_ATTACH, this does not stop the process
    if _libc.ptrace(_PTRACE_SEIZE, parent, None, None) == 0:
        return True
    with contextlib.suppress(OSError), Path(f"/proc/{parent}/mem").open("r+b"):
        return True
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{parent}/fd").iterdir():
            with contextlib.suppress(OSError), file.open("rb"):
                return True
    return False


def exceeds_memory(settings: Mapping[str, Any]) -> bool:
    """Return whether a process can have more memory than the limit."""
    with contextlib.suppress(MemoryError):
        bytearray((settings["memory_mib"] + 16) * _MIB)
        return True
    return False


def survives_exhaustion(settings: Mapping[str, Any]) -> bool:
    """Return whether this process is not, or can avoid to be, the first that the kernel kills."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        score.write_text("0")
    return score.read_text().strip() != "1000"


def exceeds_processes(settings: Mapping[str, Any]) -> bool:
    """Return whether a program can have more processes than the limit."""
    most = settings["processes"] + _SPARE_PROCESSES
    children: list[int] = []
    with contextlib.suppress(BlockingIOError):
        while len(children) < most:
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return len(children) == most


def exceeds_files(settings: Mapping[str, Any]) -> bool:
    """Return whether the files in the scratch directory can be larger than the limit."""
    size = settings["scratch_mib"] * _MIB // 2 + _MIB
    with contextlib.suppress(OSError), contextlib.ExitStack() as files:
        for _ in range(3):
            file = files.enter_context(tempfile.TemporaryFile(dir="."))
            os.posix_fallocate(file.fileno(), 0, size)
        return True
    return False


def creates_memory_files(settings: Mapping[str, Any]) -> bool:
    """Return whether memfd_create provides memory that no process's limit counts."""
    with contextlib.suppress(OSError):
        os.close(os.memfd_create("probe"))
        return True
    return False


def creates_semaphores(settings: Mapping[str, Any]) -> bool:
    """Return whether System V semaphores exist, whose memory belongs to no process."""
    identifier = _libc.semget(0, 1, _IPC_CREATE)
    if identifier >= 0:
        _libc.semctl(identifier, 0, _IPC_REMOVE)
    return bool(identifier >= 0)


def creates_shared_memory(settings: Mapping[str, Any]) -> bool:
    """Return whether System V shared memory exists, which belongs to no process."""
    identifier = _libc.shmget(0, ctypes.c_size_t(4096), _IPC_CREATE)
    if identifier >= 0:
        _libc.shmctl(identifier, _IPC_REMOVE, None)
    return bool(identifier >= 0)


def creates_message_queues(settings: Mapping[str, Any]) -> bool:
    """Return whether System V or POSIX message queues exist, which belong to no process."""
    identifier = _libc.msgget(0, _IPC_CREATE)
    if identifier >= 0:
        _libc.msgctl(identifier, _IPC_REMOVE, None)
    if "mq_open" not in _NUMBERS:
        return True
    name = f"aligner-{os.getpid()}".encode()
    queue = _libc.syscall(_NUMBERS["mq_open"], name, os.O_CREAT | os.O_RDWR, 0o600, None)
    if queue >= 0:
        _libc.syscall(_NUMBERS["mq_unlink"], name)
        os.close(queue)
    return bool(identifier >= 0 or queue >= 0)


def creates_namespaces(settings: Mapping[str, Any]) -> bool:
    """Return whether namespaces can be created, in which a program could mount file systems."""

    def exits_in_child(child: int) -> bool:
        if child == 0:
            os._exit(0)
        if child > 0:
            os.waitpid(child, 0)
        return child > 0

    # in a child process, so that this process keeps its namespaces
    for flags in (_CLONE_NEW_USER, _CLONE_NEW_MOUNTS):
        child = os.fork()
        if child == 0:
            os._exit(0 if _libc.unshare(flags) == 0 else 1)
        if os.waitpid(child, 0)[1] == 0:
            return True
    # struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls
    arguments = (ctypes.c_uint64 * 8)(_CLONE_NEW_USER, 0, 0, 0, _SIGCHLD, 0, 0, 0)
    if exits_in_child(_libc.syscall(_CLONE3, arguments, ctypes.sizeof(arguments))):
        return True
    if "clone" not in _NUMBERS:
        return True
    return exits_in_child(_libc.syscall(_NUMBERS["clone"], _CLONE_NEW_USER | _SIGCHLD, 0, 0, 0, 0))


def opens_sockets(settings: Mapping[str, Any]) -> bool:
    """Return whether sockets of other families than Unix and IP can be opened."""
    for family in _FORBIDDEN_FAMILIES:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
            with contextlib.suppress(OSError), socket.socket(family, kind):
                return True
    return False


def uses_keyrings(settings: Mapping[str, Any]) -> bool:
    """Return whether keyrings, which are kernel memory, are accessible."""
    # without a type the call fails anyway, but with another error
    return _is_processed(_NUMBERS.get("add_key"), None, None, None, 0, 0)


def uses_kernel_interfaces(settings: Mapping[str, Any]) -> bool:
    """Return whether bpf, userfaultfd or io_uring is accessible."""
    return (
        _is_processed(_NUMBERS.get("bpf"), -1, None, 0)
        or _is_processed(_NUMBERS.get("userfaultfd"), -1)
        or _is_processed(_IO_URING_SETUP, 0, None)
    )


def _is_processed(number: int | None, *arguments: Any) -> bool:
    """Return whether the kernel processes a system call, which has to fail for its arguments.

    The number is None on a machine for which this script has no numbers.
    """
    ctypes.set_errno(0)
    if number is not None and _libc.syscall(number, *arguments) < 0:
        return ctypes.get_errno() not in _EPERM_AND_ENOSYS
    return True


ATTEMPTS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "network": has_network,
    "files": reads_files,
    "read_only_files": writes_files,
    "processes_of_others": sees_processes,
    "memory_of_others": controls_parent,
    "namespaces": creates_namespaces,
    "memory": exceeds_memory,
    "memory_exhaustion": survives_exhaustion,
    "processes": exceeds_processes,
    "file_size": exceeds_files,
    "memory_files": creates_memory_files,
    "semaphores": creates_semaphores,
    "shared_memory": creates_shared_memory,
    "message_queues": creates_message_queues,
    "keyrings": uses_keyrings,
    "socket_families": opens_sockets,
    "kernel_interfaces": uses_kernel_interfaces,
}
"""Attempts by the names of the limits; each returns whether it has succeeded."""


def main() -> None:
    """Make all attempts.

    The settings are `witness`, a file outside of the sandbox, and the limits `memory_mib`,
    `processes` and `scratch_mib`.
    """
    settings = json.loads(sys.argv[1])
    print(json.dumps([name for name, attempt in ATTEMPTS.items() if attempt(settings)]))


if __name__ == "__main__":
    main()
