"""Small curves of runs for tables: the positions of a metric's points in an SVG image."""

from dataclasses import dataclass

from aligner.view.run_curves import Curve

WIDTH = 120
"""Width of the image in CSS pixels."""
HEIGHT = 28
"""Height of the image in CSS pixels."""
_MARGIN = 2


@dataclass(frozen=True)
class Sparkline:
    """A curve as text for the attribute `points` of an SVG polyline."""

    points: str
    first: float
    last: float
    lowest: float
    highest: float


def build_sparkline(curve: Curve | None) -> Sparkline | None:
    """Return a curve in the coordinates of the image; None for fewer than two points."""
    if curve is None or len(curve.values) < 2:
        return None
    first_step = curve.steps[0]
    lowest = min(curve.values)
    highest = max(curve.values)
    x_scale = (WIDTH - 2 * _MARGIN) / ((curve.steps[-1] - first_step) or 1)
    y_scale = (HEIGHT - 2 * _MARGIN) / ((highest - lowest) or 1)
    points = " ".join(
        f"{_MARGIN + (step - first_step) * x_scale:.1f},"
        f"{HEIGHT - _MARGIN - (value - lowest) * y_scale:.1f}"
        for step, value in zip(curve.steps, curve.values, strict=True)
    )
    return Sparkline(points, curve.values[0], curve.values[-1], lowest, highest)
