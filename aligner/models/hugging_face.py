"""Conversion between Hugging Face's config.json and a `ModelShape`, as transformers reads it.

Each supported architecture has a table of the entries that its transformers 5 configuration class
knows, with the class's defaults. `tests/models/test_config_defaults.py` compares the tables with
the installed classes. Entries are read in one of these ways:

- entries of the shape, and the rotary entries, are read;
- entries that change the forward pass and are not implemented must have the class's default;
- entries without an effect on log-probs are accepted;
- entries that transformers does not know are ignored; `config_notes` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aligner.errors import ConfigError
from aligner.models.rope_entries import (
    FULL,
    SLIDING,
    RopeFormat,
    find_unknown_entries,
    is_number,
    read_ropes,
    write_ropes,
)
from aligner.models.shape import LayerShape, ModelShape
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
    is_positive: bool = False
    """Whether a number must not be 0."""
    to_shape: Callable[[Any], Any] = lambda value: value
    """Function from the entry's value to the attribute of the shape."""
    to_config: Callable[[Any], Any] = lambda value: value
    """Function from the attribute of the shape to the entry's value."""


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
    eos_token_id: int | tuple[int, ...] | None = 2
    """Default EOS ids of the transformers class; None if it has none."""
    pad_token_id: int | None = None
    """Default padding token of the transformers class; None if it has none."""
    window: Literal["none", "always", "switched", "layered", "typed", "without_rope"] = "none"
    """Layers with a sliding window. "none": no layer; "always": all layers if the window is not
    null; "switched": all layers if `use_sliding_window` is true; "layered": the layers that
    `layer_types` names, else those from `max_window_layers` on, if `use_sliding_window` is true;
    "typed": the layers that `layer_types` names, else all layers except each
    `full_attention_interval`th one; "without_rope": the layers that `layer_types` names, else those
    without rotary positions, if `use_sliding_window` is true."""
    full_attention_interval: int = 0
    """Default interval of the layers without a window, with window="typed"."""
    interval_key: str | None = None
    """Entry of this interval; None if there is none."""
    window_size: int | None = 4096
    """Default of the entry `sliding_window`."""
    rope: RopeFormat | None = field(default_factory=RopeFormat)
    """Rotary entries; None for learned positions."""
    scalar_prefix: str | None = None
    """Prefix of the name of the class with a scalar head, if it is not `name`."""
    causal_suffix: str = "ForCausalLM"
    """Suffix of the name of the class with a language model's head."""

    @property
    def causal_name(self) -> str:
        """Name of the class with a language model's head."""
        return self.name + self.causal_suffix

    @property
    def scalar_name(self) -> str:
        """Name of the class with a head of one number per token."""
        return f"{self.scalar_prefix or self.name}ForSequenceClassification"

    @property
    def known_entries(self) -> frozenset[str]:
        """All entries that transformers knows for this architecture."""
        rotary = () if self.rope is None else self.rope.entries
        return frozenset(
            (
                *(entry.key for entry in self.entries.values()),
                *self.supported,
                *self.without_effect,
                *self.dropouts,
                *self.aliases,
                *rotary,
                *_WINDOW_ENTRIES[self.window],
                *(() if self.interval_key is None else (self.interval_key,)),
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

# Entries of the sliding window, by `Architecture.window`.
_WINDOW_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "always": ("sliding_window",),
    "switched": ("use_sliding_window", "sliding_window"),
    "layered": ("use_sliding_window", "sliding_window", "max_window_layers"),
    "typed": ("sliding_window",),
    "without_rope": (
        "use_sliding_window",
        "sliding_window",
        "no_rope_layers",
        "no_rope_layer_interval",
    ),
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
    is_tied: bool = False,
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
        "tied_embeddings": Entry("tie_word_embeddings", is_tied),
    }


def _invert(value: float) -> float:
    return 1.0 / value


def _key_value_heads(default: int | None) -> Entry:
    return Entry("num_key_value_heads", default, nullable=True)


_HEAD_DIM = Entry("head_dim", None, nullable=True)
# OLMo 3 has the same entries.
_OLMO2 = _decoder(
    vocabulary=50304,
    feed_forward=Entry("intermediate_size", 11008),
    key_value_heads=_key_value_heads(None),
    head_dim=_HEAD_DIM,
    positions=2048,
    epsilon=1e-5,
)

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
        _decoder(
            vocabulary=32000,
            feed_forward=Entry("intermediate_size", 14336),
            key_value_heads=Entry("num_key_value_heads", 8),
            head_dim=_HEAD_DIM,
            positions=131072,
        ),
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
        {"qk_norm": "head"},
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
            "num_experts": Entry("num_local_experts", 8),
            "experts_per_token": Entry("num_experts_per_tok", 2),
        },
        supported={"router_jitter_noise": 0.0, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        aliases={"num_experts": "num_local_experts"},
        window="always",
        window_size=None,
        rope=RopeFormat(theta=1000000.0),
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
        {"qk_norm": "head"},
        {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], **_SILU},
        # intermediate_size is the size of dense layers, which the supported models do not have.
        without_effect=("intermediate_size", *_LOAD_BALANCING_LOSS),
        aliases={"num_local_experts": "num_experts"},
        eos_token_id=None,
        window="switched",
    ),
    Architecture(
        "SmolLM3",
        "smollm3",
        "smollm3",
        _decoder(
            vocabulary=128256,
            hidden=2048,
            feed_forward=Entry("intermediate_size", 11008),
            layers=36,
            heads=16,
            key_value_heads=_key_value_heads(4),
            head_dim=_HEAD_DIM,
            positions=32768,
            is_tied=True,
        ),
        supported={"attention_bias": False, "mlp_bias": False, **_SILU},
        eos_token_id=128001,
        pad_token_id=128004,
        window="without_rope",
        window_size=None,
        rope=RopeFormat(theta=2000000.0),
    ),
    Architecture(
        "Granite",
        "granite",
        "granite",
        {
            **_decoder(
                vocabulary=32000,
                feed_forward=Entry("intermediate_size", 11008),
                key_value_heads=_key_value_heads(None),
                head_dim=_HEAD_DIM,
                positions=2048,
            ),
            "embedding_scale": Entry("embedding_multiplier", 1.0),
            "attention_scale": Entry("attention_multiplier", 1.0),
            "residual_scale": Entry("residual_multiplier", 1.0),
            "logit_scale": Entry(
                "logits_scaling", 1.0, is_positive=True, to_shape=_invert, to_config=_invert
            ),
        },
        supported={"attention_bias": False, "mlp_bias": False, **_SILU},
    ),
    Architecture(
        "Phi3",
        "phi3",
        "phi3",
        _decoder(
            vocabulary=32064,
            hidden=3072,
            feed_forward=Entry("intermediate_size", 8192),
            key_value_heads=_key_value_heads(None),
            head_dim=_HEAD_DIM,
            positions=4096,
            epsilon=1e-5,
        ),
        supported=_SILU,
        dropouts=("resid_pdrop", "embd_pdrop", "attention_dropout"),
        eos_token_id=32000,
        pad_token_id=32000,
        window="always",
        window_size=None,
        rope=RopeFormat(
            fraction=1.0,
            kinds=("default", "longrope"),
            aliases={"su": "longrope", "yarn": "longrope"},
            original_positions=4096,
        ),
    ),
    Architecture(
        "Olmo2",
        "olmo2",
        "olmo2",
        _OLMO2,
        {"qk_norm": "projection", "norm_placement": "after"},
        {"attention_bias": False, **_SILU},
        eos_token_id=50279,
        pad_token_id=1,
    ),
    Architecture(
        "Olmo3",
        "olmo3",
        "olmo2",
        _OLMO2,
        {"qk_norm": "projection", "norm_placement": "after"},
        {"attention_bias": False, **_SILU},
        eos_token_id=50279,
        pad_token_id=1,
        window="typed",
        full_attention_interval=4,
        rope=RopeFormat(theta=500000.0, local_theta=500000.0),
    ),
    Architecture(
        "Gemma3",
        "gemma3_text",
        "gemma3",
        {
            **_decoder(
                vocabulary=262208,
                hidden=2304,
                feed_forward=Entry("intermediate_size", 9216),
                layers=26,
                heads=8,
                key_value_heads=Entry("num_key_value_heads", 4),
                head_dim=Entry("head_dim", 256),
                positions=131072,
                is_tied=True,
            ),
            "activation": Entry("hidden_activation", "gelu_pytorch_tanh"),
            "attention_scale": Entry(
                "query_pre_attn_scalar",
                256,
                to_shape=lambda scalar: scalar**-0.5,
                to_config=lambda scale: round(scale**-2),
            ),
        },
        {
            "qk_norm": "head",
            "norm_placement": "both",
            "zero_centered_norms": True,
            "embedding_scale": None,
        },
        {
            "attention_bias": False,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        eos_token_id=1,
        window="typed",
        full_attention_interval=6,
        interval_key="sliding_window_pattern",
        rope=RopeFormat(
            theta=1000000.0, local_theta=10000.0, local_theta_key="rope_local_base_freq"
        ),
        scalar_prefix="Gemma3Text",
    ),
    Architecture(
        "Glm4",
        "glm4",
        "glm4",
        {
            **_decoder(
                vocabulary=151552,
                feed_forward=Entry("intermediate_size", 13696),
                layers=40,
                key_value_heads=Entry("num_key_value_heads", 2),
                head_dim=Entry("head_dim", 128),
                positions=131072,
                epsilon=1.5625e-7,
            ),
            "qkv_bias": Entry("attention_bias", True),
        },
        {"norm_placement": "both"},
        _SILU,
        eos_token_id=(151329, 151336, 151338),
        pad_token_id=151329,
        rope=RopeFormat(fraction=0.5, is_interleaved=True),
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
        rope=RopeFormat(theta_key="rotary_emb_base", fraction=0.25, fraction_key="rotary_pct"),
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
        {**_BIASED, "learned_positions": True},
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
        rope=None,
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
    if architecture.rope is not None:
        unknown += find_unknown_entries(architecture.rope, config)
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
        attribute: entry.to_shape(_entry_value(entry, config, origin))
        for attribute, entry in table.items()
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

    layers = _read_layers(architecture, config, values, origin)
    del values["num_layers"]
    for layer in layers:
        scaling = None if layer.rope is None else layer.rope.scaling
        if scaling is not None and scaling.kind == "longrope":
            # longer contexts have other frequencies, which depend on the length of the sequence
            values["max_positions"] = min(values["max_positions"], scaling.original_positions)
    return ModelShape(
        layers,
        **values,
        **architecture.implied,
        family=architecture.family,
        eos_token_ids=_eos_token_ids(architecture, config, values["vocab_size"], origin),
        pad_token_id=_pad_token_id(architecture, config, values["vocab_size"], origin),
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
        if probability is not None and not is_number(probability):
            raise ConfigError(f"{origin}: {key}={probability!r}: must be a number")


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
        is_valid, allowed = is_number(value) and value >= 0, "a number >= 0"
        if entry.is_positive:
            is_valid, allowed = is_valid and value > 0, "a number > 0"
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


def _read_layers(
    architecture: Architecture, config: Mapping[str, Any], values: Mapping[str, Any], origin: str
) -> tuple[LayerShape, ...]:
    """Return the parts in which layers differ: their rotary positions and windows."""
    count = values["num_layers"]
    if architecture.rope is None:
        return (LayerShape(),) * count
    has_rope = [True] * count
    if architecture.window == "without_rope":
        has_rope = _read_rope_layers(config, count, origin)
    windows = _read_windows(architecture, config, has_rope, origin)
    full, sliding = read_ropes(
        architecture.rope, config, values["head_dim"], values["max_positions"], origin
    )
    return tuple(
        LayerShape((full if window is None else sliding) if rotates else None, window)
        for rotates, window in zip(has_rope, windows, strict=True)
    )


def _read_rope_layers(config: Mapping[str, Any], count: int, origin: str) -> list[bool]:
    """Return whether each layer has rotary positions, from the entries of SmolLM3."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.get("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise ConfigError(
                f"{origin}: no_rope_layer_interval={interval!r}: must be an integer > 0"
            )
        return [(layer + 1) % interval != 0 for layer in range(count)]
    # despite the name of the entry, 1 means a layer with rotary positions
    if not isinstance(flags, list) or len(flags) < count or not all(f in (0, 1) for f in flags):
        raise ConfigError(
            f"{origin}: no_rope_layers={flags!r}: must be a list of 0 and 1 for {count} layers"
        )
    return [bool(flag) for flag in flags[:count]]


def _read_windows(
    architecture: Architecture, config: Mapping[str, Any], has_rope: Sequence[bool], origin: str
) -> list[int | None]:
    """Return the sliding window of each layer, None for a layer without one.

    `has_rope` tells which layers have rotary positions.
    """
    kind = architecture.window
    layers = len(has_rope)
    size = config.get("sliding_window", architecture.window_size)
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    may_be_null = kind != "typed"
    if kind != "none" and not is_size and (size is not None or not may_be_null):
        allowed = "an integer > 0" + " or null" * may_be_null
        raise ConfigError(f"{origin}: sliding_window={size!r}: must be {allowed}")
    is_used = kind in ("always", "typed")
    if kind in ("switched", "layered", "without_rope"):
        is_used = config.get("use_sliding_window", False)
        if not isinstance(is_used, bool):
            raise ConfigError(f"{origin}: use_sliding_window={is_used!r}: must be true or false")
    if not is_used:
        size = None

    # In transformers, these layers have a window unless layer_types is set.
    first = config.get("max_window_layers", 28) if kind == "layered" else 0
    has_window = [layer >= first for layer in range(layers)]
    if kind == "typed":
        interval = architecture.full_attention_interval
        if architecture.interval_key is not None:
            interval = config.get(architecture.interval_key, interval)
            if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
                raise ConfigError(
                    f"{origin}: {architecture.interval_key}={interval!r}: must be an integer > 0"
                )
        has_window = [(layer + 1) % interval != 0 for layer in range(layers)]
    elif kind == "without_rope":
        has_window = [not rotates for rotates in has_rope]
    default = [FULL if size is None or not each else SLIDING for each in has_window]
    types = config.get("layer_types")
    # Other architectures ignore layer_types in transformers; a contradiction is an error here.
    is_read = kind in ("layered", "typed", "without_rope") and size is not None
    read_types = [FULL, SLIDING] if is_read else []
    if types is None or types == default:
        types = default
    elif not (
        isinstance(types, list)
        and len(types) == layers
        and all(each in read_types for each in types)
    ):
        raise ConfigError(
            f"{origin}: layer_types={types!r} with sliding_window={size!r} is not supported;"
            f" supported: {layers} times {default[-1]!r}, or no layer_types"
        )
    return [size if each == SLIDING else None for each in types]


def _eos_token_ids(
    architecture: Architecture, config: Mapping[str, Any], vocabulary: int, origin: str
) -> tuple[int, ...]:
    default = architecture.eos_token_id
    # The default of the class belongs to a larger vocabulary.
    if default is not None and max(default if isinstance(default, tuple) else (default,)) >= (
        vocabulary
    ):
        default = None
    value = config.get("eos_token_id", default)
    # a class with several ids replaces null by them
    if value is None and isinstance(default, tuple):
        value = default
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for token in ids:
        _check_token(token, "eos_token_id", value, vocabulary, origin)
    return ids


def _pad_token_id(
    architecture: Architecture, config: Mapping[str, Any], vocabulary: int, origin: str
) -> int:
    """Return the padding token, which no computation reads; 0 if the model has none.

    Conversions of the first Llama models have the id -1, which also means no padding token.
    """
    default = architecture.pad_token_id
    # The default of the class belongs to a larger vocabulary.
    if default is not None and default >= vocabulary:
        default = None
    value = config.get("pad_token_id", default)
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
        entry.key: entry.to_config(getattr(shape, attribute))
        for attribute, entry in architecture.entries.items()
    }
    if "activation" in architecture.entries:
        names = [
            name for name, activation in _ACTIVATIONS.items() if activation == shape.activation
        ]
        config[architecture.entries["activation"].key] = names[0]
    if architecture.rope is not None:
        config |= _write_layers(architecture, architecture.rope, shape)
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


def _write_layers(
    architecture: Architecture, rope: RopeFormat, shape: ModelShape
) -> dict[str, Any]:
    """Return the entries from which `_read_layers` reads the layers of a shape."""
    rotary = [(layer.rope, layer.sliding_window) for layer in shape.layers if layer.rope]
    full = [rope for rope, window in rotary if window is None]
    sliding = [rope for rope, window in rotary if window is not None]
    entries: dict[str, Any] = {}
    if rotary:
        # without a layer of a type, its positions have no effect
        entries["rope_parameters"] = write_ropes(rope, (full or sliding)[0], (sliding or full)[0])
    kind = architecture.window
    if kind == "none":
        return entries
    windows = [layer.sliding_window for layer in shape.layers]
    size = next((window for window in windows if window is not None), None)
    if kind == "without_rope":
        entries["no_rope_layers"] = [int(layer.rope is not None) for layer in shape.layers]
    if kind in ("layered", "typed", "without_rope"):
        entries["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if kind in ("always", "typed"):
        return {**entries, "sliding_window": size}
    if size is None:
        return {**entries, "use_sliding_window": False}
    return {**entries, "use_sliding_window": True, "sliding_window": size}
