"""Two replicas of vLLM: one is killed, and comes back with the next weight sync."""

from __future__ import annotations

import dataclasses
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aligner.data.types import Prompt, Sample, create_empty_samples
from aligner.engines.engine_loop import SingleResponses
from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.replicas import create_replica_group, generate_in_parts
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.schema import EngineParallelConfig
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED
from tests.worker_pool import WorkerPool

pytestmark = [*NEEDED, pytest.mark.timeout(900)]
PROMPTS, SAMPLES_PER_PROMPT = 6, 2
OPTIONS = SamplingOptions(30, temperature=0.8)


def generate(engine: VLLMEngine, rank: int, *, is_killed: bool = False) -> list[Sample]:
    """Generate on two replicas; with `is_killed`, kill vLLM at the first pause."""
    prompts = [Prompt(index, "", torch.tensor([7, 9 + index])) for index in range(PROMPTS)]
    parts = generate_in_parts(
        engine,
        SingleResponses(engine),
        engine._settings,
        rank,
        create_empty_samples(prompts, SAMPLES_PER_PROMPT),
        SAMPLES_PER_PROMPT,
        OPTIONS,
        steps=1,
    )
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
        if is_killed:
            is_killed = False
            os.kill(engine._replica.client._program.process.pid, signal.SIGKILL)  # type: ignore


def lose_replica(directory: str) -> dict[str, Any]:
    """Generate undisturbed, with a kill of rank 1's vLLM, without it, and after a weight sync."""
    rank = dist.get_rank()
    layout = EngineParallelConfig(tensor=1, data=2)
    settings = dataclasses.replace(
        engines.SETTINGS, kind="vllm", kv_cache_mib=64, parallel=layout, batch_size=4
    )
    group = create_replica_group(layout, rank, timedelta(seconds=60))
    path = Path(directory)
    engine = VLLMEngine(path, engines.shape_of(path), settings, rank, seed=7, group=group)
    try:
        engines.publish(engine, path, 0)
        samples = [generate(engine, rank), generate(engine, rank, is_killed=rank == 1)]
        versions = [engine.version]
        samples.append(generate(engine, rank))
        engines.publish(engine, path, 1)
        versions.append(engine.version)
        samples.append(generate(engine, rank))
    finally:
        engine.shutdown()
    return {"samples": samples, "versions": versions}


@pytest.mark.promise("exited-replica-is-left-out")
def test_killed_replica_is_left_out_until_the_next_weight_sync(
    pool: WorkerPool, tmp_path: Path
) -> None:
    directory = engines.save_tiny(tmp_path, seed=0, head_dim=32)
    results = pool.run(lose_replica, 2, str(directory), timeout=800)
    assert [result["versions"] for result in results] == [[0, 1], [None, 1]]
    for result in results:
        expected = result["samples"][0]
        for samples in result["samples"][1:]:
            for sample, other in zip(samples, expected, strict=True):
                assert sample.finish_reason != "unfinished"
                assert sample.tokens.tolist() == other.tokens.tolist()
                torch.testing.assert_close(
                    sample.engine_logprobs, other.engine_logprobs, atol=1e-4, rtol=0
                )
