"""The tools `python` and `bash`, which run programs of the policy in a sandbox."""

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.agents.sandboxes import python_program as python_program
from aligner.agents.sandboxes.creation import create_sandbox
from aligner.agents.sandboxes.sandbox import ExecResult, Sandbox, SandboxSettings
from aligner.agents.tool_protocol import ToolFailed

# maximum number of bytes of a character in UTF-8
_BYTES_PER_CHARACTER = 4
# Redirects the program's standard error to its standard output, so that their order is kept.
_MERGE_OUTPUTS = 'exec "$@" 2>&1'
# -s: no user site packages; -B: no .pyc files; -u: a killed program loses no output
_PYTHON = ("python3", "-s", "-B", "-u", "-c")


@dataclass(frozen=True)
class PythonTool:
    """The tool `python`: each program runs in a sandbox of its own, without earlier state."""

    settings: SandboxSettings
    max_characters: int
    """Size of the output above which only its beginning and its end are returned."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Run the program `code`, and return its output and a description of its exit.

        The description is empty after a normal exit. The result may exceed `max_characters`; the
        caller shortens it.
        """
        code = _get_argument(arguments, "code")
        command = [*_PYTHON, Path(python_program.__file__).read_text()]
        async with await create_sandbox(settings=self.settings) as sandbox:
            result = await sandbox.exec(
                ["sh", "-c", _MERGE_OUTPUTS, "sh", *command],
                stdin=code,
                timeout_s=timeout_s,
                max_output_bytes=2 * _BYTES_PER_CHARACTER * self.max_characters,
            )
        # after an exception, which has code 1, the output contains its traceback
        return _format_result(result, (0, 1), timeout_s, self.settings.limits.cpu_s)


@dataclass(frozen=True)
class BashTool:
    """The tool `bash`: the commands of an episode run in one sandbox, which keeps their files."""

    get_sandbox: Callable[[], Awaitable[Sandbox]]
    """Function that returns the episode's sandbox, and starts it at the first call."""
    cpu_s: int
    """CPU limit of a process in seconds."""
    max_characters: int
    """Size of the output above which only its beginning and its end are returned."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Run `command`, and return its output and a description of its exit.

        The description is empty after the exit code 0.
        """
        command = _get_argument(arguments, "command")
        sandbox = await self.get_sandbox()
        result = await sandbox.exec(
            ["sh", "-c", _MERGE_OUTPUTS, "sh", "bash", "-c", command],
            timeout_s=timeout_s,
            max_output_bytes=2 * _BYTES_PER_CHARACTER * self.max_characters,
        )
        return _format_result(result, (0,), timeout_s, self.cpu_s)


def _get_argument(arguments: dict[str, Any], name: str) -> str:
    """Return the only argument of a call. Raises ToolFailed if there are others."""
    if {*arguments} != {name} or not isinstance(arguments[name], str):
        raise ToolFailed(f"wrong arguments: it takes `{name}`, a text, alone")
    return str(arguments[name])


def _format_result(
    result: ExecResult, quiet_codes: tuple[int, ...], timeout_s: float, cpu_s: int
) -> str:
    """Return the output of a program, followed by a description of an unusual exit in brackets."""
    # the standard error contains only messages of the sandbox itself
    printed = result.stdout.rstrip() + f"\n{result.stderr}".rstrip()
    number = result.exit_code - 128
    description = ""
    if result.timed_out:
        description = f"[ended after {timeout_s:g} s]"
    elif number == signal.SIGXCPU:
        description = f"[ended after {cpu_s} s of processor time]"
    elif 0 < number < signal.NSIG:
        description = f"[killed by {signal.Signals(number).name}]"
    elif result.exit_code not in quiet_codes:
        description = f"[exit code {result.exit_code}]"
    return "\n".join(filter(None, (printed, description))) or "[nothing was printed]"
