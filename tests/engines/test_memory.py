"""The estimate of an engine's memory compared with the embedded engine's actual bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.embedded.engine_weights import compute_parameters
from aligner.engines.engine_protocol import SamplingOptions
from aligner.models.hugging_face import read_config
from aligner.models.weight_slices import weight_table
from aligner.placement.memory.model_states import count_engine_weights, count_shared_weights
from aligner.placement.memory.role_memory import compute_engine_memory
from aligner.schema import Config, EngineConfig, EngineParallelConfig, ParallelConfig
from aligner.schema.keys import with_values
from aligner.training.rollout_builder import RolloutBuilder
from aligner.training.samplers import ColocatedSampler
from tests.engines.engines import engine_bytes
from tests.megatron.test_memory import DEEPSEEK, GPT2, LLAMA, MIXTRAL, NEOX, QWEN3, TIED
from tests.training.fakes import Scorers, Stream

MODELS = {
    "llama": LLAMA,
    "tied": TIED,
    "qwen3": QWEN3,
    "neox": NEOX,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
}
PADDING = 0.01
"""Allowed padding as a fraction of the storage: every parameter is aligned."""


@pytest.mark.parametrize("name", MODELS)
def test_engine_weight_bytes_equal_estimate(name: str) -> None:
    shape = read_config(MODELS[name], "test")
    engine = EmbeddedEngine(shape, EngineConfig(), 0, 1)
    assert (
        4 * count_engine_weights(shape, 1)
        <= engine_bytes(engine)
        <= (1 + PADDING) * 4 * count_engine_weights(shape, 1)
    )
    for expert in (1, 2) if shape.num_experts else (1,):
        layout = EngineParallelConfig(tensor=2, expert=expert)
        for rank in range(2):
            halves = sum(part.numel for part in compute_parameters(shape, layout, rank))
            assert halves == count_engine_weights(shape, 2, expert)


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_vllm_have_the_weights_of_the_model(name: str) -> None:
    shape = read_config(MODELS[name], "test")
    outer = [spec for spec in weight_table(shape) if spec.layer is None]
    copies = sum(spec.numel for spec in outer if len(spec.stages) > 1)
    if name in ("gpt2", "mixtral"):
        # vLLM's models of these families have all weights outside the layers on each stage.
        copies = 2 * sum(spec.numel for spec in outer)
    stages = [count_engine_weights(shape, 1, 1, 3, stage) for stage in range(3)]
    assert sum(stages) == count_engine_weights(shape, 1) + copies


@pytest.mark.parametrize("name", MODELS)
def test_shared_engine_stores_only_unshared_weights(name: str) -> None:
    shape = read_config(MODELS[name], "test")
    trained = {
        parameter.name: torch.empty(parameter.shape)
        for parameter in compute_parameters(shape, EngineParallelConfig())
    }
    settings = EngineConfig(update="shared", parallel=EngineParallelConfig())
    engine = EmbeddedEngine(shape, settings, 0, 1, shared=trained)
    rest = count_engine_weights(shape, 1) - count_shared_weights(shape, ParallelConfig(), 0, 1)
    assert 4 * rest <= engine_bytes(engine) <= (1 + PADDING) * 4 * rest


@pytest.mark.parametrize(
    ("entries", "values", "rows"),
    [
        (LLAMA, {}, 4),
        (DEEPSEEK, {}, 4),
        (LLAMA, {"rollout.micro_batches": 1}, 8),
        (LLAMA, {"rollout.spare_prompts": 1}, 6),
        (LLAMA, {"engine.batch_size": 3}, 3),
    ],
    ids=["micro-batches", "latents", "at-once", "spare-prompts", "batch-size"],
)
def test_kv_cache_bytes_equal_estimate(
    entries: dict[str, Any], values: dict[str, int], rows: int
) -> None:
    shape = read_config(entries, "test")
    sizes = {
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2,
        "data.max_prompt_tokens": 1,
    }
    config = with_values(Config(), {**sizes, "rollout.max_response_tokens": 5, **values})
    engine = EmbeddedEngine(shape, config.engine, 0, 1)
    empty, update = engine_bytes(engine), engine.begin_update(0)
    for view in update.views(list(engine._weights.views)).values():
        view.fill_(0.01)
    update.load(list(engine._weights.views))
    update.commit()
    sampler, options = (
        ColocatedSampler(engine, config.engine, 0),
        SamplingOptions(max_new_tokens=5),
    )
    source = RolloutBuilder(
        Stream(), sampler, Scorers(lambda _: False), config.rollout, options, pad_token_id=0
    )
    for _ in range(2):
        source.take()
    assert engine_bytes(engine) - empty == compute_engine_memory(config, shape).cache
    # the latent and the rotated key, or keys and values of all heads
    width = 2 * shape.num_kv_heads * shape.head_dim
    if shape.latent_attention is not None:
        width = entries["kv_lora_rank"] + entries["qk_rope_head_dim"]
    assert compute_engine_memory(config, shape).cache == rows * 5 * shape.num_layers * width * 4
