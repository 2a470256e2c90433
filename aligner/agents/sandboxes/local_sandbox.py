"""Sandbox on this machine: each command runs under bubblewrap, and its files are kept between
commands as an archive."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
from typing import IO, Any

from aligner.agents.failures import InfrastructureError
from aligner.agents.sandboxes.bubblewrap import (
    FILES_PER_MIB,
    STATE_TIMEOUT_S,
    Bubblewrap,
    open_temporary_file,
)
from aligner.agents.sandboxes.sandbox import KILLED_EXIT_CODE, ExecResult, Sandbox

# time in seconds for the start of the driver and the end of the command's processes
_DRIVER_TIMEOUT_S = 30.0
_OMISSION = "\n[…]\n".encode()


class LocalSandbox(Sandbox):
    """Sandbox on this machine.

    Each command has its own mount namespace with an empty scratch directory of limited size, into
    which `sandbox_driver` extracts the sandbox's files. Afterwards it archives the files in a
    temporary file without a name. A sandbox therefore has no processes and no named files between
    commands. A snapshot is one of these archives.
    """

    def __init__(self, bubblewrap: Bubblewrap) -> None:
        super().__init__()
        self._bubblewrap = bubblewrap
        # archive of the sandbox's files; an archive is never changed after it has been written
        self._files: IO[bytes] = _create_archive()
        self._snapshots: dict[str, IO[bytes]] = {}
        self._snapshot_numbers = itertools.count(1)

    async def close(self) -> None:
        """Delete the files and snapshots."""
        for file in (self._files, *self._snapshots.values()):
            file.close()
        self._snapshots.clear()

    async def _start(self) -> None:
        """Do nothing: a local sandbox has no process of its own."""

    async def _exec(
        self, command: list[str], stdin: bytes, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        if self._files.closed:
            raise InfrastructureError("the sandbox is closed")
        # Files, not pipes: a program that prints without end, or does not read its input, cannot
        # block this process. The size limit of files also applies to the output.
        with (
            open_temporary_file(stdin) as stdin_file,
            tempfile.TemporaryFile() as stdout_file,
            tempfile.TemporaryFile() as stderr_file,
            tempfile.TemporaryFile() as report_file,
        ):
            new_files = _create_archive()
            state_files = [self._files.fileno(), new_files.fileno(), report_file.fileno()]
            with self._bubblewrap.build_command(command, timeout_s, state_files) as (
                full_command,
                options,
            ):
                process = await asyncio.create_subprocess_exec(
                    *full_command,
                    stdin=stdin_file,
                    stdout=stdout_file,
                    stderr=stderr_file,
                    **options,
                )
                try:
                    # the driver enforces the timeout, unless the command hinders it
                    with contextlib.suppress(asyncio.TimeoutError):
                        total_s = timeout_s + 2 * STATE_TIMEOUT_S + _DRIVER_TIMEOUT_S
                        await asyncio.wait_for(process.wait(), total_s)
                finally:
                    # without namespaces, child processes would outlive the command
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()

            stdout, is_stdout_truncated = _read_output(stdout_file, max_output_bytes)
            stderr, is_stderr_truncated = _read_output(stderr_file, max_output_bytes)
            report_file.seek(0)
            reports = [json.loads(line) for line in report_file]

        if not reports:
            reason = stderr.decode(errors="replace").strip()[-300:]
            raise InfrastructureError(f"the sandbox did not start: {reason or 'no message'}")
        # the second report, if there is one, contains the result
        result: dict[str, Any] = {
            "exit_code": KILLED_EXIT_CODE,
            "timed_out": False,
            "is_saved": False,
            "has_too_many_files": False,
        }
        result |= reports[-1]
        if result["has_too_many_files"]:
            max_files = self._bubblewrap.limits.scratch_mib * FILES_PER_MIB
            stderr += f"sandbox: the command created more than {max_files} files\n".encode()
        if result["is_saved"]:
            self._replace_files(new_files)
        else:
            new_files.close()
            stderr += b"sandbox: the command's changes of files could not be saved\n"
        return ExecResult(
            result["exit_code"],
            stdout,
            stderr,
            result["timed_out"],
            is_stdout_truncated or is_stderr_truncated,
        )

    async def _snapshot(self) -> str:
        snapshot = f"snapshot-{next(self._snapshot_numbers)}"
        self._snapshots[snapshot] = self._files
        return snapshot

    async def _reset(self, snapshot: str | None) -> None:
        if snapshot is None:
            self._replace_files(_create_archive())
        else:
            self._replace_files(self._snapshots[snapshot])

    def _replace_files(self, files: IO[bytes]) -> None:
        """Replace the archive of the sandbox's files; snapshots keep theirs open."""
        if not any(self._files is snapshot for snapshot in self._snapshots.values()):
            self._files.close()
        self._files = files


def _create_archive() -> IO[bytes]:
    """Return an empty archive: a temporary file without a name, which the system deletes when no
    process has opened it."""
    return tempfile.TemporaryFile()


def _read_output(output: IO[bytes], max_bytes: int) -> tuple[bytes, bool]:
    """Return an output, or the beginning and the end of a long one, and whether it was long."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= max_bytes:
        return output.read(), False
    # The bytes in the middle are never read, because a file may be as large as `scratch_mib`.
    beginning = output.read(max_bytes // 2)
    output.seek(size - max_bytes // 2)
    return beginning + _OMISSION + output.read(), True
