"""The choice between the layers of transformer-engine and of aligner, with a simulated GPU."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from megatron.core.models.common.embeddings import rope_utils

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.megatron import layer_specs
from aligner.megatron.gpt_model import build_model, computing_dtype, transformer_config
from aligner.models.hugging_face import read_config
from aligner.placement.placement_table import find_layer_notes
from aligner.schema import ActorConfig, LoraConfig, MegatronModelConfig, ParallelConfig
from tests.megatron import families

ARCHITECTURES = {"llama2": "LlamaForCausalLM", "pythia": "GPTNeoXForCausalLM"}


def test_transformer_engine_is_used_only_where_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, fp32, plain, adapted = (
        torch.bfloat16,
        torch.float32,
        ActorConfig(),
        ActorConfig(lora=LoraConfig(rank=8)),
    )
    shape = read_config(families.CONFIGS["llama2"](transformers).to_dict(), "test")

    def uses(settings: MegatronModelConfig, dtype: torch.dtype) -> bool:
        return layer_specs.uses_transformer_engine(shape, settings, dtype)

    assert not uses(plain, bf16), "it is not here"
    monkeypatch.setattr(layer_specs, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert uses(plain, bf16) and uses(MegatronModelConfig(), bf16)
    assert not uses(adapted, bf16), "a norm inside a linear layer changes what goes into an adapter"
    assert not uses(plain, fp32), "its attention over packed sequences takes 16 bits"
    for family in ("llama-yarn", "qwen3-windows"):
        shape = read_config(families.CONFIGS[family](transformers).to_dict(), "test")
        assert not uses(plain, bf16), "its attention has no such layers"


def test_transformer_engine_enables_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object())
    for family, swiglu in {"llama2": True, "pythia": False}.items():
        entries = {
            **families.CONFIGS[family](transformers).to_dict(),
            "architectures": [ARCHITECTURES[family]],
        }
        shape = read_config(entries, family)
        fused = transformer_config(shape, ParallelConfig(), torch.bfloat16, transformer_engine=True)
        assert fused.apply_rope_fusion and fused.bias_activation_fusion == swiglu
        assert not transformer_config(shape, ParallelConfig(), torch.bfloat16).apply_rope_fusion


def test_deterministic_torch_sets_megatron_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_config(
        families.CONFIGS["llama2"](transformers).to_dict()
        | {"architectures": ["LlamaForCausalLM"]},
        "llama2",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not transformer_config(shape, ParallelConfig(), torch.bfloat16).deterministic_mode
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert transformer_config(shape, ParallelConfig(), torch.bfloat16).deterministic_mode


def test_fp8_recipe_sets_megatron_fp8_format(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_config(
        families.CONFIGS["llama2"](transformers).to_dict()
        | {"architectures": ["LlamaForCausalLM"]},
        "llama2",
    )
    for recipe, numbers in {"tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}.items():
        made = transformer_config(shape, ParallelConfig(), torch.bfloat16, fp8_recipe=recipe)
        assert (made.fp8, made.fp8_recipe, made.fp8_param) == (numbers, recipe, False)
    assert transformer_config(shape, ParallelConfig(), torch.bfloat16).fp8 is None
    settings = ActorConfig(precision="fp8")
    assert computing_dtype(settings, torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"precision=fp8: requires transformer-engine on a GPU"):
        build_model(shape, SimpleNamespace(device=torch.device("cpu")), "vocabulary", settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["critic.precision=fp8"], None),
        (
            ["actor.precision=fp8", "actor.lora.rank=8"],
            r"actor\.precision=fp8: is not supported with actor\.lora\.rank",
        ),
    ],
)
def test_fp8_without_gpus_or_with_lora_is_refused(
    monkeypatch: pytest.MonkeyPatch, more: list[str], named: str | None
) -> None:
    config = compose_config(["experiment=tiny_ppo", *more])
    monkeypatch.setenv("ALIGNER_GPUS", "0")
    with pytest.raises(ConfigError, match="precision=fp8: requires GPUs with transformer-engine"):
        check(config)
    monkeypatch.setenv("ALIGNER_GPUS", "8")
    with nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        check(config)


def test_gradient_fusion_requires_apex_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_config(
        families.CONFIGS["llama2"](transformers).to_dict()
        | {"architectures": ["LlamaForCausalLM"]},
        "llama2",
    )
    assert transformer_config(
        shape, ParallelConfig(), torch.float32
    ).gradient_accumulation_fusion, "ours, on a CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not transformer_config(
        shape, ParallelConfig(), torch.bfloat16
    ).gradient_accumulation_fusion
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find("torch" if name == "fused_weight_gradient_mlp_cuda" else name),
    )
    assert transformer_config(shape, ParallelConfig(), torch.bfloat16).gradient_accumulation_fusion


def test_roles_without_transformer_engine_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "8")
    assert [*find_layer_notes(compose_config(["experiment=tiny_ppo"]))] == []
    adapted = compose_config(["experiment=tiny_ppo", "actor.lora.rank=8", "critic.precision=fp32"])
    critic, trainer = find_layer_notes(adapted)
    assert "trainer: with LoRA" in trainer and "critic: in float32" in critic
    monkeypatch.setenv("ALIGNER_GPUS", "0")
    assert [*find_layer_notes(adapted)] == []
