"""The `aligner` command in a process of its own, and how its end is told."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from aligner.exit_codes import error_of
from aligner.observability.logs import REPORTED


class ChildCommand:
    """A running command. It goes on where this process ends, and no signal of this process's
    terminal or kernel reaches it."""

    def __init__(self, arguments: Sequence[str], python_path: Path | None = None) -> None:
        """Starts it in this process's working directory; `python_path` is where Python finds
        modules of the user's own."""
        environment = {"COLUMNS": str(shutil.get_terminal_size((100, 24)).columns)} | os.environ
        # standard output and error come in the order in which they are written
        environment["PYTHONUNBUFFERED"] = "1"
        if python_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(python_path), os.environ.get("PYTHONPATH")])
            )
        # A file without a name: nothing is left of it, and nobody has to read it for the command to
        # go on.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the command's, which outlives this call
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aligner", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def printed(self) -> str:
        """What it has printed so far, on standard output and error, without the error that it ends
        with."""
        return self._parts()[0]

    def raise_error(self, otherwise: str | None = None) -> None:
        """Raise what the command has ended with, in its own words; where it had none `otherwise`,
        or its last line.

        Raises AlignerError, ConfigError, Stopped or Interrupted, by the exit code; nothing for one
        that has done its work.
        """
        if code := self.exit_code:
            printed, error = self._parts()
            last = (printed.splitlines() or [f"exited with code {code}"])[-1]
            raise error_of(code, error or otherwise or last)

    def finish(self) -> None:
        """Wait for its end, and end it where the waiting is interrupted. Raises as `raise_error`
        does."""
        try:
            self._process.wait()
        finally:
            self.end()
        self.raise_error()

    def end(self) -> None:
        """End it if it still runs, as Ctrl-C does, and wait for that."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def _parts(self) -> tuple[str, str]:
        """The output up to the error, and the error."""
        descriptor = self._output.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        before, mark, error = text.rpartition(f"\n{REPORTED}")
        if not mark:
            before, mark, error = (
                ("", REPORTED, text.removeprefix(REPORTED))
                if text.startswith(REPORTED)
                else (text, "", "")
            )
        return (before + "\n" if before and mark else before), error.strip()
