"""Attempts of a program to leave the sandbox of the tools `python` and `bash`, or to use more than
its limits.

Each attempt runs as a program of the tool `python`. The program prints `ESCAPED` and a description
if it succeeds. The attempts do not share code with the probe that aligner runs at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aligner.agents.sandboxes import SandboxSettings
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.agents.sandboxes.sandbox import Isolation
from aligner.agents.sandboxes.sandbox_limits import describe_gaps, describe_missing_groups
from aligner.agents.sandboxes.sandbox_tools import PythonTool
from aligner.schema.environment import PythonToolConfig
from benchmarks.security.registry import (
    HELD,
    Outcome,
    Probe,
    add_probe,
    finding,
    not_enforceable,
    probe,
)

LIMITS = PythonToolConfig(cpu_s=5, memory_mib=256, processes=8, scratch_mib=8)
_TIMEOUT_S = 30.0
_CHARACTERS = 2000
_ESCAPED = "ESCAPED"
_EXCESS = 64 << 20
"""Bytes that an attempt allocates outside of the limits, as evidence."""

_LIBC = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def escaped(description):
    print("ESCAPED:", description)
    sys.exit()
"""

# By name: attempt, expected behavior, and the program, which `_LIBC` precedes.
ATTEMPTS = {
    "system_v_semaphores": (
        "allocate 64 MiB of kernel memory as System V semaphores",
        "semget fails",
        f"""
# a semaphore needs 64 bytes in the kernel
sets = 0
while sets * 32000 * 64 < {_EXCESS} and libc.semget(0, 32000, 0o1600) >= 0:
    sets += 1
if sets:
    escaped(f"{{sets}} sets of 32000 semaphores")
""",
    ),
    "system_v_shared_memory": (
        "allocate System V shared memory",
        "shmget fails",
        f"""
if libc.shmget(0, ctypes.c_size_t({_EXCESS}), 0o1600) >= 0:
    escaped("shmget")
""",
    ),
    "system_v_messages": (
        "allocate System V message queues",
        "msgget fails",
        """
if libc.msgget(0, 0o1600) >= 0:
    escaped("msgget")
""",
    ),
    "posix_messages": (
        "allocate a POSIX message queue",
        "mq_open fails",
        """
if libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None) >= 0:
    escaped("mq_open")
""",
    ),
    "tmpfs_in_new_namespace": (
        "create a user and a mount namespace, and fill a tmpfs in it",
        "unshare fails",
        f"""
def fill():
    if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"size=1g"):
        return False
    with open("/tmp/filled", "wb") as file:
        for _ in range({_EXCESS} >> 20):
            file.write(bytes(1 << 20))
    return True
for flags in (0x10000000 | 0x20000, 0x20000, 0x10000000):
    if libc.unshare(flags) == 0:
        escaped(f"unshare({{flags:#x}}), tmpfs filled: {{fill()}}")
""",
    ),
    "namespaces_by_clone": (
        "create a user namespace with clone and clone3",
        "clone fails with EPERM, clone3 with ENOSYS",
        """
machine = os.uname().machine
clone = {"x86_64": 56, "aarch64": 220}[machine]
child = libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
if child > 0:
    escaped("clone(CLONE_NEWUSER)")
arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17, 0, 0, 0)
child = libc.syscall(435, arguments, 64)
if child == 0:
    os._exit(0)
if child > 0:
    escaped("clone3(CLONE_NEWUSER)")
""",
    ),
    "foreign_namespaces": (
        "enter another namespace with setns",
        "setns fails",
        """
if libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0) == 0:
    escaped("setns")
""",
    ),
    "vsock": (
        "open a socket to the hypervisor (AF_VSOCK)",
        "socket fails",
        """
try:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    escaped("AF_VSOCK")
except OSError:
    pass
""",
    ),
    "unusual_sockets": (
        "open sockets of all other families, such as AF_ALG, AF_NETLINK and AF_PACKET",
        "socket fails",
        """
opened = []
for family in {*range(3, 46)} - {10}:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).close()
            opened.append(family)
        except OSError:
            pass
if opened:
    escaped(f"families {sorted({*opened})}")
""",
    ),
    "fork_bomb": (
        "start more processes than environment.python.processes",
        "fork fails",
        f"""
import time
children = []
try:
    while len(children) < {LIMITS.processes}:
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, 9)
if len(children) >= {LIMITS.processes}:
    escaped(f"{{len(children)}} processes")
""",
    ),
    "memory": (
        "allocate more memory than environment.python.memory_mib",
        "MemoryError",
        f"""
try:
    bytearray({LIMITS.memory_mib + 32} << 20)
    escaped("bytearray")
except MemoryError:
    pass
""",
    ),
    "memfd": (
        "allocate memory with memfd_create and memfd_secret",
        "both fail",
        """
for number in ({"x86_64": 319, "aarch64": 279}[os.uname().machine], 447):
    if libc.syscall(number, b"name", 0) >= 0:
        escaped(f"system call {number}")
""",
    ),
    "large_files": (
        "write more than environment.python.scratch_mib",
        "writes fail",
        f"""
total = 0
try:
    for number in range(4):
        with open(str(number), "wb") as file:
            for _ in range({LIMITS.scratch_mib} - 1):
                total += file.write(bytes(1 << 20))
except OSError:
    pass
if total > {LIMITS.scratch_mib << 20}:
    escaped(f"{{total}} bytes")
""",
    ),
    "small_files": (
        "create a million empty files, each of which needs kernel memory",
        "the command is ended after some thousand files",
        """
for number in range(1_000_000):
    if number % 1000 == 0:
        os.mkdir(str(number))
        os.chdir(str(number))
    os.close(os.open(str(number % 1000), os.O_CREAT | os.O_WRONLY))
escaped("1,000,000 files")
""",
    ),
    "write_outside": (
        "write files outside the scratch directory",
        "all directories are read-only",
        """
for directory in ("/", "/usr", "/etc", "/dev", "/dev/shm", "/run", "/var/tmp", sys.prefix):
    try:
        open(directory + "/made-by-a-program", "w").close()
        escaped(directory)
    except OSError:
        pass
""",
    ),
    "ptrace": (
        "attach to the parent process and write to its memory",
        "ptrace fails, and /proc/PID/mem cannot be opened",
        """
for process in (1, os.getppid()):
    if libc.ptrace(16, process, 0, 0) == 0:
        escaped(f"ptrace of process {process}")
    try:
        open(f"/proc/{process}/mem", "r+b").close()
        escaped(f"/proc/{process}/mem")
    except OSError:
        pass
""",
    ),
    "files_of_driver": (
        "open the archives and the report of the process that starts the program",
        "/proc/PID/fd is not accessible",
        """
for process in (1, os.getppid()):
    try:
        names = os.listdir(f"/proc/{process}/fd")
    except OSError:
        continue
    for name in names:
        # bubblewrap has the program's standard streams
        if process == 1 and int(name) < 3:
            continue
        try:
            os.open(f"/proc/{process}/fd/{name}", os.O_RDWR)
        except OSError:
            continue
        escaped(f"descriptor {name} of process {process}")
""",
    ),
    "other_processes": (
        "see or signal processes outside the sandbox",
        "only processes of the sandbox exist",
        f"""
visible = [name for name in os.listdir("/proc") if name.isdigit()]
if len(visible) > 3:
    escaped(f"{{len(visible)}} processes are visible")
try:
    os.kill({os.getpid()}, 0)
    escaped("signal")
except OSError:
    pass
""",
    ),
    "priority": (
        "take the processor from the processes of the run with a real-time priority",
        "sched_setscheduler and nice fail",
        """
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    escaped("SCHED_FIFO")
except OSError:
    pass
try:
    os.nice(-5)
    escaped("nice")
except OSError:
    pass
""",
    ),
    "keyrings": (
        "store kernel memory in keyrings",
        "add_key and keyctl fail",
        """
add_key, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
if libc.syscall(add_key, b"user", b"name", b"value", 5, -3) >= 0:
    escaped("add_key")
if libc.syscall(keyctl, 0, -3, 1) >= 0:
    escaped("keyctl")
""",
    ),
    "kernel_interfaces": (
        "use bpf, perf_event_open, userfaultfd and io_uring",
        "all fail",
        """
numbers = {"x86_64": (321, 298, 323, 425), "aarch64": (280, 241, 282, 425)}[os.uname().machine]
area = ctypes.create_string_buffer(4096)
for name, number in zip(("bpf", "perf_event_open", "userfaultfd", "io_uring_setup"), numbers):
    ctypes.set_errno(0)
    result = libc.syscall(number, area, 0, -1, -1, 0)
    # EINVAL, EFAULT and others show that the kernel has processed the call
    if result >= 0 or ctypes.get_errno() not in (1, 38):
        escaped(f"{name}: {result}, errno {ctypes.get_errno()}")
""",
    ),
}


def run_attempt(program: str, isolation: Isolation) -> str:
    """Run a program with the tool `python`, and return its output."""
    tool = PythonTool(SandboxSettings(LIMITS, isolation=isolation), _CHARACTERS)
    return asyncio.run(tool.call({"code": _LIBC + program}, _TIMEOUT_S))


@functools.cache
def _detect() -> tuple[Isolation, str]:
    """Return the isolation of this host, and the gaps that `aligner validate` reports."""
    bubblewrap = Bubblewrap.detect(LIMITS)
    gaps = bubblewrap.find_gaps()
    return bubblewrap.isolation, describe_gaps(gaps) if gaps else ""


def _attempt(program: str) -> Outcome:
    """Run a program that prints `ESCAPED` if its attempt succeeds, and return the outcome."""
    isolation, gaps = _detect()
    # Without namespaces, the attempts would harm this host. `aligner validate` then exits with an
    # error, unless the configuration accepts the gaps.
    if isolation == "none":
        return not_enforceable(gaps)
    output = run_attempt(program, isolation)
    # a failure of the program itself would look like a success of the sandbox
    if _ESCAPED in output or "Traceback" in output:
        return finding(output.strip()[-300:])
    return HELD


for _name, (_description, _expected, _program) in ATTEMPTS.items():
    _function = functools.partial(_attempt, _program)
    _component = "environment.tools=[python]"
    add_probe(Probe("sandbox", _name, _description, _expected, _component, _function))


@contextlib.contextmanager
def _secret_file() -> Iterator[Path]:
    """Yield a file of this user outside of the directories for temporary files."""
    with tempfile.NamedTemporaryFile("w", dir=Path.home()) as file:
        file.write("the secret")
        file.flush()
        yield Path(file.name)


@probe(
    "sandbox",
    attempt="read a file of the user who runs aligner",
    expected="the file does not exist in the sandbox",
    component="environment.tools=[python]",
)
def other_files() -> Outcome:
    with _secret_file() as file:
        program = f"""
try:
    escaped(open({str(file)!r}).read())
except OSError:
    pass
"""
        return _attempt(program)


@probe(
    "sandbox",
    attempt="connect to a server on this host",
    expected="the connection fails",
    component="environment.tools=[python]",
)
def network() -> Outcome:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
try:
    socket.create_connection({server.getsockname()!r}, 2)
    escaped("connected")
except OSError:
    pass
"""
        return _attempt(program)


@probe(
    "sandbox",
    attempt="use more memory with several processes than all of them together may have",
    expected="the kernel ends processes of the program",
    component="environment.python.memory_mib",
)
def memory_of_all_processes() -> Outcome:
    if reason := describe_missing_groups(LIMITS):
        return not_enforceable(reason)
    children = 4
    program = f"""
import time
children = []
for _ in range({children}):
    child = os.fork()
    if not child:
        filled = bytearray(os.urandom(1)) * ({LIMITS.memory_mib * 3 // 4} << 20)
        time.sleep(2)
        os._exit(0)
    children.append(child)
if not any(os.waitpid(child, 0)[1] for child in children):
    escaped("{children} x {LIMITS.memory_mib * 3 // 4} MiB")
"""
    return _attempt(program)


@probe(
    "sandbox",
    attempt="let the kernel end other processes if memory is exhausted",
    expected="oom_score_adj is 1000 and cannot be changed",
    component="environment.tools=[python]",
)
def order_of_ending() -> Outcome:
    return _attempt("""
score = "/proc/self/oom_score_adj"
for value in ("-1000", "0"):
    try:
        with open(score, "w") as file:
            file.write(value)
    except OSError:
        pass
with open(score) as file:
    value = file.read().strip()
if value != "1000":
    escaped(value)
""")
