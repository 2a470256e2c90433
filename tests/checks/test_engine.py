"""Checks of `engine`: TensorRT-LLM, vLLM, and exact log-probs."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from aligner.checks import engine as engines
from aligner.checks.check import check
from aligner.checks.engine import find_engine_kind_problems, find_engine_machine_problems
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.models.model_source import NOTHING_EXPECTED
from aligner.models.shape import DeltaNet, LatentAttention, LayerShape, Rope
from aligner.placement import roles
from aligner.placement.roles import get_device, uses_gpus
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.engines.vllm.shared_clients import INSTALLED
from tests.models.test_layouts import DENSE, EXPERTS

TENSORRT_LLM = EngineConfig(kind="tensorrt_llm", update="in_place")


@pytest.fixture
def gpu_image(monkeypatch):
    """Simulate a machine with a GPU and the packages of TensorRT-LLM."""
    monkeypatch.setattr(engines, "has_gpu", lambda: True)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())


def problems(**changes):
    shape = changes.pop("shape", DENSE)
    engine = dataclasses.replace(TENSORRT_LLM, **changes)
    return [*find_engine_machine_problems(engine), *find_engine_kind_problems(engine, shape)]


def test_tensorrt_llm_requires_packages_and_gpu(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(roles, "Path", lambda path: tmp_path)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check(
            compose_config(
                ["experiment=tiny_ppo", "engine=tensorrt_llm", f"run.dir={tmp_path / 'run'}"]
            )
        )
    packages, gpu = str(caught.value).splitlines()
    assert packages.startswith(
        "engine.kind=tensorrt_llm: requires the Python packages tensorrt_llm and ray, which"
        " are not installed here; run in a TensorRT-LLM"
    )
    assert (
        gpu
        == "engine.kind=tensorrt_llm: requires a GPU, but this machine has none; use engine=embedded"
    )


def test_slurm_job_does_not_require_local_gpus(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(roles, "Path", lambda path: tmp_path)
    slurm = ["experiment=tiny_ppo", "cluster=slurm", f"run.dir={tmp_path / 'run'}"]
    check(compose_config([*slurm, "engine=tensorrt_llm"]))
    config = compose_config(slurm)
    assert uses_gpus(config) and get_device(config, "auto").itemsize == 2
    assert get_device(config, "fp32").itemsize == 4
    assert not uses_gpus(compose_config([*slurm, "cluster.slurm.gpus=none"]))
    assert not uses_gpus(compose_config(["experiment=tiny_ppo"]))


@pytest.mark.usefixtures("gpu_image")
def test_tensorrt_llm_accepts_supported_models() -> None:
    assert problems() == problems(shape=EXPERTS) == problems(precision="bf16") == []


@pytest.mark.usefixtures("gpu_image")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "fp32"},
            (
                "engine.precision=fp32: must be auto or bf16 with engine.kind=tensorrt_llm, which"
                " computes in bf16"
            ),
        ),
        (
            {"update": "atomic"},
            "engine.update=atomic: must be in_place with engine.kind=tensorrt_llm",
        ),
        (
            {
                "shape": dataclasses.replace(DENSE, vocab_size=DENSE.vocab_size + 1),
                "parallel": EngineParallelConfig(tensor=2),
            },
            "engine.parallel.tensor=2: must divide the model's",
        ),
        (
            {"shape": dataclasses.replace(DENSE, family="gpt2")},
            "does not support the model family gpt2; supported: llama,",
        ),
        (
            {"shape": dataclasses.replace(DENSE, qkv_bias=True, attention_output_bias=True)},
            "engine.kind=tensorrt_llm: does not support the biases of attention_bias or mlp_bias",
        ),
        (
            {
                "shape": dataclasses.replace(
                    EXPERTS,
                    family="qwen3_moe",
                    layers=(
                        dataclasses.replace(EXPERTS.layers[0], has_experts=False),
                        *EXPERTS.layers[1:],
                    ),
                )
            },
            "engine.kind=tensorrt_llm: does not support layers without experts in a mixture-of",
        ),
    ],
)
def test_unsupported_tensorrt_llm_key_is_refused(changes, message) -> None:
    (problem,) = problems(**changes)
    assert message in problem


VLLM = ("experiment=tiny_ppo", "engine=vllm", "+model.config.head_dim=32")


@INSTALLED
@pytest.mark.parametrize("source", ["random", "directory"])
def test_architecture_unknown_to_vllm_is_refused(tmp_path: Path, source: str) -> None:
    def check_architecture(architecture: str) -> None:
        config = compose_config(
            [*VLLM, f"model.config.architectures=[{architecture}]", f"run.dir={tmp_path / 'run'}"]
        )
        if source == "directory":
            (tmp_path / "config.json").write_text(json.dumps(config.model.config))
            config.model = dataclasses.replace(
                config.model, source=source, path=str(tmp_path), config={}
            )
        check(config)

    check_architecture("LlamaForCausalLM")
    message = (
        "engine.kind=vllm: the installed vLLM does not support the architecture"
        " LlamaForSequenceClassification; use engine=embedded"
    )
    with pytest.raises(ConfigError, match=message):
        check_architecture("LlamaForSequenceClassification")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"delta_net": DeltaNet(2, 4, 16, 16, 4), "family": "qwen3_next"},
            "does not support gated delta nets, which vLLM 0.32 computes on CPUs in bf16 only",
        ),
        (
            {
                "latent_attention": LatentAttention(None, 512, 64, 64, 64),
                "layers": (LayerShape(Rope(10000.0)),),
            },
            "does not support rope_interleave=false",
        ),
        ({"gate_limit": 6.0}, "supports only swiglu_limit=7, but config.json has 6"),
        (
            {
                "attention_sinks": True,
                "layers": (LayerShape(sliding_window=8), LayerShape(sliding_window=8)),
            },
            "supports attention sinks only if layer_types in config.json alternates",
        ),
        ({"attention_output_bias": True}, "does not support the biases of attention_bias"),
    ],
)
def test_unsupported_model_is_refused_with_vllm(changes, message) -> None:
    engine = EngineConfig(kind="vllm", update="in_place")
    (problem,) = find_engine_kind_problems(engine, dataclasses.replace(DENSE, **changes))
    assert problem.startswith(f"engine.kind=vllm: {message}")
    assert problem.endswith("; use engine=embedded")


def test_stage_without_experts_is_refused_with_vllm() -> None:
    expert = EXPERTS.layers[0]
    dense = dataclasses.replace(expert, has_experts=False)
    shape = dataclasses.replace(EXPERTS, family="glm4_moe", layers=(dense, dense, expert, expert))
    for pipeline, is_refused in ((1, False), (2, True)):
        layout = EngineParallelConfig(pipeline=pipeline)
        engine = EngineConfig(kind="vllm", update="in_place", parallel=layout)
        problems = "\n".join(find_engine_kind_problems(engine, shape))
        assert ("leaves a stage without experts" in problems) == is_refused


def test_a_python_without_vllm_is_refused(tmp_path: Path) -> None:
    message = f"engine.vllm.python={sys.executable}: vLLM is not installed there; run `aligner"
    with pytest.raises(ConfigError, match=message):
        check(
            compose_config(
                [*VLLM, f"engine.vllm.python={sys.executable}", f"run.dir={tmp_path / 'run'}"]
            )
        )


@pytest.mark.parametrize(("kind", "count"), [("vllm", 1), ("embedded", 0)])
def test_external_engine_refuses_quantized_weights(tmp_path: Path, kind: str, count: int) -> None:
    config = compose_config([*VLLM, f"run.dir={tmp_path / 'run'}"])
    content = dict(config.model.config) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config.model = dataclasses.replace(config.model, source="directory", path=str(tmp_path))
    config.engine = dataclasses.replace(config.engine, kind=kind)
    shape = read_config(content, "model.path")
    message = f"(quant_method=fp8); convert them to bf16 with `aligner convert {tmp_path} OUTPUT`"
    found = engines.find_problems(config, shape, NOTHING_EXPECTED)
    assert len([problem for problem in found if message in problem]) == count


def test_embedded_engine_accepts_fp32_and_atomic() -> None:
    assert problems(kind="embedded", precision="fp32", update="atomic") == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.parallel.tensor=2", "engine.parallel.data=2"],
            "actor.parallel.tensor=2: must be 1 with engine.exact=true",
        ),
        (
            ["engine.parallel.tensor=2", "actor.parallel.data=2"],
            "engine.parallel.tensor=2: must be 1 with engine.exact=true",
        ),
        (
            ["engine.precision=bf16"],
            "engine.precision=bf16: must be auto or fp32 with engine.exact=true",
        ),
        (
            ["actor.precision=bf16"],
            "actor.precision=bf16: must be auto or fp32 with engine.exact=true",
        ),
        (["actor.lora.rank=4"], "actor.lora.rank=4: must be 0 with engine.exact=true"),
        (
            ["cluster.threads_per_rank=2"],
            "cluster.threads_per_rank=2: must be 1 or null with engine.exact=true",
        ),
        (["cluster=slurm"], "engine.exact=true: is supported on CPUs only"),
    ],
)
def test_exact_refuses_incompatible_settings(overrides, message, tmp_path) -> None:
    config = compose_config(
        ["experiment=tiny_ppo", "engine.exact=true", *overrides, f"run.dir={tmp_path / 'run'}"]
    )
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_exact_uses_one_thread_and_checks_shape(tmp_path) -> None:
    config = compose_config(
        ["experiment=tiny_ppo", "engine.exact=true", f"run.dir={tmp_path / 'run'}"]
    )
    check(config)
    assert roles.compute_threads_per_rank(config) == 1
    shapes = (
        (EXPERTS, "mixture-of-experts"),
        (dataclasses.replace(DENSE, attention_softcap=50.0), "soft caps or attention sinks"),
        (dataclasses.replace(DENSE, logit_softcap=30.0), "soft caps or attention sinks"),
        (
            dataclasses.replace(DENSE, ffn_hidden_size=40),
            "multiple of 32, but the model has 40",
        ),
        (
            dataclasses.replace(
                DENSE, ffn_hidden_size=64, latent_attention=LatentAttention(None, 8, 4, 4, 8)
            ),
            "not supported for models with latent attention",
        ),
    )
    for shape, message in shapes:
        assert [message in problem for problem in engines._find_exact_problems(config, shape)] == [
            True
        ]
