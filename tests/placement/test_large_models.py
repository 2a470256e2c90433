"""Large mixtures of experts are accepted on clusters of 80 GB GPUs that are large enough for them, and
refused on smaller ones with the missing memory."""

from __future__ import annotations

from typing import Any

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models.model_source import absent_inputs
from aligner.schema import Config
from aligner.schema.keys import with_values
from tests.models.published_configs import SUPPORTED

pytestmark = pytest.mark.slow
VLLM = ("engine=vllm", "engine.vllm.memory_fraction=0.9")
EMBEDDED = ("engine=embedded", "engine.update=in_place")


def make_config(name: str, pipeline: int, ranks: int, overrides: tuple[str, ...]) -> Config:
    """Return GRPO with the trainer on 32 GPUs per pipeline stage, and the engine on GPUs of its own.

    Args:
        name: Name of the model in the table of published configurations.
        pipeline: Number of pipeline stages of the trainer.
        ranks: Tensor- and expert-parallel size of the engine's two replicas.
        overrides: Overrides that select the engine and the rest of its layout.
    """
    trainer: dict[str, Any] = {
        "tensor": 4,
        "sequence": "true",
        "pipeline": pipeline,
        "data": 8,
        "expert": 32,
        "expert_tensor": 1,
    }
    engine = {"tensor": ranks, "expert": ranks, "data": 2}
    config = compose_config(
        [
            "experiment=llama3_8b_grpo",
            "model.path=models/large",
            "engine.placement=server",
            "engine.sleep=false",
            "rollout.max_staleness=1",
            "actor.recompute=full",
            "cluster.devices_per_node=8",
            "cluster.device_memory_gib=76",
            *(f"actor.parallel.{key}={value}" for key, value in trainer.items()),
            *(f"engine.parallel.{key}={value}" for key, value in engine.items()),
            *overrides,
        ]
    )
    return with_values(config, {"model.config": SUPPORTED[name]})


@pytest.mark.parametrize(
    ("name", "pipeline", "ranks", "engine"),
    [
        ("Qwen3 235B-A22B", 8, 8, VLLM),
        ("gpt-oss 120B", 4, 8, VLLM),
        ("GLM-4.5", 8, 16, EMBEDDED),
        ("GLM-4.5", 8, 8, (*VLLM, "engine.parallel.pipeline=2")),
        ("GLM-4.5", 8, 16, VLLM),
        ("DeepSeek-V3", 16, 32, EMBEDDED),
        ("DeepSeek-V3", 16, 8, (*VLLM, "engine.parallel.pipeline=4")),
    ],
)
def test_large_model_is_accepted(
    name: str, pipeline: int, ranks: int, engine: tuple[str, ...]
) -> None:
    config = make_config(name, pipeline, ranks, engine)
    assert check(config, absent_inputs(config)).num_experts >= 128


@pytest.mark.parametrize(
    ("name", "pipeline", "ranks", "engine", "message"),
    [
        ("Qwen3 235B-A22B", 8, 4, VLLM, "generator, which needs 112.6 GiB"),
        ("Qwen3 235B-A22B", 2, 8, VLLM, "trainer, which needs "),
        ("gpt-oss 120B", 4, 2, VLLM, "generator, which needs 111.9 GiB"),
        ("GLM-4.5", 8, 8, VLLM, "generator, which needs 85.3 GiB"),
        ("DeepSeek-V3", 16, 8, VLLM, "generator, which needs 161.0 GiB"),
        (
            "DeepSeek-V3",
            16,
            8,
            (*VLLM, "engine.parallel.pipeline=2"),
            r"generator, which needs [\d.]+ GiB per device during .* \(pipeline stage 1\)",
        ),
        (
            "DeepSeek-V3",
            16,
            8,
            ("engine=vllm", "engine.parallel.pipeline=4"),
            r"engine\.vllm\.memory_fraction=0\.4: too small, because vLLM may then use 30\.4 of 76"
            r" GiB per device, but needs 44\.\d GiB",
        ),
        (
            "GLM-4.5",
            8,
            12,
            (*VLLM, "engine.parallel.expert=1"),
            "a replica of engine.kind=vllm has 12 ranks",
        ),
    ],
)
def test_too_small_cluster_is_refused_with_its_memory(
    name: str, pipeline: int, ranks: int, engine: tuple[str, ...], message: str
) -> None:
    config = make_config(name, pipeline, ranks, engine)
    with pytest.raises(ConfigError, match=message):
        check(config, absent_inputs(config))
