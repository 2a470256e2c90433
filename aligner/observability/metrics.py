"""A run's `metrics.jsonl` and `samples.jsonl`: writing, cutting back on resume, reading,
following."""

import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import xxhash

from aligner.data.claim import writing
from aligner.errors import AlignerError
from aligner.files import append, write_file
from aligner.paths import RunPaths
from aligner.schema import LoggingConfig
from aligner.schema.renamed import with_current_metrics

Record = Mapping[str, float]
"""A step's metrics by name; where it stands for itself, with its `step`."""

_NEWEST_BYTES = 1 << 17
_CHUNK = 1 << 20
_END_TIMEOUT_S = 8.0  # below cluster.stop_timeout_s by default: after that the launcher kills


class MetricsSink(Protocol):
    """Takes the metrics that `metrics.jsonl` has got."""

    def write(self, step: int, record: Record) -> None:
        """Take the metrics of a step; one that it has is not taken again."""

    def resume(self, kept: Sequence[Record]) -> None:
        """The run goes on after these records, each with its `step`: hold those, and nothing of
        later steps."""

    def close(self, failed: bool) -> None:
        """The run has ended; write out what is held back."""


class RunningChecksum:
    """The checksum of a file that grows, in a second file: `<size> <checksum>`, of the file's first
    `size` bytes.

    The second file never covers more than the first file contains, in whatever moment the process
    is killed or the machine loses power: bytes are on disk before they are covered, and no longer
    covered before they are cut off.
    """

    def __init__(self, path: Path, file: Path) -> None:
        """The checksum of `path`, stored in `file`."""
        self._path, self._file = path, file
        self._digest = xxhash.xxh3_64()
        self._size = 0

    def verify(self) -> None:
        """Read the file, and compare it with its checksum, if there is one.

        Raises:
            AlignerError: The file, or its checksum, is damaged.
        """
        if not self._file.exists():
            return
        stored = self._file.read_text(encoding="utf-8", errors="replace").split()
        if len(stored) != 2 or not stored[0].isdecimal():
            raise AlignerError(f"{self._file}: not a checksum; {self._remedy}")

        size, checksum = int(stored[0]), stored[1]
        if self._size_on_disk() < size:
            found = f"it has {self._size_on_disk()} bytes"
        else:
            self.restart(size)
            found = f"they have {self._digest.hexdigest()}"
        if self._size != size or self._digest.hexdigest() != checksum:
            raise AlignerError(
                f"{self._path}: damaged: its first {size} bytes must have the checksum {checksum},"
                f" but {found}; restore the file from a backup, or {self._remedy}"
            )

    def restart(self, size: int) -> None:
        """Cover the first `size` bytes of the file as they are now."""
        self._digest, self._size = xxhash.xxh3_64(), 0
        if size:
            with self._path.open("rb") as stream:
                while self._size < size and (chunk := stream.read(min(_CHUNK, size - self._size))):
                    self._add(chunk)
        self._store()

    def append(self, content: bytes) -> None:
        """Cover bytes that were just appended to the file, and are on disk."""
        if self._size + len(content) != self._size_on_disk():
            # Another process appended to the file, or an unfinished line preceded these bytes.
            self.restart(self._size_on_disk())
            return
        self._add(content)
        self._store()

    def _add(self, content: bytes) -> None:
        self._digest.update(content)
        self._size += len(content)

    def _store(self) -> None:
        write_file(self._file, f"{self._size} {self._digest.hexdigest()}\n")

    def _size_on_disk(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    @property
    def _remedy(self) -> str:
        return f"delete {self._file.name} to use the file as it is"


class RecordWriter:
    """Appends the records of each step to a JSON-lines file; each gets its `step`."""

    def __init__(self, path: Path, checksum: Path | None = None) -> None:
        """`checksum` is the file of the records' `RunningChecksum`; None writes none."""
        self._path = path
        self._checksum = None if checksum is None else RunningChecksum(path, checksum)
        path.parent.mkdir(parents=True, exist_ok=True)

    @writing()
    def write(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Record a step's, JSON values all, at once; the file is there from then on, also where a
        step has none."""
        lines = [
            json.dumps({"step": step, **record}, ensure_ascii=False, allow_nan=False) + "\n"
            for record in records
        ]
        content = "".join(lines).encode()
        append(self._path, content, to_disk=self._checksum is not None)
        if self._checksum is not None:
            self._checksum.append(content)

    @writing()
    def truncate_after(self, step: int) -> None:
        """Drop the records of steps after `step`, and what a killed writer left unfinished: one
        truncation, to a prefix.

        Raises AlignerError if the file does not match its checksum."""
        if self._checksum is not None:
            self._checksum.verify()
        if not self._path.exists():
            return
        kept = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or _record(line, self._path, kept)["step"] > step:
                    break
                kept += len(line)
        if self._checksum is not None:
            self._checksum.restart(kept)
        os.truncate(self._path, kept)


def _record(line: bytes, path: Path, start: int) -> dict[str, Any]:
    """What a line says that begins at this byte of the file. Raises AlignerError, naming it, for
    what no writer wrote."""
    try:
        record = json.loads(line)
    except ValueError:  # a machine that went down may leave zeros for what it had not yet written
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), (int, float)):
        number = path.read_bytes()[:start].count(b"\n") + 1
        raise AlignerError(
            f"{path}: line {number} is not a JSON object with a step; remove the line"
        )
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a JSON-lines file; none when there is no file."""
    return FileFollower(path).new_records()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every step's metrics, in order, with what was added to it (`MetricsWriter.amend`)."""
    return with_records([], read_records(path))


def read_newest_metrics(path: Path) -> list[dict[str, float]]:
    """Those of the last steps, as many as the file's end has; for who reads many runs at a time."""
    return with_records([], FileFollower(path, newest_bytes=_NEWEST_BYTES).new_records())


def with_records(
    steps: list[dict[str, float]], records: Sequence[dict[str, float]]
) -> list[dict[str, float]]:
    """Metrics by step, and what was read behind them: more of the last step, further steps, or
    steps that were done again. Metrics of older runs get their present names."""
    for record in map(with_current_metrics, records):
        while steps and steps[-1]["step"] > record["step"]:
            steps.pop()
        if steps and steps[-1]["step"] == record["step"]:
            steps[-1] |= record
        else:
            steps.append(record)
    return steps


class FileFollower:
    """Reads the records that another process appends to a JSON-lines file."""

    def __init__(self, path: Path, *, newest_bytes: int | None = None) -> None:
        """Begins with the first line that begins among the last so many bytes; with the file's
        first if not given."""
        self._path, self._offset = path, 0
        if newest_bytes is not None and path.exists():
            with path.open("rb") as file:
                if start := max(0, file.seek(0, os.SEEK_END) - newest_bytes):
                    file.seek(start)
                    file.readline()
                    self._offset = file.tell()

    def new_records(self) -> list[dict[str, Any]]:
        """The lines completed since the last call. Raises AlignerError for one that is no
        record."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            # A resumed trainer cuts the file back to its checkpoint: follow it there.
            self._offset = min(self._offset, file.seek(0, os.SEEK_END))
            file.seek(self._offset)
            block = file.read()
        records = []
        for line in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
            records.append(_record(line, self._path, self._offset))
            self._offset += len(line)
        return records


def _finite(step: int, stats: Mapping[str, float]) -> dict[str, float]:
    record = {key: float(value) for key, value in stats.items()}
    for key, value in record.items():
        if not math.isfinite(value):
            raise AlignerError(
                f"step {step}: metric {key} is {value}, which is not finite; stopping the run"
            )
    return record


class MetricsWriter:
    """Appends each step's metrics to `metrics.jsonl`, and hands them to sinks; the end of a `with`
    block closes those."""

    def __init__(self, paths: RunPaths, sinks: Sequence[MetricsSink] = ()) -> None:
        self._path, self._sinks = paths.metrics, sinks
        self._file = RecordWriter(paths.metrics, paths.metrics_checksum)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    @writing()
    def write(self, step: int, stats: Mapping[str, float]) -> None:
        """Record one step. Raises AlignerError, before anything is written, for a value that is not
        finite."""
        record = _finite(step, stats)
        self._file.write(step, [record])
        for sink in self._sinks:
            sink.write(step, record)

    @writing()
    def amend(self, step: int, stats: Mapping[str, float]) -> None:
        """Add to the last step, on a line of its own for who follows the file. Raises as `write`
        does."""
        self._file.write(step, [_finite(step, stats)])
        whole = {key: value for key, value in read_metrics(self._path)[-1].items() if key != "step"}
        for sink in self._sinks:
            sink.write(step, whole)

    @writing()
    def truncate_after(self, step: int, *, amends: bool = False) -> None:
        """Drop what was recorded after `step`, in the sinks too; one to be amended they get then,
        as a whole."""
        self._file.truncate_after(step)
        kept = [
            record for record in read_metrics(self._path) if not amends or record["step"] < step
        ]
        for sink in self._sinks:
            sink.resume(kept)

    @writing()
    def close(self, *, failed: bool = False) -> None:
        """Have the sinks write out what they still hold."""
        for sink in self._sinks:
            sink.close(failed)


@contextmanager
def recording(writer: MetricsWriter | None, settings: LoggingConfig) -> Iterator[None]:
    """Close the writer at the end of a run, however it ends; for what a tracker holds back, also at
    SIGTERM."""
    if writer is None:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        # In a thread: this one may have been interrupted in the middle of a write.
        closing = threading.Thread(target=writer.close, kwargs={"failed": True}, daemon=True)
        closing.start()
        closing.join(_END_TIMEOUT_S)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if settings.wandb.enabled or settings.mlflow.enabled:
        signal.signal(signal.SIGTERM, end)
    with writer:
        yield
