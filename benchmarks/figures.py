"""Helpers for results of benchmarks: ratios of paired times, and reproducible SVG plots."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def paired(name: str, above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of the ratios of paired measurements, under `name`."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return {name: median(ratios), f"{name}_least": min(ratios), f"{name}_most": max(ratios)}


def vector_plots() -> Any:
    """Return matplotlib's pyplot, configured for reproducible SVG files.

    Raises ImportError if the figures extra is not installed.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "aligner"}
    from matplotlib import pyplot

    return pyplot
