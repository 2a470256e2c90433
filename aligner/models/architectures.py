"""The supported architectures: the entries of config.json that their transformers classes read.

Each architecture has a table of the entries that its transformers 5 configuration class knows, with
the class's defaults. `tests/models/test_config_defaults.py` compares the tables with the installed
classes. `hugging_face.py` reads an entry in one of these ways:

- entries of the shape, and the rotary entries, are read;
- entries that change the forward pass and are not implemented must have the class's default;
- entries without an effect on log-probs are accepted;
- entries that transformers does not know are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aligner.models.rope_entries import RopeFormat


@dataclass(frozen=True)
class Entry:
    """An entry of config.json that a `ModelShape` is read from.

    The default's type is the entry's type; an entry whose default is None is a number.
    """

    key: str
    default: bool | int | float | str | None
    """Value of the transformers class if config.json lacks the entry."""
    nullable: bool = False
    """Whether the entry may be null. Then it has another meaning than a missing entry."""
    is_positive: bool = False
    """Whether a number must not be 0."""
    is_fractional: bool = False
    """Whether a number with the default None may be a fraction."""
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
    other_model_types: tuple[str, ...] = field(default=(), kw_only=True)
    """Values of `model_type` in published files whose code is that of the class."""
    family: str
    """Model family, a key of `families.WEIGHTS`."""
    entries: Mapping[str, Entry]
    """Entries of the shape, by the shape's attribute."""
    expert_entries: Mapping[str, Entry] = field(default_factory=dict)
    """Entries of a mixture of experts, by the attribute of `Experts`; empty without experts."""
    latent_entries: Mapping[str, Entry] = field(default_factory=dict)
    """Entries of latent attention, by the attribute of `LatentAttention`; empty without it."""
    delta_net_entries: Mapping[str, Entry] = field(default_factory=dict)
    """Entries of gated delta nets, by the attribute of `DeltaNet`; empty without delta nets. The
    layers with a delta net are those that `layer_types` names, else all layers except each
    `full_attention_interval`th one."""
    ignored_tensors: str | None = None
    """Prefix of the names of tensors that the transformers class ignores in files: those of
    multi-token prediction, which no entry of config.json counts. None if there are none."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that all models of the architecture have."""
    implied_experts: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of `Experts` that all models of the architecture have."""
    expert_layers: Literal["all", "listed", "last"] = "all"
    """Layers with experts, in an architecture with experts. "listed": the layers whose number is a
    multiple of `decoder_sparse_step`, except for those in `mlp_only_layers`; "last": the layers
    after the first `first_k_dense_replace` ones."""
    dense_count: int = 0
    """Default of the entry `first_k_dense_replace`."""
    group_key: str | None = None
    """Entry that says whether the router chooses groups of experts first: "greedy", its default, or
    "group_limited_greedy". None if the router always does so."""
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
    """Default interval of the layers without a window, with window="typed", or of the layers
    without a delta net."""
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
    def shape_entries(self) -> tuple[Entry, ...]:
        """All entries of the shape, including those of experts, latent attention and delta nets."""
        tables = (
            self.entries,
            self.expert_entries,
            self.latent_entries,
            self.delta_net_entries,
        )
        return tuple(entry for table in tables for entry in table.values())

    @property
    def known_entries(self) -> frozenset[str]:
        """All entries that transformers knows for this architecture."""
        rotary = () if self.rope is None else self.rope.entries
        return frozenset(
            (
                *(entry.key for entry in self.shape_entries),
                *self.supported,
                *self.without_effect,
                *self.dropouts,
                *self.aliases,
                *rotary,
                *_WINDOW_ENTRIES[self.window],
                *_EXPERT_LAYER_ENTRIES[self.expert_layers],
                *(() if self.interval_key is None else (self.interval_key,)),
                *(() if self.group_key is None else (self.group_key,)),
                *COMMON_SUPPORTED,
                *COMMON_WITHOUT_EFFECT,
                "eos_token_id",
                "pad_token_id",
                "layer_types",
                "quantization_config",
                "compression_config",
            )
        )


# Entries that transformers reads for every architecture, and of which only the default is
# implemented.
COMMON_SUPPORTED: Mapping[str, Any] = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "transformers_weights": None,
}

# Generation options, which transformers drops from config.json.
GENERATION_ENTRIES = (
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
COMMON_WITHOUT_EFFECT = (
    *GENERATION_ENTRIES,
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

# Entries of the layers with experts, by `Architecture.expert_layers`.
_EXPERT_LAYER_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "all": (),
    "listed": ("mlp_only_layers", "decoder_sparse_step"),
    "last": ("first_k_dense_replace",),
}

# Attributes of models with layer norms, and biases in the feed-forward network.
_BIASED = {"normalization": "layer", "gated": False, "ffn_bias": True}
_SILU = {"hidden_act": "silu"}
# Entries of the load-balancing loss, which the trainer does not use.
_LOAD_BALANCING_LOSS = ("output_router_logits", "router_aux_loss_coef")
# Entries that transformers computes from those of latent attention.
_COMPUTED_HEAD_DIMS = ("head_dim", "qk_head_dim")


def _attention_biases(default: bool) -> dict[str, Entry]:
    """Return the entry `attention_bias`, for classes in which it adds all biases of attention."""
    entry = Entry("attention_bias", default)
    return {"qkv_bias": entry, "attention_output_bias": entry}


def _decoder(
    *,
    vocabulary: int,
    hidden: int = 4096,
    feed_forward: Entry,
    layers: int = 32,
    heads: int = 32,
    key_value_heads: Entry,
    head_dim: Entry | None = None,
    positions: int,
    epsilon: float = 1e-6,
    is_tied: bool = False,
    has_attention_bias: bool = False,
    has_mlp_bias: bool = False,
) -> dict[str, Entry]:
    """Return the entries that the architectures like Llama have, with their defaults.

    `has_attention_bias` and `has_mlp_bias` say whether the class has the entries `attention_bias`,
    for all biases of attention, and `mlp_bias`.
    """
    return {
        "num_layers": Entry("num_hidden_layers", layers),
        "hidden_size": Entry("hidden_size", hidden),
        "num_heads": Entry("num_attention_heads", heads),
        "num_kv_heads": key_value_heads,
        **({} if head_dim is None else {"head_dim": head_dim}),
        "ffn_hidden_size": feed_forward,
        "vocab_size": Entry("vocab_size", vocabulary),
        "max_positions": Entry("max_position_embeddings", positions),
        "norm_epsilon": Entry("rms_norm_eps", epsilon),
        "tied_embeddings": Entry("tie_word_embeddings", is_tied),
        **(_attention_biases(False) if has_attention_bias else {}),
        **({"ffn_bias": Entry("mlp_bias", False)} if has_mlp_bias else {}),
    }


# Latent attention, in DeepSeek-V2 and V3.
_LATENT_ATTENTION = {
    "q_lora_rank": Entry("q_lora_rank", 1536, nullable=True),
    "kv_lora_rank": Entry("kv_lora_rank", 512),
    "qk_nope_head_dim": Entry("qk_nope_head_dim", 128),
    "qk_rope_head_dim": Entry("qk_rope_head_dim", 64),
    "v_head_dim": Entry("v_head_dim", 128),
}


def _invert(value: float) -> float:
    return 1.0 / value


def _one_if_null(value: int | None) -> int:
    return 1 if value is None else value


def _key_value_heads(default: int | None) -> Entry:
    return Entry("num_key_value_heads", default, nullable=True)


_HEAD_DIM = Entry("head_dim", None, nullable=True)
_GEMMA_SCORES = {
    "activation": Entry("hidden_activation", "gelu_pytorch_tanh"),
    "attention_scale": Entry(
        "query_pre_attn_scalar",
        256,
        to_shape=lambda scalar: scalar**-0.5,
        to_config=lambda scale: round(scale**-2),
    ),
}


def _softcap(key: str, default: float | None) -> Entry:
    return Entry(key, default, nullable=True, is_positive=True, is_fractional=True)


# OLMo 3 has the same entries.
_OLMO2 = _decoder(
    vocabulary=50304,
    feed_forward=Entry("intermediate_size", 11008),
    key_value_heads=_key_value_heads(None),
    head_dim=_HEAD_DIM,
    positions=2048,
    epsilon=1e-5,
    has_attention_bias=True,
)

# Entries of the experts of DeepSeek-V3 and GLM-4.5, except for those with other defaults.
_SIGMOID_EXPERTS = {
    "per_token": Entry("num_experts_per_tok", 8),
    "normalizes_weights": Entry("norm_topk_prob", True),
    "shared_count": Entry("n_shared_experts", 1),
}
# The router of these models.
_SIGMOID_ROUTER = {"score_function": "sigmoid", "has_correction_bias": True}
# transformers' other name for the number of layers of multi-token prediction.
_MTP_ALIAS = {"num_mtp_layers": "num_nextn_predict_layers"}
# The shared expert of Qwen's models.
_GATED_SHARED_EXPERT = {"shared_count": 1, "has_shared_gate": True}
# Attributes of models with gated delta nets.
_HYBRID = {"qk_norm": "head", "zero_centered_norms": True, "attention_gate": True}
_DELTA_NET = {
    "key_heads": Entry("linear_num_key_heads", 16),
    "value_heads": Entry("linear_num_value_heads", 32),
    "key_dim": Entry("linear_key_head_dim", 128),
    "value_dim": Entry("linear_value_head_dim", 128),
    "conv_width": Entry("linear_conv_kernel_dim", 4),
}

ARCHITECTURES = (
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
            has_attention_bias=True,
            has_mlp_bias=True,
        ),
        supported=_SILU,
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
        implied={"qkv_bias": True},
        supported=_SILU,
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
            has_attention_bias=True,
        ),
        implied={"qk_norm": "head"},
        supported=_SILU,
        eos_token_id=None,
        window="layered",
    ),
    Architecture(
        "Mixtral",
        "mixtral",
        "mixtral",
        _decoder(
            vocabulary=32000,
            feed_forward=Entry("intermediate_size", 14336),
            key_value_heads=Entry("num_key_value_heads", 8),
            head_dim=_HEAD_DIM,
            positions=131072,
            epsilon=1e-5,
        ),
        expert_entries={
            "count": Entry("num_local_experts", 8),
            "per_token": Entry("num_experts_per_tok", 2),
            "ffn_hidden_size": Entry("intermediate_size", 14336),
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
        _decoder(
            vocabulary=151936,
            hidden=2048,
            feed_forward=Entry("intermediate_size", 6144),
            layers=24,
            key_value_heads=Entry("num_key_value_heads", 4),
            head_dim=_HEAD_DIM,
            positions=32768,
            has_attention_bias=True,
        ),
        expert_entries={
            "count": Entry("num_experts", 128),
            "per_token": Entry("num_experts_per_tok", 8),
            "ffn_hidden_size": Entry("moe_intermediate_size", 768),
            "normalizes_weights": Entry("norm_topk_prob", False),
        },
        implied={"qk_norm": "head"},
        expert_layers="listed",
        supported=_SILU,
        without_effect=_LOAD_BALANCING_LOSS,
        aliases={"num_local_experts": "num_experts"},
        eos_token_id=None,
        window="switched",
    ),
    Architecture(
        "Qwen2Moe",
        "qwen2_moe",
        "qwen2_moe",
        {
            **_decoder(
                vocabulary=151936,
                hidden=2048,
                feed_forward=Entry("intermediate_size", 5632),
                layers=24,
                heads=16,
                key_value_heads=_key_value_heads(16),
                head_dim=_HEAD_DIM,
                positions=32768,
            ),
            "qkv_bias": Entry("qkv_bias", True),
        },
        expert_entries={
            "count": Entry("num_experts", 60),
            "per_token": Entry("num_experts_per_tok", 4),
            "ffn_hidden_size": Entry("moe_intermediate_size", 1408),
            "normalizes_weights": Entry("norm_topk_prob", False),
            "shared_ffn_hidden_size": Entry("shared_expert_intermediate_size", 5632),
        },
        implied_experts=_GATED_SHARED_EXPERT,
        expert_layers="listed",
        supported={"use_sliding_window": False, **_SILU},
        without_effect=("sliding_window", "max_window_layers", *_LOAD_BALANCING_LOSS),
        eos_token_id=None,
    ),
    Architecture(
        "Glm4Moe",
        "glm4_moe",
        "glm4_moe",
        {
            **_decoder(
                vocabulary=151552,
                feed_forward=Entry("intermediate_size", 10944),
                layers=46,
                heads=96,
                key_value_heads=Entry("num_key_value_heads", 8),
                head_dim=_HEAD_DIM,
                positions=131072,
                epsilon=1e-5,
            ),
            "qkv_bias": Entry("attention_bias", False),
            "qk_norm": Entry(
                "use_qk_norm",
                False,
                to_shape=lambda is_used: "head" if is_used else None,
                to_config=lambda kind: kind is not None,
            ),
        },
        expert_entries={
            **_SIGMOID_EXPERTS,
            "count": Entry("n_routed_experts", 128),
            "ffn_hidden_size": Entry("moe_intermediate_size", 1408),
            "weight_scale": Entry("routed_scaling_factor", 1.0),
            "groups": Entry("n_group", 1),
            "groups_per_token": Entry("topk_group", 1),
        },
        implied_experts=_SIGMOID_ROUTER,
        expert_layers="last",
        dense_count=1,
        supported=_SILU,
        without_effect=("output_router_logits", "num_nextn_predict_layers"),
        aliases={"num_local_experts": "n_routed_experts", **_MTP_ALIAS},
        eos_token_id=None,
        rope=RopeFormat(fraction=0.5),
    ),
    Architecture(
        "MiniMaxM2",
        "minimax_m2",
        "minimax_m2",
        _decoder(
            vocabulary=200064,
            hidden=3072,
            feed_forward=Entry("intermediate_size", 1536),
            layers=62,
            heads=48,
            key_value_heads=Entry("num_key_value_heads", 8),
            head_dim=Entry("head_dim", 128),
            positions=196608,
        ),
        expert_entries={
            "count": Entry("num_local_experts", 256),
            "per_token": Entry("num_experts_per_tok", 8),
            "ffn_hidden_size": Entry("intermediate_size", 1536),
        },
        implied={"qk_norm": "projection"},
        implied_experts={"score_function": "sigmoid", "has_correction_bias": True},
        supported={"router_jitter_noise": 0.0, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        aliases={"num_experts": "num_local_experts"},
        eos_token_id=200020,
        rope=RopeFormat(theta=5000000.0, fraction=1.0, size_key="rotary_dim"),
    ),
    Architecture(
        "Olmoe",
        "olmoe",
        "olmoe",
        _decoder(
            vocabulary=50304,
            hidden=2048,
            feed_forward=Entry("intermediate_size", 2048),
            layers=16,
            heads=16,
            key_value_heads=_key_value_heads(None),
            head_dim=_HEAD_DIM,
            positions=4096,
            epsilon=1e-5,
            has_attention_bias=True,
        ),
        expert_entries={
            "count": Entry("num_experts", 64),
            "per_token": Entry("num_experts_per_tok", 8),
            "ffn_hidden_size": Entry("intermediate_size", 2048),
            "normalizes_weights": Entry("norm_topk_prob", False),
        },
        implied={"qk_norm": "projection"},
        supported={"clip_qkv": None, "sliding_window": None, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        aliases={"num_local_experts": "num_experts"},
        eos_token_id=50279,
        pad_token_id=1,
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
            has_attention_bias=True,
            has_mlp_bias=True,
        ),
        supported=_SILU,
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
                has_attention_bias=True,
                has_mlp_bias=True,
            ),
            "embedding_scale": Entry("embedding_multiplier", 1.0),
            "attention_scale": Entry("attention_multiplier", 1.0),
            "residual_scale": Entry("residual_multiplier", 1.0),
            "logit_scale": Entry(
                "logits_scaling", 1.0, is_positive=True, to_shape=_invert, to_config=_invert
            ),
        },
        supported=_SILU,
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
        implied={"qk_norm": "projection", "norm_placement": "after"},
        supported=_SILU,
        eos_token_id=50279,
        pad_token_id=1,
    ),
    Architecture(
        "Olmo3",
        "olmo3",
        "olmo2",
        _OLMO2,
        implied={"qk_norm": "projection", "norm_placement": "after"},
        supported=_SILU,
        eos_token_id=50279,
        pad_token_id=1,
        window="typed",
        full_attention_interval=4,
        rope=RopeFormat(theta=500000.0, local_theta=500000.0),
    ),
    Architecture(
        "Gemma2",
        "gemma2",
        "gemma2",
        {
            **_decoder(
                vocabulary=256000,
                hidden=2304,
                feed_forward=Entry("intermediate_size", 9216),
                layers=26,
                heads=8,
                key_value_heads=Entry("num_key_value_heads", 4),
                head_dim=Entry("head_dim", 256),
                positions=8192,
                is_tied=True,
                has_attention_bias=True,
            ),
            **_GEMMA_SCORES,
            "attention_softcap": _softcap("attn_logit_softcapping", 50.0),
            "logit_softcap": _softcap("final_logit_softcapping", 30.0),
        },
        implied={
            "norm_placement": "both",
            "zero_centered_norms": True,
            "embedding_scale": None,
        },
        supported={"use_bidirectional_attention": None},
        eos_token_id=1,
        pad_token_id=0,
        window="typed",
        full_attention_interval=2,
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
                has_attention_bias=True,
            ),
            **_GEMMA_SCORES,
            "logit_softcap": _softcap("final_logit_softcapping", None),
        },
        implied={
            "qk_norm": "head",
            "norm_placement": "both",
            "zero_centered_norms": True,
            "embedding_scale": None,
        },
        # The class has the soft cap of the scores, but does not apply it.
        supported={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
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
        implied={"norm_placement": "both"},
        supported=_SILU,
        eos_token_id=(151329, 151336, 151338),
        pad_token_id=151329,
        rope=RopeFormat(fraction=0.5, is_interleaved=True),
    ),
    Architecture(
        "SeedOss",
        "seed_oss",
        "seed_oss",
        {
            **_decoder(
                vocabulary=155136,
                feed_forward=Entry("intermediate_size", 27648),
                layers=64,
                heads=80,
                key_value_heads=_key_value_heads(8),
                head_dim=Entry("head_dim", 128, nullable=True),
                positions=524288,
                has_mlp_bias=True,
            ),
            "qkv_bias": Entry("attention_bias", True),
            "attention_output_bias": Entry("attention_out_bias", False),
        },
        supported=_SILU,
        without_effect=("pretraining_tp",),
        dropouts=("attention_dropout", "residual_dropout"),
        pad_token_id=1,
    ),
    Architecture(
        "DeepseekV3",
        "deepseek_v3",
        "deepseek_v3",
        _decoder(
            vocabulary=129280,
            hidden=7168,
            feed_forward=Entry("intermediate_size", 18432),
            layers=61,
            heads=128,
            key_value_heads=_key_value_heads(128),
            positions=4096,
        ),
        latent_entries=_LATENT_ATTENTION,
        expert_entries={
            **_SIGMOID_EXPERTS,
            "count": Entry("n_routed_experts", 256),
            "ffn_hidden_size": Entry("moe_intermediate_size", 2048),
            "weight_scale": Entry("routed_scaling_factor", 2.5),
            "groups": Entry("n_group", 8),
            "groups_per_token": Entry("topk_group", 4),
        },
        implied_experts=_SIGMOID_ROUTER,
        expert_layers="last",
        dense_count=3,
        supported={"attention_bias": False, **_SILU},
        without_effect=(
            *_LOAD_BALANCING_LOSS,
            *_COMPUTED_HEAD_DIMS,
            "pretraining_tp",
            "num_nextn_predict_layers",
        ),
        aliases={"num_local_experts": "n_routed_experts", **_MTP_ALIAS},
        other_model_types=("kimi_k2",),
        eos_token_id=1,
        rope=RopeFormat(is_interleaved=True, interleaved_key="rope_interleave", scales_scores=True),
    ),
    Architecture(
        "DeepseekV2",
        "deepseek_v2",
        "deepseek_v2",
        _decoder(
            vocabulary=102400,
            feed_forward=Entry("intermediate_size", 11008),
            key_value_heads=_key_value_heads(None),
            positions=2048,
        ),
        latent_entries=_LATENT_ATTENTION,
        expert_entries={
            "count": Entry("n_routed_experts", 64),
            "per_token": Entry("num_experts_per_tok", None),
            "ffn_hidden_size": Entry("moe_intermediate_size", 1407),
            "shared_count": Entry("n_shared_experts", 2),
            "weight_scale": Entry("routed_scaling_factor", 1.0),
            "groups": Entry("n_group", None, nullable=True, to_shape=_one_if_null),
            "groups_per_token": Entry("topk_group", None, nullable=True, to_shape=_one_if_null),
        },
        # transformers ignores norm_topk_prob; the model's own code does not.
        implied_experts={"normalizes_weights": False, "scores_per_group": 1},
        expert_layers="last",
        group_key="topk_method",
        supported={
            "attention_bias": False,
            "mlp_bias": False,
            "norm_topk_prob": False,
            **_SILU,
        },
        without_effect=(*_LOAD_BALANCING_LOSS, *_COMPUTED_HEAD_DIMS, "pretraining_tp"),
        aliases={"num_experts": "n_routed_experts"},
        rope=RopeFormat(is_interleaved=True, scales_scores=True),
    ),
    Architecture(
        "Qwen3Next",
        "qwen3_next",
        "qwen3_next",
        _decoder(
            vocabulary=151936,
            hidden=2048,
            feed_forward=Entry("intermediate_size", 5632),
            layers=48,
            heads=16,
            key_value_heads=Entry("num_key_value_heads", 2),
            head_dim=Entry("head_dim", 256),
            positions=32768,
        ),
        expert_entries={
            "count": Entry("num_experts", 512),
            "per_token": Entry("num_experts_per_tok", 10),
            "ffn_hidden_size": Entry("moe_intermediate_size", 512),
            "normalizes_weights": Entry("norm_topk_prob", True),
            "shared_ffn_hidden_size": Entry("shared_expert_intermediate_size", 512),
        },
        implied_experts=_GATED_SHARED_EXPERT,
        expert_layers="listed",
        delta_net_entries=_DELTA_NET,
        ignored_tensors="mtp.",
        implied=_HYBRID,
        supported={"attention_bias": False, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        eos_token_id=None,
        full_attention_interval=4,
        interval_key="full_attention_interval",
        rope=RopeFormat(fraction=0.25),
    ),
    Architecture(
        "Qwen3_5Moe",
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        _decoder(
            vocabulary=248320,
            hidden=2048,
            # no layer has a network without experts
            feed_forward=Entry("moe_intermediate_size", 512),
            layers=40,
            heads=16,
            key_value_heads=Entry("num_key_value_heads", 2),
            head_dim=Entry("head_dim", 256),
            positions=32768,
        ),
        expert_entries={
            "count": Entry("num_experts", 256),
            "per_token": Entry("num_experts_per_tok", 8),
            "ffn_hidden_size": Entry("moe_intermediate_size", 512),
            "shared_ffn_hidden_size": Entry("shared_expert_intermediate_size", 512),
        },
        implied_experts=_GATED_SHARED_EXPERT,
        delta_net_entries=_DELTA_NET,
        ignored_tensors="mtp.",
        implied=_HYBRID,
        supported={"attention_bias": False, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        eos_token_id=None,
        full_attention_interval=4,
        interval_key="full_attention_interval",
        rope=RopeFormat(fraction=0.25),
    ),
    Architecture(
        "Qwen3_5",
        "qwen3_5_text",
        "qwen3_5",
        _decoder(
            vocabulary=248320,
            feed_forward=Entry("intermediate_size", 12288),
            heads=16,
            key_value_heads=Entry("num_key_value_heads", 4),
            head_dim=Entry("head_dim", 256),
            positions=32768,
        ),
        delta_net_entries=_DELTA_NET,
        ignored_tensors="mtp.",
        implied=_HYBRID,
        supported={"attention_bias": False, **_SILU},
        eos_token_id=None,
        full_attention_interval=4,
        interval_key="full_attention_interval",
        rope=RopeFormat(fraction=0.25),
        scalar_prefix="Qwen3_5Text",
    ),
    Architecture(
        "GptOss",
        "gpt_oss",
        "gpt_oss",
        {
            **_decoder(
                vocabulary=201088,
                hidden=2880,
                feed_forward=Entry("intermediate_size", 2880),
                layers=36,
                heads=64,
                key_value_heads=Entry("num_key_value_heads", 8),
                head_dim=Entry("head_dim", 64),
                positions=131072,
                epsilon=1e-5,
            ),
            **_attention_biases(True),
            "gate_limit": Entry("swiglu_limit", 7.0, is_positive=True),
        },
        expert_entries={
            "count": Entry("num_local_experts", 128),
            "per_token": Entry("num_experts_per_tok", 4),
            "ffn_hidden_size": Entry("intermediate_size", 2880),
        },
        implied={"activation": "quick_gelu", "projection_offset": 1.0, "attention_sinks": True},
        implied_experts={"has_biases": True, "has_router_bias": True},
        # The gain of the sigmoid is that of quick_gelu.
        supported={"swiglu_alpha": 1.702, **_SILU},
        without_effect=_LOAD_BALANCING_LOSS,
        aliases={"num_experts": "num_local_experts"},
        eos_token_id=None,
        window="typed",
        full_attention_interval=2,
        window_size=128,
        rope=RopeFormat(
            theta=150000.0,
            default={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
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
            **_attention_biases(True),
        },
        implied=_BIASED,
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
        implied={
            **_BIASED,
            "qkv_bias": True,
            "attention_output_bias": True,
            "learned_positions": True,
        },
        supported={
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

ARCHITECTURES_BY_CLASS: Mapping[str, Architecture] = {
    **{architecture.causal_name: architecture for architecture in ARCHITECTURES},
    **{architecture.scalar_name: architecture for architecture in ARCHITECTURES},
}
"""Architectures by the class name in config.json, with a language model's head or a scalar head."""
