"""Log-probs of vLLM for models of every family that it runs, against transformers."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aligner.checks.engine import VLLM_FAMILIES
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.schema import EngineParallelConfig
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED
from tests.megatron import families, jobs
from tests.rounds import covering, rare

pytestmark = [*NEEDED, pytest.mark.timeout(600)]
# vLLM's attention on CPUs supports no smaller heads than those of 32 elements.
HEADS: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
# vLLM's latent attention on CPUs supports these sizes only, which are the published ones.
LATENT: dict[str, Any] = {
    "hidden_size": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "qk_head_dim": 128,
    "head_dim": 64,
    "v_head_dim": 64,
}
CHANGES: dict[str, dict[str, Any]] = {
    # vLLM's Gemma 2 always has tied embeddings.
    "gemma2": HEADS | {"tie_word_embeddings": True},
    # vLLM's gpt-oss always has this limit. With these weights it applies to some projections.
    "gpt-oss": HEADS | {"swiglu_limit": 7.0, "initializer_range": 0.2},
    "deepseek_v2": LATENT,
    "deepseek_v2-lite": LATENT,
    "deepseek_v3": LATENT,
    "moonlight": LATENT,
}
NAMES = (
    "gpt-oss",
    "smollm3",
    "granite",
    "phi3",
    "olmo3",
    "gemma2",
    "gemma3",
    "glm4",
    "qwen2_moe",
    "qwen3_moe-dense",
    "glm4_moe",
    "minimax_m2",
    "deepseek_v2",
    "deepseek_v2-lite",
    "deepseek_v3",
    "moonlight",
    "seed_oss",
    "olmoe",
)


def compute_largest_error(directory: Path, samples: list[Sample]) -> float:
    """Return the largest difference of the engine's log-probs from those of transformers."""
    model = families.load_reference(directory)
    errors = []
    for sample in samples:
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        logprobs = (logits / jobs.TEMPERATURE).log_softmax(-1)
        expected = logprobs.gather(-1, sample.tokens[sample.prompt_length :, None])[:, 0]
        errors.append((sample.engine_logprobs - expected).abs().max().item())
    return max(errors)


def generate(directory: Path, layout: EngineParallelConfig) -> list[Sample]:
    """Return samples of an engine after its second weight update, on the first rank. Collective over a
    replica."""
    rank, group = 0, None
    if layout.ranks > 1:
        rank = dist.get_rank()
        group = dist.new_group(
            timeout=timedelta(seconds=400)
        )  # rank 1 waits until vLLM has started
    settings = dataclasses.replace(engines.SETTINGS, kind="vllm", kv_cache_mib=64, parallel=layout)
    engine = VLLMEngine(directory, engines.shape_of(directory), settings, rank, 7, group)
    try:
        for version in range(2):
            assert list(engine.find_changed_weights()) == []
            engines.publish(engine, directory, version)
            assert list(engine.find_wrong_weights({})) == []
        requests = [
            GenerationRequest(Prompt(index, "", torch.arange(2, 5 + index)), 0)
            for index in range(6)
        ]
        options = SamplingOptions(14, temperature=jobs.TEMPERATURE)
        return engines.generate(engine, requests, options)
    finally:
        engine.shutdown()


@pytest.mark.promise("vllm-logprobs-equal-megatron")
@pytest.mark.parametrize("name", covering(NAMES, (), families.parts))
def test_logprobs_equal_transformers_after_a_second_update(tmp_path, name):
    directory = families.save(name, tmp_path, **CHANGES.get(name, HEADS))
    shape = engines.shape_of(directory)
    assert shape.family in VLLM_FAMILIES
    assert compute_largest_error(directory, generate(directory, EngineParallelConfig())) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_moe", rare("glm4_moe")])
def test_logprobs_of_expert_parallel_workers_equal_transformers(pool, tmp_path, name):
    directory = families.save(name, tmp_path, **HEADS)
    layout = EngineParallelConfig(tensor=2, expert=2)
    samples, _ = pool.run(generate, 2, directory, layout, timeout=500)
    assert compute_largest_error(directory, samples) < 1e-4
