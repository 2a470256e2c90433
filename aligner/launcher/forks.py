"""The launcher's side of `aligner.cli.fork_server`: ranks that are forked instead of started, on
machines without GPUs."""

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

_PROGRAM = (sys.executable, "-m", "aligner")
"""What a command begins with that can be forked."""
_ANSWER_S = 300.0
"""It imports before it answers, which takes minutes where the machine is busy enough."""
_SUSPENDED_S = 5.0
"""A fork server that is suspended for longer is not used any more: ranks then start by
themselves."""
_LOOK_S = 0.5
_ROOM_FOR_TITLES = " " * 1024
"""The title of a process, which `ps` shows, has the place of the command line that started it."""


class AdoptedProcess:
    """What `subprocess.Popen` is for its children, for a child that another process has left to
    this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        """A signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A process that forks ranks.

    This process must be a child subreaper: it gets the ranks as its children.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the process, which imports what every run needs and then waits for `set_up`.

        Args:
            environment: Variables that are read when a process starts, and the mark of the launch.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aligner.cli.fork_server", _ROOM_FOR_TITLES],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def set_up(self, config: Path, roles: Iterable[str], environment: Mapping[str, str]) -> None:
        """Have the process import what the ranks of a run's roles need.

        Args:
            config: The run's `config.yaml`.
            roles: The run's roles without `prepare`.
            environment: Variables that libraries read when they are imported.
        """
        self._send({"config": str(config), "roles": [*roles], "environment": dict(environment)})

    def fork(
        self, role: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> AdoptedProcess | None:
        """Fork a rank with this command and environment, in a session of its own, its output
        appended to `log`.

        Returns:
            The rank; None if the command is another program's, or if the server has exited or does
            not answer.
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
        if self._answers() and (answer := self._process.stdout.readline()):
            return AdoptedProcess(int(answer))
        self.close()
        return None

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _answers(self) -> bool:
        """Wait for an answer; False if there is none in time, or if the server is suspended."""
        answers = self._process.stdout
        assert answers is not None
        deadline = time.monotonic() + _ANSWER_S
        suspended_s = 0.0
        server = psutil.Process(self._process.pid)
        while time.monotonic() < deadline and suspended_s < _SUSPENDED_S:
            if select.select([answers], [], [], _LOOK_S)[0]:
                return True
            is_suspended = server.status() == psutil.STATUS_STOPPED
            suspended_s = suspended_s + _LOOK_S if is_suspended else 0.0
        return False

    def close(self) -> None:
        """End the server; its ranks are not its children."""
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.kill()
