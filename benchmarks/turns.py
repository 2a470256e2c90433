"""Measure the overhead of multi-turn episodes with 1 to 128 turns, and compare with transformers.

Weights are random. In each turn the policy generates 8 tokens on average, the same in every repeat,
and an environment in a worker process responds with 8 words. transformers' `generate` receives the
whole history of every turn again as text, the usual way to run episodes with it. It generates turns
of the same lengths, one batch per turn.

- `forward_s`, `sampling_s`: time per turn of an episode in forward passes, and in sampling from the
  logits.
- `between_s`: all other time per turn: tokenization, the environment process, and waiting for it.
  `between_share` is its share of the total time.
- `prefill_ratio`: tokens that were prefilled, divided by the number of prompt and observation
  tokens; 1 means that no token was prefilled twice.

Figures are medians over `--repeats`; ratios also have minimum (`_least`) and maximum (`_most`).

With `--delays`, environments take up to 2 s per turn in 64 concurrent episodes. `delays_ratio`
compares the total time with a lower bound: the longer of the same episodes without delays and the
slowest episode alone.

With `--replicas`, several samples of each prompt are generated on several replicas, which the
benchmark runs one after another. A hit rate is the fraction of the input tokens of all turns that
are in the KV cache already: `hit_rate_router` with the assignment of `aligner.engines.router`,
`hit_rate_round_robin` if the samples of a prompt are distributed over the replicas.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine import CORES, DTYPES
from benchmarks.figures import paired
from benchmarks.models import MODELS, write_model, write_tokenizer
from benchmarks.processes import Group, Way
from benchmarks.turns_environment import TOLD

TURNS = (1, 2, 8, 32, 128)
DRAWN = 8
PROMPT_TOKENS = 16
MOST_DELAY_S = 2.0


@dataclass(frozen=True)
class Work:
    """Episodes to generate, each of `turns` turns."""

    turns: int
    episodes: Sequence[int]
    """Numbers of the episodes, which determine their prompts."""
    delay_s: float = 0.0
    samples_per_prompt: int = 1
    """Number of adjacent episodes with the same prompt."""


@dataclass(frozen=True)
class Taken:
    """Times in seconds and numbers of tokens of a generation of episodes."""

    whole_s: float
    forward_s: float
    sampling_s: float
    prefilled: int
    new: int
    """Number of prompt and observation tokens."""
    inputs: int
    """Number of input tokens of all turns, each of which has the whole history as its input."""
    lengths: list[list[int]]
    """Number of generated tokens of each turn of each episode."""
    ended_s: list[float]
    """Time at which each episode was complete."""


class Ours:
    """The embedded engine, with environments in a worker process."""

    def __init__(self, directory: str, precision: str) -> None:
        from aligner.agents.environment_pool import EnvironmentPool
        from aligner.agents.episodes import EnvironmentEpisodes
        from aligner.agents.generate import load_weights
        from aligner.data.export import find_source
        from aligner.data.tokenizer import Tokenizer
        from aligner.engines.embedded.embedded_engine import EmbeddedEngine
        from aligner.engines.embedded.token_sampler import TokenSampler
        from aligner.engines.engine_protocol import GenerationEngine
        from aligner.models.model_source import directory_shape
        from aligner.schema import EngineConfig
        from aligner.schema.environment import EnvironmentConfig

        self._shape = directory_shape(Path(directory), "--model")
        engine = EmbeddedEngine(self._shape, EngineConfig(precision=precision), rank=0, seed=1)
        load_weights(engine, find_source(Path(directory)))
        settings = EnvironmentConfig(
            target="benchmarks.turns_environment:Words",
            max_turns=max(TURNS),
            max_turn_tokens=self._shape.max_positions,
        )
        self._pool = EnvironmentPool.from_config(settings)
        self._pool.start()
        assert isinstance(engine, GenerationEngine)
        self._engine = EnvironmentEpisodes(
            engine, self._pool, Tokenizer(Path(directory)), settings, seed=1
        )
        self._forward_s = self._sampling_s = 0.0
        self._prefilled = 0
        forward, sample = engine._state.forward, TokenSampler._sample_and_broadcast

        def forwarded(step: Any, cache: Any) -> Any:
            begin = time.perf_counter()
            logits = forward(step, cache)
            self._forward_s += time.perf_counter() - begin
            self._prefilled += 0 if step.prompts is None else len(step.prompts.tokens)
            self._prefilled += 0 if step.needs_logits else len(step.tokens)
            return logits

        def sampled(*arguments: Any) -> Any:
            begin = time.perf_counter()
            chosen = sample(*arguments)
            self._sampling_s += time.perf_counter() - begin
            return chosen

        engine._state.forward = forwarded
        TokenSampler._sample_and_broadcast = sampled  # type: ignore[method-assign]

    def episodes(self, work: Work) -> Taken:
        """Generate episodes, and return their times and numbers of tokens."""
        import torch

        from aligner.data.types import Prompt
        from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions

        task, requests = {"turns": work.turns, "delay_s": work.delay_s}, []
        for number in work.episodes:
            prompt, sample = divmod(number, work.samples_per_prompt)
            draw = torch.Generator().manual_seed(prompt)
            tokens = torch.randint(3, self._shape.vocab_size, (PROMPT_TOKENS,), generator=draw)
            requests.append(GenerationRequest(Prompt(prompt, "", tokens, task), sample))
        most = min(32 * work.turns + 256, self._shape.max_positions - PROMPT_TOKENS)
        # With random weights all tokens are about equally probable.
        stops = range(self._shape.vocab_size // DRAWN)
        self._forward_s, self._sampling_s, self._prefilled = 0.0, 0.0, 0
        samples, ended, begin = {}, {}, time.perf_counter()
        generation = self._engine.start(requests, SamplingOptions(most, stop_token_ids=stops))  # type: ignore[arg-type]
        while not generation.is_done:
            for place, sample in generation.step():
                samples[place], ended[place] = sample, time.perf_counter() - begin
        whole = time.perf_counter() - begin
        turns = [
            [len(part) for part in samples[place].split_turns()] for place in range(len(requests))
        ]
        if wrong := [each for each in turns if len(each) != 2 * work.turns - 1]:
            raise AssertionError(f"an episode was cut: {wrong}")
        return Taken(
            whole,
            self._forward_s,
            self._sampling_s,
            self._prefilled,
            len(turns) * PROMPT_TOKENS + sum(sum(each[1::2]) for each in turns),
            sum(
                PROMPT_TOKENS + sum(each[:turn])
                for each in turns
                for turn in range(0, len(each), 2)
            ),
            [each[::2] for each in turns],
            [ended[place] for place in range(len(requests))],
        )

    def close(self) -> None:
        """Stop the process of the environments."""
        self._pool.close()


class Peer:
    """transformers' `generate`, which receives the whole history in every turn."""

    def __init__(self, directory: str, precision: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, DTYPES[precision])
        ).eval()

    def episodes(self, lengths: Sequence[Sequence[int]]) -> float:
        """Generate episodes whose turns have these lengths, and return the time in seconds."""
        begin = time.perf_counter()
        histories = [" ".join(f"w{3 + place}" for place in range(PROMPT_TOKENS)) for _ in lengths]
        told = " ".join(f"w{3 + place}" for place in range(TOLD))
        for turn in zip(*lengths, strict=True):
            asked = self._tokenizer(
                histories, return_tensors="pt", padding=True, return_token_type_ids=False
            )
            drawn = self._model.generate(
                **asked,
                max_new_tokens=max(turn),
                min_new_tokens=max(turn),
                do_sample=True,
                top_k=0,
                pad_token_id=self._tokenizer.pad_token_id,
            )
            said = drawn[:, asked["input_ids"].shape[1] :]
            texts = self._tokenizer.batch_decode(
                [row[:length] for row, length in zip(said, turn, strict=True)]
            )
            histories = [
                f"{history} {text} {told}" for history, text in zip(histories, texts, strict=True)
            ]
        return time.perf_counter() - begin


def measure(args: argparse.Namespace, ours: Any, peer: Any, turns: int) -> dict[str, Any]:
    """Measure episodes of `turns` turns, and return the figures."""
    work, numbers = Work(turns, range(args.episodes)), turns * args.episodes
    ours.call("episodes", Work(turns, work.episodes))  # allocates memory
    taken: list[Taken] = []
    peer_s: list[float] = []
    for _ in range(args.repeats):
        taken.append(ours.call("episodes", work))
        if peer is not None and turns <= args.peer_turns:
            peer_s.append(peer.call("episodes", taken[0].lengths))
    between = [each.whole_s - each.forward_s - each.sampling_s for each in taken]
    result: dict[str, Any] = {
        "turns": turns,
        "s": median(each.whole_s for each in taken),
        "forward_s": median(each.forward_s for each in taken) / numbers,
        "sampling_s": median(each.sampling_s for each in taken) / numbers,
        "between_s": median(between) / numbers,
        **paired("between_share", between, [each.whole_s for each in taken]),
        **paired("prefill_ratio", [each.prefilled for each in taken], [each.new for each in taken]),
    }
    if peer_s:
        result |= {
            "transformers_s": median(peer_s),
            **paired("ratio", peer_s, [each.whole_s for each in taken]),
        }
    return result


def measure_delays(args: argparse.Namespace, ours: Any) -> dict[str, Any]:
    """Measure episodes whose environments respond with a delay, and return the figures."""
    everyone = range(args.episodes)
    ours.call("episodes", Work(args.delay_turns, everyone))  # allocates memory
    together, without, alone = [], [], []
    for _ in range(args.repeats):
        delayed = ours.call("episodes", Work(args.delay_turns, everyone, MOST_DELAY_S))
        slowest = max(everyone, key=lambda number: delayed.ended_s[number])
        together.append(delayed.whole_s)
        without.append(ours.call("episodes", Work(args.delay_turns, everyone)).whole_s)
        alone.append(ours.call("episodes", Work(args.delay_turns, [slowest], MOST_DELAY_S)).whole_s)
    bounds = [max(pair) for pair in zip(without, alone, strict=True)]
    return {
        "episodes": args.episodes,
        "turns": args.delay_turns,
        "together_s": median(together),
        "without_delays_s": median(without),
        "slowest_alone_s": median(alone),
        **paired("delays_ratio", together, bounds),
    }


def measure_replicas(args: argparse.Namespace, ours: Any) -> dict[str, Any]:
    """Measure the hit rate of the KV cache with two assignments of episodes to replicas."""
    from aligner.engines.router import Router

    count = args.episodes
    prompts = [number // args.samples_per_prompt for number in range(count)]
    assignments = {
        "router": Router(prompts, args.replicas, count).assign([True] * args.replicas),
        "round_robin": [range(replica, count, args.replicas) for replica in range(args.replicas)],
    }
    turns = args.turns[-1]
    result = {"episodes": count, "turns": turns, "replicas": args.replicas}
    for name, assigned in assignments.items():
        taken = [
            ours.call(
                "episodes",
                Work(turns, episodes, samples_per_prompt=args.samples_per_prompt),
            )
            for episodes in assigned
        ]
        prefilled, inputs = (
            sum(each.prefilled for each in taken),
            sum(each.inputs for each in taken),
        )
        result[f"hit_rate_{name}"] = 1 - prefilled / inputs
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=sorted(MODELS), help="model shape (smollm2_135m; with --delays tiny)"
    )
    parser.add_argument(
        "--precision", choices=sorted(DTYPES), default="fp32", help="precision of both sides (fp32)"
    )
    parser.add_argument(
        "--turns", type=int, nargs="+", choices=TURNS, default=TURNS, help="turns per episode (all)"
    )
    parser.add_argument("--episodes", type=int, help="concurrent episodes (4; with --delays 64)")
    parser.add_argument("--repeats", type=int, default=3, help="number of measurements (3)")
    parser.add_argument(
        "--peer-turns",
        type=int,
        default=max(TURNS),
        help="maximum number of turns for which transformers is measured (128)",
    )
    parser.add_argument(
        "--no-transformers", action="store_true", help="do not measure transformers"
    )
    parser.add_argument(
        "--delays", action="store_true", help="measure the cost of environment delays instead"
    )
    parser.add_argument(
        "--delay-turns", type=int, default=8, help="turns per episode with --delays (8)"
    )
    parser.add_argument(
        "--replicas", type=int, help="measure the hit rate of the KV cache with so many replicas"
    )
    parser.add_argument("--samples-per-prompt", type=int, default=4, help="with --replicas (4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(arguments)
    args.model = args.model or ("tiny" if args.delays else "smollm2_135m")
    args.episodes = args.episodes or (64 if args.delays else 4)
    way = Way("1 process", CORES, as_ranks=True)
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, args.model)
        write_tokenizer(directory, args.model)
        about = {"benchmark": "turns", "model": args.model, "precision": args.precision}
        with Group(way, functools.partial(Ours, directory, args.precision)) as ours:
            if args.replicas:
                tell(about | measure_replicas(args, ours), as_json=args.json)
            elif args.delays:
                tell(about | measure_delays(args, ours), as_json=args.json)
            elif args.no_transformers:
                for turns in args.turns:
                    tell(about | measure(args, ours, None, turns), as_json=args.json)
            else:
                with Group(
                    Way("1 process", CORES), functools.partial(Peer, directory, args.precision)
                ) as peer:
                    for turns in args.turns:
                        tell(about | measure(args, ours, peer, turns), as_json=args.json)
            ours.call("close")


def tell(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print(
            *(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in result.items()
            )
        )


if __name__ == "__main__":
    main()
