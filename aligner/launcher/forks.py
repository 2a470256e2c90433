"""The launcher's client of `aligner.cli.fork_server`.

On machines without GPUs, a rank is not started as a new program, but forked from a process that has
already imported its modules. This saves the import time of each rank.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

# Beginning of the commands that the fork server can run.
_PROGRAM = (sys.executable, "-m", "aligner")
# The server imports modules before it responds, which takes minutes on a busy machine.
_RESPONSE_TIMEOUT_S = 300.0
# Maximum suspension of a fork server, in seconds. After a longer suspension, ranks are started as
# new processes.
_SUSPENDED_S = 5.0
_POLL_S = 0.5
# Setting a process title, which `ps` shows, overwrites the command line in place. The padding makes
# the command line long enough for every title.
_TITLE_PADDING = " " * 1024


class AdoptedProcess:
    """A child process that another process started, with the interface of `subprocess.Popen`.

    The launcher adopts forked ranks because it is a child subreaper.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._exit_code is None:
            ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
            if ended_pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A process that forks ranks.

    The process that creates it must be a child subreaper, so that the forked ranks become its
    children.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the process, which imports the modules of every run and then waits for `set_up`.

        Args:
            environment: Environment variables that take effect when a process starts, and the start
                id of this process.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aligner.cli.fork_server", _TITLE_PADDING],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def set_up(self, config: Path, roles: Iterable[str], environment: Mapping[str, str]) -> None:
        """Make the process import the modules that the roles of a run need.

        Args:
            config: The run's `config.yaml`.
            roles: The run's roles without `prepare`.
            environment: Variables that libraries read when they are imported.
        """
        self._send({"config": str(config), "roles": [*roles], "environment": dict(environment)})

    def fork(
        self, role: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> AdoptedProcess | None:
        """Fork a rank in its own session.

        Args:
            role: Role of the rank.
            command: Command line of the rank.
            environment: All environment variables of the rank.
            log: File to which the rank's output is appended.

        Returns:
            The rank; None if the command belongs to another program, or if the server has exited or
            does not respond.
        """
        assert self._process.stdout is not None
        if tuple(command[: len(_PROGRAM)]) != _PROGRAM or self._process.poll() is not None:
            return None
        request = {
            "role": role,
            "arguments": [*command[len(_PROGRAM) :]],
            "environment": dict(environment),
            "log": str(log.absolute()),
        }
        self._send(request)
        if self._wait_for_response() and (response := self._process.stdout.readline()):
            return AdoptedProcess(int(response))
        self.close()
        return None

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message as one line of JSON; a server that has exited is ignored."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _wait_for_response(self) -> bool:
        """Return whether the server responds within `_RESPONSE_TIMEOUT_S`.

        The method returns False early if the server is suspended for `_SUSPENDED_S`.
        """
        responses = self._process.stdout
        assert responses is not None
        deadline = time.monotonic() + _RESPONSE_TIMEOUT_S
        suspended_s = 0.0
        server = psutil.Process(self._process.pid)
        while time.monotonic() < deadline and suspended_s < _SUSPENDED_S:
            if select.select([responses], [], [], _POLL_S)[0]:
                return True
            is_suspended = server.status() == psutil.STATUS_STOPPED
            suspended_s = suspended_s + _POLL_S if is_suspended else 0.0
        return False

    def close(self) -> None:
        """Kill the server. The forked ranks continue, because they are not its children."""
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.kill()
