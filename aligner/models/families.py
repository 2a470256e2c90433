"""The weights of the model families: what each calls them, how they lie in megatron-core's, and how
they are cut.

One table a family drives import, export, checkpoints and resharding; `hugging_face.py` reads its
config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Part = Literal["whole", "query", "key", "value", "gate", "up"]


@dataclass(frozen=True)
class Weight:
    """One kind of weight: a Hugging Face tensor, or a part of one, and its place in megatron-core's
    parameter.

    `{layer}` and `{expert}` in the names count up. `sizes` name the dimensions, in megatron-core's
    order, outputs first.
    """

    name: str
    parameter: str
    sizes: tuple[str, ...]
    cut: int | None = None
    """The dimension of `sizes` that tensor parallelism cuts; None: every tensor-parallel rank holds
    all of it."""
    part: Part = "whole"
    """Which part of the fused parameter it is: query, key, value interleave by key/value group;
    gate lies above up."""
    transposed: bool = False
    """Whether the file holds it inputs first."""
    fused_in: str | None = None
    """The file's tensor that holds query, key and value one after another, where it does."""
    when: str | None = None
    """The attribute of the shape without which it does not exist."""


def _linear(name: str, parameter: str, outputs: str, inputs: str, cut: int, **more: Any) -> Weight:
    return Weight(f"{name}.weight", f"{parameter}.weight", (outputs, inputs), cut, **more)


def _bias(name: str, parameter: str, outputs: str, cut: int | None, **more: Any) -> Weight:
    return Weight(f"{name}.bias", f"{parameter}.bias", (outputs,), cut, **more)


def _layer_norm(name: str, parameter: str, *, biased: bool = False) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", f"{parameter}.weight", ("hidden",))
    return (weight, _bias(name, parameter, "hidden", None)) if biased else (weight,)


_LAYER, _CORE = "model.layers.{layer}.", "decoder.layers.{layer}."
_ATTENTION = _CORE + "self_attention."
_QKV = _ATTENTION + "linear_qkv"
_PROJECTIONS: tuple[tuple[str, str, Part], ...] = (
    ("q", "query", "query"),
    ("k", "key", "key"),
    ("v", "key", "value"),
)

_LLAMA_ATTENTION = (
    *_layer_norm(_LAYER + "input_layernorm", _CORE + "input_layernorm"),
    *(
        _linear(f"{_LAYER}self_attn.{at}_proj", _QKV, size, "hidden", 0, part=part)
        for at, size, part in _PROJECTIONS
    ),
    *(
        _bias(f"{_LAYER}self_attn.{at}_proj", _QKV, size, 0, part=part, when="qkv_bias")
        for at, size, part in _PROJECTIONS
    ),
    *(
        Weight(
            f"{_LAYER}self_attn.{at}_norm.weight",
            f"{_CORE}self_attention.{at}_layernorm.weight",
            ("head",),
            when="qk_norm",
        )
        for at in ("q", "k")
    ),
    _linear(_LAYER + "self_attn.o_proj", _ATTENTION + "linear_proj", "hidden", "query", 1),
    *_layer_norm(_LAYER + "post_attention_layernorm", _CORE + "pre_mlp_layernorm"),
)


def _gated(prefix: str, parameter: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    return (
        _linear(prefix + gate, parameter + "linear_fc1", "ffn", "hidden", 0, part="gate"),
        _linear(prefix + up, parameter + "linear_fc1", "ffn", "hidden", 0, part="up"),
        _linear(prefix + down, parameter + "linear_fc2", "hidden", "ffn", 1),
    )


_LLAMA_MLP = _gated(_LAYER + "mlp.", _CORE + "mlp.", "gate_proj", "up_proj", "down_proj")
_EXPERT = _CORE + "mlp.experts.local_experts.{expert}."


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    router = Weight(
        _LAYER + block + ".gate.weight", _CORE + "mlp.router.weight", ("experts", "hidden")
    )
    return (router, *_gated(_LAYER + block + ".experts.{expert}.", _EXPERT, gate, up, down))


_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def _llama_like(*mlp: Weight) -> tuple[Weight, ...]:
    return (
        Weight("model.embed_tokens.weight", _EMBEDDING, ("vocabulary", "hidden"), 0),
        *_LLAMA_ATTENTION,
        *mlp,
        *_layer_norm("model.norm", "decoder.final_layernorm"),
        Weight("lm_head.weight", _HEAD, ("vocabulary", "hidden"), 0),
    )


_GPT2_LAYER = "transformer.h.{layer}."
_GPT2_PARTS: tuple[Part, ...] = ("query", "key", "value")

_GPT2 = (
    Weight("transformer.wte.weight", _EMBEDDING, ("vocabulary", "hidden"), 0),
    Weight(
        "transformer.wpe.weight", "embedding.position_embeddings.weight", ("positions", "hidden")
    ),
    *_layer_norm(_GPT2_LAYER + "ln_1", _CORE + "input_layernorm", biased=True),
    *(
        replace(
            make(f"{_GPT2_LAYER}attn.{part}"),
            part=part,
            fused_in=f"{_GPT2_LAYER}attn.c_attn.{kind}",
        )
        for kind, make in (
            ("weight", lambda name: _linear(name, _QKV, "query", "hidden", 0, transposed=True)),
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
        transposed=True,
    ),
    _bias(_GPT2_LAYER + "attn.c_proj", _ATTENTION + "linear_proj", "hidden", None),
    *_layer_norm(_GPT2_LAYER + "ln_2", _CORE + "pre_mlp_layernorm", biased=True),
    _linear(
        _GPT2_LAYER + "mlp.c_fc", _CORE + "mlp.linear_fc1", "ffn", "hidden", 0, transposed=True
    ),
    _bias(_GPT2_LAYER + "mlp.c_fc", _CORE + "mlp.linear_fc1", "ffn", 0),
    _linear(
        _GPT2_LAYER + "mlp.c_proj", _CORE + "mlp.linear_fc2", "hidden", "ffn", 1, transposed=True
    ),
    _bias(_GPT2_LAYER + "mlp.c_proj", _CORE + "mlp.linear_fc2", "hidden", None),
    *_layer_norm("transformer.ln_f", "decoder.final_layernorm", biased=True),
    Weight("lm_head.weight", _HEAD, ("vocabulary", "hidden"), 0),
)

_NEOX_LAYER = "gpt_neox.layers.{layer}."

_NEOX = (
    Weight("gpt_neox.embed_in.weight", _EMBEDDING, ("vocabulary", "hidden"), 0),
    *_layer_norm(_NEOX_LAYER + "input_layernorm", _CORE + "input_layernorm", biased=True),
    # Query, key and value of a head lie together, as megatron-core has them.
    _linear(_NEOX_LAYER + "attention.query_key_value", _QKV, "qkv", "hidden", 0),
    _bias(_NEOX_LAYER + "attention.query_key_value", _QKV, "qkv", 0),
    _linear(_NEOX_LAYER + "attention.dense", _ATTENTION + "linear_proj", "hidden", "query", 1),
    _bias(_NEOX_LAYER + "attention.dense", _ATTENTION + "linear_proj", "hidden", None),
    *_layer_norm(
        _NEOX_LAYER + "post_attention_layernorm", _CORE + "pre_mlp_layernorm", biased=True
    ),
    _linear(_NEOX_LAYER + "mlp.dense_h_to_4h", _CORE + "mlp.linear_fc1", "ffn", "hidden", 0),
    _bias(_NEOX_LAYER + "mlp.dense_h_to_4h", _CORE + "mlp.linear_fc1", "ffn", 0),
    _linear(_NEOX_LAYER + "mlp.dense_4h_to_h", _CORE + "mlp.linear_fc2", "hidden", "ffn", 1),
    _bias(_NEOX_LAYER + "mlp.dense_4h_to_h", _CORE + "mlp.linear_fc2", "hidden", None),
    *_layer_norm("gpt_neox.final_layer_norm", "decoder.final_layernorm", biased=True),
    Weight("embed_out.weight", _HEAD, ("vocabulary", "hidden"), 0),
)

SCALAR_HEAD = Weight("score.weight", _HEAD, ("one", "hidden"))
"""What a reward model or critic has instead of a language-model head, in every family."""

WEIGHTS: Mapping[str, tuple[Weight, ...]] = {
    "llama": _llama_like(*_LLAMA_MLP),
    "mixtral": _llama_like(*_experts("block_sparse_moe", "w1", "w3", "w2")),
    "qwen3_moe": _llama_like(*_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
}

# What a file may hold besides the table: buffers of older releases, which are computed and not
# learned.
COMPUTED_BUFFERS = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
)
