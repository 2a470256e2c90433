"""How near generation beside training comes to the slower of the two.

Two runs of one configuration, the engine on devices of its own: in turn (`rollout.max_staleness=0`) and beside training (1).
On two CPU cores the trainer has one and the generator the other. `ideal_s` is the longer of the two phases as measured in
turn, each alone: generation, and the rest of the step but for the publish. Medians over the steps, the first three and the
last left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs import run_to_end

COMMON = (
    *("algorithm=rloo", "engine.placement=server", "logging.tensorboard=false", "cluster.threads_per_rank=1"),
    *("model.config.hidden_size=256", "model.config.intermediate_size=768", "model.config.num_hidden_layers=6"),
    *("model.config.max_position_embeddings=256", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8"),
    *("rollout.micro_batches=1", "engine.batch_size=64", "algorithm.minibatches=1"),
)
_WARM_UP, _COOL_DOWN = 3, 1


def phases(max_staleness: int, steps: int, overrides: tuple[str, ...]) -> dict[str, float]:
    """Median seconds of a step, its generation and its publish."""
    place = Path(tempfile.mkdtemp(prefix="aligner-async-"))
    try:
        run = run_to_end(place / "run", *COMMON, *overrides, f"rollout.max_staleness={max_staleness}", f"run.steps={steps}")
        measured = run.metrics[_WARM_UP : len(run.metrics) - _COOL_DOWN]
    finally:
        shutil.rmtree(place)
    return {name: median(step[f"time/{name}"] for step in measured) for name in ("step", "generate", "reshard")}


def measure(response_tokens: int, steps: int) -> dict[str, Any]:
    """One comparison's figures."""
    overrides = (f"rollout.max_response_tokens={response_tokens}",)
    apart, together = (phases(max_staleness, steps, overrides) for max_staleness in (0, 1))
    training = apart["step"] - apart["generate"] - apart["reshard"]
    ideal = max(apart["generate"], training)
    return {
        "response_tokens": response_tokens,
        "sync_s": apart["step"],
        "generate_s": apart["generate"],
        "train_s": training,
        "publish_s": apart["reshard"],
        "ideal_s": ideal,
        "async_s": together["step"],
        "over_ideal": together["step"] / ideal,
        "speedup": apart["step"] / together["step"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="steps of a run (16)")
    parser.add_argument("--response-tokens", type=int, nargs="+", default=[32], metavar="N", help="a comparison each (32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a comparison")
    parsed = parser.parse_args()
    for response_tokens in parsed.response_tokens:
        found = measure(response_tokens, parsed.steps)
        shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
        print(json.dumps(shown) if parsed.json else "  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
