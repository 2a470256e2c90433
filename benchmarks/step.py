"""Compare the time of a whole GRPO step (generation to weight sync) with TRL on the same cores.

    python -m benchmarks.step --peer trl --model smollm2_135m --json
    python -m benchmarks.step --peer trl --model llama_3m --new-tokens 64 --json

Our side is `aligner launch`. The peer is TRL's GRPOTrainer with transformers' generation, in a
separate environment that is installed the first time. Both sides start from the same random weights
and use the same prompts of equal length, responses of exactly --new-tokens tokens, temperature 1, a
reference model, a trivial reward, and one update per step.

Each side first tries several numbers of threads and processes and is measured with the fastest.
Then launches of both sides alternate. The time of a launch is the median of its steps, without the
first --warm-up steps. Figures are medians over launches, with minimum (`_least`) and maximum
(`_most`).

`products_s` is the time of the GEMMs of a step alone, on the ranks of our side: those of the linear
layers and the output layer in generation, in the forward pass of the reference model, and in the
forward and backward passes of the update. Attention is not included.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from aligner.launcher.rank_environment import FreePorts
from benchmarks.figures import paired
from benchmarks.models import MODELS, write_model, write_tokenizer
from benchmarks.peer_environment import peer_python
from benchmarks.processes import OUR_WAYS, Group, Way
from benchmarks.runs import REPOSITORY, run_to_end

OURS = {way.name: way for way in OUR_WAYS}
PEER_WAYS = {
    f"{way.name}, {rows} rows": (way, rows)
    for way in (
        Way("1 thread", 1),
        Way("2 threads", 2),
        Way("data parallel, 2 processes", 1, {"data": 2}),
    )
    for rows in (64, 8)
}
"""Ways to run the peer, each with its number of sequences per micro-batch over all processes."""
MICRO_BATCH_TOKENS = 2048
LEARNING_RATE, KL_COEFFICIENT = 1e-6, 0.04
TIMEOUT_S = 3600
Steps = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Work:
    """Work of a step, the same for both sides."""

    directory: str
    """Directory of the model, with weights and tokenizer."""
    prompts: tuple[str, ...]
    samples: int
    new_tokens: int
    precision: str
    steps: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompts[0].split())


def ours(work: Work, way: Way, overrides: Sequence[str]) -> Steps:
    """Launch a run of aligner, and return the times of the phases of each step in seconds."""
    with tempfile.TemporaryDirectory() as place:
        run = run_to_end(
            Path(place, "run"),
            *(
                "algorithm=grpo",
                "algorithm.minibatches=1",
                f"algorithm.kl_coefficient={KL_COEFFICIENT}",
            ),
            *(
                "model.source=directory",
                f"model.path={work.directory}",
                "reward.function=benchmarks.step_reward:ours",
            ),
            *(
                f"data.prompts={json.dumps(work.prompts)}",
                f"data.max_prompt_tokens={work.prompt_tokens}",
            ),
            *(
                f"rollout.prompts_per_step={len(work.prompts)}",
                f"rollout.samples_per_prompt={work.samples}",
            ),
            *(
                f"rollout.max_response_tokens={work.new_tokens}",
                "rollout.stop_at_eos=false",
                "rollout.micro_batches=1",
            ),
            *(f"actor.precision={work.precision}", f"engine.precision={work.precision}"),
            *(
                f"actor.optimizer.learning_rate={LEARNING_RATE}",
                f"actor.micro_batch_tokens={MICRO_BATCH_TOKENS}",
            ),
            *(f"actor.parallel.data={way.processes}", f"cluster.threads_per_rank={way.threads}"),
            *("logging.tensorboard=false", "logging.samples_every=1000", "logging.samples_mib=0"),
            *(f"run.steps={work.steps}", *overrides),
            timeout_s=TIMEOUT_S,
        )
        metrics = run.metrics
    lengths = [step["response/length"] for step in metrics]
    assert lengths == [work.new_tokens] * work.steps, f"responses of {lengths} tokens"
    return [
        {name.removeprefix("time/"): value for name, value in step.items() if "time/" in name}
        for step in metrics
    ]


def trl(work: Work, way: Way, rows: int) -> Steps:
    """Run TRL, and return the times of the phases of each step in seconds.

    `rows` is the number of sequences per micro-batch over all processes.
    """
    python, port = peer_python("trl"), next(FreePorts())
    given = asdict(work) | {
        "learning_rate": LEARNING_RATE,
        "kl_coefficient": KL_COEFFICIENT,
        "processes": way.processes,
    }
    with tempfile.TemporaryDirectory() as place:
        files = [
            Path(place, name)
            for name in ("given", *(f"told-{rank}" for rank in range(way.processes)))
        ]
        files[0].write_text(
            json.dumps(
                given | {"output": place, "rows": rows // way.processes, "threads": way.threads}
            )
        )
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": str(way.threads),
        }
        environment["PYTHONWARNINGS"] = "ignore::FutureWarning"
        if way.processes > 1:
            environment |= {
                "WORLD_SIZE": str(way.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        processes = [
            subprocess.Popen(
                [python, "-m", "benchmarks.step_trl", files[0], told],
                env=environment
                | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if way.processes > 1 else {}),
                stdout=subprocess.DEVNULL,
            )
            for rank, told in enumerate(files[1:])
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"TRL exited with codes {codes}; its error is printed above")
        steps: Steps = json.loads(files[1].read_text())
    return steps


class Products:
    """The GEMMs of one rank in a step, without any other computation."""

    def __init__(self, work: Work, way: Way) -> None:
        import torch
        from safetensors.torch import load_file

        dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
        weights = {
            name: each.to(dtype)
            for name, each in load_file(Path(work.directory, "model.safetensors")).items()
        }
        table = weights.pop("model.embed_tokens.weight")
        head = weights.pop("lm_head.weight", table)
        layers = [weight for weight in weights.values() if weight.dim() == 2]
        prompts, responses = len(work.prompts), len(work.prompts) * work.samples
        tokens = prompts * work.prompt_tokens + responses * work.new_tokens
        scored = responses * work.new_tokens
        parts = -(-tokens // way.processes // MICRO_BATCH_TOKENS)

        def passes(layer_rows: int, head_rows: int, times: int) -> list[tuple[int, Any]]:
            rows = [(layer_rows, weight) for weight in layers] + [(head_rows, head)]
            return [(count // way.processes, weight) for count, weight in rows] * times

        self._forward = passes(prompts * work.prompt_tokens, prompts, 1)
        self._forward += passes(responses, responses, work.new_tokens - 1)
        self._backward = passes(tokens // parts, scored // parts, parts)
        self._forward += self._backward  # the reference model's
        sizes = {(rows, size) for rows, weight in self._forward for size in weight.shape}
        self._inputs = {each: torch.randn(each, dtype=dtype) for each in sizes}
        self._outputs = {
            each: torch.empty(each, dtype=dtype) for each in sizes | {tuple(head.shape)}
        }
        self._outputs |= {tuple(weight.shape): torch.empty_like(weight) for weight in layers}

    def seconds(self) -> float:
        import torch

        inputs, outputs = self._inputs, self._outputs
        begin = time.perf_counter()
        for count, weight in self._forward + self._backward:
            rows, columns = weight.shape
            torch.mm(inputs[count, columns], weight.t(), out=outputs[count, rows])
        for count, weight in self._backward:
            rows, columns = weight.shape
            torch.mm(inputs[count, rows], weight, out=outputs[count, columns])
            torch.mm(inputs[count, rows].t(), inputs[count, columns], out=outputs[rows, columns])
        return time.perf_counter() - begin


def medians(steps: Steps) -> dict[str, float]:
    """Return the median time of each phase; a step without a phase counts as 0 seconds."""
    return {
        name: median(step.get(name, 0.0) for step in steps)
        for name in dict.fromkeys(key for step in steps for key in step)
    }


def measure(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    draw, vocabulary = random.Random(0), MODELS[args.model]["vocab_size"]
    prompts = tuple(
        " ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(args.prompt_tokens))
        for _ in range(args.prompts)
    )
    work = Work(
        directory, prompts, args.samples, args.new_tokens, args.precision, args.warm_up + args.steps
    )

    def launch(side: Callable[..., Steps], *way: Any) -> dict[str, float]:
        return medians(side(work, *way)[args.warm_up :])

    trials = {
        "ours": {
            name: functools.partial(launch, ours, OURS[name], args.override)
            for name in args.our_way
        },
        "peer": {name: functools.partial(launch, trl, *PEER_WAYS[name]) for name in args.peer_way},
    }
    tried = {
        side: {name: ways[name]()["step"] for name in ways if len(ways) > 1}
        for side, ways in trials.items()
    }
    best = {
        side: min(ways, key=lambda name: tried[side].get(name, 0.0))
        for side, ways in trials.items()
    }
    way = OURS[best["ours"]]
    found: dict[str, list[dict[str, float]]] = {"ours": [], "peer": [], "products": []}
    with Group(way, functools.partial(Products, work, way)) as group:
        group.call("seconds")  # the first call allocates memory
        for _ in range(args.repeats):
            for side in trials:
                found[side].append(trials[side][best[side]]())
            found["products"].append({"step": group.call("seconds")})
    ways = {f"{side}_way": name for side, name in best.items()} | {
        f"{side}_trials_s": each for side, each in tried.items()
    }
    return ways | report(found)


def report(found: Mapping[str, Steps]) -> dict[str, Any]:
    seconds = {side: [launch["step"] for launch in launches] for side, launches in found.items()}
    result: dict[str, Any] = {}
    for side, values in seconds.items():
        result |= {
            f"{side}_s": median(values),
            f"{side}_least_s": min(values),
            f"{side}_most_s": max(values),
        }
    result |= {f"{side}_phases_s": medians(found[side]) for side in ("ours", "peer")}
    ratios = paired("ratio", seconds["peer"], seconds["ours"])
    return result | ratios | paired("products_fraction", seconds["products"], seconds["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", choices=["trl"], default="trl", help="trainer to compare with (trl)"
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="smollm2_135m",
        help="model shape (smollm2_135m)",
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step (8)")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt (8)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="tokens of each prompt (16)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of each response (16)")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="precision of both sides (fp32)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="launches of each side (5)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each launch (3)")
    parser.add_argument(
        "--warm-up", type=int, default=1, help="steps of each launch before the measured steps (1)"
    )
    parser.add_argument(
        "--our-way",
        nargs="+",
        choices=OURS,
        default=[*OURS],
        help="threads and ranks that our side tries (all)",
    )
    parser.add_argument(
        "--peer-way",
        nargs="+",
        choices=PEER_WAYS,
        default=[*PEER_WAYS],
        help="threads, processes and micro-batch sizes that the peer tries (all)",
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of our configuration",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    peer_python(args.peer)  # the first installation takes minutes
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, args.model)
        write_tokenizer(directory, args.model)
        result = measure(args, directory)
    if args.json:
        shape = ("model", "precision", "prompts", "samples", "prompt_tokens", "new_tokens")
        print(
            json.dumps(
                {"benchmark": "step", "peer": args.peer}
                | {name: getattr(args, name) for name in shape}
                | result
            )
        )
    else:
        for key, value in result.items():
            print(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")


if __name__ == "__main__":
    main()
