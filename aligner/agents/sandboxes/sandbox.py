"""Interface of a sandbox, and the settings from which sandboxes are created."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Literal

from aligner.errors import AlignerError
from aligner.schema.environment import EnvironmentConfig, PythonToolConfig

Isolation = Literal["own_user", "user_namespace", "none"]
"""User and namespaces of a local sandbox.

- `own_user`: a user id that no other process has; only root can change to it
- `user_namespace`: the caller's user, which is the user `nobody` inside a user namespace
- `none`: the caller's user without any namespace

The first two also have network, process, IPC, hostname, cgroup and mount namespaces.
"""

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_OUTPUT_BYTES = 1 << 20
KILLED_EXIT_CODE = 137
"""Exit code of a command that SIGKILL has ended: 128 plus the number of the signal."""
PROGRAM_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # the process limit counts threads
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the replay of an episode must print the same output
}
"""Environment variables of every command."""


class SandboxFileError(AlignerError):
    """A file in a sandbox does not exist, cannot be read or written, or is too large."""


@dataclass(frozen=True)
class SandboxSettings:
    """Kind and limits of sandboxes.

    The kind follows from the fields: with `url` a sandbox is remote, with `image` it is a
    container, otherwise it is local.
    """

    limits: PythonToolConfig = field(default_factory=PythonToolConfig)
    """Resource limits (`environment.python`)."""
    requirement: str = "required"
    """Whether a local sandbox must enforce everything (`environment.sandbox`)."""
    image: str | None = None
    """Container image (`environment.sandbox_image`)."""
    url: str | None = None
    """URL of a server of `aligner serve-sandboxes` (`environment.sandbox_url`)."""
    isolation: Isolation | None = None
    """Isolation of local sandboxes; None to detect the strongest one."""

    @staticmethod
    def from_config(settings: EnvironmentConfig) -> "SandboxSettings":
        """Return the settings of the section `environment`."""
        return SandboxSettings(
            settings.python, settings.sandbox, settings.sandbox_image, settings.sandbox_url
        )

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "SandboxSettings":
        """Return the settings that `to_json` has converted.

        Raises:
            TypeError: A field is missing or unknown.
        """
        return SandboxSettings(**{**fields, "limits": PythonToolConfig(**fields["limits"])})

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class ExecResult:
    """Result of a command in a sandbox."""

    exit_code: int
    """Exit code; 128 plus the number of the signal if a signal has ended the command."""
    stdout_bytes: bytes
    """Standard output. The middle of a long output is replaced by `[…]`."""
    stderr_bytes: bytes
    """Standard error, like `stdout_bytes`."""
    timed_out: bool = False
    """Whether the command was killed after its timeout."""
    is_truncated: bool = False
    """Whether one of the outputs was longer than the limit."""

    @property
    def stdout(self) -> str:
        """Standard output as text."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.stderr_bytes.decode(errors="replace")


class Sandbox(ABC):
    """Files and limits in which commands of one episode run; created by `create_sandbox`.

    Commands run one after the other, in the order of the calls. Files persist between commands;
    processes do not: when a command ends, all processes that it has started are killed. Paths are
    relative to the working directory of the commands.

    A program that fails or is too slow is a result (`ExecResult`). A sandbox that does not start,
    or is lost, raises InfrastructureError, so that the episode is retried and not scored.

    Example:
        >>> async with await create_sandbox({"data.txt": "1 2 3"}) as sandbox:
        ...     result = await sandbox.exec(["wc", "-w", "data.txt"], timeout_s=10)
        ...     print(result.exit_code, result.stdout)
    """

    def __init__(self) -> None:
        self._initial_files: Mapping[str, str | bytes] = {}
        # commands, snapshots and resets run one after the other; asyncio's lock is fair
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> "Sandbox":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self, files: Mapping[str, str | bytes]) -> None:
        """Start the sandbox, and write its initial files; `create_sandbox` calls this method.

        Raises:
            InfrastructureError: The sandbox does not start.
            SandboxFileError: A file cannot be written.
        """
        self._initial_files = dict(files)
        await self._start()
        await self._write_initial_files()

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run a command, and return its result.

        Args:
            command: Program and arguments; no shell interprets them.
            stdin: Standard input of the command.
            timeout_s: Time in seconds after which the command is killed.
            max_output_bytes: Maximum number of bytes of each output. Of a longer output, the
                beginning and the end are returned.

        Raises:
            InfrastructureError: The sandbox is lost.
        """
        content = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
        async with self._lock:
            return await self._exec(list(command), content, timeout_s, max_output_bytes)

    async def read_file(self, path: str, max_bytes: int = 16 << 20) -> bytes:
        """Return the contents of a file.

        Raises:
            SandboxFileError: The file cannot be read, or has more than `max_bytes` bytes.
        """
        result = await self.exec(["cat", "--", path], max_output_bytes=max_bytes)
        if result.exit_code:
            raise SandboxFileError(f"{path}: {result.stderr.strip()}")
        if result.is_truncated:
            raise SandboxFileError(f"{path}: has more than {max_bytes} bytes")
        return result.stdout_bytes

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file, and create its directories.

        Raises:
            SandboxFileError: The file cannot be written.
        """
        script = 'mkdir -p -- "$1" && cat > "$2"'
        command = ["sh", "-c", script, "sh", str(PurePosixPath(path).parent), path]
        result = await self.exec(command, stdin=content)
        if result.exit_code:
            raise SandboxFileError(f"{path}: {result.stderr.strip()}")

    async def snapshot(self) -> str:
        """Save the state of all files, and return its id, which is valid until `close`.

        Raises:
            InfrastructureError: The sandbox is lost.
        """
        async with self._lock:
            return await self._snapshot()

    async def reset(self, snapshot: str | None = None) -> None:
        """Restore the files of a snapshot; None restores the initial state.

        Raises:
            InfrastructureError: The sandbox is lost.
            KeyError: There is no such snapshot.
        """
        async with self._lock:
            await self._reset(snapshot)
        if snapshot is None:
            await self._write_initial_files()

    @abstractmethod
    async def close(self) -> None:
        """End the sandbox, and delete its files and snapshots. May be called repeatedly."""

    async def _write_initial_files(self) -> None:
        for path, content in self._initial_files.items():
            await self.write_file(path, content)

    @abstractmethod
    async def _start(self) -> None:
        """Start the sandbox. Raises InfrastructureError if it does not start."""

    @abstractmethod
    async def _exec(
        self, command: list[str], stdin: bytes, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        """Run a command; see `exec`. No other method of the sandbox runs at the same time."""

    @abstractmethod
    async def _snapshot(self) -> str:
        """Save the state of all files; see `snapshot`."""

    @abstractmethod
    async def _reset(self, snapshot: str | None) -> None:
        """Restore a state; see `reset`. None restores the state without the initial files."""
