"""Conversion between Hugging Face's config.json and a `ModelShape`, as transformers reads it.

Each supported architecture has a table of the entries that its transformers 5 configuration class
knows, with the class's defaults. `tests/models/test_config_defaults.py` compares the tables with
the installed classes. Entries are read in one of these ways:

- entries of the shape, and the rotary entries, are read;
- entries that change the forward pass and are not implemented must have the class's default;
- entries without an effect on log-probs are accepted;
- entries that transformers does not know are ignored; `config_notes` lists them.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape, RopeScaling
from aligner.models.weight_slices import Head


@dataclass(frozen=True)
class Entry:
    """An entry of config.json that a `ModelShape` is read from.

    The default's type is the entry's type; an entry whose default is None is a whole number.
    """

    key: str
    default: bool | int | float | str | None
    """Value of the transformers class if config.json lacks the entry."""
    nullable: bool = False
    """Whether the entry may be null. Then it has another meaning than a missing entry."""


@dataclass(frozen=True)
class Architecture:
    """The entries of an architecture's config.json, as its transformers class reads them."""

    name: str
    """Prefix of the names of the transformers classes."""
    model_type: str
    """Value of the entry `model_type`."""
    family: str
    """Model family, a key of `families.WEIGHTS`."""
    entries: Mapping[str, Entry]
    """Entries of the shape, by the shape's attribute."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that all models of the architecture have."""
    supported: Mapping[str, Any] = field(default_factory=dict)
    """Default of each entry for which only the default is implemented."""
    without_effect: tuple[str, ...] = ()
    """Entries of the class that do not change log-probs."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Dropout probabilities, which are not applied."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of entries in the table, by their other names in config.json."""
    eos_token_id: int | None = 2
    """Default EOS id of the transformers class; None if it has none."""
    window: Literal["none", "always", "switched", "layered"] = "none"
    """Layers with a sliding window. "none": no layer; "always": all layers if the window is not
    null; "switched": all layers if `use_sliding_window` is true; "layered": the layers from
    `max_window_layers` on if `use_sliding_window` is true."""
    rope_theta: float = 10000.0
    """Default rotary base of the transformers class."""
    theta_key: str = "rope_theta"
    """Entry of the rotary base outside `rope_parameters`."""
    fraction_key: str = "partial_rotary_factor"
    """Entry of the rotated fraction outside `rope_parameters`."""
    rotary_fraction: float | None = None
    """Default fraction of a head's dimensions that is rotated; None if the architecture rotates all
    dimensions and has no such entry."""
    causal_suffix: str = "ForCausalLM"
    """Suffix of the name of the class with a language model's head."""

    @property
    def causal_name(self) -> str:
        """Name of the class with a language model's head."""
        return self.name + self.causal_suffix

    @property
    def scalar_name(self) -> str:
        """Name of the class with a head of one number per token."""
        return f"{self.name}ForSequenceClassification"

    @property
    def is_rotary(self) -> bool:
        """Whether the model has rotary positions."""
        return self.implied.get("position") != "learned"

    @property
    def known_entries(self) -> frozenset[str]:
        """All entries that transformers knows for this architecture."""
        rotary = (*_ROPE_ENTRIES, self.theta_key, self.fraction_key) if self.is_rotary else ()
        return frozenset(
            (
                *(entry.key for entry in self.entries.values()),
                *self.supported,
                *self.without_effect,
                *self.dropouts,
                *self.aliases,
                *rotary,
                *_WINDOW_ENTRIES[self.window],
                *_COMMON_SUPPORTED,
                *_COMMON_WITHOUT_EFFECT,
                "eos_token_id",
                "pad_token_id",
                "layer_types",
                "quantization_config",
                "compression_config",
            )
        )


# Entries that transformers reads for every architecture, and of which only the default is
# implemented.
_COMMON_SUPPORTED: Mapping[str, Any] = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "transformers_weights": None,
}

# Generation options, which transformers drops from config.json.
_GENERATION_ENTRIES = (
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
)

# Entries that transformers reads for every architecture, and that do not change log-probs.
_COMMON_WITHOUT_EFFECT = (
    *_GENERATION_ENTRIES,
    "architectures",
    "model_type",
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "dtype",
    "torch_dtype",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "gradient_checkpointing",
    "chunk_size_feed_forward",
    "initializer_range",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "tie_last_hidden_states",
    "bos_token_id",
    "sep_token_id",
)

# Entries of every architecture with rotary embeddings.
_ROPE_ENTRIES = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")
# Entries of the sliding window, by `Architecture.window`.
_WINDOW_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "always": (),  # an entry of the shape
    "switched": ("use_sliding_window", "sliding_window"),
    "layered": ("use_sliding_window", "sliding_window", "max_window_layers"),
}

# Attributes of models with layer norms, and biases in all linear layers.
_BIASED = {"normalization": "layer", "gated": False, "linear_bias": True, "qkv_bias": True}
_SILU = {"hidden_act": "silu"}
# Entries of the load-balancing loss, which the trainer does not use.
_LOAD_BALANCING_LOSS = ("output_router_logits", "router_aux_loss_coef")


def _decoder(
    *,
    vocabulary: int,
    hidden: int = 4096,
    feed_forward: Entry,
    layers: int = 32,
    heads: int = 32,
    key_value_heads: Entry,
    head_dim: Entry,
    positions: int,
    epsilon: float = 1e-6,
) -> dict[str, Entry]:
    """Return the entries that the architectures like Llama have, with their defaults."""
    return {
        "num_layers": Entry("num_hidden_layers", layers),
        "hidden_size": Entry("hidden_size", hidden),
        "num_heads": Entry("num_attention_heads", heads),
        "num_kv_heads": key_value_heads,
        "head_dim": head_dim,
        "ffn_hidden_size": feed_forward,
        "vocab_size": Entry("vocab_size", vocabulary),
        "max_positions": Entry("max_position_embeddings", positions),
        "norm_epsilon": Entry("rms_norm_eps", epsilon),
        "tied_embeddings": Entry("tie_word_embeddings", False),
    }


def _key_value_heads(default: int | None) -> Entry:
    return Entry("num_key_value_heads", default, nullable=True)


_HEAD_DIM = Entry("head_dim", None, nullable=True)

_ARCHITECTURES = (
    Architecture(
        "Llama",
        "llama",
        "llama",
        _decoder(
            vocabulary=32000,
            feed_forward=Entry("intermediate_size", 11008),
            key_value_heads=_key_value_heads(None),
            head_dim=_HEAD_DIM,
            positions=2048,
        ),
        supported={"attention_bias": False, "mlp_bias": False, **_SILU},
        # The entry only splits matmuls, and transformers 5 no longer reads it.
        without_effect=("pretraining_tp",),
    ),
    Architecture(
        "Mistral",
        "mistral",
        "llama",
        {
            **_decoder(
                vocabulary=32000,
                feed_forward=Entry("intermediate_size", 14336),
                key_value_heads=Entry("num_key_value_heads", 8),
                head_dim=_HEAD_DIM,
                positions=131072,
            ),
            "sliding_window": Entry("sliding_window", 4096, nullable=True),
        },
        supported=_SILU,
        window="always",
    ),
    Architecture(
        "Qwen2",
        "qwen2",
        "llama",
        _decoder(
            vocabulary=151936,
            feed_forward=Entry("intermediate_size", 22016),
            key_value_heads=_key_value_heads(32),
            head_dim=_HEAD_DIM,
            positions=32768,
        ),
        {"qkv_bias": True},
        _SILU,
        eos_token_id=None,
        window="layered",
    ),
    Architecture(
        "Qwen3",
        "qwen3",
        "llama",
        _decoder(
            vocabulary=151936,
            feed_forward=Entry("intermediate_size", 22016),
            key_value_heads=_key_value_heads(32),
            head_dim=Entry("head_dim", 128),
            positions=32768,
        ),
        {"qk_norm": True},
        {"attention_bias": False, **_SILU},
        eos_token_id=None,
        window="layered",
    ),
    Architecture(
        "Mixtral",
        "mixtral",
        "mixtral",
        {
            **_decoder(
                vocabulary=32000,
                feed_forward=Entry("intermediate_size", 14336),
                key_value_heads=Entry("num_key_value_heads", 8),
                head_dim=_HEAD_DIM,
                positions=131072,
                epsilon=1e-5,
            ),
            "sliding_window": Entry("sliding_window", None, nullable=True),
            "num_experts": Entry("num_local_experts", 8),
            "experts_per_token": Entry("num_experts_per_tok", 2),
        },
        supported={"router_jitter_noise": 0.0, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        aliases={"num_experts": "num_local_experts"},
        window="always",
        rope_theta=1000000.0,
    ),
    Architecture(
        "Qwen3Moe",
        "qwen3_moe",
        "qwen3_moe",
        {
            **_decoder(
                vocabulary=151936,
                hidden=2048,
                feed_forward=Entry("moe_intermediate_size", 768),
                layers=24,
                key_value_heads=Entry("num_key_value_heads", 4),
                head_dim=_HEAD_DIM,
                positions=32768,
            ),
            "num_experts": Entry("num_experts", 128),
            "experts_per_token": Entry("num_experts_per_tok", 8),
            "normalize_expert_weights": Entry("norm_topk_prob", False),
        },
        {"qk_norm": True},
        {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], **_SILU},
        # intermediate_size is the size of dense layers, which the supported models do not have.
        without_effect=("intermediate_size", *_LOAD_BALANCING_LOSS),
        aliases={"num_local_experts": "num_experts"},
        eos_token_id=None,
        window="switched",
    ),
    Architecture(
        "GPTNeoX",
        "gpt_neox",
        "gpt_neox",
        {
            "num_layers": Entry("num_hidden_layers", 44),
            "hidden_size": Entry("hidden_size", 6144),
            "num_heads": Entry("num_attention_heads", 64),
            "ffn_hidden_size": Entry("intermediate_size", 24576),
            "vocab_size": Entry("vocab_size", 50432),
            "max_positions": Entry("max_position_embeddings", 2048),
            "norm_epsilon": Entry("layer_norm_eps", 1e-5),
            "activation": Entry("hidden_act", "gelu"),
            "tied_embeddings": Entry("tie_word_embeddings", False),
            "parallel_residual": Entry("use_parallel_residual", True),
        },
        _BIASED,
        {"attention_bias": True},
        # classifier_dropout belongs to token classification, not to sequence classification.
        without_effect=("classifier_dropout", "is_decoder"),
        dropouts=("attention_dropout", "hidden_dropout"),
        theta_key="rotary_emb_base",
        fraction_key="rotary_pct",
        rotary_fraction=0.25,
    ),
    Architecture(
        "GPT2",
        "gpt2",
        "gpt2",
        {
            "num_layers": Entry("n_layer", 12),
            "hidden_size": Entry("n_embd", 768),
            "num_heads": Entry("n_head", 12),
            "ffn_hidden_size": Entry("n_inner", None, nullable=True),
            "vocab_size": Entry("vocab_size", 50257),
            "max_positions": Entry("n_positions", 1024),
            "norm_epsilon": Entry("layer_norm_epsilon", 1e-5),
            "activation": Entry("activation_function", "gelu_new"),
            "tied_embeddings": Entry("tie_word_embeddings", True),
        },
        {**_BIASED, "position": "learned", "rope_theta": 0.0},
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        # The summary is part of a head that aligner does not support.
        without_effect=(
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        eos_token_id=50256,
        causal_suffix="LMHeadModel",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    **{architecture.causal_name: architecture for architecture in _ARCHITECTURES},
    **{architecture.scalar_name: architecture for architecture in _ARCHITECTURES},
}
"""Architectures by the class name in config.json, with a language model's head or a scalar head."""

# Activation of a `ModelShape`, by its name in config.json.
_ACTIVATIONS: Mapping[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# Entries of the RoPE scaling llama3, by the attribute of `RopeScaling`.
_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}

# Entries of each supported kind of RoPE scaling.
_ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": tuple(_SCALING.values()),
}

# Attributes of a shape that `read_described_config` requires.
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "ffn_hidden_size",
    "vocab_size",
    "num_experts",
)


def read_config(config: Any, origin: str) -> ModelShape:
    """Return the shape that a Hugging Face configuration describes, as transformers reads it.

    Missing entries have the defaults of the transformers class. Entries that contradict each
    other are refused, unless transformers and this function resolve them alike.

    Args:
        config: The content of config.json.
        origin: Path or key, which errors begin with.

    Raises:
        ConfigError: The content is not a configuration, its architecture or an entry is not
            supported, or a value has the wrong type.
    """
    architecture, entries = _check_entries(with_architecture(config), origin)
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
    if shape.num_experts and shape.experts_per_token > shape.num_experts:
        raise ConfigError(
            f"{origin}: {shape.experts_per_token} experts per token are more than the model's"
            f" {shape.num_experts} experts"
        )
    return shape


def with_architecture(config: Any) -> Any:
    """Return the content of config.json with the entry `architectures`.

    If config.json lacks the entry, it is the language model of `model_type`, which
    `AutoModelForCausalLM` would load.
    """
    if not isinstance(config, Mapping) or config.get("architectures"):
        return config
    names = [
        architecture.causal_name
        for architecture in _ARCHITECTURES
        if architecture.model_type == config.get("model_type")
    ]
    return {**config, "architectures": names} if names else config


def read_described_config(config: Any, origin: str) -> ModelShape:
    """Return the shape of a model that a configuration key describes and no file contains.

    The configuration must contain the sizes, because the defaults of a transformers class are the
    sizes of one particular model.

    Args:
        config: Entries of a config.json.
        origin: Configuration key, which errors begin with.

    Raises:
        ConfigError: A size is missing, or `read_config` raises the error.
    """
    architecture, entries = _check_entries(with_architecture(config), origin)
    sizes = [entry for name, entry in architecture.entries.items() if name in _SIZES]
    missing = [
        entry.key for entry in sizes if not entry.nullable and entries.get(entry.key) is None
    ]
    if missing:
        raise ConfigError(
            f"{origin}: required entries of config.json are missing: {', '.join(missing)}"
        )
    return read_config(config, origin)


def config_notes(config: Mapping[str, Any]) -> list[str]:
    """Return notes about a configuration that `read_config` accepts, one line each.

    There is at most one note about entries that transformers does not know, and one about dropout.
    """
    architecture = ARCHITECTURES[with_architecture(config)["architectures"][0]]
    unknown = [key for key in config if key not in architecture.known_entries]
    if architecture.is_rotary:
        key, rope = _rope_entry(config)
        scaling_entries = _ROPE_KINDS[_rope_kind(rope)]
        known = ("rope_theta", "rope_type", "type", "partial_rotary_factor", *scaling_entries)
        unknown += [f"{key}.{name}" for name in rope if name not in known]
    notes = []
    if unknown:
        notes.append(
            f"config.json: ignored entries that transformers' {architecture.name}Config does not"
            f" know: {', '.join(unknown)}"
        )
    dropouts = [f"{key}={config[key]}" for key in architecture.dropouts if config.get(key)]
    if dropouts:
        notes.append(f"config.json: models train without dropout; ignored: {', '.join(dropouts)}")
    return notes


def _check_entries(config: Any, origin: str) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture, and the entries without aliases.

    Raises:
        ConfigError: The content is not an object, or its architecture is not supported.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{origin}: config.json must be a JSON object, got {type(config).__name__}"
        )
    names = config.get("architectures") or ["<none>"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{origin}: architectures={names!r}: must be a list of names")
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        raise ConfigError(
            f"{origin}: architecture {names[0]} is not supported; supported:"
            f" {', '.join(ARCHITECTURES)}"
        )
    # transformers chooses the class by this entry, not by `architectures`.
    model_type = config.get("model_type", architecture.model_type)
    if model_type != architecture.model_type:
        raise ConfigError(
            f"{origin}: model_type={model_type!r} contradicts architectures={names!r}; set"
            f" model_type={architecture.model_type!r} or the architecture of that type"
        )
    return architecture, _without_aliases(architecture, config, origin)


def _without_aliases(
    architecture: Architecture, config: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    """Return the entries under the names of the architecture's table."""
    entries = dict(config)
    for alias, key in architecture.aliases.items():
        if alias not in entries:
            continue
        value = entries.pop(alias)
        if entries.setdefault(key, value) != value:
            raise ConfigError(
                f"{origin}: {alias}={value!r} contradicts {key}={entries[key]!r}; remove one of"
                " them"
            )
    return entries


def _read_shape(architecture: Architecture, config: Mapping[str, Any], origin: str) -> ModelShape:
    _refuse_quantization(config, origin)
    _refuse_unsupported(architecture, config, origin)

    table = architecture.entries
    values: dict[str, Any] = {
        attribute: _entry_value(entry, config, origin) for attribute, entry in table.items()
    }
    if "activation" in values:
        values["activation"] = _activation(
            values["activation"], f"{origin}: {table['activation'].key}"
        )
    hidden = values["hidden_size"]
    heads = values["num_heads"]
    # Null or missing entries have these defaults in the transformers classes.
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * hidden
    if not values.get("head_dim"):
        if hidden % heads:
            raise ConfigError(
                f"{origin}: the hidden size, {hidden}, must be a multiple of the number of"
                f" attention heads, {heads}"
            )
        values["head_dim"] = hidden // heads
    # Architectures without this entry ignore it in transformers; another value is an error here.
    head_dim = config.get("head_dim")
    if head_dim not in (None, values["head_dim"]):
        raise ConfigError(
            f"{origin}: head_dim={head_dim!r} is not supported; supported: the hidden size divided"
            f" by the number of attention heads, {values['head_dim']}"
        )

    _check_layer_types(architecture, config, values, origin)
    if architecture.is_rotary:
        values |= _read_rope(architecture, config, values, origin)
    return ModelShape(
        **values,
        **architecture.implied,
        family=architecture.family,
        eos_token_ids=_eos_token_ids(architecture, config, values["vocab_size"], origin),
        pad_token_id=_pad_token_id(config, values["vocab_size"], origin),
    )


def _refuse_quantization(config: Mapping[str, Any], origin: str) -> None:
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if value is None:
            continue
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        raise ConfigError(
            f"{origin}: {key} with quant_method={method!r}: quantized weights are not supported;"
            " set a directory with weights in float32, bfloat16 or float16"
        )


def _refuse_unsupported(architecture: Architecture, config: Mapping[str, Any], origin: str) -> None:
    for key, supported in {**_COMMON_SUPPORTED, **architecture.supported}.items():
        value = config.get(key, supported)
        if key == "mlp_only_layers" and value is None:
            continue
        if value != supported:
            raise ConfigError(
                f"{origin}: {key}={value!r} is not supported; supported: {supported!r}"
            )
    for key in architecture.dropouts:
        probability = config.get(key, 0.0)
        if probability is not None and not _is_number(probability):
            raise ConfigError(f"{origin}: {key}={probability!r}: must be a number")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _entry_value(entry: Entry, config: Mapping[str, Any], origin: str) -> Any:
    """Return the entry's value or default; None only if the entry may be null."""
    value = config.get(entry.key, entry.default)
    if value is None and entry.nullable:
        return None
    if value is None:
        raise ConfigError(
            f"{origin}: required entries of config.json are missing: {entry.key} (null)"
        )
    if isinstance(entry.default, bool):
        is_valid, allowed = isinstance(value, bool), "true or false"
    elif isinstance(entry.default, float):
        is_valid, allowed = _is_number(value) and value >= 0, "a number >= 0"
    elif isinstance(entry.default, str):
        is_valid, allowed = isinstance(value, str), "a name"
    else:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        is_valid, allowed = is_whole and value > 0, "an integer > 0"
    if not is_valid:
        raise ConfigError(f"{origin}: {entry.key}={value!r}: must be {allowed}")
    return value


def _activation(name: Any, entry: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{entry}={name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _check_layer_types(
    architecture: Architecture, config: Mapping[str, Any], values: Mapping[str, Any], origin: str
) -> None:
    """Refuse windows of single layers: every layer of a `ModelShape` has the same attention."""
    layers = values["num_layers"]
    window = values.get("sliding_window")
    types = config.get("layer_types")
    if types is not None:
        kind = "full_attention" if window is None else "sliding_attention"
        if types != [kind] * layers:
            raise ConfigError(
                f"{origin}: layer_types={types!r} with sliding_window={window!r} is not supported;"
                f" supported: {layers} times {kind!r}, or no layer_types"
            )
    is_switched = architecture.window in ("switched", "layered")
    if not is_switched or config.get("use_sliding_window", False) is False:
        return
    # In transformers, layers from max_window_layers on use sliding-window attention, unless
    # layer_types is set.
    first = config.get("max_window_layers", 28) if architecture.window == "layered" else 0
    if config.get("sliding_window", 4096) is None or types is not None or first >= layers:
        return
    raise ConfigError(
        f"{origin}: use_sliding_window={config['use_sliding_window']!r} is not supported;"
        " supported: False"
        + (f", or max_window_layers >= {layers}" if architecture.window == "layered" else "")
    )


def _eos_token_ids(
    architecture: Architecture, config: Mapping[str, Any], vocabulary: int, origin: str
) -> tuple[int, ...]:
    default = architecture.eos_token_id
    # The default of the class belongs to a larger vocabulary.
    if default is not None and default >= vocabulary:
        default = None
    value = config.get("eos_token_id", default)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for token in ids:
        _check_token(token, "eos_token_id", value, vocabulary, origin)
    return ids


def _pad_token_id(config: Mapping[str, Any], vocabulary: int, origin: str) -> int:
    """Return the padding token, which no computation reads; 0 if the model has none.

    Conversions of the first Llama models have the id -1, which also means no padding token.
    """
    value = config.get("pad_token_id")
    if value is None or (value == -1 and isinstance(value, int)):
        return 0
    _check_token(value, "pad_token_id", value, vocabulary, origin)
    return int(value)


def _check_token(token: Any, key: str, value: Any, vocabulary: int, origin: str) -> None:
    is_whole = isinstance(token, int) and not isinstance(token, bool)
    if not is_whole or not 0 <= token < vocabulary:
        raise ConfigError(
            f"{origin}: {key}={value!r}: must be at least 0 and less than vocab_size={vocabulary}"
        )


def _rope_entry(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and content of the rotary entry that transformers reads.

    If config.json has neither entry, return the newer name and an empty object.
    """
    if config.get("rope_scaling"):
        return "rope_scaling", config["rope_scaling"]
    return "rope_parameters", config.get("rope_parameters") or {}


def _rope_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _read_rope(
    architecture: Architecture, config: Mapping[str, Any], values: Mapping[str, Any], origin: str
) -> dict[str, Any]:
    """Return the rotary attributes of a shape: theta, rotated fraction and scaling.

    transformers 5 moved these entries into `rope_parameters`; both forms are read. transformers
    lets `rope_scaling` replace all of `rope_parameters`, which other programs do not do. If the
    two differ, they are refused.
    """
    newer = config.get("rope_parameters")
    older = config.get("rope_scaling")
    for key, value in (("rope_parameters", newer), ("rope_scaling", older)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{origin}: {key}={value!r}: must be an object or null")
    key, rope = _rope_entry(config)
    result = _rope_attributes(architecture, config, key, rope, values, origin)
    if newer and older:
        other = _rope_attributes(architecture, config, "rope_parameters", newer, values, origin)
        if other != result:
            raise ConfigError(
                f"{origin}: rope_scaling={dict(older)!r} contradicts"
                f" rope_parameters={dict(newer)!r}; remove one of them"
            )
    return result


def _rope_attributes(
    architecture: Architecture,
    config: Mapping[str, Any],
    key: str,
    rope: Mapping[str, Any],
    values: Mapping[str, Any],
    origin: str,
) -> dict[str, Any]:
    """Return the rotary attributes that an entry describes; `key` is the entry's name."""
    kind = _rope_kind(rope)
    nested = [name for name, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(
            f"{origin}: {key} of single kinds of layers is not supported: {', '.join(nested)}"
        )
    required = _ROPE_KINDS.get(kind) if isinstance(kind, str) else None
    if required is None:
        raise ConfigError(
            f"{origin}: rope scaling {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}"
        )

    # original_max_position_embeddings: an entry outside of rope_parameters takes precedence. If
    # there is neither, the model's context was not extended.
    positions_key = _SCALING["original_positions"]
    scaling_values = {positions_key: values["max_positions"], **rope}
    if positions_key in config:
        scaling_values[positions_key] = config[positions_key]
    if missing := [name for name in required if name not in scaling_values]:
        raise ConfigError(
            f"{origin}: rope scaling {kind}: required entries are missing: {', '.join(missing)}"
        )
    for name in required:
        if not _is_number(scaling_values[name]) or scaling_values[name] <= 0:
            raise ConfigError(
                f"{origin}: {key}: {name}={scaling_values[name]!r}: must be a number > 0"
            )

    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", float(scaling_values["factor"]))
    elif kind == "llama3":
        factor, low, high, positions = (scaling_values[name] for name in _SCALING.values())
        if high <= low:
            raise ConfigError(
                f"{origin}: {key}: high_freq_factor={high!r}: must be above low_freq_factor={low!r}"
            )
        scaling = RopeScaling("llama3", float(factor), float(low), float(high), int(positions))
    return {
        "rope_theta": _rope_number(
            rope, "rope_theta", config, architecture.theta_key, architecture.rope_theta, origin
        ),
        "rotary_fraction": _rotary_fraction(architecture, rope, config, values, origin),
        "rope_scaling": scaling,
    }


def _rope_number(
    rope: Mapping[str, Any],
    name: str,
    config: Mapping[str, Any],
    key: str,
    default: float,
    origin: str,
) -> float:
    """Return a number above 0 of the rotary entries.

    Args:
        rope: Content of `rope_parameters` or `rope_scaling`.
        name: Name of the number in `rope`.
        config: Content of config.json. If it contains the number too, both must be equal.
        key: Other name of the number in `config`.
        default: Value if neither contains the number.
        origin: Path or key, which errors begin with.
    """
    value = rope.get(name, config.get(key, default))
    if not _is_number(value) or value <= 0:
        raise ConfigError(f"{origin}: {name}={value!r}: must be a number > 0")
    for other in dict.fromkeys((key, name)):
        if config.get(other) not in (None, value):
            raise ConfigError(
                f"{origin}: {other}={config[other]!r} contradicts {name}={value!r}, which"
                " transformers reads; remove the former"
            )
    return float(value)


def _rotary_fraction(
    architecture: Architecture,
    rope: Mapping[str, Any],
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    origin: str,
) -> float:
    """Return the fraction of a head's dimensions that is rotated."""
    name = "partial_rotary_factor"
    key = architecture.fraction_key
    if architecture.rotary_fraction is None:
        for value in (rope.get(name), config.get(key)):
            if value not in (None, 1.0):
                raise ConfigError(f"{origin}: {name}={value!r} is not supported; supported: 1.0")
        fraction = 1.0
    else:
        fraction = _rope_number(rope, name, config, key, architecture.rotary_fraction, origin)
    if fraction > 1 or int(values["head_dim"] * fraction) < 1:
        raise ConfigError(
            f"{origin}: {name}={fraction:g} with head_dim={values['head_dim']}: must rotate at"
            f" least 1 and at most {values['head_dim']} dimensions"
        )
    # Dimensions are rotated in pairs. An odd number is rounded up, which exceeds an odd head size.
    if values["head_dim"] % 2 and int(values["head_dim"] * fraction) == values["head_dim"]:
        raise ConfigError(
            f"{origin}: head_dim={values['head_dim']}: must be even, because all dimensions are"
            " rotated in pairs"
        )
    return fraction


def hugging_face_config(shape: ModelShape, head: Head = "vocabulary") -> dict[str, Any]:
    """Return the content of a config.json from which `read_config` reads the given shape.

    Args:
        shape: The model's shape.
        head: Head of the model.
    """
    for architecture in _ARCHITECTURES:
        if architecture.family == shape.family:
            config = _to_config(architecture, shape, head)
            if read_config(config, "shape") == shape:
                return config
    raise AssertionError(f"no architecture of the {shape.family} family has this shape: {shape}")


def _to_config(architecture: Architecture, shape: ModelShape, head: Head) -> dict[str, Any]:
    """Return the config.json of an architecture with a shape's values.

    The shape may have attributes that the architecture cannot represent.
    """
    config = {
        entry.key: getattr(shape, attribute) for attribute, entry in architecture.entries.items()
    }
    if "activation" in architecture.entries:
        names = [
            name for name, activation in _ACTIVATIONS.items() if activation == shape.activation
        ]
        config[architecture.entries["activation"].key] = names[0]
    if architecture.is_rotary:
        scaling = {} if shape.rope_scaling is None else dataclasses.asdict(shape.rope_scaling)
        fraction = (
            {}
            if architecture.rotary_fraction is None
            else {"partial_rotary_factor": shape.rotary_fraction}
        )
        config["rope_parameters"] = {
            "rope_type": scaling.get("kind", "default"),
            "rope_theta": shape.rope_theta,
            **fraction,
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
