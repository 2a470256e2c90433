"""Tiny random models of every family, and training steps by aligner and by transformers."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from aligner.megatron import gpt_model, grouped_experts, layer_specs
from aligner.megatron import optimizer as megatron_optimizer
from aligner.megatron import world as worlds
from aligner.models.architectures import ARCHITECTURES
from aligner.models.hugging_face import read_config
from aligner.models.model_source import directory_shape
from aligner.models.weight_slices import Slice
from aligner.proof.comparison import compute_slice_errors, compute_tensor_errors
from aligner.proof.reference import (
    STEPS,
    Results,
    find_stored_buffers,
    load_reference,
    train_reference,
    with_changes,
)
from aligner.proof.reference import measure_rounding as measure_rounding_of
from tests.megatron import jobs
from tests.model_parts import describe_parts

# The optimizer of `aligner.proof`, without clipping and with a larger epsilon: Adam amplifies rounding
# errors of gradients near epsilon, which context parallelism makes larger than those of transformers.
OPTIMIZER: Mapping[str, Any] = {"epsilon": 2e-4, "clip_grad_norm": 1e9, "schedule": "constant"}

_SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 72,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_GROUPED: Mapping[str, Any] = {**_SIZES, "num_key_value_heads": 2}


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **more}}


def _llama2(t: Any) -> Any:
    return t.LlamaConfig(**_SIZES, **_rope())


def _llama3(t: Any) -> Any:
    # The original length is close to the sequences' lengths, so that every frequency band occurs:
    # unchanged, blended and scaled.
    stretched = _rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    )
    return t.LlamaConfig(**{**_GROUPED, "tie_word_embeddings": True}, **stretched)


def _llama_linear(t: Any) -> Any:
    return t.LlamaConfig(**_GROUPED, **_rope("linear", factor=4.0))


def _llama_yarn(t: Any) -> Any:
    # Some frequencies turn too rarely in the original context to be scaled, others too often.
    stretched = _rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=0.5
    )
    return t.LlamaConfig(**_GROUPED, **stretched)


def _qwen3_windows(t: Any) -> Any:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    return t.Qwen3Config(**_GROUPED, **_rope(), **windows, head_dim=32)


def _smollm3(t: Any, **sizes: Any) -> Any:
    windows = {"use_sliding_window": True, "sliding_window": 5}
    return t.SmolLM3Config(**{**_GROUPED, **sizes}, **_rope(), **windows, no_rope_layer_interval=2)


def _granite(t: Any) -> Any:
    factors = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
    }
    return t.GraniteConfig(**_GROUPED, **_rope(), **factors)


def _phi3_longrope(t: Any) -> Any:
    factors = [1.0, 1.2, 1.5, 2.0, 3.0, 4.0]
    stretched = _rope(
        "longrope", partial_rotary_factor=0.75, short_factor=factors, long_factor=factors
    )
    return t.Phi3Config(
        **{**_GROUPED, "max_position_embeddings": 512},
        **stretched,
        original_max_position_embeddings=64,
    )


def _olmo3(t: Any) -> Any:
    stretched = _rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0)
    ropes = {
        "full_attention": stretched["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    return t.Olmo3Config(**_GROUPED, rope_parameters=ropes, sliding_window=5)


def _gemma2(t: Any, **more: Any) -> Any:
    # Most scores and logits of this model are in the curved part of the caps.
    softcaps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return t.Gemma2Config(
        **_GROUPED,
        **_rope(),
        **(softcaps | more),
        sliding_window=5,
        query_pre_attn_scalar=20,
        head_dim=32,
    )


def _gemma3(t: Any, **more: Any) -> Any:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    return t.Gemma3TextConfig(
        **_GROUPED,
        rope_parameters=ropes,
        sliding_window=5,
        sliding_window_pattern=2,
        query_pre_attn_scalar=20,
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        **more,
    )


def _qwen3_moe(t: Any, *, normalized: bool = True, **more: Any) -> Any:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": normalized,
    }
    return t.Qwen3MoeConfig(**_GROUPED, **_rope(), **experts, **more, head_dim=32)


def _granite_bias(t: Any) -> Any:
    biases = {"attention_bias": True, "mlp_bias": True}
    return t.GraniteConfig(**_GROUPED, **_rope(), **biases, residual_multiplier=0.7)


_LATENT: Mapping[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def _deepseek_v3(t: Any, **more: Any) -> Any:
    # mscale_all_dim scales all attention scores. The norms of the latents keep an epsilon of 1e-6.
    stretched = _rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=4.0,
        beta_slow=0.5,
        mscale=0.7,
        mscale_all_dim=1.3,
    )
    return t.DeepseekV3Config(**{**_LATENT, **more}, **stretched, rms_norm_eps=1e-3)


def _moonlight(t: Any) -> Any:
    # also the parts of Kimi K2, except for its latent of the queries
    parts = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
    return t.DeepseekV3Config(**{**_LATENT, **parts}, **_rope(), rms_norm_eps=1e-5)


def _deepseek_v2_lite(t: Any) -> Any:
    # The greedy method ignores groups.
    return t.DeepseekV2Config(**{**_LATENT, "q_lora_rank": None}, **_rope(), topk_method="greedy")


def _qwen3_moe_dense(t: Any) -> Any:
    # With two pipeline stages, the first one has no experts; the last one has a dense layer too.
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return t.Qwen3MoeConfig(
        **_GROUPED, **_rope(), **experts, mlp_only_layers=[0, 1, 3], head_dim=32
    )


def _qwen2_moe(t: Any) -> Any:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
    }
    return t.Qwen2MoeConfig(**_GROUPED, **_rope(), **experts)


def _glm4_moe(t: Any, *, groups: bool) -> Any:
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    }
    if groups:
        experts |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
    return t.Glm4MoeConfig(
        **_GROUPED, **_rope(), **experts, head_dim=32, use_qk_norm=groups, attention_bias=not groups
    )


_HYBRID: Mapping[str, Any] = {
    **_GROUPED,
    **_rope(partial_rotary_factor=0.25),
    "head_dim": 32,
    # Delta nets have other numbers and sizes of heads than attention.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    # The second pipeline stage begins with attention.
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    # With the usual epsilon, the norm behind the delta rule amplifies the rounding of outputs whose
    # query and key are almost orthogonal. float32 and float64 then differ by 1e-4.
    "rms_norm_eps": 1e-3,
}
_HYBRID_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}


def _qwen3_next(t: Any) -> Any:
    return t.Qwen3NextConfig(**_HYBRID, **_HYBRID_EXPERTS, mlp_only_layers=[1])


def _qwen3_5_moe(t: Any) -> Any:
    hybrid = {key: value for key, value in _HYBRID.items() if key != "intermediate_size"}
    return t.Qwen3_5MoeTextConfig(**hybrid, **_HYBRID_EXPERTS)


def _gpt_oss(t: Any) -> Any:
    # With this limit and these initial values, the limits apply to some projections.
    stretched = _rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=4.0,
        beta_slow=0.5,
        truncate=False,
    )
    return t.GptOssConfig(
        **_GROUPED,
        **stretched,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        head_dim=32,
        swiglu_limit=1.5,
    )


def _gpt2(t: Any) -> Any:
    sizes = {
        "n_layer": 4,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 96,
        "vocab_size": 72,
        "n_positions": 64,
    }
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return t.GPT2Config(
        **sizes, **dropout, initializer_range=0.15, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )


CONFIGS: Mapping[str, Callable[[Any], Any]] = {
    "llama2": _llama2,
    "llama3": _llama3,
    "llama-linear": _llama_linear,
    "llama-yarn": _llama_yarn,
    "llama-bias": lambda t: t.LlamaConfig(
        **_GROUPED, **_rope(), attention_bias=True, mlp_bias=True
    ),
    "qwen2": lambda t: t.Qwen2Config(**_GROUPED, **_rope()),
    "qwen3": lambda t: t.Qwen3Config(**_GROUPED, **_rope(), head_dim=32),
    "qwen3-bias": lambda t: t.Qwen3Config(**_GROUPED, **_rope(), head_dim=32, attention_bias=True),
    "qwen3-windows": _qwen3_windows,
    "mistral": lambda t: t.MistralConfig(**_GROUPED, **_rope(), sliding_window=5),
    "gpt2": _gpt2,
    "smollm3": _smollm3,
    "smollm3-six": lambda t: _smollm3(t, num_hidden_layers=6),
    "granite": _granite,
    "granite-bias": _granite_bias,
    "phi3": lambda t: t.Phi3Config(**_GROUPED, **_rope(partial_rotary_factor=0.5)),
    "phi3-longrope": _phi3_longrope,
    "olmo2": lambda t: t.Olmo2Config(**_GROUPED, **_rope()),
    "olmo2-bias": lambda t: t.Olmo2Config(**_GROUPED, **_rope(), attention_bias=True),
    "olmo2-multi-query": lambda t: t.Olmo2Config(
        **{**_GROUPED, "num_key_value_heads": 1}, **_rope()
    ),
    "olmo3": _olmo3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3-softcap": lambda t: _gemma3(t, final_logit_softcapping=3.0, attention_bias=True),
    "glm4": lambda t: t.Glm4Config(**_GROUPED, **_rope(partial_rotary_factor=0.5), head_dim=32),
    "seed_oss": lambda t: t.SeedOssConfig(
        **_GROUPED, **_rope(), head_dim=32, attention_out_bias=True, mlp_bias=True
    ),
    "deepseek_v3-dense": lambda t: _deepseek_v3(t, first_k_dense_replace=4),
    "qwen3_5": lambda t: t.Qwen3_5TextConfig(**_HYBRID),
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe": _qwen3_5_moe,
    "gpt-oss": _gpt_oss,
    "pythia": lambda t: t.GPTNeoXConfig(**_SIZES, **_rope(partial_rotary_factor=0.25)),
    "pythia-no-bias": lambda t: t.GPTNeoXConfig(
        **_SIZES, **_rope(partial_rotary_factor=0.25), attention_bias=False
    ),
    "mixtral": lambda t: t.MixtralConfig(
        **_GROUPED, **_rope(), num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe-bias": lambda t: _qwen3_moe(t, attention_bias=True),
    "qwen3_moe-raw": lambda t: _qwen3_moe(t, normalized=False),
    "qwen3_moe-dense": _qwen3_moe_dense,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": lambda t: _glm4_moe(t, groups=False),
    "glm4_moe-groups": lambda t: _glm4_moe(t, groups=True),
    "minimax_m2": lambda t: t.MiniMaxM2Config(
        **_GROUPED,
        **_rope(),
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        rotary_dim=16,
    ),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3-halves": lambda t: _deepseek_v3(t, rope_interleave=False),
    "moonlight": _moonlight,
    "deepseek_v2": lambda t: t.DeepseekV2Config(
        **_LATENT, **_rope(), topk_method="group_limited_greedy"
    ),
    "deepseek_v2-lite": _deepseek_v2_lite,
    "olmoe": lambda t: t.OlmoeConfig(**_GROUPED, **_rope(), num_experts=4, num_experts_per_tok=2),
}
MIXTURES = (
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-bias",
    "qwen3_moe-raw",
    "qwen3_moe-dense",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "glm4_moe",
    "glm4_moe-groups",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v3-halves",
    "moonlight",
    "deepseek_v2",
    "deepseek_v2-lite",
    "olmoe",
    "gpt-oss",
)
BIASED_EXPERTS = ("gpt-oss",)
"""Families whose experts have biases, which require expert_tensor=1."""
WITHOUT_EXACT = ("gemma2", "gemma3-softcap", *MIXTURES, "deepseek_v3-dense", "qwen3_5")
"""Families that `engine.exact` does not support."""


@functools.cache
def parts(family: str) -> frozenset[str]:
    """Return the kinds of parts of a family's model; see `describe_parts`."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # about token ids outside of the vocabulary
    config = CONFIGS[family](transformers)
    transformers.utils.logging.set_verbosity(level)
    names = {each.model_type: each.causal_name for each in ARCHITECTURES}
    entries = config.to_dict() | {"architectures": [names[config.model_type]]}
    return describe_parts(read_config(entries, family))


def save(family: str, directory: Path, **changes: Any) -> Path:
    """Save a random model; norms and biases differ from ones and zeros, so that reading only the
    defaults changes the results.

    Args:
        family: Key of `CONFIGS`.
        directory: Directory of the model.
        **changes: Entries of config.json with other values.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(11)
    config = CONFIGS[family](transformers)
    for entry, value in changes.items():
        setattr(config, entry, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    for buffer in find_stored_buffers(model).values():
        buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(directory)
    return directory


def reference_steps(directory: Path, routes: Tensor | None = None) -> dict[str, Any]:
    """Return the first logits, loss and gradients, and the weights after `STEPS` updates, by the
    names of the weight table.

    With `routes` [B, S-1, L, K], tokens use these experts.
    """
    return _run_reference(_load(directory, routes))


def measure_rounding(directory: Path, routes: Tensor | None = None) -> dict[str, float]:
    """Return the relative rounding errors of `reference_steps`, by the names of its results."""
    return measure_rounding_of(
        functools.partial(_load, directory, routes), _run_reference, reference_errors
    )


def _load(directory: Path, routes: Tensor | None) -> Any:
    model = load_reference(directory)
    if routes is not None:
        force_routes(model, routes)
    return model


def _run_reference(model: Any) -> dict[str, Any]:
    experience = jobs.make_experience(model.config.vocab_size)
    logits = _logits(model, experience.tokens, experience.lengths)
    return train_reference(model, experience, with_changes(OPTIMIZER)) | {"logits": logits}


def reference_errors(results: Results, expected: Results) -> dict[str, float]:
    """Return the relative errors of loss, gradient norm, logits, gradients and weights."""
    errors = {key: abs(results[key] / expected[key] - 1) for key in ("loss", "grad_norm")}
    errors |= compute_tensor_errors({"logits": results["logits"]}, {"logits": expected["logits"]})
    for kind in ("gradients", "weights"):
        tensors = compute_tensor_errors(results[kind], expected[kind])
        errors |= {f"{kind}: {name}": error for name, error in tensors.items()}
    return errors


def force_routes(model: Any, routes: Tensor) -> None:
    """Let transformers' routers use the experts of `routes`.

    Each forward pass is one row; the rows repeat in order.
    """

    def force(layer: int) -> Callable[..., Any]:
        rows = itertools.cycle(routes[:, :, layer].long())

        def chosen(gate: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            logits, _, experts = output
            experts = torch.cat((next(rows)[: len(experts) - 1], experts[-1:]))
            # all routers with a correction bias have sigmoid scores
            has_bias = bool(find_stored_buffers(model))
            scores = logits.sigmoid() if has_bias else logits.softmax(-1)
            weights = scores.gather(-1, experts)
            if getattr(gate, "norm_topk_prob", model.config.model_type != "deepseek_v2"):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), experts

        return chosen

    gates = [
        getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        for layer in model.model.layers
    ]
    for number, gate in enumerate(filter(None, gates)):
        gate.register_forward_hook(force(number))


@torch.no_grad()
def _logits(model: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return logits [B, S, V], computed row by row; zeros past each sequence."""
    rows = (
        model(row[None, :length]).logits[0]
        for row, length in zip(tokens, lengths.tolist(), strict=True)
    )
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def family_steps(
    directory: str, layout: dict[str, Any], *, routes: Tensor | None = None, **settings: Any
) -> dict[str, Any]:
    """Run the steps of `reference_steps` on this rank of a layout; return whole logits, statistics,
    and slices of gradients and weights."""
    settings["optimizer"] = {**OPTIMIZER, **settings.get("optimizer", {})}
    actor = jobs.policy(directory, layout, settings)
    experience = dataclasses.replace(
        jobs.make_experience(actor.runner.shape.vocab_size), expert_routing=routes
    )
    result: dict[str, Any] = {"logits": jobs.policy_logits(actor, experience).numpy()}
    result["stats"], gradients = jobs.observed_train(actor, experience)
    for _ in range(STEPS - 1):
        actor.train(experience, jobs.loss)
    result |= {
        "gradients": _arrays(gradients),
        "weights": _arrays(jobs.slices(actor.runner.weights)),
    }
    worlds.shutdown()
    return result


def threads_around_training(
    directory: str, layout: dict[str, Any], port: int, **settings: Any
) -> tuple[int, int]:
    """Return the number of this rank's threads before it joins a world, and after it has trained
    there and left.

    The function first leaves the current world; the new world's store listens on `port`.
    """
    dist.barrier()  # the store ends with rank 0, after all ranks have used it
    worlds.shutdown()
    gc.collect()
    before = jobs.threads()

    os.environ["MASTER_PORT"] = str(port)
    family_steps(directory, layout, **settings)
    gc.collect()
    return before, jobs.threads()


def deterministic_steps(directory: str, layout: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Run `family_steps` in deterministic mode."""
    environment = dict(os.environ)
    worlds.enable_deterministic_kernels()
    assert (
        torch.are_deterministic_algorithms_enabled()
        and os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    )
    try:
        return family_steps(directory, layout, **settings)
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(environment)


def overlapped_steps(
    directory: str, layout: dict[str, Any], *, optimizer: dict[str, Any], micro_batch_tokens: int
) -> dict[str, Any]:
    """Run `family_steps` with overlapped gradient reduction, in buckets that suit this small model.

    `early` is the number of bucket reductions that started during the backward pass; `waits` is the
    number of weight reads that found parameter gathers of the last update in flight.
    """
    make, start = (
        gpt_model.DistributedDataParallelConfig,
        _ParamAndGradBucketGroup.register_grad_ready,
    )
    wait = megatron_optimizer._wait_for_groups
    early, waits = [0], [0]

    def counted_wait(groups: Sequence[Any]) -> None:
        waits[0] += any(group.param_gather_handle is not None for group in groups)
        wait(groups)

    def counted(group: Any, *arguments: Any) -> None:
        before = group.grad_reduce_handle
        start(group, *arguments)
        early[0] += before is None and group.grad_reduce_handle is not None

    gpt_model.DistributedDataParallelConfig = functools.partial(make, bucket_size=4000)
    _ParamAndGradBucketGroup.register_grad_ready, megatron_optimizer._wait_for_groups = (
        counted,
        counted_wait,
    )
    try:
        chosen = {
            "optimizer": {"overlap_grad_reduce": True, **optimizer},
            "micro_batch_tokens": micro_batch_tokens,
        }
        return family_steps(directory, layout, **chosen) | {"early": early[0], "waits": waits[0]}
    finally:
        gpt_model.DistributedDataParallelConfig, _ParamAndGradBucketGroup.register_grad_ready = (
            make,
            start,
        )
        megatron_optimizer._wait_for_groups = wait


def assert_same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert that two results of `family_steps` are bit-identical."""
    assert found["stats"] == expected["stats"] and (found["logits"] == expected["logits"]).all()
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == expected[kind].keys() != set()
        assert [
            name
            for name, (_, array) in found[kind].items()
            if not (array == expected[kind][name][1]).all()
        ] == []


def read_slices(directory: str, layout: dict[str, Any]) -> dict[str, tuple[Slice, Any]]:
    """Return this rank's slices of the weights, as loaded from the files."""
    result = _arrays(jobs.slices(jobs.policy(directory, layout).runner.weights))
    worlds.shutdown()
    return result


def _arrays(slices: jobs.Slices) -> dict[str, tuple[Slice, Any]]:
    # Arrays are sent in one message; each tensor would need a shared file.
    return {name: (cut, tensor.cpu().float().numpy()) for name, (cut, tensor) in slices.items()}


def slice_errors(
    directory: Path, parts: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the relative error of each tensor of a file over all ranks' slices."""
    return compute_slice_errors(directory_shape(directory, "model.path"), parts, tensors)


def grouped_steps(
    directory: str,
    layout: dict[str, Any],
    *,
    steps: Callable[..., dict[str, Any]] = family_steps,
    **settings: Any,
) -> dict[str, Any]:
    """Run `steps` with grouped expert GEMMs, as on a GPU.

    `grouped` is the number of stacks of expert tensors, and `in_place` how many needed no copy.
    """
    stack_or_view = grouped_experts._stack_or_view
    found = {"grouped": 0, "in_place": 0}

    def counted(tensors: Sequence[Tensor]) -> Tensor:
        found["grouped"] += 1
        found["in_place"] += grouped_experts._stacked_view(tensors) is not None
        return stack_or_view(tensors)

    with (
        patch.object(layer_specs, "supports_grouped_gemm", lambda config: True),
        patch.object(grouped_experts, "_stack_or_view", counted),
    ):
        return steps(directory, layout, **settings) | found


def overlapped_grouped_steps(
    directory: str, layout: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """Run `overlapped_steps` with grouped expert GEMMs."""
    return grouped_steps(directory, layout, steps=overlapped_steps, **settings)
