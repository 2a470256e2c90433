"""Quantized weights are read as transformers dequantizes them, in any slice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligner.data.checkpoint_files import derive_model_config
from aligner.data.export import export, find_source
from aligner.data.model_directory import read_slices
from aligner.errors import ConfigError
from aligner.models.model_source import directory_shape
from aligner.models.weight_headers import weight_problems
from aligner.models.weight_slices import (
    compute_engine_slices,
    compute_trainer_slices,
    weight_table,
)
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.megatron import families

EXPERTS = "model.layers.{}.mlp.experts.{}"
# experts, outputs and inputs of the projections of the tiny gpt-oss
SHAPES = {"gate_up_proj": (4, 192, 64), "down_proj": (4, 64, 96)}


def pack_experts(directory: Path, shards: int = 1) -> dict[str, Tensor]:
    """Replace the experts' matrices of a gpt-oss directory by random mxfp4 numbers, and return what
    transformers reads, by name."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    expected = {}
    for layer in range(4):
        for kind, (experts, outputs, inputs) in SHAPES.items():
            size = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(110, 140, size, generator=generator, dtype=torch.uint8)
            name = EXPERTS.format(layer, kind)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales)
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[start::shards] for start in range(shards)]
    files = [f"model-{index}.safetensors" for index in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    set_quantization(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return expected


def set_quantization(directory: Path, quantization: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture
def packed(tmp_path):
    directory = families.save("gpt-oss", tmp_path / "packed")
    return directory, pack_experts(directory, shards=2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mxfp4_slices_equal_transformers(packed, size):
    """The slices of 4 ranks, 24 inputs of the down projection, divide the groups of 32 numbers."""
    directory, expected = packed
    table = weight_table(directory_shape(directory, "model.path"))
    specs = {spec.name: spec for spec in table}
    count = 0
    for rank in range(size):
        slices = compute_engine_slices(table, EngineParallelConfig(tensor=size), rank)
        for name, found in read_slices(directory, table, slices):
            position = specs[name].stored_range
            if position.name in expected:
                whole = expected[position.name]
                wanted = whole[position.locate(specs[name].shape, slices[name])]
                assert found.dtype == torch.bfloat16
                assert torch.equal(found, wanted), name
                count += 1
    assert count == size * 4 * 4 * 3  # layers, experts, and projections


def test_mxfp4_directory_is_exported_in_bf16_without_quantization(packed, tmp_path):
    directory, expected = packed
    assert "quantization_config" not in derive_model_config(directory, "vocabulary", 4)
    export(find_source(directory), tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: exported[name].dtype for name in expected} == dict.fromkeys(
        expected, torch.bfloat16
    )
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    assert not [name for name in exported if name.endswith(("_blocks", "_scales"))]
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in config


def test_damaged_mxfp4_tensors_are_reported(packed):
    directory, _ = packed
    table = weight_table(directory_shape(directory, "model.path"))
    assert weight_problems(directory, table) == []
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for layer, kind, change in (
            (0, "down_proj_scales", lambda tensor: None),
            (1, "gate_up_proj_blocks", lambda tensor: tensor[:, :8].clone()),
            (2, "gate_up_proj_blocks", lambda tensor: tensor.float()),
        ):
            name = EXPERTS.format(layer, kind)
            if name in tensors:
                changed = change(tensors.pop(name))
                tensors |= {} if changed is None else {name: changed}
        save_file(tensors, file)
    problems = "\n".join(weight_problems(directory, table))
    assert f"tensor {EXPERTS.format(0, 'down_proj_scales')} is not in model-" in problems
    assert f"{EXPERTS.format(1, 'gate_up_proj_blocks')} has shape (4, 8, 2, 16), expected" in (
        problems
    )
    assert f"{EXPERTS.format(2, 'gate_up_proj_blocks')} has type F32; supported: U8" in problems


def pack_linear(directory: Path) -> dict[str, Tensor]:
    """Replace the projections of a directory by random fp8 numbers with factors of 128 x 128
    blocks, and return what transformers reads, by name."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        shape = tensors[name].shape
        blocks = [-(-size // 128) for size in shape]
        values = (50 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
        factors = torch.rand(blocks, generator=generator)
        tensors |= {name: values, f"{name}_scale_inv": factors}
        expected[name] = Fp8Dequantize(None)._dequantize_one(values, factors, torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    set_quantization(
        directory,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )
    return expected


def save_wide_model(directory: Path) -> Path:
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def test_fp8_slices_equal_transformers(tmp_path):
    """The slices of 4 ranks, 96 rows of the feed-forward network, divide the blocks."""
    directory = save_wide_model(tmp_path)
    expected = pack_linear(directory)
    shape = directory_shape(directory, "model.path")
    table = weight_table(shape)
    specs = {spec.name: spec for spec in table}
    found_names = set()
    for rank in range(4):
        slices = compute_trainer_slices(table, shape, ParallelConfig(tensor=4), rank)
        for name, found in read_slices(directory, table, slices):
            if name in expected:
                wanted = expected[name][
                    specs[name].stored_range.locate(specs[name].shape, slices[name])
                ]
                assert torch.equal(found, wanted), name
                found_names.add(name)
    assert found_names == set(expected)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq': is not supported"),
        ({"quant_method": "fp8"}, None),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"weight_block_size=\[64, 64\] is not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size=None is not"),
    ],
)
def test_other_quantizations_are_refused(tmp_path, quantization, message):
    directory = families.save("qwen3", tmp_path)
    set_quantization(directory, quantization)
    if message is None:
        directory_shape(directory, "model.path")
        return
    with pytest.raises(ConfigError, match=message):
        directory_shape(directory, "model.path")
