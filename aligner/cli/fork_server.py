"""Ranks as forks of a process that has imported for all of them: `python -m aligner.cli.fork_server
CONFIG ROLE…`.

To import torch and megatron-core takes each rank seconds of a processor, and hundreds of MiB. A
request is a line of JSON on the input, of `aligner.launcher.forks`; the answer is the rank's
process id. The end of the input ends this process.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import setproctitle

from aligner.cli import run as run_command
from aligner.cli.command_table import load
from aligner.cli.rank_processes import ROLES, stored_config
from aligner.errors import AlignerError
from aligner.exit_codes import STOP_SIGNAL

_OF_SERVING = ("pytriton.triton", "tritonclient.grpc")
"""Modules that ranks import when they serve or send requests."""


def serve(config: Path, roles: list[str]) -> None:
    """Fork ranks as they are asked for: the one that prepares the run before all is imported.
    Returns in each rank."""
    gc.disable()  # looking for garbage takes a fifth of the time of imports, and there is none
    load(ROLES["prepare"])
    with suppress(AlignerError):  # the ranks will say it
        stored_config(config)
    if _is_fork():
        return
    for role in roles:
        load(ROLES[role])
    for module in _OF_SERVING if len(roles) > 1 else ():
        with suppress(ImportError):  # without servers there is no need of some
            importlib.import_module(module)
    gc.freeze()  # a collection would write to, and so copy, the pages that are shared
    while not _is_fork():
        pass


def _is_fork() -> bool:
    """Fork a rank for the next request; true in it, false here."""
    if not (line := sys.stdin.readline()):
        os._exit(0)
    if (pid := _fork()) is not None:
        # Told by this process: the rank may be suspended from its first moment on.
        os.write(1, f"{pid}\n".encode())
        return False
    _become(json.loads(line))
    return True


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
    setproctitle(" ".join(["aligner.cli.fork_server", *sys.argv[1:]]))
    serve(Path(sys.argv[1]), sys.argv[2:])
    run_command()


if __name__ == "__main__":
    run()
