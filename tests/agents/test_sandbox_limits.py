"""The limits of local sandboxes: the system call filter, control groups, and their descriptions."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.agents.sandboxes import (
    SandboxSettings,
    create_sandbox,
    sandbox_limits,
    sandbox_probe,
)
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.agents.sandboxes.control_groups import find_parent_groups
from aligner.agents.sandboxes.sandbox import Isolation
from aligner.agents.sandboxes.sandbox_limits import describe_gaps, describe_missing_groups
from aligner.agents.sandboxes.syscall_filter import build_syscall_filter
from aligner.agents.sandboxes.syscall_table import (
    ALLOWED_CALLS,
    CHECKED_CALLS,
    UNSUPPORTED_CALLS,
)
from benchmarks.security import sandbox as attempts
from benchmarks.security.registry import load_probes
from tests.agents.test_python_sandbox import HERE, LIMITS, enforced, run

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Kernel's identifier of the architecture, and position of its numbers in the table."""
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW = 0x7FFF0000
KILL = 0x80000000
FAIL = 0x00050000
FLAGS_OF_THREAD = 0x003D0F00
"""Flags with which the C library creates a thread."""
NEW_USER_NAMESPACE = 0x10000000
PROBES = load_probes(["sandbox"])


def evaluate(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """Return the action of a filter for a system call, as the kernel computes it."""
    padded = [*arguments, *[0] * 6][:6]
    call = struct.pack("=IIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    position = 0
    word = 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        match code:
            case 0x20:
                (word,) = struct.unpack_from("=I", call, operand)
            case 0x15:
                position += if_true if word == operand else if_false
            case 0x35:
                position += if_true if word >= operand else if_false
            case 0x45:
                position += if_true if word & operand else if_false
            case 0x06:
                return operand
            case _:
                raise ValueError(code)


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_allows_the_calls_of_the_table_alone(machine: str) -> None:
    architecture, position = MACHINES[machine]
    program = build_syscall_filter(machine)
    assert program is not None
    allowed = {numbers[position] for numbers in ALLOWED_CALLS.values()} - {None}
    checked = {numbers[position] for numbers in CHECKED_CALLS.values()}
    unsupported = {numbers[position] for numbers in UNSUPPORTED_CALLS.values()}
    assert not allowed & checked
    for number in {*range(600), 0x40000000, 0x40000001, 0xFFFFFFFF} - checked:
        action = evaluate(program, number, architecture=architecture)
        if number in allowed:
            expected = ALLOW
        elif number in unsupported:
            expected = FAIL | errno.EOPNOTSUPP
        else:
            expected = FAIL | (errno.ENOSYS if number >= 424 else errno.EPERM)
        assert action == expected, number
    other = 0x40000003  # i386
    assert evaluate(program, 0, architecture=other) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_checks_arguments_of_clone_and_socket(machine: str) -> None:
    architecture, position = MACHINES[machine]
    program = build_syscall_filter(machine)
    assert program is not None

    def action(name: str, *arguments: int) -> int:
        number = CHECKED_CALLS[name][position]
        return evaluate(program, number, *arguments, architecture=architecture)

    assert action("clone", FLAGS_OF_THREAD) == ALLOW and action("clone", 17) == ALLOW
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert action("clone", 1 << bit | 17) == FAIL | errno.EPERM
    for name in ("socket", "socketpair"):
        for family in range(50):
            is_allowed = family in (1, 2, 10)
            expected = ALLOW if is_allowed else FAIL | errno.EAFNOSUPPORT
            assert action(name, family, 1, 0) == expected
        assert action(name, 2, 1, 6) == action(name, 2, 2, 17) == ALLOW
        # MPTCP, SCTP
        assert action(name, 2, 1, 262) == action(name, 2, 1, 132) == FAIL | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_system_call_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    definitions = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in definitions}
    _, position = MACHINES[machine]
    if machine == "aarch64":
        numbers["newfstatat"] = numbers["fstatat"]
    for name, both in {**ALLOWED_CALLS, **CHECKED_CALLS, **UNSUPPORTED_CALLS}.items():
        # the headers may be older than the newest calls
        if name in numbers or both[position] is None or both[position] < 450:
            assert numbers.get(name) == both[position], name


@pytest.mark.promise("sandbox-bounds-everything")
@enforced
@pytest.mark.parametrize("name", [each.name for each in PROBES])
def test_attempt_to_escape_fails(name: str) -> None:
    (each,) = (each for each in PROBES if each.name == name)
    outcome = each.function()
    assert outcome.state != "finding", outcome.detail


@pytest.mark.promise("sandbox-bounds-everything")
@enforced
@pytest.mark.parametrize("name", attempts.ATTEMPTS)
def test_attempt_to_escape_from_user_namespace_fails(name: str) -> None:
    if name == "fork_bomb" and os.geteuid() == 0:
        pytest.skip("RLIMIT_NPROC does not count the processes of root")
    _, _, program = attempts.ATTEMPTS[name]
    output = attempts.run_attempt(program, "user_namespace")
    assert "ESCAPED" not in output and "Traceback" not in output, output


@enforced
@pytest.mark.parametrize("isolation", ["own_user", "user_namespace"])
def test_many_files_end_the_command(isolation: Isolation) -> None:
    if isolation == "own_user" and HERE.isolation != "own_user":
        pytest.skip("only root can change to another user")
    limits = replace(LIMITS, scratch_mib=1)
    settings = SandboxSettings(limits, isolation=isolation)
    most = 1024

    async def create() -> None:
        async with await create_sandbox({"a": "1"}, settings) as sandbox:
            few = f"for n in $(seq {most // 4}); do : > $n; done"
            result = await sandbox.exec(["sh", "-c", few])
            assert (result.exit_code, result.stderr) == (0, "")
            many = "n=0; while :; do n=$((n+1)); : > b$n; done"
            result = await sandbox.exec(["sh", "-c", many])
            assert result.exit_code == 137 and not result.timed_out
            assert f"sandbox: the command created more than {most} files\n" in result.stderr
            assert await sandbox.read_file("a") == b"1"
            assert (await sandbox.exec(["ls", "b1"])).exit_code != 0

    asyncio.run(create())


@enforced
def test_program_in_user_namespace_cannot_change_a_snapshot() -> None:
    settings = SandboxSettings(LIMITS, isolation="user_namespace")
    # the archive of the snapshot is open in the process that starts the command
    change = """
import os
parent = os.getppid()
for name in range(3, 1000):
    try:
        with open(f"/proc/{parent}/fd/{name}", "r+b") as file:
            file.write(bytes(4096))
    except OSError:
        pass
"""

    async def run_attack() -> str:
        async with await create_sandbox({"a": "1"}, settings) as sandbox:
            snapshot = await sandbox.snapshot()
            await sandbox.exec(["python3", "-c", change])
            await sandbox.reset(snapshot)
            return (await sandbox.read_file("a")).decode()

    assert asyncio.run(run_attack()) == "1"


@enforced
@pytest.mark.skipif(not find_parent_groups(), reason="no control groups can be created here")
def test_control_groups_are_removed_after_a_program() -> None:
    assert run("print(1)") == "1"
    pattern = f"aligner-sandbox-{os.getpid()}-*"
    remaining = [group for parent in find_parent_groups() for group in parent.glob(pattern)]
    assert remaining == []
    assert describe_missing_groups(LIMITS) is None


def test_without_filter_each_missing_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    if HERE.isolation == "none":
        pytest.skip("this machine has no namespaces")
    gaps = Bubblewrap(LIMITS, HERE.isolation).find_gaps()
    assert {"semaphores", "shared_memory", "message_queues", "memory_files"} <= {
        gap.name for gap in gaps
    }
    text = describe_gaps(gaps)
    assert "semaphores: System V semaphores provide memory outside the limit" in text
    assert text.endswith("it supports x86_64 and aarch64, and this machine is riscv64")


def test_every_attempt_of_the_probe_has_a_description() -> None:
    assert {*sandbox_probe.ATTEMPTS} == {*sandbox_limits._LIMITS}


@enforced
@pytest.mark.parametrize("isolation", ["own_user", "user_namespace"])
def test_programs_run_with_threads_processes_and_sockets(isolation: Isolation) -> None:
    if isolation == "own_user" and HERE.isolation != "own_user":
        pytest.skip("only root can change to another user")
    program = """
import asyncio, hashlib, os, pathlib, shutil, sqlite3, socket, ssl, subprocess, tempfile, threading
import numpy
results = []
threads = [threading.Thread(target=results.append, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(results) == [0, 1, 2, 3]
assert subprocess.run(["sh", "-c", "seq 9 | sort -r | head -1"], capture_output=True).stdout == b"9\\n"
matrix = numpy.ones((300, 300))
assert (matrix @ matrix)[0, 0] == 300 and numpy.linalg.svd(matrix[:50, :50])[1][0] > 49
async def serve():
    async def answer(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"line\\n")
    return await reader.readline()
assert asyncio.run(serve()) == b"line\\n"
socket.getaddrinfo("127.0.0.1", 80)
database = sqlite3.connect("data.db")
database.execute("create table t (a)")
database.execute("insert into t values (1)")
database.commit()
pathlib.Path("a").write_text("x")
shutil.copy2("a", "b")
os.link("a", "c")
os.symlink("a", "d")
os.mkfifo("e")
os.utime("a", (1, 1))
with tempfile.TemporaryDirectory() as directory:
    pathlib.Path(directory, "f").touch()
    shutil.copytree(directory, "copy")
script = "set -e; tar -cf f.tar a b; gzip f.tar; cp -a a g; install -m 600 a m; mv g h; find . -name h | xargs grep -l x; awk 'BEGIN { print 1 }'; sed s/x/y/ a; stat a; touch i; chmod 600 i; date; timeout 5 true; mktemp; df .; sleep 0.01"
result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
print(result.returncode, result.stderr)
"""
    limits = attempts.LIMITS
    output = run(program, sandbox=Bubblewrap(limits, isolation))
    assert output == "0"
