"""Commands in a pseudo-terminal, with a given number of columns, as a user sees them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from benchmarks.runs import python_path

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE_LINE = "\x1b[2K"


class Terminal:
    """A command in the foreground process group of a terminal.

    A context manager, which ends the command on exit.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        columns: int = 60,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `aligner` with these arguments in a directory."""
        variables = {**os.environ, "PYTHONPATH": python_path(), "TERM": "xterm-256color"}
        variables |= environment or {}
        variables.pop("COLUMNS", None)  # the terminal has a width
        self._process_id, self._descriptor = pty.fork()
        if not self._process_id:
            os.chdir(directory)
            os.execvpe(sys.executable, [sys.executable, "-m", "aligner", *arguments], variables)
        size = struct.pack("HHHH", 40, columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)
        self._output = b""
        self._has_ended = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process_id, 15)
            self.wait()
        os.close(self._descriptor)

    @property
    def raw_output(self) -> str:
        """Everything that the command has written, with escape codes."""
        return self._output.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """Visible lines without escape codes; each state of a progress bar is a line."""
        text = self.raw_output.replace(_ERASE_LINE, "\n")
        lines = _ESCAPE.sub("", text).replace("\r", "\n").split("\n")
        return [line for line in lines if line.strip()]

    def press_ctrl_c(self) -> None:
        """Send Ctrl-C: the terminal sends SIGINT to the whole foreground process group."""
        os.write(self._descriptor, b"\x03")

    def read_until(self, text: str, timeout_s: float = 150) -> None:
        """Read output until it contains a text.

        Raises:
            AssertionError: The command ended before, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines):
            assert self._read() and time.monotonic() < deadline, "\n".join(self.lines)

    def wait(self) -> int:
        """Read the output until the command ends, and return its exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self._process_id, 0)
        self._has_ended = True
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Read the next block of output; False at its end."""
        try:
            block = os.read(self._descriptor, 65536)
        except OSError:  # all processes have closed the terminal
            return False
        self._output += block
        return bool(block)


def find_long_lines(lines: list[str], columns: int = 60) -> list[str]:
    """Return the lines that are wider than a terminal and can be wrapped.

    Lines with a single word, such as a path, and commands to copy are excluded.
    """
    return [
        line
        for line in lines
        if len(line) > columns
        and len(line.split()) > 1
        and not re.match(r"\s+(aligner|sbatch|cd) ", line)
        and not re.match(r"[a-z ]+: /\S+$", line)
    ]
