"""Weights of the model families: Hugging Face names, megatron-core parameters, and sharding.

Each family has one table, which import, export, checkpoints and resharding use. `hugging_face.py`
reads the config.json of the families.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Part = Literal[
    "whole",
    "query",
    "key",
    "value",
    "gate",
    "up",
    "delta_query",
    "delta_key",
    "delta_value",
    "delta_gate",
    "delta_beta",
    "delta_decay",
    "conv_query",
    "conv_key",
    "conv_value",
]
"""Part of a fused parameter of megatron-core or of `megatron/gated_delta_net.py`."""


FUSED_PARTS: tuple[tuple[Part, ...], ...] = (
    ("query", "key", "value"),
    ("gate", "up"),
    ("delta_query", "delta_key", "delta_value"),
    ("conv_query", "conv_key", "conv_value"),
)
"""Parts of the fused parameters, in the order in which files store them."""

INTERLEAVED_PARTS: tuple[Part, ...] = (
    "query",
    "key",
    "value",
    "delta_query",
    "delta_key",
    "delta_value",
    "delta_gate",
    "delta_beta",
    "delta_decay",
)
"""Parts that the trainer's parameters interleave by key head."""


@dataclass(frozen=True)
class Weight:
    """A kind of weight: a Hugging Face tensor, or a part of one, and megatron-core's parameter.

    The names contain the placeholders `{layer}` and `{expert}` for the indices of the decoder layer
    and the expert.
    """

    name: str
    """Hugging Face name."""
    parameter: str
    """Name of megatron-core's parameter, which may contain further weights."""
    sizes: tuple[str, ...]
    """Names of the dimensions in megatron-core's order, outputs first; `weight_table` defines the
    names."""
    split_axis: int | None = None
    """Index in `sizes` of the dimension that tensor parallelism splits; None if every
    tensor-parallel rank holds the whole weight."""
    part: Part = "whole"
    """Part of the fused parameter. Query, key and value are interleaved by KV group; the rows of
    gate precede those of up. The projections of a delta net are interleaved by key head, in the
    order of `Part`; the parts of its convolution follow one another."""
    is_transposed: bool = False
    """Whether the file stores the matrix with the inputs first."""
    fused_in: str | None = None
    """Name of the file's tensor that contains the parts of the parameter one after another, in the
    order of `FUSED_PARTS`; for a weight of an expert, the tensor stacks those of all experts. None
    if the weight is a tensor of its own."""
    is_interleaved: bool = False
    """Whether this tensor alternates the rows of the parts instead."""
    requires: str | None = None
    """Attribute of `ModelShape` that must be true for the weight to exist; None for a weight that
    always exists."""
    layer_requires: str | None = None
    """Attribute of `LayerShape` that must be true for a layer to have the weight; None for a weight
    of all layers."""
    is_trained: bool = True
    """Whether gradients train the weight."""


def _linear(
    name: str, parameter: str, outputs: str, inputs: str, split_axis: int, **options: Any
) -> Weight:
    return Weight(f"{name}.weight", f"{parameter}.weight", (outputs, inputs), split_axis, **options)


def _bias(
    name: str, parameter: str, outputs: str, split_axis: int | None, **options: Any
) -> Weight:
    return Weight(f"{name}.bias", f"{parameter}.bias", (outputs,), split_axis, **options)


def _norm(name: str, parameter: str, *, has_bias: bool = False) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", f"{parameter}.weight", ("hidden",))
    return (weight, _bias(name, parameter, "hidden", None)) if has_bias else (weight,)


_LAYER = "model.layers.{layer}."
_CORE = "decoder.layers.{layer}."
_ATTENTION = _CORE + "self_attention."
_QKV = _ATTENTION + "linear_qkv"
# Hugging Face's prefix, the name of the output dimension, and the part of the fused parameter.
_PROJECTIONS: tuple[tuple[str, str, Part], ...] = (
    ("q", "query", "query"),
    ("k", "key", "key"),
    ("v", "key", "value"),
)

_PROJECTED = tuple(
    _linear(f"{_LAYER}self_attn.{prefix}_proj", _QKV, size, "hidden", 0, part=part)
    for prefix, size, part in _PROJECTIONS
)
_FUSED_PROJECTIONS = tuple(
    replace(weight, fused_in=f"{_LAYER}self_attn.qkv_proj.weight") for weight in _PROJECTED
)
_QKV_BIASES = tuple(
    _bias(f"{_LAYER}self_attn.{prefix}_proj", _QKV, size, 0, part=part, requires="qkv_bias")
    for prefix, size, part in _PROJECTIONS
)
_HEAD_NORMS = tuple(
    Weight(
        f"{_LAYER}self_attn.{prefix}_norm.weight",
        f"{_ATTENTION}{prefix}_layernorm.weight",
        ("head",),
        requires="qk_norm",
    )
    for prefix in ("q", "k")
)
_PROJECTION_NORMS = tuple(
    Weight(
        f"{_LAYER}self_attn.{prefix}_norm.weight",
        f"{_ATTENTION}{prefix}_layernorm.weight",
        (size,),
        0,
    )
    for prefix, size in (("q", "query"), ("k", "key"))
)
_OUTPUT = _linear(_LAYER + "self_attn.o_proj", _ATTENTION + "linear_proj", "hidden", "query", 1)
_OUTPUT_BIAS = _bias(
    _LAYER + "self_attn.o_proj",
    _ATTENTION + "linear_proj",
    "hidden",
    None,
    requires="attention_output_bias",
)
# Norms of a layer: before attention and feed-forward network, and after them.
_BEFORE_ATTENTION = _CORE + "input_layernorm"
_BEFORE_MLP = _CORE + "pre_mlp_layernorm"
_AFTER_ATTENTION = _CORE + "self_attn_bda.norm"
_AFTER_MLP = _CORE + "mlp_bda.norm"


def _latent(
    name: str,
    parameter: str,
    sizes: tuple[str, ...],
    split_axis: int | None = None,
    requires: str | None = None,
) -> Weight:
    return Weight(
        f"{_LAYER}self_attn.{name}.weight",
        f"{_ATTENTION}{parameter}.weight",
        sizes,
        split_axis,
        requires=requires,
    )


# Multi-head latent attention. Every tensor rank holds the whole projections to the latents, and its
# heads of the projections from the latents.
_LATENT_ATTENTION = (
    _latent("q_proj", "linear_q_proj", ("query", "hidden"), 0, "lacks_query_latent"),
    _latent(
        "q_a_proj",
        "linear_q_down_proj",
        ("query_latent", "hidden"),
        requires="has_query_latent",
    ),
    _latent("q_a_layernorm", "q_layernorm", ("query_latent",), requires="has_query_latent"),
    _latent("q_b_proj", "linear_q_up_proj", ("query", "query_latent"), 0, "has_query_latent"),
    _latent("kv_a_proj_with_mqa", "linear_kv_down_proj", ("key_latent_and_rope", "hidden")),
    _latent("kv_a_layernorm", "kv_layernorm", ("key_latent",)),
    _latent("kv_b_proj", "linear_kv_up_proj", ("key_and_value", "key_latent"), 0),
    _latent("o_proj", "linear_proj", ("hidden", "attended"), 1),
)
_LLAMA_ATTENTION = (
    *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
    *_PROJECTED,
    *_QKV_BIASES,
    *_HEAD_NORMS,
    _OUTPUT,
    _OUTPUT_BIAS,
    *_norm(_LAYER + "post_attention_layernorm", _BEFORE_MLP),
)


def _gated(
    prefix: str, parameter: str, gate: str, up: str, down: str, size: str = "ffn", **options: Any
) -> tuple[Weight, ...]:
    inputs, outputs = parameter + "linear_fc1", parameter + "linear_fc2"
    return (
        _linear(prefix + gate, inputs, size, "hidden", 0, part="gate", **options),
        _linear(prefix + up, inputs, size, "hidden", 0, part="up", **options),
        _linear(prefix + down, outputs, "hidden", size, 1, **options),
    )


# Hugging Face's prefix, megatron-core's parameter, the name and the split of the output dimension,
# and the part of the fused parameter.
_MLP_PROJECTIONS: tuple[tuple[str, str, str, int | None, Part], ...] = (
    ("gate", "mlp.linear_fc1", "ffn", 0, "gate"),
    ("up", "mlp.linear_fc1", "ffn", 0, "up"),
    ("down", "mlp.linear_fc2", "hidden", None, "whole"),
)
_LLAMA_MLP = _gated(
    _LAYER + "mlp.",
    _CORE + "mlp.",
    "gate_proj",
    "up_proj",
    "down_proj",
    layer_requires="is_dense",
)
_MLP_BIASES = tuple(
    _bias(
        f"{_LAYER}mlp.{name}_proj",
        _CORE + parameter,
        size,
        split_axis,
        part=part,
        requires="ffn_bias",
        layer_requires="is_dense",
    )
    for name, parameter, size, split_axis, part in _MLP_PROJECTIONS
)
_EXPERT = _CORE + "mlp.experts.local_experts.{expert}."


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    router = Weight(
        _LAYER + block + ".gate.weight",
        _CORE + "mlp.router.weight",
        ("experts", "hidden"),
        layer_requires="has_experts",
    )
    experts = _gated(
        _LAYER + block + ".experts.{expert}.",
        _EXPERT,
        gate,
        up,
        down,
        "expert_ffn",
        layer_requires="has_experts",
    )
    return (router, *experts)


def _shared_experts(name: str) -> tuple[Weight, ...]:
    """Return the weights of the shared experts, whose module in the file has this name."""
    return _gated(
        f"{_LAYER}mlp.{name}.",
        _CORE + "mlp.shared_experts.",
        "gate_proj",
        "up_proj",
        "down_proj",
        "shared_ffn",
        layer_requires="has_experts",
    )


def _correction_bias(block: str) -> Weight:
    return Weight(
        f"{_LAYER}{block}.e_score_correction_bias",
        _CORE + "mlp.router.expert_bias",
        ("experts",),
        layer_requires="has_experts",
        is_trained=False,
    )


_SHARED_GATE = Weight(
    _LAYER + "mlp.shared_expert_gate.weight",
    _CORE + "mlp.shared_experts.gate_weight",
    ("one", "hidden"),
    layer_requires="has_experts",
)
# Most families have these names.
_MLP_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_QWEN_EXPERTS = (*_MLP_EXPERTS, *_shared_experts("shared_expert"), _SHARED_GATE)
_MIXTRAL_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")
DEEPSEEK_MLP = (
    *_LLAMA_MLP,
    *_MLP_EXPERTS,
    _correction_bias("mlp.gate"),
    *_shared_experts("shared_experts"),
)
"""Feed-forward networks of DeepSeek-V3, some of which have experts; also those of GLM-4.5."""

# gpt-oss stacks the weights of all experts of a layer in one tensor, and alternates gate and up.
_EXPERT_NAME = _LAYER + "mlp.experts.{expert}."
_STACKED_NAME = _LAYER + "mlp.experts."
_GATES: tuple[Part, ...] = ("gate", "up")
_STACKED_EXPERTS = (
    Weight(
        _LAYER + "mlp.router.weight",
        _CORE + "mlp.router.weight",
        ("experts", "hidden"),
        layer_requires="has_experts",
    ),
    Weight(
        _LAYER + "mlp.router.bias",
        _CORE + "mlp.router.bias",
        ("experts",),
        layer_requires="has_experts",
    ),
    *(
        _linear(
            f"{_EXPERT_NAME}{part}_proj",
            _EXPERT + "linear_fc1",
            "expert_ffn",
            "hidden",
            0,
            part=part,
            is_transposed=True,
            fused_in=_STACKED_NAME + "gate_up_proj",
            is_interleaved=True,
            layer_requires="has_experts",
        )
        for part in _GATES
    ),
    *(
        _bias(
            f"{_EXPERT_NAME}{part}_proj",
            _EXPERT + "linear_fc1",
            "expert_ffn",
            0,
            part=part,
            fused_in=_STACKED_NAME + "gate_up_proj_bias",
            is_interleaved=True,
            layer_requires="has_experts",
        )
        for part in _GATES
    ),
    _linear(
        _EXPERT_NAME + "down_proj",
        _EXPERT + "linear_fc2",
        "hidden",
        "expert_ffn",
        1,
        is_transposed=True,
        fused_in=_STACKED_NAME + "down_proj",
        layer_requires="has_experts",
    ),
    _bias(
        _EXPERT_NAME + "down_proj",
        _EXPERT + "linear_fc2",
        "hidden",
        None,
        fused_in=_STACKED_NAME + "down_proj_bias",
        layer_requires="has_experts",
    ),
)

_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"


_FUSED_MLP = tuple(
    weight
    if weight.part == "whole"
    else replace(weight, fused_in=f"{_LAYER}mlp.gate_up_proj.weight")
    for weight in _LLAMA_MLP
)


def _model(*layer: Weight) -> tuple[Weight, ...]:
    """Return the weights of a model with these weights in each layer, and Llama's other names."""
    return (
        Weight("model.embed_tokens.weight", _EMBEDDING, ("vocabulary", "hidden"), 0),
        *layer,
        *_norm("model.norm", "decoder.final_layernorm"),
        Weight("lm_head.weight", _HEAD, ("vocabulary", "hidden"), 0),
    )


_PHI3 = _model(
    *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
    *_FUSED_PROJECTIONS,
    _OUTPUT,
    *_norm(_LAYER + "post_attention_layernorm", _BEFORE_MLP),
    *_FUSED_MLP,
)
_OLMO2 = _model(
    *_PROJECTED,
    *_QKV_BIASES,
    *_PROJECTION_NORMS,
    _OUTPUT,
    _OUTPUT_BIAS,
    *_norm(_LAYER + "post_attention_layernorm", _AFTER_ATTENTION),
    *_LLAMA_MLP,
    *_norm(_LAYER + "post_feedforward_layernorm", _AFTER_MLP),
)
# Gemma 2 has no norms of queries and keys.
_GEMMA = _model(
    *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
    *_PROJECTED,
    *_QKV_BIASES,
    *_HEAD_NORMS,
    _OUTPUT,
    _OUTPUT_BIAS,
    *_norm(_LAYER + "post_attention_layernorm", _AFTER_ATTENTION),
    *_norm(_LAYER + "pre_feedforward_layernorm", _BEFORE_MLP),
    *_LLAMA_MLP,
    *_norm(_LAYER + "post_feedforward_layernorm", _AFTER_MLP),
)
_GLM4 = _model(
    *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
    *_PROJECTED,
    *_QKV_BIASES,
    _OUTPUT,
    *_norm(_LAYER + "post_self_attn_layernorm", _AFTER_ATTENTION),
    *_norm(_LAYER + "post_attention_layernorm", _BEFORE_MLP),
    *_FUSED_MLP,
    *_norm(_LAYER + "post_mlp_layernorm", _AFTER_MLP),
)

_GATED_ATTENTION = tuple(
    replace(weight, layer_requires="has_attention")
    for weight in (
        # Each head of the file's tensor has the rows of its query, followed by those of its gate.
        _linear(_LAYER + "self_attn.q_proj", _QKV, "gated_query", "hidden", 0, part="query"),
        *(weight for weight in _PROJECTED if weight.part != "query"),
        *_HEAD_NORMS,
        _OUTPUT,
    )
)
_DELTA_NET = _LAYER + "linear_attn."
_DELTA_INPUT = _ATTENTION + "in_proj_qkvz"
_DELTA_GATES = _ATTENTION + "in_proj_ba"
# The part of the projection, the part of the convolution, and the name of the dimension.
_DELTA_PARTS: tuple[tuple[Part, Part, str], ...] = (
    ("delta_query", "conv_query", "delta_key"),
    ("delta_key", "conv_key", "delta_key"),
    ("delta_value", "conv_value", "delta_value"),
)


def _delta_net(*projections: Weight) -> tuple[Weight, ...]:
    """Return the weights of a layer's gated delta net, with the given input projections."""
    weights = (
        *projections,
        *(
            Weight(
                f"{_DELTA_NET}{part}.weight",
                _ATTENTION + "conv_weight",
                (size, "one", "delta_conv"),
                0,
                part=part,
                fused_in=_DELTA_NET + "conv1d.weight",
            )
            for _, part, size in _DELTA_PARTS
        ),
        Weight(_DELTA_NET + "dt_bias", _ATTENTION + "dt_bias", ("delta_heads",), 0),
        Weight(_DELTA_NET + "A_log", _ATTENTION + "a_log", ("delta_heads",), 0),
        Weight(_DELTA_NET + "norm.weight", _ATTENTION + "norm_weight", ("delta_head",)),
        _linear(_DELTA_NET + "out_proj", _ATTENTION + "out_proj", "hidden", "delta_value", 1),
    )
    return tuple(replace(weight, layer_requires="has_delta_net") for weight in weights)


# Qwen3.5 stores queries, keys and values one after another, and the other projections separately.
_QWEN3_5_DELTA_NET = _delta_net(
    *(
        _linear(
            _DELTA_NET + part,
            _DELTA_INPUT,
            size,
            "hidden",
            0,
            part=part,
            fused_in=_DELTA_NET + "in_proj_qkv.weight",
        )
        for part, _, size in _DELTA_PARTS
    ),
    _linear(_DELTA_NET + "in_proj_z", _DELTA_INPUT, "delta_value", "hidden", 0, part="delta_gate"),
    _linear(_DELTA_NET + "in_proj_b", _DELTA_GATES, "delta_heads", "hidden", 0, part="delta_beta"),
    _linear(_DELTA_NET + "in_proj_a", _DELTA_GATES, "delta_heads", "hidden", 0, part="delta_decay"),
)
# Qwen3-Next interleaves all projections by key head, as the trainer's parameters do.
_QWEN3_NEXT_DELTA_NET = _delta_net(
    _linear(_DELTA_NET + "in_proj_qkvz", _DELTA_INPUT, "delta_input", "hidden", 0),
    _linear(_DELTA_NET + "in_proj_ba", _DELTA_GATES, "delta_gates", "hidden", 0),
)


def _hybrid(delta_net: tuple[Weight, ...], *feed_forward: Weight) -> tuple[Weight, ...]:
    """Return the weights of a model whose layers have attention with a gate, or delta nets."""
    return _model(
        *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
        *_GATED_ATTENTION,
        *delta_net,
        *_norm(_LAYER + "post_attention_layernorm", _BEFORE_MLP),
        *feed_forward,
    )


# Attention and norms of DeepSeek-V2 and V3.
_DEEPSEEK_ATTENTION = (
    *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
    *_LATENT_ATTENTION,
    *_norm(_LAYER + "post_attention_layernorm", _BEFORE_MLP),
)
# Norms of all heads together, before attention and feed-forward network.
_PROJECTION_NORMED = (
    *_norm(_LAYER + "input_layernorm", _BEFORE_ATTENTION),
    *_PROJECTED,
    *_QKV_BIASES,
    *_PROJECTION_NORMS,
    _OUTPUT,
    _OUTPUT_BIAS,
    *_norm(_LAYER + "post_attention_layernorm", _BEFORE_MLP),
)
_MINIMAX_M2 = _model(*_PROJECTION_NORMED, *_MIXTRAL_EXPERTS, _correction_bias("block_sparse_moe"))
_OLMOE = _model(*_PROJECTION_NORMED, *_MLP_EXPERTS)

_GPT_OSS = _model(
    *_LLAMA_ATTENTION,
    Weight(
        _LAYER + "self_attn.sinks",
        _ATTENTION + "core_attention.softmax_offset",
        ("heads",),
        0,
        requires="attention_sinks",
    ),
    *_STACKED_EXPERTS,
)

_GPT2_LAYER = "transformer.h.{layer}."
_GPT2_PARTS: tuple[Part, ...] = ("query", "key", "value")

_GPT2 = (
    Weight("transformer.wte.weight", _EMBEDDING, ("vocabulary", "hidden"), 0),
    Weight(
        "transformer.wpe.weight", "embedding.position_embeddings.weight", ("positions", "hidden")
    ),
    *_norm(_GPT2_LAYER + "ln_1", _CORE + "input_layernorm", has_bias=True),
    *(
        replace(
            build_weight(f"{_GPT2_LAYER}attn.{part}"),
            part=part,
            fused_in=f"{_GPT2_LAYER}attn.c_attn.{kind}",
        )
        for kind, build_weight in (
            ("weight", lambda name: _linear(name, _QKV, "query", "hidden", 0, is_transposed=True)),
            ("bias", lambda name: _bias(name, _QKV, "query", 0)),
        )
        for part in _GPT2_PARTS
    ),
    _linear(
        _GPT2_LAYER + "attn.c_proj",
        _ATTENTION + "linear_proj",
        "hidden",
        "query",
        1,
        is_transposed=True,
    ),
    _bias(_GPT2_LAYER + "attn.c_proj", _ATTENTION + "linear_proj", "hidden", None),
    *_norm(_GPT2_LAYER + "ln_2", _CORE + "pre_mlp_layernorm", has_bias=True),
    _linear(
        _GPT2_LAYER + "mlp.c_fc", _CORE + "mlp.linear_fc1", "ffn", "hidden", 0, is_transposed=True
    ),
    _bias(_GPT2_LAYER + "mlp.c_fc", _CORE + "mlp.linear_fc1", "ffn", 0),
    _linear(
        _GPT2_LAYER + "mlp.c_proj", _CORE + "mlp.linear_fc2", "hidden", "ffn", 1, is_transposed=True
    ),
    _bias(_GPT2_LAYER + "mlp.c_proj", _CORE + "mlp.linear_fc2", "hidden", None),
    *_norm("transformer.ln_f", "decoder.final_layernorm", has_bias=True),
    Weight("lm_head.weight", _HEAD, ("vocabulary", "hidden"), 0),
)

_NEOX_LAYER = "gpt_neox.layers.{layer}."

_NEOX = (
    Weight("gpt_neox.embed_in.weight", _EMBEDDING, ("vocabulary", "hidden"), 0),
    *_norm(_NEOX_LAYER + "input_layernorm", _CORE + "input_layernorm", has_bias=True),
    # The tensor interleaves query, key and value by head, as megatron-core's parameter does.
    _linear(_NEOX_LAYER + "attention.query_key_value", _QKV, "qkv", "hidden", 0),
    _bias(_NEOX_LAYER + "attention.query_key_value", _QKV, "qkv", 0, requires="qkv_bias"),
    _linear(_NEOX_LAYER + "attention.dense", _ATTENTION + "linear_proj", "hidden", "query", 1),
    _bias(
        _NEOX_LAYER + "attention.dense",
        _ATTENTION + "linear_proj",
        "hidden",
        None,
        requires="attention_output_bias",
    ),
    *_norm(_NEOX_LAYER + "post_attention_layernorm", _CORE + "pre_mlp_layernorm", has_bias=True),
    _linear(_NEOX_LAYER + "mlp.dense_h_to_4h", _CORE + "mlp.linear_fc1", "ffn", "hidden", 0),
    _bias(_NEOX_LAYER + "mlp.dense_h_to_4h", _CORE + "mlp.linear_fc1", "ffn", 0),
    _linear(_NEOX_LAYER + "mlp.dense_4h_to_h", _CORE + "mlp.linear_fc2", "hidden", "ffn", 1),
    _bias(_NEOX_LAYER + "mlp.dense_4h_to_h", _CORE + "mlp.linear_fc2", "hidden", None),
    *_norm("gpt_neox.final_layer_norm", "decoder.final_layernorm", has_bias=True),
    Weight("embed_out.weight", _HEAD, ("vocabulary", "hidden"), 0),
)

SCALAR_HEAD = Weight("score.weight", _HEAD, ("one", "hidden"))
"""Head of a reward model or critic, in every family."""

WEIGHTS: Mapping[str, tuple[Weight, ...]] = {
    "llama": _model(*_LLAMA_ATTENTION, *_LLAMA_MLP, *_MLP_BIASES),
    "mixtral": _model(*_LLAMA_ATTENTION, *_MIXTRAL_EXPERTS),
    "qwen3_moe": _model(*_LLAMA_ATTENTION, *_LLAMA_MLP, *_MLP_EXPERTS),
    "qwen2_moe": _model(
        *_LLAMA_ATTENTION,
        *_LLAMA_MLP,
        *_QWEN_EXPERTS,
    ),
    "glm4_moe": _model(*_LLAMA_ATTENTION, *DEEPSEEK_MLP),
    "minimax_m2": _MINIMAX_M2,
    "olmoe": _OLMOE,
    "granite": _model(*_LLAMA_ATTENTION, *_LLAMA_MLP, *_MLP_BIASES),
    "smollm3": _model(*_LLAMA_ATTENTION, *_LLAMA_MLP, *_MLP_BIASES),
    "seed_oss": _model(*_LLAMA_ATTENTION, *_LLAMA_MLP, *_MLP_BIASES),
    "phi3": _PHI3,
    "olmo2": _OLMO2,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "glm4": _GLM4,
    "deepseek_v2": _model(
        *_DEEPSEEK_ATTENTION, *_LLAMA_MLP, *_MLP_EXPERTS, *_shared_experts("shared_experts")
    ),
    "deepseek_v3": _model(*_DEEPSEEK_ATTENTION, *DEEPSEEK_MLP),
    "qwen3_next": _hybrid(_QWEN3_NEXT_DELTA_NET, *_LLAMA_MLP, *_QWEN_EXPERTS),
    "qwen3_5": _hybrid(_QWEN3_5_DELTA_NET, *_LLAMA_MLP),
    "qwen3_5_moe": _hybrid(_QWEN3_5_DELTA_NET, *_QWEN_EXPERTS),
    "gpt_oss": _GPT_OSS,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
}

# Buffers that older releases of transformers saved. They are computed, not learned, so a file may
# contain them in addition to the weights of the table.
COMPUTED_BUFFERS = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
)
