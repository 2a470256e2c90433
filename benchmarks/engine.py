"""Compare the throughput of the embedded engine with transformers' `generate`, vLLM, and the GEMMs
alone.

Weights are random. The embedded engine runs either as one single-threaded replica per core or as
one replica with all threads; transformers runs in one process with one thread or all threads. Each
side tries both and is measured with the faster one. All sides sample for the same prompts.

First, all responses have the same length. Then lengths are mixed (uniform): transformers decodes a
batch until its longest response is complete, while the embedded engine uses continuous batching. No
side knows the lengths in advance; they stand for the stop tokens of a trained model.

`gemm_fraction` is the time of the GEMMs of a decode step alone, on the same cores with the same
batch size, as a share of the step time. Figures are medians over `--repeats`; ratios are computed
within each repeat.

`--engines embedded,vllm,transformers` also measures vLLM as engine=vllm runs it (requires `aligner
install-vllm`); vLLM chooses its own threads.

`--guesses N` measures speculative decoding (`engine.speculation`) instead: it generates one
response greedily, with N draft tokens per step and without. Greedy responses of random weights soon
repeat themselves, so the result is the largest possible gain.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import paired
from benchmarks.models import MODELS, shape_of, write_model
from benchmarks.processes import Group, Way

CORES = len(os.sched_getaffinity(0))
WAYS = {
    way.name: way
    for way in (
        Way("1 replica", CORES, as_ranks=True),
        Way(f"{CORES} replicas", 1, {"data": CORES}, as_ranks=True),
    )
}
PEER_WAYS = (Way("1 thread", 1), Way(f"{CORES} threads", CORES))
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SHORTEST, LONGEST = 8, 64


@dataclass(frozen=True)
class Work:
    """Responses to generate. Each group of `samples` adjacent responses has the same prompt."""

    lengths: tuple[int, ...]
    samples: int
    prompt_tokens: int

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return the token ids of the prompt of each response."""
        draw = random.Random(0)
        count = -(-len(self.lengths) // self.samples)
        prompts = [
            [draw.randrange(vocabulary) for _ in range(self.prompt_tokens)] for _ in range(count)
        ]
        return [prompts[index // self.samples] for index in range(len(self.lengths))]


class Replica:
    """One replica of the embedded engine.

    Of `way.processes` replicas, replica i generates the samples of every prompt whose index modulo
    the number of replicas is i.
    """

    def __init__(
        self,
        directory: str | None,
        model: str,
        way: Way,
        batch: int,
        precision: str,
        guesses: int = 0,
        device: str = "cpu",
    ) -> None:
        """Build the engine with the weights in `directory`; None: with random weights, created on
        the device."""
        import torch

        from aligner.agents.generate import load_weights
        from aligner.data.export import find_source
        from aligner.engines.embedded.embedded_engine import EmbeddedEngine
        from aligner.models.weight_slices import weight_table
        from aligner.schema import EngineConfig, SpeculationConfig

        self._shape, self._replica, self._replicas = (
            shape_of(model),
            int(os.environ["RANK"]),
            way.processes,
        )
        self._rows = -(-batch // self._replicas)
        speculation, self._greedy = SpeculationConfig(tokens=guesses), batch == 1
        settings = EngineConfig(batch_size=self._rows, precision=precision, speculation=speculation)
        self._prompt_passes = 0
        self._engine = EmbeddedEngine(
            self._shape, settings, rank=0, seed=1, device=device, listener=self._saw_prompts
        )
        if directory is not None:
            load_weights(self._engine, find_source(Path(directory)))
        else:
            update, names = (
                self._engine.begin_update(0),
                [spec.name for spec in weight_table(self._shape)],
            )
            for view in update.views(names).values():
                view.normal_(0, 0.02)
            update.load(names)
            update.commit()
        widths, dtype = (self._shape.hidden_size, self._shape.ffn_hidden_size), DTYPES[precision]
        self._inputs = {
            width: torch.randn(self._rows, width).to(getattr(torch, dtype)) for width in widths
        }

    def generate(self, work: Work) -> float:
        """Generate this replica's responses, and return the time in seconds."""
        begin = time.perf_counter()
        self._steps(work)
        return time.perf_counter() - begin

    def decoding_step(self, work: Work) -> float:
        """Return the mean time in seconds of a decode step that prefills no prompt."""
        steps = [
            (seconds, drawn) for seconds, drawn, ran_prompts in self._steps(work) if not ran_prompts
        ]
        return sum(seconds for seconds, _ in steps) / sum(drawn for _, drawn in steps)

    def products(self) -> float:
        """Return the time in seconds of the GEMMs of one decode step alone, computed as in the
        engine."""
        import torch

        tables = {"embedding.position_embeddings.weight"}
        if not self._shape.tied_embeddings:
            tables.add("embedding.word_embeddings.weight")
        tensors, linear = (
            self._engine._weights.tensors.items(),
            self._engine._state.decoder._matmuls.linear,
        )
        repeats, matrices = (
            8,
            [
                (name, tensor)
                for name, tensor in tensors
                if tensor.dim() == 2 and name not in tables
            ],
        )
        with torch.inference_mode():
            begin = time.perf_counter()
            for _ in range(repeats):
                for name, weight in matrices:
                    linear(self._inputs[weight.shape[1]], name.removesuffix(".weight"))
        return (time.perf_counter() - begin) / repeats

    def _saw_prompts(self, name: str, begin: float, end: float) -> None:
        self._prompt_passes += 1

    def _steps(self, work: Work) -> list[tuple[float, int, bool]]:
        """Run all steps, and return for each step its time in seconds, the number of tokens per
        row, and whether it prefilled prompts."""
        import torch

        from aligner.data.types import Prompt
        from aligner.engines.engine_loop import SingleResponses
        from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions

        requests = [
            GenerationRequest(
                Prompt(index // work.samples, "", torch.tensor(prompt)),
                index % work.samples,
                length,
            )
            for index, (prompt, length) in enumerate(
                zip(work.prompts(self._shape.vocab_size), work.lengths, strict=True)
            )
            if index // work.samples % self._replicas == self._replica
        ]
        generation = SingleResponses(self._engine).start(
            requests, SamplingOptions(max(work.lengths), greedy=self._greedy)
        )
        found = []
        while not generation.is_done:
            first, begin, passes = (
                next(iter(self._engine._scheduler._running), None),
                time.perf_counter(),
                self._prompt_passes,
            )
            had = 0 if first is None else len(first.tokens)
            generation.step()
            drawn = 0 if first is None else len(first.tokens) - had
            found.append((time.perf_counter() - begin, drawn, self._prompt_passes > passes))
        return found


class VLLM:
    """vLLM with the settings of engine=vllm."""

    def __init__(self, directory: str, model: str, batch: int, precision: str) -> None:
        import dataclasses

        from aligner.agents.generate import load_weights
        from aligner.data.export import find_source
        from aligner.engines.vllm.vllm_engine import VLLMEngine
        from aligner.schema import EngineConfig

        shape = shape_of(model)
        shape = dataclasses.replace(shape, max_positions=min(shape.max_positions, 512))
        settings = EngineConfig(
            kind="vllm", update="in_place", batch_size=batch, precision=precision
        )
        self._shape, self._engine = (
            shape,
            VLLMEngine(Path(directory), shape, settings, rank=0, seed=1),
        )
        load_weights(self._engine, find_source(Path(directory)))

    def generate(self, work: Work) -> float:
        """Generate all responses, and return the time in seconds."""
        import torch

        from aligner.data.types import Prompt
        from aligner.engines.engine_loop import SingleResponses, run_steps
        from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions

        prompts = [torch.tensor(prompt) for prompt in work.prompts(self._shape.vocab_size)]
        requests = [
            GenerationRequest(
                Prompt(index // work.samples, "", prompt), index % work.samples, length
            )
            for index, (prompt, length) in enumerate(zip(prompts, work.lengths, strict=True))
        ]
        begin = time.perf_counter()
        run_steps(SingleResponses(self._engine).start(requests, SamplingOptions(max(work.lengths))))
        return time.perf_counter() - begin


class Peer:
    """transformers' `generate`, in batches of a fixed size."""

    def __init__(self, directory: str, batch: int, precision: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()
        self._batch = batch
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, DTYPES[precision])
        ).eval()

    def generate(self, work: Work) -> float:
        """Generate all responses, and return the time in seconds."""
        import torch

        prompts = torch.tensor(work.prompts(self._model.config.vocab_size))
        begin = time.perf_counter()
        for first in range(0, len(prompts), self._batch):
            part, longest = (
                prompts[first : first + self._batch],
                max(work.lengths[first : first + self._batch]),
            )
            self._model.generate(
                part,
                attention_mask=torch.ones_like(part),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        return time.perf_counter() - begin


def best_way(ways: Sequence[Way], make: Callable[[Way], Callable[[], Any]], work: Work) -> Way:
    """Return the fastest way to generate the responses."""

    def seconds(way: Way) -> float:
        with Group(way, make(way)) as group:
            # The first call allocates memory.
            group.call(
                "generate", Work((2,) * CORES * work.samples, work.samples, work.prompt_tokens)
            )
            return group.call("generate", work)

    return ways[0] if len(ways) == 1 else min(ways, key=seconds)


def measure(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    draw = random.Random(1)
    equal = Work((args.new_tokens,) * args.batch, args.samples_per_prompt, args.prompt_tokens)
    lengths = tuple(draw.randint(SHORTEST, LONGEST) for _ in range(args.mixed_batches * args.batch))
    mixed = Work(lengths, args.samples_per_prompt, args.prompt_tokens)

    def ours(way: Way) -> Callable[[], Any]:
        return functools.partial(Replica, directory, args.model, way, args.batch, args.precision)

    def peer(_: Way) -> Callable[[], Any]:
        return functools.partial(Peer, directory, args.batch, args.precision)

    def vllm(_: Way) -> Callable[[], Any]:
        return functools.partial(VLLM, directory, args.model, args.batch, args.precision)

    sides = {"ours": (best_way(args.ways, ours, equal), ours)}
    if "transformers" in args.engines:
        sides["transformers"] = (best_way(PEER_WAYS, peer, equal), peer)
    if "vllm" in args.engines:
        sides["vllm"] = (PEER_WAYS[-1], vllm)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        groups = {
            side: stack.enter_context(Group(way, make(way))) for side, (way, make) in sides.items()
        }
        if "vllm" in groups:
            groups["vllm"].call("generate", equal)  # the first call compiles kernels
        for _ in range(args.repeats):
            for name, work in (("equal", equal), ("mixed", mixed)):
                for side, group in groups.items():
                    seconds.setdefault(f"{side}_{name}", []).append(group.call("generate", work))
            seconds.setdefault("step", []).append(groups["ours"].call("decoding_step", equal))
            seconds.setdefault("products", []).append(groups["ours"].call("products"))
    ways = {side: way.name for side, (way, _) in sides.items()}
    return report(ways, seconds, equal, mixed)


def measure_guesses(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    work, way = Work((args.new_tokens,), 1, args.prompt_tokens), WAYS["1 replica"]
    seconds: dict[int, list[float]] = {0: [], args.guesses: []}
    with contextlib.ExitStack() as stack:
        make = functools.partial(Replica, directory, args.model, way, 1, args.precision)
        groups = {
            count: stack.enter_context(Group(way, functools.partial(make, count)))
            for count in seconds
        }
        for group in groups.values():
            group.call("generate", work)  # the first call allocates memory
        for _ in range(args.repeats):
            for count, group in groups.items():
                seconds[count].append(group.call("generate", work))
    typical = {"alone_s": median(seconds[0]), "alone_guessing_s": median(seconds[args.guesses])}
    return typical | paired("guesses_ratio", seconds[0], seconds[args.guesses])


def report(
    ways: dict[str, str], seconds: dict[str, list[float]], equal: Work, mixed: Work
) -> dict[str, Any]:
    typical = {name: median(values) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "ours": ways["ours"],
        "tokens_per_s": sum(equal.lengths) / typical["ours_equal"],
        "step_s": typical["step"],
        **paired("gemm_fraction", seconds["products"], seconds["step"]),
        "mixed_tokens_per_s": sum(mixed.lengths) / typical["ours_mixed"],
    }
    for side in ways.keys() - {"ours"}:
        prefix = "" if side == "transformers" else f"{side}_"
        result |= {
            side: ways[side],
            f"{side}_tokens_per_s": sum(equal.lengths) / typical[f"{side}_equal"],
            f"{side}_mixed_tokens_per_s": sum(mixed.lengths) / typical[f"{side}_mixed"],
            **paired(f"{prefix}ratio", seconds[f"{side}_equal"], seconds["ours_equal"]),
            **paired(f"{prefix}mixed_ratio", seconds[f"{side}_mixed"], seconds["ours_mixed"]),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="smollm2_135m",
        help="model shape (smollm2_135m)",
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="batch size, summed over replicas (64)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=32, help="tokens of each response of equal length (32)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=16, help="tokens of each prompt (16)")
    parser.add_argument(
        "--mixed-batches",
        type=int,
        default=5,
        metavar="N",
        help="number of responses of mixed lengths, in batches (5)",
    )
    parser.add_argument(
        "--samples-per-prompt", type=int, default=8, help="responses per prompt (8)"
    )
    parser.add_argument(
        "--way",
        choices=sorted(WAYS),
        help="replicas of the embedded engine (by default the faster choice)",
    )
    parser.add_argument(
        "--precision", choices=sorted(DTYPES), default="fp32", help="precision of all sides (fp32)"
    )
    parser.add_argument(
        "--guesses",
        type=int,
        metavar="N",
        help="measure speculative decoding with N draft tokens, for a single response",
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements (5)")
    parser.add_argument(
        "--engines",
        type=lambda text: text.split(","),
        default=["embedded", "transformers"],
        metavar="NAME,…",
        help="engines to measure: embedded, vllm, transformers (embedded,transformers)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    args.ways = [WAYS[args.way]] if args.way else list(WAYS.values())
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, args.model)
        result = {"model": args.model, "precision": args.precision, "new_tokens": args.new_tokens}
        if args.guesses:
            result |= {"guesses": args.guesses} | measure_guesses(args, directory)
        else:
            result |= {"batch": args.batch} | measure(args, directory)
    if args.json:
        print(json.dumps({"benchmark": "engine", **result}))
    else:
        for key, value in result.items():
            print(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")


if __name__ == "__main__":
    main()
