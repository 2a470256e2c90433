"""Small curves of runs for tables: few points of a metric, and their positions in an SVG image."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH = 120
"""Width of the image in CSS pixels."""
HEIGHT = 28
"""Height of the image in CSS pixels."""
_MARGIN = 2
_MAX_POINTS = 100
# Files up to this size are read completely, in bytes.
_COMPLETE_BYTES = 200_000


@dataclass(frozen=True)
class Sparkline:
    """A curve as text for the attribute `points` of an SVG polyline."""

    points: str
    first: float
    last: float
    lowest: float
    highest: float


def read_curve(metrics_file: Path, metric: str) -> list[tuple[float, float]]:
    """Return some steps of a run and the values of a metric, in the order of the steps.

    The time of the call does not depend on the number of steps: of a long file, only lines at
    equal distances in bytes are read.

    Args:
        metrics_file: The file `metrics.jsonl` of the run.
        metric: Name of the metric.
    """
    curve = []
    for line in _read_some_lines(metrics_file):
        try:
            record = json.loads(line)
        except ValueError:  # the run is writing the last line
            continue
        value = record.get(metric)
        if isinstance(value, int | float) and record.get("step", 0) > 0:
            curve.append((float(record["step"]), float(value)))
    stride = -(-len(curve) // _MAX_POINTS) or 1
    return [*curve[:-1:stride], *curve[-1:]]


def build_sparkline(curve: Sequence[tuple[float, float]]) -> Sparkline | None:
    """Return a curve in the coordinates of the image; None for fewer than two points."""
    if len(curve) < 2:
        return None
    steps, values = zip(*curve, strict=True)
    lowest = min(values)
    highest = max(values)
    x_scale = (WIDTH - 2 * _MARGIN) / ((steps[-1] - steps[0]) or 1)
    y_scale = (HEIGHT - 2 * _MARGIN) / ((highest - lowest) or 1)
    points = " ".join(
        f"{_MARGIN + (step - steps[0]) * x_scale:.1f},"
        f"{HEIGHT - _MARGIN - (value - lowest) * y_scale:.1f}"
        for step, value in curve
    )
    return Sparkline(points, values[0], values[-1], lowest, highest)


def _read_some_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a small file, or some lines of a large file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            if size <= _COMPLETE_BYTES:
                yield from content
                return
            yield content.readline()
            for number in range(1, _MAX_POINTS):
                content.seek(size * number // _MAX_POINTS)
                content.readline()  # the position is in the middle of a line
                yield content.readline()
    except FileNotFoundError:  # no step has been recorded yet
        return
