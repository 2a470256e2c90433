"""Hugging Face's config.json: the architectures that are supported, and a model's shape from it and
as one.

An architecture is a table of entries, read and written by the same functions. One with rotary
positions has their entries too.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape, RopeScaling
from aligner.models.weight_slices import Head

SIZE, REQUIRED = object(), object()
"""Instead of a default: the entry must be there, as a whole number above 0 or as anything."""

Entry = tuple[str, Any]
"""An entry's name, and the value that it has where it is left out."""


@dataclass(frozen=True)
class Architecture:
    """What the config.json of an architecture says about a `ModelShape`."""

    name: str
    model_type: str
    family: str
    entries: Mapping[str, Entry]
    """By the shape's attribute."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that all of its models have."""
    supported: Mapping[str, Any] = field(default_factory=dict)
    """Entries of which one value is supported, their default."""
    causal_suffix: str = "ForCausalLM"
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that is rotated where the configuration does not say."""

    @property
    def causal_name(self) -> str:
        """The language model, as Hugging Face calls it."""
        return self.name + self.causal_suffix

    @property
    def scalar_name(self) -> str:
        """The model with one number a token."""
        return f"{self.name}ForSequenceClassification"

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotations, which have entries of their own."""
        return self.implied.get("position") != "learned"


_ROTARY: Mapping[str, Entry] = {
    "num_layers": ("num_hidden_layers", SIZE),
    "hidden_size": ("hidden_size", SIZE),
    "num_heads": ("num_attention_heads", SIZE),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "ffn_hidden_size": ("intermediate_size", SIZE),
    "vocab_size": ("vocab_size", SIZE),
    "max_positions": ("max_position_embeddings", 2048),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tied_embeddings": ("tie_word_embeddings", False),
}
_WINDOW: Mapping[str, Entry] = {"sliding_window": ("sliding_window", None)}
_BIASED = {"normalization": "layer", "gated": False, "linear_bias": True, "qkv_bias": True}
_SILU = {"hidden_act": "silu"}
_NO_WINDOW = {**_SILU, "use_sliding_window": False}
_QWEN3 = {**_ROTARY, "head_dim": ("head_dim", 128)}

_ARCHITECTURES = (
    Architecture(
        "Llama",
        "llama",
        "llama",
        _ROTARY,
        supported={"attention_bias": False, "mlp_bias": False, **_SILU},
    ),
    Architecture("Mistral", "mistral", "llama", {**_ROTARY, **_WINDOW}, supported=_SILU),
    Architecture("Qwen2", "qwen2", "llama", _ROTARY, {"qkv_bias": True}, _NO_WINDOW),
    Architecture(
        "Qwen3",
        "qwen3",
        "llama",
        _QWEN3,
        {"qk_norm": True},
        {**_NO_WINDOW, "attention_bias": False},
    ),
    Architecture(
        "Mixtral",
        "mixtral",
        "mixtral",
        {
            **_ROTARY,
            **_WINDOW,
            "num_experts": ("num_local_experts", SIZE),
            "experts_per_token": ("num_experts_per_tok", 2),
        },
        supported=_SILU,
    ),
    Architecture(
        "Qwen3Moe",
        "qwen3_moe",
        "qwen3_moe",
        {
            **_QWEN3,
            "ffn_hidden_size": ("moe_intermediate_size", SIZE),
            "num_experts": ("num_experts", SIZE),
            "experts_per_token": ("num_experts_per_tok", SIZE),
            "normalize_expert_weights": ("norm_topk_prob", False),
        },
        {"qk_norm": True},
        {**_NO_WINDOW, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Architecture(
        "GPTNeoX",
        "gpt_neox",
        "gpt_neox",
        {
            **{
                attribute: entry
                for attribute, entry in _ROTARY.items()
                if attribute != "num_kv_heads"
            },
            "norm_epsilon": ("layer_norm_eps", 1e-5),
            "activation": ("hidden_act", REQUIRED),
            "parallel_residual": ("use_parallel_residual", True),
        },
        _BIASED,
        {"attention_bias": True},
        rotary_fraction=0.25,  # of releases before transformers 5
    ),
    Architecture(
        "GPT2",
        "gpt2",
        "gpt2",
        {
            "num_layers": ("n_layer", SIZE),
            "hidden_size": ("n_embd", SIZE),
            "num_heads": ("n_head", SIZE),
            "head_dim": ("head_dim", None),
            "ffn_hidden_size": ("n_inner", None),
            "vocab_size": ("vocab_size", SIZE),
            "max_positions": ("n_positions", 1024),
            "norm_epsilon": ("layer_norm_epsilon", 1e-5),
            "activation": ("activation_function", REQUIRED),
            "tied_embeddings": ("tie_word_embeddings", True),
        },
        {**_BIASED, "position": "learned", "rope_theta": 0.0},
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        causal_suffix="LMHeadModel",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    **{architecture.causal_name: architecture for architecture in _ARCHITECTURES},
    **{architecture.scalar_name: architecture for architecture in _ARCHITECTURES},
}
"""By the name in config.json, with a language model's head or a scalar one."""

_ACTIVATIONS: Mapping[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
"""Rope scaling llama3: our attribute to the entry."""


def read_config(config: Any, origin: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes; `origin` (a path or key) names it in
    errors.

    Raises ConfigError for what is no configuration, an architecture that is not known, a missing
    entry, or a variant that is not supported.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{origin}: config.json must be a JSON object, got {type(config).__name__}"
        )
    named = config.get("architectures") or ["<none>"]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ConfigError(f"{origin}: architectures={named!r}: must be a list of names")
    architecture = ARCHITECTURES.get(named[0])
    if architecture is None:
        raise ConfigError(
            f"{origin}: architecture {named[0]} is not supported; supported:"
            f" {', '.join(ARCHITECTURES)}"
        )
    # transformers 5 writes num_local_experts, earlier releases num_experts.
    entries = {
        "num_experts": config.get("num_local_experts"),
        **{key: value for key, value in config.items() if value is not None},
    }
    try:
        shape = _read_shape(architecture, entries, origin)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{origin}: a value in config.json has the wrong type: {error}"
        ) from error
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{origin}: the number of attention heads, {shape.num_heads}, must be a multiple of"
            f" the number of key-value heads, {shape.num_kv_heads}"
        )
    if shape.num_experts and shape.experts_per_token == 1 and shape.normalize_expert_weights:
        raise ConfigError(
            f"{origin}: one expert per token with normalized expert weights is not supported,"
            " because the router would get no gradient"
        )
    return shape


def _read_shape(architecture: Architecture, config: Mapping[str, Any], origin: str) -> ModelShape:
    for key, supported in architecture.supported.items():
        if (value := config.get(key, supported)) != supported:
            raise ConfigError(
                f"{origin}: {key}={value!r} is not supported; supported: {supported!r}"
            )
    table = architecture.entries
    missing = [
        key
        for key, default in table.values()
        if default in (SIZE, REQUIRED) and config.get(key) is None
    ]
    if missing:
        raise ConfigError(
            f"{origin}: required entries of config.json are missing: {', '.join(missing)}"
        )
    values = {attribute: config.get(key, default) for attribute, (key, default) in table.items()}
    for attribute, (key, default) in table.items():
        value = values[attribute]
        if default is SIZE or (attribute in ("num_kv_heads", "head_dim") and value is not None):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{origin}: {key}={value!r}: must be an integer > 0")
        elif isinstance(default, bool):
            values[attribute] = bool(value)
    if "activation" in values:
        values["activation"] = _activation(
            values["activation"], f"{origin}: {table['activation'][0]}"
        )
    hidden, heads, eos = values["hidden_size"], values["num_heads"], config.get("eos_token_id")
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * hidden
    if not values.get("head_dim"):
        if hidden % heads:
            raise ConfigError(
                f"{origin}: the hidden size, {hidden}, must be a multiple of the number of"
                f" attention heads, {heads}"
            )
        values["head_dim"] = hidden // heads
    if architecture.is_rotary:
        values |= _read_rope(config, architecture.rotary_fraction, origin)
    return ModelShape(
        **values,
        **architecture.implied,
        family=architecture.family,
        eos_token_ids=(
            tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
        ),
        pad_token_id=config.get("pad_token_id", 0),
    )


def _activation(name: Any, entry: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{entry}={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _read_rope(config: Mapping[str, Any], fraction: float, origin: str) -> dict[str, Any]:
    """Theta, rotated fraction and scaling; transformers 5 moved all of them into
    rope_parameters."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fraction = 1.0 if config.get("rope_parameters") else fraction
    kind, scaling = rope.get("rope_type", rope.get("type", "default")), None
    wanted = {"default": (), "linear": ("factor",), "llama3": tuple(_SCALING.values())}.get(kind)
    if wanted is None:
        raise ConfigError(
            f"{origin}: rope scaling {kind!r} is not supported; supported: default, linear, llama3"
        )
    if missing := [name for name in wanted if name not in rope]:
        raise ConfigError(
            f"{origin}: rope scaling {kind}: required entries are missing: {', '.join(missing)}"
        )
    if kind == "linear":
        scaling = RopeScaling("linear", float(rope["factor"]))
    elif kind == "llama3":
        factor, low, high, positions = (rope[name] for name in _SCALING.values())
        scaling = RopeScaling("llama3", float(factor), float(low), float(high), int(positions))
    return {
        "rope_theta": float(
            rope.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
        ),
        "rotary_fraction": float(
            rope.get(
                "partial_rotary_factor",
                config.get("partial_rotary_factor", config.get("rotary_pct", fraction)),
            )
        ),
        "rope_scaling": scaling,
    }


def hugging_face_config(shape: ModelShape, head: Head = "vocabulary") -> dict[str, Any]:
    """The configuration that `read_config` reads this shape from, with a language model's or a
    scalar head."""
    for architecture in _ARCHITECTURES:
        if architecture.family == shape.family:
            config = _written(architecture, shape, head)
            if read_config(config, "shape") == shape:
                return config
    raise AssertionError(f"no architecture of the {shape.family} family has this shape: {shape}")


def _written(architecture: Architecture, shape: ModelShape, head: Head) -> dict[str, Any]:
    config = {
        key: getattr(shape, attribute) for attribute, (key, _) in architecture.entries.items()
    }
    if "activation" in architecture.entries:
        names = [
            name for name, activation in _ACTIVATIONS.items() if activation == shape.activation
        ]
        config[architecture.entries["activation"][0]] = names[0]
    if architecture.is_rotary:
        scaling = {} if shape.rope_scaling is None else dataclasses.asdict(shape.rope_scaling)
        config["rope_parameters"] = {
            "rope_type": scaling.get("kind", "default"),
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_fraction,
            **{entry: scaling[attribute] for attribute, entry in _SCALING.items() if scaling},
        }
    return {
        "architectures": [
            architecture.causal_name if head == "vocabulary" else architecture.scalar_name
        ],
        "model_type": architecture.model_type,
        **config,
        "eos_token_id": list(shape.eos_token_ids),
        "pad_token_id": shape.pad_token_id,
        **({} if head == "vocabulary" else {"num_labels": 1}),
    }
