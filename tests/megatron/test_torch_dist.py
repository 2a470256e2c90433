"""Conversion from and to torch_dist checkpoints, with models of megatron-core alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aligner.data.export import export, find_source, find_torch_dist_checkpoint
from aligner.errors import ConfigError
from aligner.megatron.torch_dist import read_checkpoint, write_checkpoint
from aligner.models.model_source import directory_shape
from tests.megatron import families, jobs

LAYOUT = {"tensor": 2, "pipeline": 2}
FAMILIES = ("llama3", "qwen2", "qwen3", "gpt2", "mixtral")


def describe(directory: Path) -> dict[str, Any]:
    """Return the arguments of `plain_megatron` for a model."""
    shape = directory_shape(directory, "test")
    config: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
        "qk_layernorm": shape.qk_norm is not None,
        "gated_linear_unit": shape.gated,
        "add_bias_linear": shape.family == "gpt2",
        "add_qkv_bias": shape.qkv_bias,
    }
    if shape.experts is not None:
        config |= {
            "num_moe_experts": shape.experts.count,
            "moe_router_topk": shape.experts.per_token,
            "moe_ffn_hidden_size": shape.experts.ffn_hidden_size,
        }
    return LAYOUT | {
        "config": config,
        "activation": "silu" if shape.gated else "gelu",
        "vocab_size": shape.vocab_size,
        "max_positions": shape.max_positions,
        "tied": shape.tied_embeddings,
        "positions": "learned_absolute" if shape.learned_positions else "rope",
    }


def load_and_save(source: Path, target: Path, dump: Path, described: dict[str, Any]) -> None:
    """Let megatron-core load a checkpoint on four ranks, and save it from there."""
    target.mkdir()
    dump.mkdir()
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
        *("-m", "tests.megatron.plain_megatron"),
        *(str(source), str(target), str(dump), json.dumps(described)),
    )
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]


def rank_parameters(directory: str) -> dict[str, torch.Tensor]:
    """Return the parameters of this rank of the trainer, by megatron-core's names."""
    has_experts = directory_shape(Path(directory), "test").experts is not None
    actor = jobs.policy(directory, {**LAYOUT, "sequence": has_experts})
    (chunk,) = actor.runner.chunks
    return {name: each.detach().clone() for name, each in chunk.named_parameters()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    write_checkpoint(find_source(model), tmp_path / "checkpoint")
    return tmp_path / "checkpoint" / "release"


def edit_config(model: Path, target: Path, **entries: Any) -> Path:
    """Write a copy of config.json with other entries, and return its directory."""
    target.mkdir()
    config = json.loads((model / "config.json").read_text()) | entries
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_core_loads_and_saves_the_same_weights(pool, tmp_path, family):
    directory = families.save(family, tmp_path / "model")
    write_checkpoint(find_source(directory), tmp_path / "written")
    written = find_torch_dist_checkpoint(tmp_path / "written")
    assert written == tmp_path / "written" / "release"

    load_and_save(written, tmp_path / "saved", tmp_path / "ranks", describe(directory))
    for rank, own in enumerate(pool.run(rank_parameters, 4, str(directory))):
        loaded = torch.load(tmp_path / "ranks" / f"rank_{rank}.pt")
        assert set(loaded) == set(own)
        assert [name for name in own if not torch.equal(loaded[name], own[name])] == []

    saved = find_torch_dist_checkpoint(tmp_path / "saved")
    assert saved is not None
    assert_converts_to(saved, directory, tmp_path / "back")


def assert_converts_to(checkpoint: Path, model: Path, output: Path) -> None:
    """Check that the conversion of a checkpoint has the weights of a model."""
    export(read_checkpoint(checkpoint, model), output)
    expected = load_file(model / "model.safetensors")
    found = load_file(output / "model.safetensors")
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_there_and_back_keeps_every_bit(tmp_path, family):
    directory = families.save(family, tmp_path / "model")
    write_checkpoint(find_source(directory), tmp_path / "written")
    assert_converts_to(tmp_path / "written" / "release", directory, tmp_path / "back")


def test_dtype_applies_to_the_written_checkpoint(model, tmp_path):
    write_checkpoint(find_source(model), tmp_path / "half", dtype="bfloat16")
    export(read_checkpoint(tmp_path / "half" / "release", model), tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, expected in load_file(model / "model.safetensors").items():
        assert torch.equal(found[name], expected.bfloat16())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 3}, r"linear_qkv.weight has \[4\] layers .* requires \[3\]"),
        ({"intermediate_size": 80}, r"linear_fc1.weight has shape \[192, 64\]"),
        ({"attention_bias": True}, r"linear_qkv.bias is missing"),
        ({"tie_word_embeddings": False}, r"output_layer.weight is missing"),
        ({"vocab_size": 80}, r"word_embeddings.weight has shape \[72, 64\]"),
    ],
)
def test_config_of_another_model_is_refused(checkpoint, model, tmp_path, entries, message):
    other = edit_config(model, tmp_path / "other", **entries)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(checkpoint, other)


def test_weights_that_the_model_lacks_are_refused(tmp_path):
    biased = families.save("qwen2", tmp_path / "qwen2")
    write_checkpoint(find_source(biased), tmp_path / "checkpoint")
    plain = edit_config(
        biased, tmp_path / "plain", architectures=["LlamaForCausalLM"], model_type="llama"
    )
    with pytest.raises(ConfigError, match=r"linear_qkv.bias has no counterpart"):
        read_checkpoint(tmp_path / "checkpoint" / "release", plain)


class _Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_metadata_cannot_execute_code(checkpoint, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Attack()))
    with pytest.raises(ConfigError, match=r"refers to posix.system"):
        read_checkpoint(checkpoint, model)
    assert not (tmp_path / "attacked").exists()


def test_metadata_cannot_call_methods_of_allowed_classes(checkpoint, model, tmp_path):
    """A name with a dot would reach a method of an allowed class, or of a module that it imports."""
    name = b"\x8c\x1etorch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93."
    name = name.replace(b"\x1e", bytes([len("torch.distributed.checkpoint.metadata")]))
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + name)
    with pytest.raises(ConfigError, match=r"refers to .*metadata\.Metadata\.__init__"):
        read_checkpoint(checkpoint, model)


def test_damaged_checkpoint_is_named(checkpoint, model, tmp_path):
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(ConfigError, match="incomplete or damaged"):
        export(read_checkpoint(checkpoint, model), tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("family", ["gemma3", "olmo2"])
def test_models_that_megatron_lacks_are_refused(tmp_path, family):
    directory = families.save(family, tmp_path / "model")
    with pytest.raises(ConfigError, match="Megatron-LM's models have no parameter"):
        write_checkpoint(find_source(directory), tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def run_convert(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aligner", "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_command_converts_in_both_directions(model, tmp_path):
    done = run_convert(model, tmp_path / "megatron", "--format", "torch_dist")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "megatron")), done.stderr
    done = run_convert(tmp_path / "megatron", tmp_path / "back")
    assert done.returncode == 2
    assert "contains no config.json and no tokenizer; add --config" in " ".join(done.stderr.split())
    done = run_convert(tmp_path / "megatron", tmp_path / "back", "--config", model)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = load_file(model / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
