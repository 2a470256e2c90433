"""Whose a run is: the trainer's that came last. One before it that was stopped, and goes on, writes
nothing more into it.

The run directory's file `claim` counts who has taken the run, and says who did last. Who takes the
run has the file locked alone, and who writes has it locked together with others: to look whose the
run is, and to write, are one step.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aligner.data.checksums import DamagedError, read_sealed, sealed
from aligner.errors import AlignerError, ConfigError
from aligner.files import NO_LOCKS, Holder
from aligner.paths import run_paths
from aligner.schema import Config

_log = logging.getLogger(__name__)
_RECORD_BYTES = 512  # of one size, so that one write replaces all of it
_POLL_S, _TELL_AFTER_S = 0.05, 1.0
_own: tuple[Config, Mapping[str, Any]] | None = None


def take_run(config: Config) -> dict[str, Any]:
    """Take the run, once nobody writes into it: its `attempt`, how often it was taken before, and
    this process as `holder`.

    Raises ConfigError where somebody is in the middle of writing, and stays so.
    """
    file = run_paths(config).claim
    file.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as stream:
        _lock(config, stream.fileno(), fcntl.LOCK_EX)
        try:
            attempt = read_sealed(file)["attempt"] + 1 if os.fstat(stream.fileno()).st_size else 0
        except DamagedError as error:
            raise AlignerError(
                f"{error}. The file names the trainer that may write to the run (fencing). Make"
                " sure that no process of the run is alive, then delete the file"
            ) from error
        record = {"attempt": attempt, "holder": str(Holder.here())}
        os.pwrite(
            stream.fileno(), sealed(json.dumps(record).ljust(_RECORD_BYTES) + "\n").encode(), 0
        )
        os.fsync(stream.fileno())
    return record


def write_as(config: Config, record: Mapping[str, Any]) -> None:
    """Have this process write into the run while `claim` says so much of what `take_run` gave to
    whoever took it."""
    global _own
    _own = config, record


@contextmanager
def writing() -> Iterator[None]:
    """Around all that changes what a run goes on from: nobody takes the run meanwhile.

    Raises AlignerError where somebody else has taken it before. A process that was never told
    `write_as` may write.
    """
    if _own is None:
        yield
        return
    config, record = _own
    file = run_paths(config).claim
    with file.open("rb") as stream:
        _lock(config, stream.fileno(), fcntl.LOCK_SH)
        found = read_sealed(file)
        if found != {**found, **record}:
            raise AlignerError(
                f"{file}: attempt {found['attempt']} ({found['holder']}) has taken over the run;"
                f" attempt {record['attempt']} may no longer write to the run"
            )
        yield


def _lock(config: Config, descriptor: int, kind: int) -> None:
    """Wait for the lock; on a filesystem without any, of which the launch tells, what the file says
    has to do.

    The wait covers `cluster.stop_timeout_s`, after which what a killed launcher has left on its
    machine is killed.
    """
    begun, patience_s, tell_at = time.monotonic(), 2 * config.cluster.stop_timeout_s, _TELL_AFTER_S
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            if not isinstance(error, BlockingIOError):
                raise
        if (waited := time.monotonic() - begun) > tell_at:
            found = read_sealed(run_paths(config).claim)
            problem = (
                f"run.dir={config.run.dir}: attempt {found['attempt']} ({found['holder']}) is"
                " writing to the run"
            )
            if waited > patience_s:
                raise ConfigError(
                    f"{problem} and has not finished within {waited:.0f} s; the process may be"
                    " suspended: kill the process, then launch again"
                )
            _log.warning("%s; waiting up to %g s until the write is finished", problem, patience_s)
            tell_at = patience_s
        time.sleep(_POLL_S)
