"""Compare the step time of asynchronous training with the slower of generation and training.

The same configuration runs with the engine on separate devices, synchronously
(`rollout.max_staleness=0`) and asynchronously (each value of `--max-staleness`). On two CPU cores
the trainer uses one core and the generator the other. `ideal_s` is the longer of two phases of the
synchronous run: generation, or the rest of the step without weight sync.

The three workloads differ in the number and length of responses: long responses make generation
the slower phase, many responses make training the slower phase. Figures are means over the steps,
without the first three and the last. With `--repeats`, synchronous and asynchronous runs alternate
and the figures are medians, because the speed of a machine varies over time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.runs import run_to_end

COMMON = (
    *(
        "algorithm=rloo",
        "algorithm.truncated_importance=sequence",
        "engine.placement=server",
        "logging.tensorboard=false",
        "cluster.threads_per_rank=1",
    ),
    *(
        "model.config.hidden_size=256",
        "model.config.intermediate_size=768",
        "model.config.num_hidden_layers=6",
    ),
    *(
        "model.config.max_position_embeddings=1024",
        "rollout.micro_batches=1",
        "algorithm.minibatches=1",
    ),
)
BOUND = {"training": (8, 8, 32), "balanced": (3, 4, 192), "generation": (2, 2, 384)}
"""Prompts per step, samples per prompt and tokens per response of each workload, by its slower
phase."""
_WARM_UP, _COOL_DOWN = 3, 1


def workload(bound: str, max_staleness: int, steps: int) -> tuple[str, ...]:
    """Return the overrides of a run of a workload; `bound` is its slower phase."""
    prompts, samples, tokens = BOUND[bound]
    return (
        *COMMON,
        f"rollout.prompts_per_step={prompts}",
        f"rollout.samples_per_prompt={samples}",
        f"rollout.max_response_tokens={tokens}",
        f"rollout.max_staleness={max_staleness}",
        f"run.steps={steps}",
    )


def phases(bound: str, max_staleness: int, steps: int) -> dict[str, float]:
    """Run a workload, and return the mean times of a step, of generation and of weight sync in
    seconds."""
    place = Path(tempfile.mkdtemp(prefix="aligner-async-"))
    try:
        run = run_to_end(place / "run", *workload(bound, max_staleness, steps), timeout_s=600)
        measured = run.metrics[_WARM_UP : len(run.metrics) - _COOL_DOWN]
    finally:
        shutil.rmtree(place)
    return {
        name: mean(step.get(f"time/{name}", 0.0) for step in measured)
        for name in ("step", "generate", "reshard")
    }


def compared(apart: Mapping[str, float], together: Mapping[str, float]) -> dict[str, float]:
    """Compare the phases of a synchronous run (`apart`) with those of an asynchronous run
    (`together`)."""
    training = apart["step"] - apart["generate"] - apart["reshard"]
    ideal = max(apart["generate"], training)
    return {
        "sync_s": apart["step"],
        "generate_s": apart["generate"],
        "train_s": training,
        "publish_s": apart["reshard"],
        "ideal_s": ideal,
        "async_s": together["step"],
        "waited_s": together["generate"],
        "over_ideal": together["step"] / ideal,
        "speedup": apart["step"] / together["step"],
    }


def measure(
    bound: str, staleness: Sequence[int], steps: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Run one workload, and yield its figures for each maximum staleness.

    `waited_s` is the time for which a step of the trainer waits for samples.
    """
    runs = [{each: phases(bound, each, steps) for each in (0, *staleness)} for _ in range(repeats)]
    for max_staleness in staleness:
        found = [compared(run[0], run[max_staleness]) for run in runs]
        figures = {name: median(each[name] for each in found) for name in found[0]}
        yield {"bound": bound, "max_staleness": max_staleness, **figures, "repeats": repeats}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bound",
        nargs="+",
        choices=BOUND,
        default=[*BOUND],
        help="workloads, named after the slower phase (all)",
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        nargs="+",
        default=[1],
        metavar="K",
        help="maximum staleness of each asynchronous run (1)",
    )
    parser.add_argument("--steps", type=int, default=16, help="steps of each run (16)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each configuration (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per comparison")
    parsed = parser.parse_args()
    for bound in parsed.bound:
        for found in measure(bound, parsed.max_staleness, parsed.steps, parsed.repeats):
            shown = {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in found.items()
            }
            text = (
                json.dumps(shown)
                if parsed.json
                else "  ".join(f"{name} {value}" for name, value in shown.items())
            )
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
