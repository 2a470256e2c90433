"""Compare the throughput of a training step with a plain transformers + torch step on the same
cores.

A step consists of forward, backward, gradient clipping and Adam with a policy-gradient loss over
response tokens, in fp32 with random weights. With mixed lengths (uniform between --shortest and
--longest) the peer pads sequences and our side packs them; padding does not count as tokens. Each
side first tries two settings (the peer one thread and two threads; our side one process with two
threads, and two ranks with one thread each) and is measured with the faster one. Then steps of both
sides alternate. Figures are medians over steps; ratios are computed between consecutive steps.

`shared_prompts_ratio` compares a step whose sequences each have their own prompt with a step of the
same size in which `--samples` responses share a prompt (`--prompts`, `--prompt`, `--response`).

`gemm_fraction` is the time of the GEMMs of our step alone, as a share of the step time.
`logprob_mib` is the memory of the computation from hidden states to log-probs, with gradients, for
one micro-batch; `logprob_dense_mib` is that of log_softmax over all logits at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.figures import paired
from benchmarks.models import MODELS, write_model
from benchmarks.processes import OUR_WAYS, Group, Way
from benchmarks.train_workers import LogprobPass, Ours, Peer

PEER_WAYS = (Way("1 thread", 1), Way("2 threads", 2))


def best_way(
    kind: Callable[..., Any],
    ways: Sequence[Way],
    directory: str,
    budget: int,
    lengths: Sequence[int],
) -> tuple[Way, dict[str, float]]:
    """Return the fastest way, and the step time of every way in seconds."""
    seconds = {}
    for way in ways:
        with Group(way, functools.partial(kind, directory, way, budget)) as group:
            for _ in range(2):  # the first steps allocate memory
                group.call("step", lengths)
            seconds[way.name] = group.call("step", lengths)
    return min(ways, key=lambda way: seconds[way.name]), seconds


def measure(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    draw = random.Random(0)
    mixed = [draw.randint(args.shortest, args.longest) for _ in range(args.sequences)]
    equal = [args.longest] * args.sequences
    budget = args.micro_batch_tokens
    our_way, our_trials = best_way(Ours, OUR_WAYS, directory, budget, mixed)
    peer_way, peer_trials = best_way(Peer, PEER_WAYS, directory, budget, mixed)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(
            Group(our_way, functools.partial(Ours, directory, our_way, budget))
        )
        peer = stack.enter_context(
            Group(peer_way, functools.partial(Peer, directory, peer_way, budget))
        )
        for side in (ours, peer, ours, peer):
            side.call("step", equal)
        for _ in range(args.steps):
            for name, lengths in (("mixed", mixed), ("equal", equal)):
                for side, group in (("ours", ours), ("peer", peer)):
                    seconds.setdefault(f"{side}_{name}", []).append(group.call("step", lengths))
            seconds.setdefault("products", []).append(ours.call("products", equal))
            for name, samples in (("separate", 1), ("shared", args.samples)):
                rows = [args.prompt + args.response] * args.prompts * args.samples
                seconds.setdefault(name, []).append(ours.call("step", rows, args.prompt, samples))
    typical = {name: median(values) for name, values in seconds.items()}
    return {
        "mixed_tokens": sum(mixed),
        "equal_tokens": sum(equal),
        "ours": our_way.name,
        "ours_trials_s": our_trials,
        "peer": peer_way.name,
        "peer_trials_s": peer_trials,
        "ours_tokens_per_s": sum(mixed) / typical["ours_mixed"],
        "peer_tokens_per_s": sum(mixed) / typical["peer_mixed"],
        **paired("ratio", seconds["peer_mixed"], seconds["ours_mixed"]),
        "ours_equal_length_tokens_per_s": sum(equal) / typical["ours_equal"],
        "peer_equal_length_tokens_per_s": sum(equal) / typical["peer_equal"],
        **paired("equal_length_ratio", seconds["peer_equal"], seconds["ours_equal"]),
        **paired("gemm_fraction", seconds["products"], seconds["ours_equal"]),
        "shared_prompts_s": typical["shared"],
        "separate_prompts_s": typical["separate"],
        **paired("shared_prompts_ratio", seconds["separate"], seconds["shared"]),
    }


def memory(directory: str, tokens: int, chunk_tokens: int) -> dict[str, Any]:
    way = Way("1 process, 2 threads", 2)
    with Group(way, functools.partial(LogprobPass, directory, way, tokens)) as group:
        group.call("chunked", tokens)  # the GEMM library allocates its buffers
        dense = group.call("dense")
        chunked = group.call("chunked", chunk_tokens)
    return {
        "logprob_tokens": tokens,
        "logprob_chunk_tokens": chunk_tokens,
        "logprob_mib": chunked,
        "logprob_dense_mib": dense,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="smollm2_135m",
        help="model shape (smollm2_135m)",
    )
    parser.add_argument("--sequences", type=int, default=12, help="sequences per step (12)")
    parser.add_argument(
        "--shortest", type=int, default=16, help="minimum tokens of mixed sequences (16)"
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=128,
        help="maximum tokens of mixed sequences, and tokens of equal ones (128)",
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps of each side and kind (5)"
    )
    parser.add_argument(
        "--prompts", type=int, default=2, help="prompts of the comparison of shared prompts (2)"
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="samples per prompt in that comparison (8)"
    )
    parser.add_argument(
        "--prompt", type=int, default=256, help="tokens per prompt in that comparison (256)"
    )
    parser.add_argument(
        "--response", type=int, default=64, help="tokens per response in that comparison (64)"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=2048, help="tokens of a micro-batch (2048)"
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=256,
        help="tokens per chunk in the memory measurement of log-probs (256)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, args.model)
        result = measure(args, directory) | memory(
            directory, args.micro_batch_tokens, args.chunk_tokens
        )
    if args.json:
        print(json.dumps({"benchmark": "train", "model": args.model, **result}))
    else:
        print(
            "\n".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in result.items()
            )
        )


if __name__ == "__main__":
    main()
