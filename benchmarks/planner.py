"""Compare the predictions of `aligner plan RUN` with measured steps.

Each workload of `benchmarks.async_pipeline`, and PPO with a critic and a reward server (`critic`),
runs twice: synchronously (`rollout.max_staleness=0`) and asynchronously (1). The asynchronous step
is predicted from the synchronous run and compared with the measured one. The error of the model for
each run's own step is reported too. Exits with code 1 if any error is larger than `--within`.

Roles that share cores slow each other down when they work at the same time, which the model does
not contain: give every role its own core, and run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.async_pipeline import BOUND, workload
from benchmarks.runs import REPOSITORY, run_to_end

WORKLOADS = (*BOUND, "critic")
_CRITIC = (
    "algorithm=ppo_decoupled",
    "engine.placement=server",
    "rollout.prompts_per_step=32",
    "logging.tensorboard=false",
    "cluster.threads_per_rank=1",
)


def overrides(name: str, max_staleness: int, steps: int) -> tuple[str, ...]:
    """Return the configuration overrides of a workload's run."""
    if name != "critic":
        return workload(name, max_staleness, steps)
    return (*_CRITIC, f"rollout.max_staleness={max_staleness}", f"run.steps={steps}")


def plan(run: Path) -> dict[str, Any]:
    """Return the output of `aligner plan RUN --json`."""
    command = [sys.executable, "-m", "aligner", "plan", str(run), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def measure(name: str, steps: int) -> dict[str, Any]:
    """Run a workload synchronously and asynchronously, and compare with the prediction."""
    with tempfile.TemporaryDirectory(prefix="aligner-planner-") as place:
        plans = []
        for max_staleness in (0, 1):
            run = Path(place) / f"staleness_{max_staleness}"
            run_to_end(run, *overrides(name, max_staleness, steps), timeout_s=600)
            plans.append(plan(run))

    synchronous, asynchronous = plans
    predicted_s = synchronous["max_staleness_1"]["predicted_step_s"]
    return {
        "workload": name,
        "synchronous_s": synchronous["step_s"],
        "asynchronous_s": asynchronous["step_s"],
        "predicted_asynchronous_s": predicted_s,
        "error": predicted_s / asynchronous["step_s"] - 1,
        "synchronous_model_error": synchronous["model_error"],
        "asynchronous_model_error": asynchronous["model_error"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=[*WORKLOADS],
        help="workloads to run (default: all)",
    )
    parser.add_argument("--steps", type=int, default=16, help="steps of each run (default: 16)")
    parser.add_argument(
        "--within", type=float, default=0.1, help="largest accepted relative error (default: 0.1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per workload")
    parsed = parser.parse_args()

    errors = []
    for name in parsed.workloads:
        row = measure(name, parsed.steps)
        errors += [abs(value) for key, value in row.items() if key.endswith("error")]
        text = (
            f"{name:10} synchronous {row['synchronous_s']:.3f} s"
            f"  asynchronous {row['asynchronous_s']:.3f} s"
            f"  predicted {row['predicted_asynchronous_s']:.3f} s ({row['error']:+.1%})"
            f"  model of the own step {row['synchronous_model_error']:+.1%},"
            f" {row['asynchronous_model_error']:+.1%}"
        )
        print(json.dumps(row) if parsed.json else text, flush=True)
    return 0 if max(errors) <= parsed.within else 1


if __name__ == "__main__":
    sys.exit(main())
