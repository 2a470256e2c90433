"""Reproduce the study of "Asynchronous RLHF" (Noukhovitch et al. 2024) on sums: curves of the gold
scorer's win rate over the KL.

All runs use `experiment=arithmetic_rlhf`: training maximizes a reward model that was trained on
preference pairs, and the scorer that labeled these pairs (the gold scorer) judges responses to
held-out sums. For each algorithm there are synchronous runs that generate the samples of N = 1, 4
and 16 minibatches at once, and asynchronous runs with a maximum staleness of k = 1 and 4 weight
versions. All runs have the same numbers of updates and samples. They are evaluated after the same
updates, except that N = 16 is evaluated after each step.

`--rows FILE` appends the figures of each run to that file and skips runs that it already contains.
`--figure FILE.svg` plots all runs (requires matplotlib; install the extra figures).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from benchmarks.algorithms import MINIBATCHES, drawn_at_once, drawn_beside, metrics_of, table
from benchmarks.figures import vector_plots

EXPERIMENT = "arithmetic_rlhf"
ALGORITHMS = ("ppo", "proximal_rloo", "online_dpo", "best_of_n")
PLACES = (*((count, 0) for count in MINIBATCHES), (1, 1), (1, 4))
"""Settings of the study: N, the number of minibatches per generation phase, and k, the maximum
staleness."""
_EVERY = 8
"""Number of updates between two evaluations, unless a single step has more updates."""
_PENALTY = {
    "online_dpo": ("algorithm.kl_coefficient=0", "algorithm.preference.beta=0.6"),
    "best_of_n": ("algorithm.kl_coefficient=0",),
}
"""Overrides of the algorithms that do not use the experiment's KL penalty in the reward. That
penalty and this beta are both six times the paper's."""
_KEY = ("algorithm", "minibatches", "max_staleness", "seed", "updates")

Point = dict[str, float]
Row = dict[str, Any]


def overrides_of(
    algorithm: str, minibatches: int, max_staleness: int, seed: int, updates: int
) -> tuple[str, ...]:
    """Return the overrides of a run of the study."""
    return (
        f"seed={seed}",
        *drawn_at_once(minibatches, updates),
        *(drawn_beside(algorithm, max_staleness) if max_staleness else ()),
        *_PENALTY.get(algorithm, ()),
        f"evaluation.every={max(1, _EVERY // minibatches)}",
    )


def curve(metrics: Sequence[dict[str, float]], minibatches: int) -> list[Point]:
    """Return the evaluations of a run, each with the number of updates before it and the mean
    reward of that step's samples."""
    names = {
        "win_rate": "eval/win_rate",
        "kl": "eval/reference_kl",
        "perplexity": "eval/reference_perplexity",
    }
    names |= {"score": "eval/score", "reward": "reward/mean"}
    return [
        {"update": step["step"] * minibatches}
        | {name: step[metric] for name, metric in names.items() if metric in step}
        for step in metrics
        if "eval/win_rate" in step
    ]


def win_rate_at(points: Sequence[Point], kl: float) -> float | None:
    """Return the win rate at which a curve first reaches a KL, interpolated linearly between its
    points; None if it does not reach this KL."""
    for before, after in pairwise(points):
        if before["kl"] < kl <= after["kl"]:
            share = (kl - before["kl"]) / (after["kl"] - before["kl"])
            return before["win_rate"] + share * (after["win_rate"] - before["win_rate"])
    return None


def study(
    algorithms: Sequence[str],
    updates: int,
    seeds: Sequence[int],
    known: Sequence[Row],
    timeout_s: float,
) -> Iterator[Row]:
    """Run the study, and yield the row of each run that is not in `known`."""
    done = {tuple(row[name] for name in _KEY) for row in known}
    for seed in seeds:
        for minibatches, staleness in PLACES:
            for algorithm in algorithms:
                key = (algorithm, minibatches, staleness, seed, updates)
                if key in done:
                    continue
                metrics, seconds = metrics_of(EXPERIMENT, algorithm, overrides_of(*key), timeout_s)
                times = [step["time/step"] for step in metrics if "time/step" in step]
                row = dict(zip(_KEY, key, strict=True)) | {
                    "wall_s": seconds,
                    "s_per_update": sum(times) / updates,
                }
                yield row | {"points": curve(metrics, minibatches)}


def name_of(row: Row) -> str:
    """Return the label of a row's setting in the study, such as `N = 4` or `k = 1`."""
    return f"k = {row['max_staleness']}" if row["max_staleness"] else f"N = {row['minibatches']}"


def ranged(values: Sequence[float | None]) -> str:
    """Return mean and range of the values of all seeds as text; `-` if a seed has no value."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values):
        return "-"
    return f"{mean(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def summary(rows: Sequence[Row], kl: float) -> list[Row]:
    """Return the figures of each algorithm in each setting over all seeds: those at the end, and
    the win rate at a KL."""
    found = []
    for algorithm, place in dict.fromkeys((row["algorithm"], name_of(row)) for row in rows):
        curves = [
            row["points"] for row in rows if (row["algorithm"], name_of(row)) == (algorithm, place)
        ]
        ends = {"win_rate": "win rate", "kl": "KL", "perplexity": "perplexity", "reward": "reward"}
        told = {
            shown: ranged([points[-1][name] for points in curves]) for name, shown in ends.items()
        }
        told[f"win rate at KL {kl:g}"] = ranged([win_rate_at(points, kl) for points in curves])
        found.append({"algorithm": algorithm, "at": place, "seeds": len(curves)} | told)
    return found


def draw(rows: Sequence[Row], kl: float, file: Path) -> None:
    """Plot the win rate over the KL, with one plot per algorithm.

    Each setting has a line for the mean over seeds, and a thin line for each seed.
    """
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    size = (3.2 * len(algorithms), 3.4)
    figure, plots = vector_plots().subplots(
        1, len(algorithms), figsize=size, sharey=True, squeeze=False
    )
    for axes, algorithm in zip(plots[0], algorithms, strict=True):
        for place in dict.fromkeys(map(name_of, rows)):
            curves = [
                row["points"]
                for row in rows
                if (row["algorithm"], name_of(row)) == (algorithm, place)
            ]
            if not curves:
                continue
            together = list(zip(*curves, strict=True))
            xs, ys = (
                [mean(point[name] for point in points) for points in together]
                for name in ("kl", "win_rate")
            )
            (line,) = axes.plot(
                xs,
                ys,
                marker="o",
                markersize=3,
                linestyle="--" if place.startswith("k") else "-",
                label=place,
            )
            for points in curves:
                seed = [[point[name] for point in points] for name in ("kl", "win_rate")]
                axes.plot(*seed, color=line.get_color(), linewidth=0.5, alpha=0.4)
        axes.axvline(kl, color="gray", linestyle=":", linewidth=0.8)
        axes.set(title=algorithm, xlabel="KL (nats per response)")
    plots[0][0].set_ylabel("win rate according to the gold scorer")
    plots[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        metavar="NAME",
        default=ALGORITHMS,
        help=f"algorithms ({' '.join(ALGORITHMS)})",
    )
    parser.add_argument(
        "--updates", type=int, default=48, help="optimizer steps of each run, a multiple of 16 (48)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (1)")
    parser.add_argument("--first-seed", type=int, default=1, help="first seed (1)")
    parser.add_argument(
        "--kl",
        type=float,
        default=0.25,
        help="KL in nats per response at which win rates are compared (0.25)",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE.jsonl",
        help="file of figures of runs, read and appended to",
    )
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="plot the curves")
    parsed = parser.parse_args()
    if parsed.updates % max(MINIBATCHES):
        parser.error(f"--updates {parsed.updates}: must be a multiple of {max(MINIBATCHES)}")
    rows = []
    if parsed.rows and parsed.rows.exists():
        rows = [json.loads(line) for line in parsed.rows.read_text().splitlines()]
    seeds = range(parsed.first_seed, parsed.first_seed + parsed.seeds)
    for row in study(parsed.algorithms, parsed.updates, seeds, rows, timeout_s=1200):
        rows.append(row)
        if parsed.rows:
            with parsed.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    Console(width=170).print(
        table(
            summary(rows, parsed.kl),
            f"{EXPERIMENT} on held-out sums: mean (minimum to maximum) over seeds",
        )
    )
    if parsed.figure:
        draw(rows, parsed.kl, parsed.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
