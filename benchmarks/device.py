"""Measure the speed of one device: a training step, decoding, weight sync, and a GRPO step.

    python -m benchmarks.device --json                     # a GPU with 80 GB
    python -m benchmarks.device --model tiny --json        # any machine

Each line has the name of the device and the figures of one part and model:

- `train`: a policy-gradient step of a 1B model and of eight layers of an 8B model. `flops_share` is
  the model FLOP utilization: the FLOP/s of GEMMs and causal attention as a share of the device's
  dense bf16 peak. `products_share` is the time of the GEMMs of the linear layers and the output
  layer alone, as a share of the step time. `peak_gib` is the peak memory that torch allocated, and
  `expected_gib` the estimate that docs/memory.md describes.
- `decode`: the embedded engine with an 8B model. `bandwidth_share` is the time in which the device
  can read the weights and the KV cache once, as a share of the time of a decode step.
- `publish`: weight sync to an engine in the same process.
- `grpo`: whole steps of `aligner launch` with GRPO.

Shares are null if the peak of the device is not known to this script. Weights are random. Figures
are medians of `--repeats` measurements, with minimum (`_least`) and maximum (`_most`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from aligner.config.compose import compose_config
from aligner.models.shape import ModelShape
from aligner.placement.memory.role_memory import GIB, compute_role_memory
from aligner.placement.roles import has_gpu
from benchmarks.engine import Replica
from benchmarks.engine import Work as Responses
from benchmarks.models import MODELS, shape_of, write_model, write_tokenizer
from benchmarks.processes import Group, Way
from benchmarks.step import Work, ours
from benchmarks.train_workers import Ours, Publishing

PEAKS = {
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100-SXM4-80GB": (312e12, 2.04e12),
    "B200": (2250e12, 8e12),
}
"""Peak dense bf16 FLOP/s and memory bandwidth in bytes/s, from NVIDIA's data sheets, by a part of
the device's name."""
PARTS = ("train", "decode", "publish", "grpo")
TRAINED = ("llama_1b", "llama_8b_8_layers")
SERVED = "llama_8b"
BATCHES = (16, 64, 256)
PROMPT_TOKENS, NEW_TOKENS = 128, 128
ONE = Way("1 process", 1 if has_gpu() else len(os.sched_getaffinity(0)), as_ranks=True)
Result = dict[str, Any]


@contextmanager
def stored(model: str, precision: str) -> Iterator[str]:
    """Write a model and its tokenizer to a temporary directory, and yield the directory."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, model, precision)
        write_tokenizer(directory, model)
        yield directory


def told(name: str, figures: list[float]) -> Result:
    """Return median, minimum and maximum of measurements."""
    return {name: median(figures), f"{name}_least": min(figures), f"{name}_most": max(figures)}


def share(work: float, peak: float | None, seconds: float) -> float | None:
    """Return the achieved rate as a share of the device's peak; None if the peak is unknown."""
    return None if peak is None else work / peak / seconds


def product_weights(shape: ModelShape) -> int:
    """Return the number of weights of the linear layers and the output layer."""
    heads = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return (
        shape.num_layers * shape.hidden_size * (heads + 3 * shape.ffn_hidden_size)
        + shape.hidden_size * shape.vocab_size
    )


def step_flops(shape: ModelShape, rows: int, tokens: int) -> float:
    """Return the FLOPs of a forward and backward pass over `rows` sequences of `tokens` tokens.

    They consist of 6 FLOPs per weight and token, and causal attention.
    """
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * tokens
    return float(rows * tokens * (6 * product_weights(shape) + attention))


def train(model: str, precision: str, flops: float | None, args: argparse.Namespace) -> Result:
    shape, lengths = shape_of(model), [args.tokens] * args.rows
    budget = args.tokens * max(1, args.micro_batch_tokens // args.tokens)
    seconds, products = [], []
    with stored(model, precision) as directory:
        with Group(ONE, functools.partial(Ours, directory, ONE, budget, precision)) as group:
            for _ in range(2):  # the first steps allocate memory
                group.call("step", lengths)
            for _ in range(args.repeats):
                seconds.append(group.call("step", lengths))
                products.append(group.call("products", lengths))
            peak = group.call("peak_bytes")
        layout = (
            "engine.placement=server",
            f"actor.precision={precision}",
            f"actor.micro_batch_tokens={budget}",
        )
        rows = (
            f"rollout.prompts_per_step={args.rows}",
            f"rollout.max_response_tokens={args.tokens - 8}",
        )
        config = compose_config(
            [
                "experiment=tiny_ppo",
                "algorithm=grpo",
                "model.source=directory",
                f"model.path={directory}",
                *layout,
                *rows,
            ]
        )
        expected = next(
            phase
            for phase in compute_role_memory(config, shape)[0].phases
            if phase.name == "training"
        )
    step, tokens = median(seconds), sum(lengths)
    return {
        "tokens": tokens,
        **told("tokens_per_s", [tokens / each for each in seconds]),
        "flops_share": share(step_flops(shape, args.rows, args.tokens), flops, step),
        "products_share": median(products) / step,
        "peak_gib": peak / GIB or None,
        "expected_gib": expected.total / GIB,
    }


def decode(
    model: str, precision: str, bandwidth: float | None, args: argparse.Namespace
) -> Iterator[Result]:
    shape, itemsize = shape_of(model), 2 if precision == "bf16" else 4
    kept = (
        2
        * shape.num_layers
        * shape.num_kv_heads
        * shape.head_dim
        * (args.prompt_tokens + args.new_tokens / 2)
    )
    make = functools.partial(
        Replica, None, model, ONE, max(args.batches), precision, device=args.device
    )
    with Group(ONE, make) as group:
        for batch in args.batches:
            work = Responses((args.new_tokens,) * batch, 1, args.prompt_tokens)
            group.call("generate", work)  # allocates memory, and records CUDA graphs
            seconds = [group.call("generate", work) for _ in range(args.repeats)]
            steps = [group.call("decoding_step", work) for _ in range(args.repeats)]
            yield {
                "batch": batch,
                **told("tokens_per_s", [batch * args.new_tokens / each for each in seconds]),
                **told("step_ms", [1000 * each for each in steps]),
                "bandwidth_share": share(
                    itemsize * (product_weights(shape) + batch * kept), bandwidth, median(steps)
                ),
            }


def publish(model: str, precision: str, args: argparse.Namespace) -> Result:
    with Group(ONE, functools.partial(Publishing, model, precision, args.device)) as group:
        group.call("publish")
        rates = [group.call("publish") for _ in range(args.repeats)]
    return told("gb_per_s", rates)


def grpo(model: str, precision: str, args: argparse.Namespace) -> Result:
    prompts = tuple(
        " ".join(f"w{3 + index}" for _ in range(args.prompt_tokens)) for index in range(args.rows)
    )
    with stored(model, precision) as directory:
        work = Work(directory, prompts, args.samples, args.new_tokens, precision, args.repeats + 1)
        steps = ours(work, ONE, (f"actor.micro_batch_tokens={args.micro_batch_tokens}",))[1:]
    parts = {name: median(step[name] for step in steps) for name in steps[0] if name != "step"}
    return {
        "samples": args.rows * args.samples,
        **told("step_s", [step["step"] for step in steps]),
        "parts_s": parts,
    }


def results(args: argparse.Namespace) -> Iterator[Result]:
    import torch

    on_gpu = torch.cuda.is_available()
    args.device, name = ("cuda", torch.cuda.get_device_name()) if on_gpu else ("cpu", "CPU")
    precision = args.precision or ("bf16" if on_gpu else "fp32")
    flops, bandwidth = next((peaks for part, peaks in PEAKS.items() if part in name), (None, None))
    for part in args.parts:
        models = {"train": TRAINED, "grpo": TRAINED[:1]}.get(part, (SERVED,))
        for model in (args.model,) if args.model else models:
            about = {
                "benchmark": "device",
                "part": part,
                "device": name,
                "model": model,
                "precision": precision,
            }
            if part == "train":
                yield about | train(model, precision, flops, args)
            elif part == "decode":
                for result in decode(model, precision, bandwidth, args):
                    yield about | result
            elif part == "publish":
                yield about | publish(model, precision, args)
            else:
                yield about | grpo(model, precision, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)"
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        help="model of every part (by default models that fit a GPU with 80 GB)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=8,
        help="sequences of a training step, and prompts of a GRPO step (8)",
    )
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens of each sequence of a training step (2048)"
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=8192,
        help="tokens of a micro-batch in training and GRPO (8192)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=BATCHES,
        help="batch sizes of decoding (16 64 256)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=PROMPT_TOKENS,
        help="tokens of each prompt in decode and grpo (128)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, help="tokens of each response (128)"
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="samples per prompt of a GRPO step (8)"
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        help="precision of all parts (bf16 on a GPU, fp32 on a CPU)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    for result in results(args):
        print(
            (
                json.dumps(result)
                if args.json
                else " ".join(f"{key}={value}" for key, value in result.items())
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
