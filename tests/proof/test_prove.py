"""`aligner prove`: small models keep the quirks of a configuration, and the command reports each
check."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.proof.run_proof import format_layout, parse_layout
from aligner.proof.run_proof import prove as prove_config
from aligner.proof.shrink import fit_stages, shrink_config
from aligner.schema import ParallelConfig

LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


def test_small_model_keeps_scaled_rope_and_ratio_of_heads():
    small = shrink_config(LLAMA31, [ParallelConfig()], "here")
    assert small["num_attention_heads"] == 4 * small["num_key_value_heads"]
    assert small["hidden_size"] < 256 and small["num_hidden_layers"] == 4
    (rope,) = {layer.rope for layer in read_config(small, "here").layers}
    assert rope is not None and rope.scaling is not None
    assert (rope.scaling.kind, rope.scaling.factor, rope.theta) == ("llama3", 8.0, 500000.0)
    # The context stays 16 times as long as the context of pretraining.
    assert small["max_position_embeddings"] == 16 * rope.scaling.original_positions


KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    "hidden_size": 7168,
    "head_dim": 64,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "vocab_size": 163840,
    "eos_token_id": 163585,
}


@pytest.mark.parametrize("rank", [1536, None])
def test_small_model_keeps_latent_attention(rank):
    small = shrink_config(KIMI_K2 | {"q_lora_rank": rank}, [ParallelConfig()], "here")
    assert small["model_type"] == "deepseek_v3" and "auto_map" not in small
    shape = read_config(small, "here")
    assert shape.latent_attention is not None and shape.latent_attention.kv_lora_rank < 64
    assert shape.has_query_latent == (rank is not None)
    assert [layer.has_experts for layer in shape.layers] == [False, True, True, True]
    # mscale_all_dim still scales the scores
    assert shape.softmax_scale is not None and shape.softmax_scale > shape.head_dim**-0.5


def test_small_model_divides_the_factor_of_softmax_scores():
    config = KIMI_K2 | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 16.0,
    }
    small = read_config(shrink_config(config, [ParallelConfig()], "here"), "here")
    assert small.experts is not None
    assert small.experts.weight_scale == 16 * small.experts.count / 160


def test_small_model_has_each_kind_of_layer():
    small = read_config(shrink_config(GEMMA3, [ParallelConfig()], "here"), "here")
    windows = [layer.sliding_window is not None for layer in small.layers]
    assert windows == [True] * 5 + [False]
    assert (small.num_heads, small.num_kv_heads) == (4, 1)
    assert small.zero_centered_norms and small.tied_embeddings


def test_small_model_fits_the_layouts():
    layouts = [parse_layout("tensor=4"), parse_layout("pipeline=3")]
    small = shrink_config(LLAMA31, layouts, "here")
    assert small["num_key_value_heads"] % 4 == 0 and small["num_hidden_layers"] % 3 == 0


def test_small_model_keeps_order_of_pipeline_stages_by_size():
    layouts = [
        parse_layout("pipeline=4,stage_layers=[10,8,8,6]"),
        parse_layout("pipeline=2,last_stage_layers=12"),
        parse_layout("pipeline=2"),
    ]
    small = read_config(shrink_config(LLAMA31, layouts, "here"), "here")
    whole = read_config(LLAMA31, "here")
    fitted = [fit_stages(layout, whole, small.num_layers).stage_layers for layout in layouts]
    assert small.num_layers == 8
    assert fitted == [[3, 2, 2, 1], [5, 3], None]


def test_layout_that_the_whole_model_does_not_fit_is_refused(tmp_path):
    layout = parse_layout("pipeline=2,stage_layers=[3,1]")
    with pytest.raises(ConfigError, match="the sum is 4, but must be the model's 32 layers"):
        prove_config(LLAMA31, "here", [layout], tmp_path)
    with pytest.raises(
        ConfigError, match="--layout tensor=3: must divide the model's 32 attention"
    ):
        prove_config(LLAMA31, "here", [parse_layout("tensor=3")], tmp_path)


def test_unknown_entries_stay_in_small_model():
    small = shrink_config(LLAMA31 | {"my_entry": 3}, [ParallelConfig()], "here")
    assert small["my_entry"] == 3


def test_unsupported_model_is_refused_with_entry():
    with pytest.raises(ConfigError, match=r"here: hidden_act='relu' is not supported"):
        shrink_config(LLAMA31 | {"hidden_act": "relu"}, [ParallelConfig()], "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensors=2", "unknown key 'tensors'; allowed: tensor, sequence"),
        ("tensor=0", "tensor=0: must be an integer > 0"),
        ("sequence=1", "sequence=1: must be true or false"),
        ("pipeline=2,stage_layers=3", "stage_layers=3: must be a list of integers > 0"),
        ("pipeline=2,stage_layers=[3,0]", r"stage_layers=\[3,0\]: must be a list of integers > 0"),
    ],
)
def test_wrong_layout_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    "text",
    ["tensor=2,sequence=true,pipeline=2", "pipeline=3,stage_layers=[2,1,1],data=2"],
)
def test_layout_is_printed_as_written(text):
    assert format_layout(parse_layout(text)) == text


def test_empty_layout_is_one_rank():
    assert format_layout(parse_layout("")) == "one rank"


def prove(directory: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aligner", "prove", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_command_reports_each_layout(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA31))
    result = prove(tmp_path, "--layout", "tensor=2", "data=2", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [layout["layout"] for layout in report["layouts"]] == ["tensor=2", "data=2"]
    assert report["passed"] and len(report["layouts"][0]["checks"]) == 7
    assert report["small_config"]["rope_scaling"]["rope_type"] == "llama3"


def test_directory_without_config_is_refused(tmp_path):
    result = prove(tmp_path)
    assert result.returncode and "config.json" in result.stderr and not result.stdout
