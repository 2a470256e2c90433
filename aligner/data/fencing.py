"""Fencing of a run directory: only the trainer that claimed the run last may write to it.

An older trainer that was suspended and continues later writes nothing more.

The file `claim` of the run directory contains a counter, the attempt, and the process that
incremented it last. A trainer that claims the run holds an exclusive lock on the file; a process
that writes to the run holds a shared lock. Therefore checking the claim and writing are one atomic
step.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aligner.data.checksums import DamagedError, read_sealed, seal
from aligner.errors import AlignerError, ConfigError
from aligner.files import NO_LOCKS, LockHolder
from aligner.paths import get_run_paths
from aligner.schema import Config

_log = logging.getLogger(__name__)
# All records have the same size, so that one write replaces the whole record.
_RECORD_BYTES = 512
_POLL_S = 0.05
_WARNING_AFTER_S = 1.0
# Configuration and claim record that allow this process to write; None disables fencing.
_writer_claim: tuple[Config, Mapping[str, Any]] | None = None


def claim_run(config: Config) -> dict[str, Any]:
    """Claim the run for this process as soon as no other process writes to it.

    Returns:
        The record in the file `claim`: `attempt`, the number of earlier claims, and `holder`, this
        process.

    Raises:
        ConfigError: Another process is in the middle of a write and does not finish it in time.
        AlignerError: The file `claim` is damaged.
    """
    file = get_run_paths(config).claim
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
        record = {"attempt": attempt, "holder": str(LockHolder.for_this_process())}
        os.pwrite(stream.fileno(), seal(json.dumps(record).ljust(_RECORD_BYTES) + "\n").encode(), 0)
        os.fsync(stream.fileno())
    return record


def set_writer_claim(config: Config, record: Mapping[str, Any]) -> None:
    """Allow this process to write to the run only while the file `claim` contains this record.

    Args:
        config: The run's configuration.
        record: The record that `claim_run` returned to the trainer, or some of its entries.
    """
    global _writer_claim
    _writer_claim = config, record


@contextmanager
def fenced_write() -> Iterator[None]:
    """Hold the claim lock while the files that a run resumes from are written.

    No other process can take over the run during the write.

    A process that did not call `set_writer_claim` may always write.

    Raises:
        AlignerError: Another process has claimed the run.
    """
    if _writer_claim is None:
        yield
        return
    config, record = _writer_claim
    file = get_run_paths(config).claim
    with file.open("rb") as stream:
        _lock(config, stream.fileno(), fcntl.LOCK_SH)
        current = read_sealed(file)
        # `set_writer_claim` may have received only some entries of the record.
        if current != {**current, **record}:
            raise AlignerError(
                f"{file}: attempt {current['attempt']} ({current['holder']}) has taken over the"
                f" run; attempt {record['attempt']} may no longer write to the run"
            )
        yield


def _lock(config: Config, descriptor: int, kind: int) -> None:
    """Wait for a lock on the file `claim`.

    On a filesystem without locks, about which the launch warns, return without a lock: then only
    the content of the file protects the run. The wait lasts twice `cluster.stop_timeout_s`, because
    processes of a killed launcher on its machine are killed within `cluster.stop_timeout_s`.

    Raises:
        ConfigError: Another process holds the lock for longer than this timeout.
    """
    start = time.monotonic()
    timeout_s = 2 * config.cluster.stop_timeout_s
    next_message_s = _WARNING_AFTER_S
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            if not isinstance(error, BlockingIOError):
                raise
        if (waited := time.monotonic() - start) > next_message_s:
            current = read_sealed(get_run_paths(config).claim)
            problem = (
                f"run.dir={config.run.dir}: attempt {current['attempt']} ({current['holder']}) is"
                " writing to the run"
            )
            if waited > timeout_s:
                raise ConfigError(
                    f"{problem} and has not finished within {waited:.0f} s; the process may be"
                    " suspended: kill the process, then launch again"
                )
            _log.warning("%s; waiting up to %g s until the write is finished", problem, timeout_s)
            # The next message is the error.
            next_message_s = timeout_s
        time.sleep(_POLL_S)
