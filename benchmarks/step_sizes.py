"""Compare the cost per sample of GRPO steps with few and with many samples.

    python -m benchmarks.step_sizes --json
    python -m benchmarks.step_sizes --sizes 2048 16384 --repeats 3

The sizes are numbers of samples per step. All launches use the same tiny model, and the same
prompts, which are as many as the largest step needs. Responses end at the EOS token, after at most
--new-tokens tokens. The launches of the sizes alternate, because the speed of a machine varies over
time; other work on the machine makes the figures useless.

The time of a launch is the median of its steps, without the first --warm-up steps. `SIZE_ms`
contains the times of the phases per sample, in milliseconds, as medians over the launches; `step`
is the whole step. `ratios` contains each phase's time per sample with the largest size, divided by
that with the smallest size in the same repeat: median, minimum (`_least`) and maximum (`_most`).
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import paired
from benchmarks.runs import run_to_end

PROMPT_CHARACTERS = 12
TIMEOUT_S = 3600


def write_prompts(file: Path, count: int) -> None:
    """Write `count` different prompts of letters, one per line."""
    draw = random.Random(0)
    prompts: set[str] = set()
    while len(prompts) < count:
        prompts.add("".join(draw.choices(string.ascii_lowercase, k=PROMPT_CHARACTERS)))
    file.write_text("".join(f"{prompt}\n" for prompt in sorted(prompts)))


def measure_launch(args: argparse.Namespace, prompts: Path, size: int) -> dict[str, float]:
    """Launch a run with `size` samples per step, and return the times of its phases per sample in
    milliseconds."""
    with tempfile.TemporaryDirectory() as place:
        run = run_to_end(
            Path(place, "run"),
            "algorithm=grpo",
            "algorithm.minibatches=1",
            f"data.path={prompts}",
            f"rollout.prompts_per_step={size // args.samples}",
            f"rollout.samples_per_prompt={args.samples}",
            f"rollout.max_response_tokens={args.new_tokens}",
            "rollout.stop_at_eos=true",
            "logging.tensorboard=false",
            f"run.steps={args.warm_up + args.steps}",
            *args.override,
            timeout_s=TIMEOUT_S,
        )
        steps = run.metrics[args.warm_up :]
    names = dict.fromkeys(name for step in steps for name in step if name.startswith("time/"))
    return {
        name.removeprefix("time/"): 1000 * median(step.get(name, 0.0) for step in steps) / size
        for name in names
    }


def compare(launches: Mapping[int, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the medians of each size, and the ratios of the largest to the smallest size.

    Args:
        launches: Times of the phases per sample of each launch, by size.
    """
    result: dict[str, Any] = {
        f"{size}_ms": {name: median(launch[name] for launch in found) for name in found[0]}
        for size, found in launches.items()
    }
    smallest, largest = launches[min(launches)], launches[max(launches)]
    ratios: dict[str, float] = {}
    for name in smallest[0]:
        ratios |= paired(
            name, [launch[name] for launch in largest], [launch[name] for launch in smallest]
        )
    return result | {"ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[2048, 16384],
        help="samples per step (2048 16384)",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt (8)")
    parser.add_argument(
        "--new-tokens", type=int, default=16, help="maximum tokens of each response (16)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="launches of each size (3)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each launch (3)")
    parser.add_argument(
        "--warm-up", type=int, default=1, help="steps of each launch before the measured steps (1)"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of the configuration",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    launches: dict[int, list[dict[str, float]]] = {size: [] for size in args.sizes}
    with tempfile.TemporaryDirectory() as directory:
        prompts = Path(directory, "prompts.txt")
        write_prompts(prompts, max(args.sizes) // args.samples)
        for _ in range(args.repeats):
            for size, found in launches.items():
                found.append(measure_launch(args, prompts, size))

    result = compare(launches)
    if args.json:
        shape = {name: getattr(args, name) for name in ("sizes", "samples", "new_tokens")}
        print(json.dumps({"benchmark": "step_sizes"} | shape | result))
    else:
        for key, phases in result.items():
            print(key, "  ".join(f"{name} {value:.4g}" for name, value in phases.items()))


if __name__ == "__main__":
    main()
