"""Train `experiment=arithmetic` with every online algorithm and compare greedy pass@1 on held-out
sums before and after training.

All runs start from the same SFT model, which is trained once and cached. The exit code is 1 unless
every run gains at least `--gain` pass@1 within `--minutes`, including start-up.

`--off-policy` runs a small version of the off-policy study in "Asynchronous RLHF" (Noukhovitch et
al. 2024, section 3). The samples of N minibatches are generated at once, so the last update of a
step is N - 1 updates off-policy; the total numbers of samples and updates stay the same.
`--figure FILE.svg` plots the result (requires matplotlib; install the extra figures).

`--beside` compares synchronous and asynchronous training with the engine on separate devices. The
maximum staleness of samples is each value of `--staleness`, in weight versions. The loss corrects
for staleness; `--uncorrected` also runs without the correction. The exit code is 1 unless the mean
pass@1 over `--seeds` of every corrected algorithm is within 0.05 of its synchronous mean.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import vector_plots
from benchmarks.runs import REPOSITORY, run_to_end

EXPERIMENT = "arithmetic"
OFF_POLICY = ("ppo", "rloo", "proximal_rloo", "online_dpo")
MINIBATCHES = (1, 4, 16)
BESIDE = ("online_dpo", "ppo_decoupled", "dapo")
STALENESS = (0, 1, 4)
_CORRECTIONS = {
    **dict.fromkeys(("copg", "dapo", "online_dpo", "ppo_decoupled"), ()),
    "proximal_rloo": ("algorithm.ratio_against=sampler",),
    "rloo": ("algorithm.truncated_importance=sequence",),
}
"""Overrides with which an algorithm corrects for staleness. All other algorithms use truncated
importance weights per token."""
_CLOSE = 0.05
_PROMPTS = 64
"""Number of prompts per optimizer step in the off-policy study."""


def online_algorithms() -> list[str]:
    """Return the values of `algorithm` that train on the policy's own samples and their scores."""
    names = {
        path.stem
        for path in (REPOSITORY / "conf/algorithm").glob("*.yaml")
        if "trainer:" not in path.read_text()
    }
    return sorted(names - {"on_policy_distillation"})


def metrics_of(
    experiment: str, algorithm: str, overrides: Sequence[str], timeout_s: float
) -> tuple[list[dict[str, float]], float]:
    """Run an experiment in a temporary directory, and return its metrics and its duration in
    seconds."""
    directory = Path(tempfile.mkdtemp(prefix="aligner-algorithms-"))
    try:
        start = time.monotonic()
        finished = run_to_end(
            directory / "run",
            f"algorithm={algorithm}",
            *overrides,
            experiment=experiment,
            timeout_s=timeout_s,
        )
        return finished.metrics, time.monotonic() - start
    finally:
        shutil.rmtree(directory)


def measure(algorithm: str, overrides: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Train `experiment=arithmetic` with an algorithm, and return pass@1 before and after, and
    times."""
    metrics, seconds = metrics_of(EXPERIMENT, algorithm, overrides, timeout_s)
    passed = [step["eval/pass@1"] for step in metrics if "eval/pass@1" in step]
    steps = [step for step in metrics if "time/step" in step]
    return {
        "algorithm": algorithm,
        "pass_at_1_before": passed[0],
        "pass_at_1_after": passed[-1],
        "gain": passed[-1] - passed[0],
        "steps": len(steps),
        "s_per_step": sum(step["time/step"] for step in steps) / len(steps),
        "wall_s": seconds,
        "kl": steps[-1].get("kl/reference"),
    }


def drawn_at_once(count: int, updates: int) -> tuple[str, ...]:
    """Return overrides with which each step generates the samples of `count` minibatches at once.

    The numbers of updates and of samples in the run do not depend on `count`.
    """
    return (
        f"run.steps={updates // count}",
        f"rollout.prompts_per_step={_PROMPTS * count}",
        f"rollout.micro_batches={count}",
        f"algorithm.minibatches={count}",
    )


def drawn_beside(algorithm: str, age: int, *, corrected: bool = True) -> tuple[str, ...]:
    """Return overrides for asynchronous training with a maximum staleness of `age` weight versions.

    `corrected` selects whether the loss corrects for staleness.
    """
    correction = (
        _CORRECTIONS.get(algorithm, ("algorithm.truncated_importance=token",)) if age else ()
    )
    if not corrected:
        correction = ("algorithm.truncated_importance=none", "algorithm.uncorrected_staleness=true")
    return ("engine.placement=server", f"rollout.max_staleness={age}", *correction)


def off_policy(
    algorithms: Sequence[str], updates: int, seeds: Sequence[int], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Run the off-policy study, and yield the figures of each run."""
    for seed in seeds:
        for count in MINIBATCHES:
            for algorithm in algorithms:
                overrides = (
                    f"seed={seed}",
                    *drawn_at_once(count, updates),
                    f"evaluation.every={updates // count}",
                )
                yield {"minibatches": count, "seed": seed} | measure(
                    algorithm, overrides, timeout_s
                )


def beside(
    algorithms: Sequence[str],
    staleness: Sequence[int],
    seeds: Sequence[int],
    uncorrected: bool,
    timeout_s: float,
) -> Iterator[dict[str, Any]]:
    """Run the study of synchronous and asynchronous training, and yield the figures of each run."""
    for seed in seeds:
        for algorithm in algorithms:
            for age in staleness:
                for corrected in (True, False) if uncorrected and age else (True,):
                    overrides = (f"seed={seed}", *drawn_beside(algorithm, age, corrected=corrected))
                    told = {"max_staleness": age, "corrected": corrected, "seed": seed}
                    yield told | measure(algorithm, overrides, timeout_s)


def are_close(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether the mean pass@1 over seeds of every corrected algorithm in asynchronous
    training is close to that of its synchronous training."""
    passed: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        if row["corrected"]:
            passed[row["algorithm"], row["max_staleness"]].append(row["pass_at_1_after"])
    means = {run: sum(values) / len(values) for run, values in passed.items()}
    return all(
        abs(mean - means.get((algorithm, 0), mean)) <= _CLOSE
        for (algorithm, _), mean in means.items()
    )


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return a table of the figures, with one row per run."""
    shown = Table(title=title, title_justify="left")
    names = [name for name in rows[0] if name != "kl"]
    for name in names:
        shown.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in rows:
        shown.add_row(
            *(
                f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name])
                for name in names
            )
        )
    return shown


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot held-out pass@1 over N, with one line per algorithm: the mean over seeds, and the
    range."""
    figure, axes = vector_plots().subplots(figsize=(6, 4))
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        counts = sorted({row["minibatches"] for row in rows})
        passed = [
            [
                row["pass_at_1_after"]
                for row in rows
                if (row["algorithm"], row["minibatches"]) == (algorithm, count)
            ]
            for count in counts
        ]
        means = [sum(values) / len(values) for values in passed]
        axes.plot(counts, means, marker="o", label=algorithm)
        axes.fill_between(
            counts,
            [min(values) for values in passed],
            [max(values) for values in passed],
            alpha=0.15,
        )
    axes.axhline(rows[0]["pass_at_1_before"], color="gray", linestyle="--", label="start")
    axes.set(
        xscale="log",
        xticks=counts,
        xticklabels=counts,
        xlabel="N: minibatches per generation phase",
        ylabel="greedy pass@1",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", nargs="+", metavar="NAME", help="algorithms to run (all of the study)"
    )
    parser.add_argument(
        "--gain", type=float, default=0.25, help="minimum gain in pass@1 of each run (0.25)"
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="time limit of each run in minutes (4)"
    )
    parser.add_argument(
        "--off-policy", action="store_true", help="run the off-policy study instead"
    )
    parser.add_argument(
        "--beside", action="store_true", help="run the study of asynchronous training instead"
    )
    parser.add_argument(
        "--staleness",
        nargs="+",
        type=int,
        default=STALENESS,
        help="values of rollout.max_staleness in the asynchronous study (0 1 4)",
    )
    parser.add_argument(
        "--uncorrected", action="store_true", help="also run without the correction for staleness"
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=96,
        help="optimizer steps of each run of the off-policy study (96)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds of a study (1)")
    parser.add_argument("--first-seed", type=int, default=1, help="first seed (1)")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="plot the off-policy study")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    parsed = parser.parse_args()
    seeds = range(parsed.first_seed, parsed.first_seed + parsed.seeds)
    timeout_s = 60 * max(parsed.minutes, 1) * 3  # the first run also trains the SFT model
    if parsed.off_policy:
        runs = off_policy(parsed.algorithms or OFF_POLICY, parsed.updates, seeds, timeout_s)
    elif parsed.beside:
        runs = beside(
            parsed.algorithms or BESIDE, parsed.staleness, seeds, parsed.uncorrected, timeout_s
        )
    else:
        # Train and cache the SFT model before the runs are timed.
        measure("rloo", ("run.steps=1", "actor.optimizer.warmup_steps=0"), timeout_s)
        runs = (
            measure(algorithm, (), timeout_s)
            for algorithm in parsed.algorithms or online_algorithms()
        )
    rows = []
    for row in runs:
        rows.append(row)
        if parsed.json:
            print(json.dumps(row), flush=True)
    if not parsed.json:
        Console().print(table(rows, f"{EXPERIMENT}: greedy pass@1 on held-out sums"))
    if parsed.figure:
        draw(rows, parsed.figure)
    if parsed.beside:
        return 0 if are_close(rows) else 1
    reached = [row["gain"] >= parsed.gain and row["wall_s"] <= 60 * parsed.minutes for row in rows]
    return 0 if parsed.off_policy or all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
