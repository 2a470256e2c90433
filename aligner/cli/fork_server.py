"""A process that imports the modules of ranks once, and forks the ranks of a run.

Without it, each rank would import torch and megatron-core itself, which takes seconds and hundreds
of MiB of memory. `aligner.launcher.forks` starts this process with `python -m
aligner.cli.fork_server`, and sends one line of JSON per message. The first message describes the
run, and may arrive some time after the process has started. Each further message requests a rank;
the response is the process id of the rank. A request waits only for the imports that its role
needs. The process exits at the end of its input.
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
from aligner.cli.rank_processes import ROLES, load_cached_config
from aligner.errors import STOP_SIGNAL, AlignerError
from aligner.placement.roles import computes_on_devices
from aligner.schema import Config

_TITLE = "aligner.cli.fork_server"
# Module that server ranks import when they start Triton.
_SERVER_MODULE = "pytriton.triton"


@dataclass
class _ImportQueue:
    """Modules of a run's roles in the order of their import."""

    waiting: deque[str]
    """Modules that have not been imported yet."""
    last: Mapping[str, str]
    """Last required module of each role that does not need all modules."""

    def import_next(self) -> None:
        """Import the next module."""
        with suppress(ImportError):  # PyTriton is optional for a run without servers
            importlib.import_module(self.waiting[0])
        self.waiting.popleft()

    def import_for(self, role: str) -> None:
        """Import the remaining modules of a role: up to its module in `last`, or all of them."""
        while self.waiting and (role not in self.last or self.last[role] in self.waiting):
            self.import_next()


def _plan_imports(config: Config | None, roles: list[str]) -> _ImportQueue:
    """Return the modules of a run's roles in the order of their import.

    The modules of a reward function come first, so that its ranks can start Triton on another core
    while the modules of the models are imported.

    Args:
        config: The run's configuration; None if it is invalid.
        roles: The run's roles without `prepare`.
    """
    modules = {role: ROLES[role].partition(":")[0] for role in ("prepare", *roles)}
    waiting = deque([modules["prepare"]])
    last = {"prepare": modules["prepare"]}
    if config is not None and "reward" in roles and not computes_on_devices(config, "reward"):
        waiting += [modules["reward"], _SERVER_MODULE]
        last["reward"] = _SERVER_MODULE

    waiting += [modules[role] for role in roles]
    waiting += [_SERVER_MODULE] if len(roles) > 1 else []
    return _ImportQueue(deque(dict.fromkeys(waiting)), last)


def serve() -> None:
    """Fork ranks on request. The function returns only in the forked ranks."""
    gc.disable()  # collections take a fifth of the import time, and find no garbage
    # Unbuffered, because `select` does not notice a request in a buffer.
    messages = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    run = _next_message(messages)
    os.environ.update(run["environment"])
    setproctitle(" ".join([_TITLE, run["config"], *run["roles"]]))
    config = None
    with suppress(AlignerError):  # the ranks report the error themselves
        config = load_cached_config(Path(run["config"]))
    imports = _plan_imports(config, run["roles"])

    while True:
        if imports.waiting and not select.select([messages], [], [], 0)[0]:
            imports.import_next()
            continue
        request = _next_message(messages)
        imports.import_for(request["role"])
        # Exclude all current objects from garbage collections in the ranks. A collection would
        # write to the memory pages that a rank shares with this process, and thereby copy them.
        gc.freeze()
        if (pid := _fork()) is None:
            _set_up_rank(request)
            return
        # This process reports the process id of the rank, because the rank may be suspended as soon
        # as it starts.
        os.write(1, f"{pid}\n".encode())


def _next_message(messages: RawIOBase) -> dict[str, Any]:
    """Return the next message; exit this process at the end of the input."""
    if not (line := messages.readline()):
        os._exit(0)
    return json.loads(line)


def _fork() -> int | None:
    """Fork a process that the launcher adopts.

    A double fork makes the new process an orphan, and the launcher, a child subreaper, its parent.

    Returns:
        In this process, the id of the new process, as soon as the launcher has adopted it; None in
        the new process.
    """
    read_end, write_end = os.pipe()
    intermediate_pid = os.fork()
    if intermediate_pid:
        os.close(write_end)
        os.waitpid(intermediate_pid, 0)
        # Do not read to the end of the pipe: the new process has the pipe open, and may be
        # suspended.
        pid = int(os.read(read_end, 32))
        os.close(read_end)
        return pid
    server_pid = os.getpid()
    if pid := os.fork():
        os.write(write_end, str(pid).encode())
        os._exit(0)
    os.close(read_end)
    os.close(write_end)
    # Wait until the intermediate process has exited, so that the launcher is the parent.
    while os.getppid() == server_pid:
        time.sleep(0.001)
    return None


def _set_up_rank(request: dict[str, Any]) -> None:
    """Give this process the session, environment, log and arguments of a newly started rank."""
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
    """Serve requests; in a forked rank, run its command."""
    # Ranks inherit the blocked signal, which would otherwise kill them before they handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    # Titles must not overwrite the environment, because the launcher reads the start id from it.
    os.environ["SPT_NOENV"] = "1"
    # The first call locates the command line in memory. This fails if the environment has changed.
    setproctitle(_TITLE)
    serve()
    run_command()


if __name__ == "__main__":
    run()
