"""The memory estimate of a model equals the measured memory of a trained model."""

from __future__ import annotations

import math

import pytest

from aligner.models.hugging_face import read_config
from aligner.placement.memory.activations import BatchLoad, StageActivations
from aligner.placement.memory.model_states import compute_trained_states
from aligner.placement.roles import Device
from aligner.schema import ParallelConfig
from tests.megatron import memory_jobs

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 320,
    "vocab_size": 192,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"]}
TIED = LLAMA | {"tie_word_embeddings": True}
QWEN3 = SIZES | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
MISTRAL = SIZES | {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
QWEN3_5 = SIZES | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 2,
}
NEOX = SIZES | {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 8,
    "vocab_size": 192,
    "n_positions": 128,
    "activation_function": "gelu_new",
}
MIXTRAL = SIZES | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

DEEPSEEK = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 4,
}

DEEPSEEK_EXPERTS = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
}

ROWS, LENGTH, MICRO_BATCH = 12, 32, 96
SP = {"tensor": 2, "sequence": True}
DISTRIBUTED = {"optimizer": {"distributed": True}}
BOUND = 0.02
"""Relative error of the tensors that autograd saves: the estimate omits a few indices and
statistics per token."""
EXPERTS_BOUND = 0.06
"""The same bound with a router: the estimate assumes that the experts are used evenly."""
LATENT_BOUND = 0.07
"""The same bound with latent attention. The estimate of recomputation ignores that the last layer
has released the tensors of its feed-forward network. The estimate of a snapshot counts replicated
tensors, which are a larger part of the model, on each rank."""
SNAPSHOT_BOUND = 0.04
"""Relative overestimate of a checkpoint snapshot: replicated tensors are counted on each rank, but
only one rank writes them."""
COPIES_SNAPSHOT_BOUND = 0.1
"""The same bound with copies of KV heads."""
FROZEN_BOUND = 0.12
"""Relative overestimate with frozen weights: the estimate ignores the smaller number of saved
tensors, which depends on the frozen weights."""

CASES = {
    "llama": (LLAMA, {}, "vocabulary", {}),
    "llama-selective": (LLAMA, {}, "vocabulary", {"recompute": "selective"}),
    "llama-full": (LLAMA, {}, "vocabulary", {"recompute": "full"}),
    "llama-bf16": (LLAMA, {}, "vocabulary", {"precision": "bf16"}),
    # the estimate omits the tensors that adapters save: a share of rank / hidden size
    "llama-lora": (LLAMA, {}, "vocabulary", {"lora": {"rank": 2}}),
    "llama-frozen": (LLAMA, {}, "vocabulary", {"frozen": ["model.embed_tokens.*"]}),
    "critic": (LLAMA, {}, "scalar", {}),
    "tied": (TIED, {}, "vocabulary", {}),
    "qwen3": (QWEN3, {}, "vocabulary", {}),
    "mistral": (MISTRAL, {}, "vocabulary", {}),
    "neox": (NEOX, {}, "vocabulary", {}),
    "qwen3_5": (QWEN3_5, {}, "vocabulary", {}),
    "qwen3_5-full": (QWEN3_5, {}, "vocabulary", {"recompute": "full"}),
    "qwen3_5-tp2-sp": (QWEN3_5, SP, "vocabulary", {}),
    "qwen3_5-bf16": (QWEN3_5, {}, "vocabulary", {"precision": "bf16"}),
    "gpt2": (GPT2, {}, "vocabulary", {}),
    "mixtral": (MIXTRAL, {}, "vocabulary", {}),
    "deepseek": (DEEPSEEK, {}, "vocabulary", {}),
    "deepseek-selective": (DEEPSEEK, {}, "vocabulary", {"recompute": "selective"}),
    "tp2": (LLAMA, {"tensor": 2}, "vocabulary", {}),
    "tp2-muon": (LLAMA, {"tensor": 2}, "vocabulary", {"optimizer": {"kind": "muon"}}),
    "tp2-sp": (LLAMA, SP, "vocabulary", {}),
    "tp2-sp-selective": (LLAMA, SP, "vocabulary", {"recompute": "selective"}),
    "tp2-sp-full": (LLAMA, SP, "vocabulary", {"recompute": "full"}),
    "tp2-sp-critic": (LLAMA, SP, "scalar", {}),
    # Two of the four tensor ranks have a copy of each KV head.
    "tp4-sp": (LLAMA, {"tensor": 4, "sequence": True}, "vocabulary", {}),
    "tp4-qwen3": (QWEN3, {"tensor": 4}, "vocabulary", {}),
    "tp4-qwen3-selective": (QWEN3, {"tensor": 4}, "vocabulary", {"recompute": "selective"}),
    "pp2": (LLAMA, {"pipeline": 2}, "vocabulary", {}),
    "pp2-full": (LLAMA, {"pipeline": 2}, "vocabulary", {"recompute": "full"}),
    "pp2-tied-last1": (TIED, {"pipeline": 2, "last_stage_layers": 1}, "vocabulary", {}),
    "pp3": (LLAMA, {"pipeline": 3}, "vocabulary", {}),
    "pp2-vpp2-uneven": (
        LLAMA | {"num_hidden_layers": 6},
        {"pipeline": 2, "virtual_pipeline": 2, "stage_layers": [1, 2, 1, 2]},
        "vocabulary",
        {},
    ),
    "pp2-vpp2": (LLAMA, {"pipeline": 2, "virtual_pipeline": 2}, "vocabulary", {}),
    "cp2": (LLAMA, {"context": 2}, "vocabulary", {}),
    "dp2-distributed": (LLAMA, {"data": 2}, "vocabulary", DISTRIBUTED),
    "dp2-distributed-bf16": (LLAMA, {"data": 2}, "vocabulary", DISTRIBUTED | {"precision": "bf16"}),
    "tp2-pp2": (LLAMA, SP | {"pipeline": 2}, "vocabulary", {}),
    "ep2": (MIXTRAL, {"data": 2, "expert": 2}, "vocabulary", DISTRIBUTED),
    "ep2-deepseek": (DEEPSEEK_EXPERTS, {"data": 2, "expert": 2}, "vocabulary", {}),
    "tp2-sp-deepseek": (DEEPSEEK, SP, "vocabulary", {}),
    "tp2-sp-deepseek-selective": (DEEPSEEK, SP, "vocabulary", {"recompute": "selective"}),
    "cp2-deepseek": (DEEPSEEK, {"context": 2}, "vocabulary", {}),
    "tp2-etp1": (MIXTRAL, SP | {"expert": 2, "expert_tensor": 1}, "vocabulary", {}),
}

TYPICAL = (
    "llama",
    "llama-full",
    "llama-lora",
    "critic",
    "gpt2",
    "mixtral",
    "tp2-sp",
    "pp2-vpp2",
    "cp2",
    "tp2-pp2",
    "ep2",
)
"""Cases that the first round of tests runs."""


@pytest.mark.promise("memory-estimate-equals-use")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in CASES],
)
def test_memory_estimate_equals_measured_use(pool, name):
    entries, layout, head, settings = CASES[name]
    settings = {"micro_batch_tokens": MICRO_BATCH} | settings
    shape, parallel = read_config(entries, "test"), ParallelConfig(**layout)
    role = memory_jobs.expected_section(head, layout, settings)
    device = Device(is_gpu=False, itemsize=2 if settings.get("precision") == "bf16" else 4)
    load = BatchLoad(MICRO_BATCH, ROWS // parallel.data * LENGTH, LENGTH)
    ranks = pool.run(
        memory_jobs.measure, parallel.ranks, entries, layout, head, settings, ROWS, LENGTH
    )
    written = 0
    for measured in ranks:
        stage = measured["stage"]
        states = compute_trained_states(shape, head, role, stage, device)
        activations = StageActivations(
            shape, head, role, stage, load, device
        ).training_activations()
        assert (measured["weights"], measured["gradients"]) == (states.weights, states.gradients)
        bound = EXPERTS_BOUND if shape.num_experts else BOUND
        bound = LATENT_BOUND if shape.latent_attention else bound
        above = FROZEN_BOUND if settings.keys() & {"lora", "frozen"} else bound
        print(f"{name} stage {stage}: saved {measured['saved']}, computed {activations.saved}")
        assert (1 - bound) * measured["saved"] < activations.saved < (1 + above) * measured["saved"]
        written += states.snapshot
        if not role.optimizer.distributed:
            assert measured["optimizer"] == states.optimizer
    # each rank holds a shard of the gradient buffer, cut at any element: compare the sums
    if role.optimizer.distributed:
        replicas = parallel.data * parallel.context
        whole = replicas * compute_trained_states(shape, head, role, 0, device).optimizer
        assert math.isclose(sum(rank["optimizer"] for rank in ranks), whole, rel_tol=1e-3)
    saved = sum(rank["snapshot"] for rank in ranks)
    print(f"{name}: snapshot {saved}, computed {written}")
    snapshot_bound = LATENT_BOUND if shape.latent_attention else SNAPSHOT_BOUND
    if parallel.tensor > shape.num_kv_heads:
        snapshot_bound = COPIES_SNAPSHOT_BOUND
    assert saved <= written < (1 + snapshot_bound) * saved
