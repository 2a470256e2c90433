"""Curves of a run for the list of runs: a limited number of points of some metrics.

The time to read a curve does not depend on the number of steps of the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.file_limits import parse_json
from aligner.observability.metrics import merge_records

MAX_POINTS = 200
"""Maximum number of points of a curve."""
# Files up to this size are read completely, in bytes.
_COMPLETE_BYTES = 200_000


@dataclass(frozen=True)
class Curve:
    """Points of a metric in the order of the steps."""

    steps: Sequence[float]
    seconds: Sequence[float]
    """Training time from the start of the first step to the end of each step. If only some steps of
    a long run are read, each of them stands for the steps between it and the one before."""
    values: Sequence[float]


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run by metric."""

    curves: Mapping[str, Curve]
    """The curves of the requested metrics that the run measured."""
    names: frozenset[str]
    """Names of all metrics in the records that were read."""


def read_curves(metrics_file: Path, metrics: Sequence[str]) -> RunCurves:
    """Return the curves of some metrics of a run, without the evaluation before the first step.

    Of a long file, only lines at equal distances in bytes are read.

    Args:
        metrics_file: The file `metrics.jsonl` of the run; it may be missing.
        metrics: Names of the metrics.
    """
    parsed = []
    for line in _read_some_lines(metrics_file):
        try:
            record = parse_json(line)
        except ValueError:  # the run is writing the last line
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int | float):
            parsed.append(record)
    records = [record for record in merge_records([], parsed) if record["step"] > 0]
    names = frozenset(name for record in records for name in record) - {"step"}

    seconds = []
    total = 0.0
    previous_step = 0.0
    for record in records:
        total += record.get("time/step", 0.0) * (record["step"] - previous_step)
        seconds.append(total)
        previous_step = record["step"]

    curves = {
        metric: _build_curve(records, seconds, metric) for metric in metrics if metric in names
    }
    return RunCurves(curves, names)


def _build_curve(
    records: Sequence[Mapping[str, float]], seconds: Sequence[float], metric: str
) -> Curve:
    points = [
        (record["step"], time, record[metric])
        for record, time in zip(records, seconds, strict=True)
        if metric in record
    ]
    stride = -(-len(points) // MAX_POINTS)
    # The last point is the newest value, which the list of runs shows too.
    thinned = [*points[: len(points) - 1 : stride], points[-1]][-MAX_POINTS:]
    return Curve(*zip(*thinned, strict=True))


def _read_some_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a small file, or some lines of a large file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            if size <= _COMPLETE_BYTES:
                yield from content
                return
            yield content.readline()
            for number in range(1, MAX_POINTS):
                content.seek(size * number // MAX_POINTS)
                content.readline()  # the position is in the middle of a line
                yield content.readline()
    except FileNotFoundError:  # no step has been recorded yet
        return
