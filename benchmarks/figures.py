"""Figures for the docs: small, and the same for the same numbers."""

from __future__ import annotations

from typing import Any


def vector_plots() -> Any:
    """matplotlib's pyplot, to be saved as SVG. Raises ImportError without the figures extra."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "aligner"}
    from matplotlib import pyplot

    return pyplot
