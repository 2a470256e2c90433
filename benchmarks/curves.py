"""Plot a run's training reward, held-out score, win rate and KL over its steps in one figure.

python -m benchmarks.curves RUN FILE.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths
from benchmarks.figures import vector_plots

CURVES = {
    "reward/mean": "training reward",
    "eval/score": "held-out score",
    "eval/win_rate": "win rate vs. initial policy",
    "kl/reference": "KL (nats per response)",
}


def draw(metrics: list[dict[str, float]], file: Path) -> None:
    """Plot each metric that the run has over its steps, evaluation metrics with 95% intervals."""
    names = [name for name in CURVES if any(name in step for step in metrics)]
    figure, plots = vector_plots().subplots(
        1, len(names), figsize=(3.4 * len(names), 3), squeeze=False
    )
    for axes, name in zip(plots[0], names, strict=True):
        points = [step for step in metrics if name in step]
        steps = [step["step"] for step in points]
        axes.plot(steps, [step[name] for step in points], marker="." if len(points) > 5 else "o")
        if f"{name}_low" in points[0]:
            bounds = ([step[f"{name}_{end}"] for step in points] for end in ("low", "high"))
            axes.fill_between(steps, *bounds, alpha=0.15)
        axes.set(xlabel="step", title=CURVES[name])
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "figure",
        type=Path,
        metavar="FILE.svg",
        help="figure to write; requires matplotlib (the figures extra)",
    )
    parsed = parser.parse_args()
    metrics = read_metrics(RunPaths(parsed.run).metrics)
    if not metrics:
        parser.error(f"{parsed.run}: metrics.jsonl is missing or has no steps")
    draw(metrics, parsed.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
