"""Samples of several replicas: they equal those of one replica, also if a replica exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aligner.data.types import Prompt, Sample, create_empty_samples
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.replicas import EarlyStopCondition, generate_in_parts, run_to_completion
from aligner.errors import AlignerError, EngineExited
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.engines.engines import publish as load_weights
from tests.engines.engines import save_tiny, shape_of
from tests.worker_pool import WorkerPool

SAMPLES_PER_PROMPT = 3
OPTIONS = SamplingOptions(24, temperature=0.9, stop_token_ids=tuple(range(6)))


class ExitingEngine(EmbeddedEngine):
    """An engine whose process seems to exit after a number of steps."""

    steps_before_exit: int | None = None
    restart_count = 0

    @property
    def can_restart(self) -> bool:
        return True

    def step(self) -> None:
        if self.steps_before_exit is not None:
            if not self.steps_before_exit:
                raise EngineExited("the engine was killed")
            self.steps_before_exit -= 1
        super().step()

    def restart(self) -> None:
        self.restart_count += 1
        self.steps_before_exit = None
        self.interrupt()
        self.discard_weights("the engine was killed")


def build_engine(directory: str, settings: EngineConfig, rank: int) -> ExitingEngine:
    engine = ExitingEngine(shape_of(Path(directory)), settings, rank, seed=5)
    load_weights(engine, Path(directory), 0)
    return engine


def build_samples(prompts: int) -> list[Sample]:
    """Return the unfinished samples of prompts of different lengths."""
    draw = torch.Generator().manual_seed(3)
    tokens = [
        torch.randint(6, 100, (2 + 3 * index % 7,), generator=draw) for index in range(prompts)
    ]
    return create_empty_samples(
        [Prompt(index, "", each, {"field": index}) for index, each in enumerate(tokens)],
        SAMPLES_PER_PROMPT,
    )


def get_settings(replicas: int, batch_size: int) -> EngineConfig:
    layout = EngineParallelConfig(tensor=1, data=replicas)
    return EngineConfig(parallel=layout, batch_size=batch_size, exact=True)


def generate(
    engine: ExitingEngine, settings: EngineConfig, rank: int, prompts: int, **arguments: Any
) -> list[Sample]:
    parts = generate_in_parts(
        engine,
        SingleResponses(engine),
        settings,
        rank,
        build_samples(prompts),
        SAMPLES_PER_PROMPT,
        OPTIONS,
        **arguments,
    )
    return run_to_completion(parts)


def generate_on_rank(
    directory: str,
    replicas: int,
    prompts: int,
    exits: dict[int, int],
    batch_size: int = 2,
    generations: int = 1,
) -> dict[str, Any]:
    """Generate on one rank of an engine: `generations` times, and once more after a weight sync.

    `exits` contains the number of engine steps after which a rank exits.
    """
    rank = dist.get_rank() if replicas > 1 else 0
    settings = get_settings(replicas, batch_size)
    engine = build_engine(directory, settings, rank)
    engine.steps_before_exit = exits.get(rank)
    had_weights: list[bool] = []
    try:
        results = []
        for _ in range(generations):
            results.append(generate(engine, settings, rank, prompts))
            had_weights.append(engine.version is not None)
        load_weights(engine, Path(directory), 1)
        results.append(generate(engine, settings, rank, prompts))
    except (AlignerError, EngineExited) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"samples": results, "restarts": engine.restart_count, "had_weights": had_weights}


def assert_equal_bits(samples: list[Sample], expected: list[Sample]) -> None:
    assert len(samples) == len(expected)
    for sample, other in zip(samples, expected, strict=True):
        assert sample.finish_reason == other.finish_reason != "unfinished"
        assert (sample.prompt_id, sample.sample_index) == (other.prompt_id, other.sample_index)
        assert sample.metadata == other.metadata
        assert torch.equal(sample.tokens, other.tokens)
        assert torch.equal(sample.engine_logprobs, other.engine_logprobs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("routed"), 0))


@pytest.mark.promise("samples-do-not-depend-on-replicas")
@pytest.mark.parametrize(("prompts", "batch_size"), [(1, 2), (5, 2), (7, 4), (6, 64)], ids=str)
def test_samples_do_not_depend_on_replicas(
    pool: WorkerPool, directory: str, prompts: int, batch_size: int
) -> None:
    (alone,) = pool.run(generate_on_rank, 1, directory, 1, prompts, {}, batch_size)
    for rank_result in pool.run(generate_on_rank, 2, directory, 2, prompts, {}, batch_size):
        for samples, expected in zip(rank_result["samples"], alone["samples"], strict=True):
            assert_equal_bits(samples, expected)


@pytest.mark.promise("exited-replica-is-left-out")
@pytest.mark.parametrize("steps", [0, 3, 11, 30])
def test_samples_of_an_exited_replica_are_generated_by_the_other_one(
    pool: WorkerPool, directory: str, steps: int
) -> None:
    (alone,) = pool.run(generate_on_rank, 1, directory, 1, 6, {}, 4, 2)
    results = pool.run(generate_on_rank, 2, directory, 2, 6, {1: steps}, 4, 2)
    for result in results:
        for samples, expected in zip(result["samples"], alone["samples"], strict=True):
            assert_equal_bits(samples, expected)
    assert [result["restarts"] for result in results] == [0, 1]
    assert [result["had_weights"] for result in results] == [[True, True], [False, False]]


def test_exit_of_every_replica_is_an_error(pool: WorkerPool, directory: str) -> None:
    results = pool.run(generate_on_rank, 2, directory, 2, 6, {0: 2, 1: 20}, 4)
    assert results[0]["error"] == "AlignerError: every replica of the engine has exited"
    assert results[1]["error"] == "EngineExited: the engine was killed"


def stop_early(directory: str) -> list[Sample]:
    """Generate until two of five prompts are complete."""
    rank = dist.get_rank()
    settings = get_settings(2, 2)
    engine = build_engine(directory, settings, rank)
    return generate(engine, settings, rank, 5, steps=2, early_stop=EarlyStopCondition(2))


def test_samples_that_wait_at_an_early_stop_stay_unfinished(
    pool: WorkerPool, directory: str
) -> None:
    for samples in pool.run(stop_early, 2, directory):
        assert [sample.prompt_id for sample in samples] == [
            prompt for prompt in range(5) for _ in range(SAMPLES_PER_PROMPT)
        ]
        by_prompt = [samples[at : at + 3] for at in range(0, 15, 3)]
        complete = [all(each.finish_reason != "unfinished" for each in row) for row in by_prompt]
        assert sum(complete) >= 2 and not all(complete)
        assert not len(samples[-1].response)
