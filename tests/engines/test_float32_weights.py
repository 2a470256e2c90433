"""Correction biases of routers stay in float32 in an engine with bf16 weights."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.megatron import world as worlds
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import plan_to_engine
from aligner.resharding.transport import Link
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.megatron import families, jobs

BIAS = "e_score_correction_bias"


def published_biases(directory: str, settings: dict[str, str]) -> dict[str, Tensor]:
    """Publish a policy on two ranks to their engine twice; return the engine's biases."""
    policy = jobs.policy(directory, {"data": 2, "expert": 2}, {"precision": settings["trainer"]})
    engine_settings = EngineConfig(
        parallel=EngineParallelConfig(tensor=2),
        precision="bf16",
        publish=settings["publish"],
        update="atomic",
    )
    shape = policy.runner.shape
    engine = EmbeddedEngine(shape, engine_settings, dist.get_rank(), 0, group=dist.group.WORLD)
    weights = policy.runner.weights
    plan = plan_to_engine(shape, policy.world.layout, engine.weight_format)
    link = Link.from_default_group(
        plan.labels, timeout=timedelta(seconds=60), device=policy.world.device
    )
    publisher = Publisher.for_engine(
        plan,
        link,
        engine_settings,
        engine.weight_format,
        read=weights.read,
        # as a snapshot holds them
        read_previous=lambda name: publisher._read(name).bfloat16(),
        begin_update=engine.begin_update,
        held_weights=engine,
        copied_names=weights.copied_names,
    )
    publisher.publish(0)
    publisher.publish(1)
    found = {
        name: view.clone() for name, view in engine._weights.views.items() if name.endswith(BIAS)
    }
    worlds.shutdown()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer": "bf16", "publish": "whole"},
        {"trainer": "fp32", "publish": "changes"},
    ],
    ids=str,
)
def test_bf16_engine_has_float32_correction_biases(pool, tmp_path, settings):
    directory = families.save("glm4_moe", tmp_path)
    file = directory / "model.safetensors"
    # values whose differences bf16 cannot represent
    tensors = {
        name: 14 + 0.001 * tensor if name.endswith(BIAS) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    expected = {name: tensor for name, tensor in tensors.items() if name.endswith(BIAS)}
    assert all(len(tensor.bfloat16().unique()) == 1 for tensor in expected.values())
    for found in pool.run(published_biases, 2, str(directory), settings):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, expected[name]), name
