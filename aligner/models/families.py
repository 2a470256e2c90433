"""The model families: what each calls its weights, how they lie in megatron-core's, how they are cut; and their config.json.

One table a family drives import, export, checkpoints and resharding. A new family is a table and a reader here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape, RopeScaling

Part = Literal["whole", "query", "key", "value", "gate", "up"]


@dataclass(frozen=True)
class Weight:
    """One kind of weight: a Hugging Face tensor, or a part of one, and its place in megatron-core's parameter.

    `{layer}` and `{expert}` in the names count up. `sizes` name the dimensions, in megatron-core's order, outputs first.
    """

    name: str
    parameter: str
    sizes: tuple[str, ...]
    cut: int | None = None
    """The dimension of `sizes` that tensor parallelism cuts; None: every tensor-parallel rank holds all of it."""
    part: Part = "whole"
    """Which part of the fused parameter it is: query, key, value interleave by key/value group; gate lies above up."""
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
_PROJECTIONS: tuple[tuple[str, str, Part], ...] = (("q", "query", "query"), ("k", "key", "key"), ("v", "key", "value"))

_LLAMA_ATTENTION = (
    *_layer_norm(_LAYER + "input_layernorm", _CORE + "input_layernorm"),
    *(_linear(f"{_LAYER}self_attn.{at}_proj", _QKV, size, "hidden", 0, part=part) for at, size, part in _PROJECTIONS),
    *(_bias(f"{_LAYER}self_attn.{at}_proj", _QKV, size, 0, part=part, when="qkv_bias") for at, size, part in _PROJECTIONS),
    *(
        Weight(
            f"{_LAYER}self_attn.{at}_norm.weight", f"{_CORE}self_attention.{at}_layernorm.weight", ("head",), when="qk_norm"
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
    router = Weight(_LAYER + block + ".gate.weight", _CORE + "mlp.router.weight", ("experts", "hidden"))
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
    Weight("transformer.wpe.weight", "embedding.position_embeddings.weight", ("positions", "hidden")),
    *_layer_norm(_GPT2_LAYER + "ln_1", _CORE + "input_layernorm", biased=True),
    *(
        replace(make(f"{_GPT2_LAYER}attn.{part}"), part=part, fused_in=f"{_GPT2_LAYER}attn.c_attn.{kind}")
        for kind, make in (
            ("weight", lambda name: _linear(name, _QKV, "query", "hidden", 0, transposed=True)),
            ("bias", lambda name: _bias(name, _QKV, "query", 0)),
        )
        for part in _GPT2_PARTS
    ),
    _linear(_GPT2_LAYER + "attn.c_proj", _ATTENTION + "linear_proj", "hidden", "query", 1, transposed=True),
    _bias(_GPT2_LAYER + "attn.c_proj", _ATTENTION + "linear_proj", "hidden", None),
    *_layer_norm(_GPT2_LAYER + "ln_2", _CORE + "pre_mlp_layernorm", biased=True),
    _linear(_GPT2_LAYER + "mlp.c_fc", _CORE + "mlp.linear_fc1", "ffn", "hidden", 0, transposed=True),
    _bias(_GPT2_LAYER + "mlp.c_fc", _CORE + "mlp.linear_fc1", "ffn", 0),
    _linear(_GPT2_LAYER + "mlp.c_proj", _CORE + "mlp.linear_fc2", "hidden", "ffn", 1, transposed=True),
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
    *_layer_norm(_NEOX_LAYER + "post_attention_layernorm", _CORE + "pre_mlp_layernorm", biased=True),
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

# What a file may hold besides the table: buffers of older releases, which are computed and not learned.
COMPUTED_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


class _Reader:
    """A config.json whose missing or unsupported entries become errors that name their origin."""

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self._config, self._origin = config, origin

    def get(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def need(self, *keys: str) -> list[Any]:
        missing = [key for key in keys if self._config.get(key) is None]
        if missing:
            raise ConfigError(f"{self._origin}: the model's configuration lacks {', '.join(missing)}")
        return [self._config[key] for key in keys]

    def sizes(self, *keys: str) -> list[int]:
        """Entries that must be there and are whole numbers above 0."""
        for key, value in zip(keys, self.need(*keys), strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{self._origin}: {key}={value!r}: must be a whole number above 0")
        return self.need(*keys)

    def head_dim(self, hidden: int, heads: int) -> int:
        """Size of an attention head, where it is not given the share of one in the hidden size."""
        if self.get("head_dim") is not None:
            return self.sizes("head_dim")[0]
        if hidden % heads:
            raise ConfigError(f"{self._origin}: a hidden size of {hidden} does not divide by {heads} attention heads")
        return hidden // heads

    def refuse(self, **unsupported: Any) -> None:
        """Raise where an entry has another value than the one given."""
        for key, supported in unsupported.items():
            if (value := self.get(key, supported)) != supported:
                raise ConfigError(f"{self._origin}: {key}={value!r} is not supported; supported: {supported!r}")

    def activation(self, key: str) -> Literal["silu", "gelu", "gelu_tanh"]:
        (name,) = self.need(key)
        if name not in _ACTIVATIONS:
            raise ConfigError(f"{self._origin}: {key}={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def rope(self) -> tuple[float, float, RopeScaling | None]:
        """Theta, rotated fraction and scaling; transformers 5 moved all of them into rope_parameters."""
        rope = self.get("rope_parameters") or self.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        theta = float(rope.get("rope_theta", self.get("rope_theta", self.get("rotary_emb_base", 10000.0))))
        fraction = float(rope.get("partial_rotary_factor", self.get("partial_rotary_factor", self.get("rotary_pct", 1.0))))
        if kind == "default":
            return theta, fraction, None
        if kind == "linear":
            return theta, fraction, RopeScaling("linear", float(rope["factor"]))
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            missing = [name for name in names if name not in rope]
            if missing:
                raise ConfigError(f"{self._origin}: rope scaling llama3 lacks {', '.join(missing)}")
            factor, low, high, positions = (rope[name] for name in names)
            return theta, fraction, RopeScaling("llama3", float(factor), float(low), float(high), int(positions))
        raise ConfigError(f"{self._origin}: rope scaling {kind!r} is not supported; supported: default, linear, llama3")

    def common(self) -> dict[str, Any]:
        eos, pad = self.get("eos_token_id"), self.get("pad_token_id")
        return {
            "eos_token_ids": tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            "pad_token_id": 0 if pad is None else pad,
        }


def _read_rotary(reader: _Reader, family: str, **more: Any) -> ModelShape:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    layers, hidden, heads, ffn, vocabulary = reader.sizes(*names)
    kv_heads = reader.sizes("num_key_value_heads")[0] if reader.get("num_key_value_heads") is not None else heads
    theta, fraction, scaling = reader.rope()
    dimensions = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": more.get("head_dim") or reader.head_dim(hidden, heads),
        "ffn_hidden_size": ffn,
        "vocab_size": vocabulary,
        "max_positions": reader.get("max_position_embeddings", 2048),
        "norm_epsilon": reader.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rotary_fraction": fraction,
        "rope_scaling": scaling,
        "tied_embeddings": bool(reader.get("tie_word_embeddings", False)),
        "family": family,
    }
    return ModelShape(**{**dimensions, **reader.common(), **more})


def _read_llama(reader: _Reader) -> ModelShape:
    reader.refuse(attention_bias=False, mlp_bias=False, hidden_act="silu")
    return _read_rotary(reader, "llama")


def _read_mistral(reader: _Reader) -> ModelShape:
    reader.refuse(hidden_act="silu")
    return _read_rotary(reader, "llama", sliding_window=reader.get("sliding_window"))


def _read_qwen2(reader: _Reader) -> ModelShape:
    reader.refuse(hidden_act="silu", use_sliding_window=False)
    return _read_rotary(reader, "llama", qkv_bias=True)


def _read_qwen3(reader: _Reader) -> ModelShape:
    reader.refuse(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    return _read_rotary(reader, "llama", qk_norm=True, head_dim=reader.get("head_dim", 128))


def _read_mixtral(reader: _Reader) -> ModelShape:
    reader.refuse(hidden_act="silu")
    (experts,) = reader.need("num_local_experts")
    return _read_rotary(
        reader,
        "mixtral",
        sliding_window=reader.get("sliding_window"),
        num_experts=experts,
        experts_per_token=reader.get("num_experts_per_tok", 2),
    )


def _read_qwen3_moe(reader: _Reader) -> ModelShape:
    reader.refuse(hidden_act="silu", attention_bias=False, use_sliding_window=False, decoder_sparse_step=1, mlp_only_layers=[])
    # transformers 5 writes num_local_experts, earlier releases num_experts.
    experts = reader.get("num_experts") or reader.need("num_local_experts")[0]
    ffn, chosen = reader.need("moe_intermediate_size", "num_experts_per_tok")
    return _read_rotary(
        reader,
        "qwen3_moe",
        qk_norm=True,
        head_dim=reader.get("head_dim", 128),
        ffn_hidden_size=ffn,
        num_experts=experts,
        experts_per_token=chosen,
        normalize_expert_weights=bool(reader.get("norm_topk_prob", False)),
    )


def _read_neox(reader: _Reader) -> ModelShape:
    reader.refuse(attention_bias=True)
    return _read_rotary(
        reader,
        "gpt_neox",
        num_kv_heads=reader.need("num_attention_heads")[0],
        norm_epsilon=reader.get("layer_norm_eps", 1e-5),
        normalization="layer",
        activation=reader.activation("hidden_act"),
        gated=False,
        linear_bias=True,
        qkv_bias=True,
        parallel_residual=bool(reader.get("use_parallel_residual", True)),
        # Releases before transformers 5 default to a quarter.
        rotary_fraction=reader.rope()[1] if reader.get("rope_parameters") else float(reader.get("rotary_pct", 0.25)),
    )


def _read_gpt2(reader: _Reader) -> ModelShape:
    reader.refuse(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    layers, hidden, heads, vocabulary = reader.sizes("n_layer", "n_embd", "n_head", "vocab_size")
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=reader.head_dim(hidden, heads),
        ffn_hidden_size=reader.get("n_inner", 4 * hidden),
        vocab_size=vocabulary,
        max_positions=reader.get("n_positions", 1024),
        norm_epsilon=reader.get("layer_norm_epsilon", 1e-5),
        rope_theta=0.0,
        tied_embeddings=bool(reader.get("tie_word_embeddings", True)),
        family="gpt2",
        normalization="layer",
        activation=reader.activation("activation_function"),
        gated=False,
        linear_bias=True,
        qkv_bias=True,
        position="learned",
        **reader.common(),
    )


READERS: Mapping[str, Callable[[_Reader], ModelShape]] = {
    "Llama": _read_llama,
    "Mistral": _read_mistral,
    "Qwen2": _read_qwen2,
    "Qwen3": _read_qwen3,
    "Mixtral": _read_mixtral,
    "Qwen3Moe": _read_qwen3_moe,
    "GPTNeoX": _read_neox,
    "GPT2": _read_gpt2,
}

_CAUSAL = {f"{name}ForCausalLM": name for name in READERS if name != "GPT2"} | {"GPT2LMHeadModel": "GPT2"}
_SCALAR = {f"{name}ForSequenceClassification": name for name in READERS}
ARCHITECTURES: Mapping[str, str] = _CAUSAL | _SCALAR
"""Hugging Face architecture to the name of its reader."""


def read_config(config: Any, origin: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes; `origin` (a path or key) names it in errors.

    Raises ConfigError for what is no configuration, an architecture that is not known, a missing entry, or a variant that is
    not supported.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{origin}: a config.json is an object of entries, got {type(config).__name__}")
    named = config.get("architectures") or ["<none>"]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ConfigError(f"{origin}: architectures={named!r}: must be a list of names")
    architecture = named[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{origin}: architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    try:
        shape = READERS[ARCHITECTURES[architecture]](_Reader(config, origin))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{origin}: a value is not of the type that a config.json has there: {error}") from error
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(f"{origin}: {shape.num_heads} attention heads do not divide by {shape.num_kv_heads} key-value heads")
    if shape.num_experts and shape.experts_per_token == 1 and shape.normalize_expert_weights:
        raise ConfigError(f"{origin}: one expert a token, its weight scaled to one, leaves the router nothing to learn from")
    return shape
