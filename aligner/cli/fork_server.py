"""Ranks as forks of a process that imports for all of them: `python -m aligner.cli.fork_server`.

To import torch and megatron-core takes each rank seconds of a processor, and hundreds of MiB. The
input has a line of JSON each from `aligner.launcher.forks`: the run, which may follow some time
after the start, and then a request for each rank; the answer is the rank's process id. A request
waits only for the modules that its role needs. The end of the input ends this process.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import setproctitle

from aligner.cli import run as run_command
from aligner.cli.rank_processes import ROLES, stored_config
from aligner.errors import STOP_SIGNAL, AlignerError
from aligner.placement.roles import computes_on_devices
from aligner.schema import Config

_TITLE = "aligner.cli.fork_server"
_OF_SERVERS = "pytriton.triton"
"""What server ranks import when they start Triton."""


@dataclass
class _Imports:
    """Modules of a run's roles in the order of their import."""

    waiting: deque[str]
    """Modules that are not imported yet."""
    last: Mapping[str, str]
    """The last module that each role needs whose ranks need not wait for all of them."""

    def import_next(self) -> None:
        """Import the next module."""
        with suppress(ImportError):  # PyTriton is optional for a run without servers
            importlib.import_module(self.waiting[0])
        self.waiting.popleft()

    def import_for(self, role: str) -> None:
        """Import what a role still needs, which is everything unless it is in `last`."""
        while self.waiting and (role not in self.last or self.last[role] in self.waiting):
            self.import_next()


def _plan_imports(config: Config | None, roles: list[str]) -> _Imports:
    """Order the imports so that the ranks of a reward function need not wait for those of models:
    they start Triton on another core meanwhile."""
    modules = {role: ROLES[role].partition(":")[0] for role in ("prepare", *roles)}
    waiting, last = deque([modules["prepare"]]), {"prepare": modules["prepare"]}
    if config is not None and "reward" in roles and not computes_on_devices(config, "reward"):
        waiting += [modules["reward"], _OF_SERVERS]
        last["reward"] = _OF_SERVERS

    waiting += [modules[role] for role in roles]
    waiting += [_OF_SERVERS] if len(roles) > 1 else []
    return _Imports(deque(dict.fromkeys(waiting)), last)


def serve() -> None:
    """Fork ranks as they are requested. Returns in each rank."""
    gc.disable()  # looking for garbage takes a fifth of the time of imports, and there is none
    # Unbuffered, because `select` knows nothing of a request in a buffer.
    messages = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    run = _next_message(messages)
    os.environ.update(run["environment"])
    setproctitle(" ".join([_TITLE, run["config"], *run["roles"]]))
    config = None
    with suppress(AlignerError):  # the ranks will say it
        config = stored_config(Path(run["config"]))
    imports = _plan_imports(config, run["roles"])

    while True:
        if imports.waiting and not select.select([messages], [], [], 0)[0]:
            imports.import_next()
            continue
        request = _next_message(messages)
        imports.import_for(request["role"])
        # A collection would write to, and so copy, the pages that a rank shares with this process.
        gc.freeze()
        if (pid := _fork()) is None:
            _become(request)
            return
        # Reported by this process: the rank may be suspended from its first moment on.
        os.write(1, f"{pid}\n".encode())


def _next_message(messages: RawIOBase) -> dict[str, Any]:
    """Return the next line of the input; its end ends this process."""
    if not (line := messages.readline()):
        os._exit(0)
    return json.loads(line)


def _fork() -> int | None:
    """Fork a process that the launcher adopts.

    Returns:
        The process id here, once the process is the launcher's child; None in the process itself.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        # One read, not to the end: the forked process has the pipe open, and may be suspended.
        pid = int(os.read(reading, 32))
        os.close(reading)
        return pid
    own = os.getpid()
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    while os.getppid() == own:
        time.sleep(0.001)
    return None


def _become(request: dict[str, Any]) -> None:
    """Give this process what a start of its own would have given it."""
    gc.enable()
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (os.dup(log), 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.argv = ["aligner", *request["arguments"]]
    setproctitle(" ".join([*sys.argv, f"rank={os.environ['RANK']}"]))


def run() -> NoReturn:
    """Serve; in a rank, its command."""
    # Ranks inherit it: they must not die of the signal before they can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    # a title has the command line's place alone: by their environment processes are found
    os.environ["SPT_NOENV"] = "1"
    # finds that place: not once the environment differs
    setproctitle(_TITLE)
    serve()
    run_command()


if __name__ == "__main__":
    run()
