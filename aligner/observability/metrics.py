"""Writers and readers of a run's `metrics.jsonl` and `samples.jsonl`.

A resumed run truncates both files to its checkpoint. `FileFollower` reads a file while another
process appends to it.
"""

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

from aligner.data.fencing import fenced_write
from aligner.errors import AlignerError
from aligner.file_limits import parse_json
from aligner.files import append_to_file, write_file
from aligner.paths import RunPaths
from aligner.schema import LoggingConfig
from aligner.schema.renamed import with_current_metrics
from aligner.values import is_finite_number

Record = Mapping[str, float]
"""Metrics of one step by name. The record contains the step number as `step`, unless the step
number is passed separately."""

# Size of the end of a file that `read_newest_metrics` reads, in bytes.
_NEWEST_BYTES = 1 << 17
# Block size for reading a file, in bytes.
_CHUNK = 1 << 20
# Maximum time to close the sinks after SIGTERM, in seconds. It is shorter than the default of
# cluster.stop_timeout_s, after which the launcher kills the process.
_END_TIMEOUT_S = 8.0


class MetricsSink(Protocol):
    """A tracker that receives the metrics written to `metrics.jsonl`."""

    def write(self, step: int, record: Record) -> None:
        """Record the metrics of a step. A step that is already recorded stays unchanged."""

    def resume(self, records: Sequence[Record]) -> None:
        """Restore the state of a resumed run, so that the tracker has exactly these records.

        Each record contains its `step`.
        """

    def close(self, failed: bool) -> None:
        """Write out buffered metrics at the end of the run."""


class RunningChecksum:
    """Checksum of a growing file, stored in a second file as `<size> <checksum>` of the first
    `size` bytes.

    New bytes are on disk before the checksum covers them, and the checksum excludes bytes before
    they are truncated. The checksum therefore never covers bytes that the file lacks, even if the
    process is killed or the machine loses power.
    """

    def __init__(self, path: Path, file: Path) -> None:
        """Create the checksum of the file `path`. The checksum is stored in `file`."""
        self._path = path
        self._file = file
        self._digest = xxhash.xxh3_64()
        self._size = 0

    def verify(self) -> None:
        """Read the file, and compare it with its checksum, if there is one.

        Raises:
            AlignerError: If the file or its checksum is damaged.
        """
        if not self._file.exists():
            return
        stored = self._file.read_text(encoding="utf-8", errors="replace").split()
        if len(stored) != 2 or not stored[0].isdecimal():
            raise AlignerError(f"{self._file}: not a checksum; {self._remedy}")

        size = int(stored[0])
        checksum = stored[1]
        if self._size_on_disk() < size:
            difference = f"it has {self._size_on_disk()} bytes"
        else:
            self.restart(size)
            difference = f"they have {self._digest.hexdigest()}"
        if self._size != size or self._digest.hexdigest() != checksum:
            raise AlignerError(
                f"{self._path}: damaged: its first {size} bytes must have the checksum {checksum},"
                f" but {difference}; restore the file from a backup, or {self._remedy}"
            )

    def restart(self, size: int) -> None:
        """Compute the checksum of the first `size` bytes of the file anew, and store it."""
        self._digest = xxhash.xxh3_64()
        self._size = 0
        if size:
            with self._path.open("rb") as stream:
                while self._size < size and (chunk := stream.read(min(_CHUNK, size - self._size))):
                    self._add(chunk)
        self._store()

    def append(self, content: bytes) -> None:
        """Update the checksum with bytes that have been appended to the file and are on disk."""
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
    """Writer that appends the records of each step, with their `step`, to a JSON-lines file."""

    def __init__(self, path: Path, checksum: Path | None = None) -> None:
        """Create the writer, and the file's directory.

        Args:
            path: The JSON-lines file.
            checksum: File of the `RunningChecksum` of `path`; None writes no checksum.
        """
        self._path = path
        self._checksum = None if checksum is None else RunningChecksum(path, checksum)
        path.parent.mkdir(parents=True, exist_ok=True)

    @fenced_write()
    def write(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of a step in one write. The file exists afterwards, even if there are
        no records.

        Args:
            step: The training step.
            records: Records with JSON values.
        """
        lines = [
            json.dumps({"step": step, **record}, ensure_ascii=False, allow_nan=False) + "\n"
            for record in records
        ]
        content = "".join(lines).encode()
        append_to_file(self._path, content, to_disk=self._checksum is not None)
        if self._checksum is not None:
            self._checksum.append(content)

    @fenced_write()
    def truncate_after(self, step: int) -> None:
        """Delete the records of steps after `step`, and the unfinished line of a killed writer, in
        one truncation.

        Raises:
            AlignerError: If the file does not match its checksum, or a line is not a record.
        """
        if self._checksum is not None:
            self._checksum.verify()
        if not self._path.exists():
            return
        new_size = 0
        with self._path.open("rb") as file:
            for line in file:
                if (
                    not line.endswith(b"\n")
                    or _parse_record(line, self._path, new_size)["step"] > step
                ):
                    break
                new_size += len(line)
        # The checksum must exclude the bytes before they are truncated; see `RunningChecksum`.
        if self._checksum is not None:
            self._checksum.restart(new_size)
        os.truncate(self._path, new_size)


def _parse_record(
    line: bytes, path: Path, start: int, required_field: str = "step"
) -> dict[str, Any]:
    """Return the record of a line of a file.

    Args:
        line: The line.
        path: The file.
        start: Position of the line in the file, in bytes.
        required_field: Field that the record must have; a step must be a number.

    Raises:
        AlignerError: If the line is not a record; the error contains the line number.
    """
    try:
        record = parse_json(line)
    except ValueError:  # after a power failure, a file may contain zeros instead of its last bytes
        record = None
    value = record.get(required_field) if isinstance(record, dict) else None
    is_record = is_finite_number(value) if required_field == "step" else isinstance(value, str)
    if not is_record:
        number = path.read_bytes()[:start].count(b"\n") + 1
        raise AlignerError(
            f"{path}: line {number} is not a JSON object with a {required_field}; remove the line"
        )
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all complete records of a JSON-lines file; an empty list if the file is missing."""
    return FileFollower(path).read_new_records()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return each step's metrics in order, including amendments (`MetricsWriter.amend`)."""
    return merge_records([], read_records(path))


def read_newest_metrics(path: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps in the last 128 KiB of the file.

    Commands that read many runs use this function, because it is fast.
    """
    return merge_records([], FileFollower(path, newest_bytes=_NEWEST_BYTES).read_new_records())


def merge_records(
    steps: list[dict[str, float]], records: Sequence[dict[str, float]]
) -> list[dict[str, float]]:
    """Append records to the metrics of steps, and return `steps`, which is changed in place.

    A record of the last step is merged into it. A record of an earlier step, which a resumed run
    has trained again, replaces this step and all later steps. Metrics of older runs get their
    current names.

    Raises:
        AlignerError: If the value of a metric is not a number.
    """
    for record in map(with_current_metrics, records):
        for name, value in record.items():
            if not isinstance(value, int | float):
                raise AlignerError(
                    f"metrics.jsonl: step {record['step']}: {name:.80}={value!r:.80}: must be a"
                    " number; remove the line"
                )
        while steps and steps[-1]["step"] > record["step"]:
            steps.pop()
        if steps and steps[-1]["step"] == record["step"]:
            steps[-1] |= record
        else:
            steps.append(record)
    return steps


class FileFollower:
    """Reader of the records that another process appends to a JSON-lines file."""

    def __init__(
        self, path: Path, *, newest_bytes: int | None = None, required_field: str = "step"
    ) -> None:
        """Open a file, which need not exist yet.

        Args:
            path: The file.
            newest_bytes: Maximum number of bytes to read from the end of the existing file; an
                incomplete first line is skipped. None reads the whole file.
            required_field: Field that every record must have.
        """
        self._path = path
        self._required_field = required_field
        self._offset = 0
        if newest_bytes is not None and path.exists():
            with path.open("rb") as file:
                if start := max(0, file.seek(0, os.SEEK_END) - newest_bytes):
                    file.seek(start)
                    file.readline()
                    self._offset = file.tell()

    def read_new_records(self) -> list[dict[str, Any]]:
        """Return the records of the lines that were completed since the last call.

        Raises:
            AlignerError: If a line is not a record.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            # A resumed trainer truncates the file to its checkpoint: continue at the new end.
            self._offset = min(self._offset, file.seek(0, os.SEEK_END))
            file.seek(self._offset)
            block = file.read()
        records = []
        for line in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
            records.append(_parse_record(line, self._path, self._offset, self._required_field))
            self._offset += len(line)
        return records


def _to_finite_record(step: int, stats: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats. Raise AlignerError if a value is not finite."""
    record = {key: float(value) for key, value in stats.items()}
    for key, value in record.items():
        if not math.isfinite(value):
            raise AlignerError(
                f"step {step}: metric {key} is {value}, which is not finite; stopping the run"
            )
    return record


class MetricsWriter:
    """Writer that appends each step's metrics to `metrics.jsonl`, and passes them to sinks.

    The end of a `with` block closes the sinks.
    """

    def __init__(self, paths: RunPaths, sinks: Sequence[MetricsSink] = ()) -> None:
        self._path = paths.metrics
        self._sinks = sinks
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

    @fenced_write()
    def write(self, step: int, stats: Mapping[str, float]) -> None:
        """Record one step.

        Raises:
            AlignerError: If a value is not finite; nothing is written then.
        """
        record = _to_finite_record(step, stats)
        self._file.write(step, [record])
        for sink in self._sinks:
            sink.write(step, record)

    @fenced_write()
    def amend(self, step: int, stats: Mapping[str, float]) -> None:
        """Add metrics to the last step, on a separate line for readers that follow the file.

        Raises:
            AlignerError: If a value is not finite; nothing is written then.
        """
        self._file.write(step, [_to_finite_record(step, stats)])
        full_record = {
            key: value for key, value in read_metrics(self._path)[-1].items() if key != "step"
        }
        for sink in self._sinks:
            sink.write(step, full_record)

    @fenced_write()
    def truncate_after(self, step: int, *, amends: bool = False) -> None:
        """Delete the metrics of steps after `step`, also in the sinks.

        Args:
            step: The last step to keep.
            amends: Whether `step` will be amended. The sinks then receive this step with its
                amendment, because they do not change a recorded step.
        """
        self._file.truncate_after(step)
        records = [
            record for record in read_metrics(self._path) if not amends or record["step"] < step
        ]
        for sink in self._sinks:
            sink.resume(records)

    @fenced_write()
    def close(self, *, failed: bool = False) -> None:
        """Close the sinks, which write out their buffered metrics."""
        for sink in self._sinks:
            sink.close(failed)


@contextmanager
def recording(writer: MetricsWriter | None, settings: LoggingConfig) -> Iterator[None]:
    """Close the writer when the block exits or raises.

    With a tracker that buffers metrics, the writer is also closed at SIGTERM.
    """
    if writer is None:
        yield
        return

    def close_and_terminate(number: int, frame: FrameType | None) -> None:
        # Close in another thread: the signal may have interrupted a write of this thread, which
        # then cannot continue before the handler returns.
        closing = threading.Thread(target=writer.close, kwargs={"failed": True}, daemon=True)
        closing.start()
        closing.join(_END_TIMEOUT_S)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if settings.wandb.enabled or settings.mlflow.enabled:
        signal.signal(signal.SIGTERM, close_and_terminate)
    with writer:
        yield
