"""The embedded engine's log-probs equal Megatron's for every family, on one and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.data.collectives import broadcast_samples
from aligner.data.types import Prompt, Sample, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.engines.engines import find_tolerance, generate, load_directory
from tests.megatron import families, jobs
from tests.rounds import slow, typical

LENGTHS = (3, 9, 1, 9)
NEW_TOKENS = (14, 9, 14, 5, 11, 14, 2, 14)


def sample_and_score(directory: str, tensor: int, expert: int = 1) -> tuple[list[Sample], float]:
    """Generate on all ranks of the world; return the samples and the largest log-prob difference to
    Megatron."""
    generator = torch.Generator().manual_seed(5)
    shape = directory_shape(Path(directory), "model.path")
    prompts = [
        Prompt(index, "", torch.randint(2, shape.vocab_size, (length,), generator=generator))
        for index, length in enumerate(LENGTHS)
    ]
    # Fewer rows than responses, so that some start while others are in flight.
    layout = EngineParallelConfig(tensor=tensor, expert=expert)
    settings = EngineConfig(parallel=layout, batch_size=3)
    engine = EmbeddedEngine(shape, settings, dist.get_rank(), seed=2, group=dist.group.WORLD)
    load_directory(engine, Path(directory))
    requests = [
        GenerationRequest(prompts[index // 2], index % 2, limit)
        for index, limit in enumerate(NEW_TOKENS)
    ]
    options = SamplingOptions(
        max(NEW_TOKENS), temperature=jobs.TEMPERATURE, routes=bool(shape.num_experts)
    )
    samples = broadcast_samples(generate(engine, requests, options))
    batch = collate(samples, pad_token_id=0)
    scored = jobs.policy(directory, {"data": tensor}).logprobs(batch.tokens, batch.lengths)
    return samples, float(torch.where(batch.mask, scored - batch.engine_logprobs, 0.0).abs().max())


@pytest.mark.promise("engine-logprobs-equal-megatron")
@pytest.mark.parametrize("family", ["qwen2", *map(slow, ("olmo2", "glm4", "qwen3_moe"))])
def test_logprobs_of_more_ranks_than_kv_heads_equal_megatron(pool, tmp_path, family):
    directory = str(families.save(family, tmp_path))
    ((alone, _),) = pool.run(sample_and_score, 1, directory, 1)
    for samples, error in pool.run(sample_and_score, 4, directory, 4):
        assert error < find_tolerance(directory, samples, error)
        assert [sample.tokens.tolist() for sample in samples] == [
            sample.tokens.tolist() for sample in alone
        ]


@pytest.mark.promise("engine-logprobs-equal-megatron")
@pytest.mark.parametrize(
    ("family", "tensor", "expert"),
    [
        ("qwen3_moe", 2, 2),
        ("qwen3_moe", 4, 2),
        slow("qwen3_next", 2, 2),
        *(
            slow(family, tensor, expert)
            for family in ("mixtral", "gpt-oss", "deepseek_v3")
            for tensor, expert in ((2, 2), (4, 2))
        ),
    ],
)
def test_logprobs_of_expert_parallel_engine_equal_megatron(pool, tmp_path, family, tensor, expert):
    directory = str(families.save(family, tmp_path))
    ((alone, _),) = pool.run(sample_and_score, 1, directory, 1)
    for samples, error in pool.run(sample_and_score, tensor, directory, tensor, expert):
        assert error < find_tolerance(directory, samples, error)
        assert [sample.tokens.tolist() for sample in samples] == [
            sample.tokens.tolist() for sample in alone
        ]
        assert [routes_of(sample) for sample in samples] == [routes_of(sample) for sample in alone]


def routes_of(sample: Sample) -> list[list[list[int]]] | None:
    return None if sample.expert_routing is None else sample.expert_routing.sort(-1).values.tolist()


@pytest.mark.promise("engine-trainer-mismatch-below-1e-3", "engine-logprobs-equal-megatron")
@pytest.mark.parametrize("family", typical(families.CONFIGS, ("llama3", "gpt2", "qwen3_moe")))
def test_logprobs_equal_megatron(pool, tmp_path, family):
    directory = str(families.save(family, tmp_path))
    ((alone, error),) = pool.run(sample_and_score, 1, directory, 1)
    assert error < find_tolerance(directory, alone, error)
    for samples, error in pool.run(sample_and_score, 2, directory, 2):
        assert error < find_tolerance(directory, samples, error)
        assert [sample.tokens.tolist() for sample in samples] == [
            sample.tokens.tolist() for sample in alone
        ]
        assert [routes_of(sample) for sample in samples] == [routes_of(sample) for sample in alone]
    assert [len(sample.engine_logprobs) for sample in alone] == list(NEW_TOKENS)
    assert len({tuple(sample.tokens.tolist()) for sample in alone}) == len(alone)
    assert [sample.expert_routing is not None for sample in alone] == [
        family in families.MIXTURES
    ] * len(alone)
