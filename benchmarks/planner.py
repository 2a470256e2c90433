"""How near `aligner plan --measured RUN` comes to what runs take.

Each workload of `benchmarks.async_pipeline`, and PPO with a critic and a reward server (`critic`),
runs in turn (`rollout.max_staleness=0`) and beside training (1). From either run both are
predicted: its own step and the other's. Exits 1 unless every prediction is within `--within` of the
measured step. Roles that share cores slow each other when they work beside each other, which no
plan knows of: give every role a core of its own, and nothing else to do to the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.async_pipeline import BOUND, workload
from benchmarks.runs import REPOSITORY, run_to_end

WORKLOADS = (*BOUND, "critic")
MODES = (0, 1)
_CRITIC = (
    *("algorithm=ppo_decoupled", "engine.placement=server", "rollout.prompts_per_step=32"),
    *("logging.tensorboard=false", "cluster.threads_per_rank=1"),
)


def overrides(name: str, max_staleness: int, steps: int) -> tuple[str, ...]:
    """Of a workload's run."""
    if name != "critic":
        return workload(name, max_staleness, steps)
    return (*_CRITIC, f"rollout.max_staleness={max_staleness}", f"run.steps={steps}")


def plan(run: Path, max_staleness: int) -> dict[str, Any]:
    """What `aligner plan` says of a run."""
    command = ("plan", "--measured", str(run), "--max-staleness", str(max_staleness), "--json")
    said = subprocess.run(
        [sys.executable, "-m", "aligner", *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(said.stdout))


def measure(name: str, steps: int) -> Iterator[dict[str, Any]]:
    """The four predictions of a workload."""
    with tempfile.TemporaryDirectory(prefix="aligner-planner-") as place:
        runs = {mode: Path(place) / f"staleness_{mode}" for mode in MODES}
        for mode, directory in runs.items():
            run_to_end(directory, *overrides(name, mode, steps), timeout_s=600)
        plans = {(source, mode): plan(runs[source], mode) for source in MODES for mode in MODES}
        for (source, mode), planned in plans.items():
            measured = plans[mode, mode]["measured_step_s"]
            predicted = planned["predicted_measured_step_s" if source == mode else "step_s"]
            yield {
                "workload": name,
                "from": source,
                "of": mode,
                "measured_s": measured,
                "predicted_s": predicted,
                "error": predicted / measured - 1,
                "busy_s": planned["busy_s"],
            }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="which (all)"
    )
    parser.add_argument("--steps", type=int, default=16, help="steps of a run (16)")
    parser.add_argument("--within", type=float, default=0.1, help="error that is still right (0.1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prediction")
    parsed = parser.parse_args()
    errors = []
    for name in parsed.workloads:
        for row in measure(name, parsed.steps):
            errors.append(abs(row["error"]))
            modes = f"staleness {row['of']} from a run with {row['from']}"
            text = (
                f"{name:10} {modes}  {row['measured_s']:.3f} s  predicted {row['predicted_s']:.3f}"
                f" s  {row['error']:+.1%}"
            )
            print(json.dumps(row) if parsed.json else text, flush=True)
    return 0 if max(errors) <= parsed.within else 1


if __name__ == "__main__":
    sys.exit(main())
