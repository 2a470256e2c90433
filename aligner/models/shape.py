"""Dimensions and parts of a decoder-only transformer, and the frequencies of its rotary embeddings.

A model is described by its parts, not by its family: `ModelShape` has what all layers share, and
one `LayerShape` for each layer, because the layers of many models differ.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for contexts longer than those of pretraining."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """dynamic: frequencies are scaled beyond the model's context only, so they are never scaled
    here."""
    factor: float
    """Number by which scaled frequencies are divided; longrope: extension of the context."""
    low_frequency_factor: float = 1.0
    """llama3: frequencies with fewer turns within the original context are scaled fully."""
    high_frequency_factor: float = 4.0
    """llama3: frequencies with more turns within the original context are not scaled."""
    original_positions: int = 8192
    """llama3, yarn, longrope: context length of pretraining, in tokens."""
    beta_fast: float = 32.0
    """yarn: frequencies with more turns within the original context are not scaled."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer turns within the original context are scaled fully."""
    truncate: bool = True
    """yarn: whether both limits are rounded to whole dimensions."""
    attention_factor: float = 1.0
    """yarn, longrope: factor of the rotated queries and keys."""
    mscale_all_dim: float = 0.0
    """yarn with latent attention: weight of log(`factor`) in the factor of the attention scores
    (see `compute_mscale`); 0 for none."""
    short_factors: tuple[float, ...] = ()
    """longrope: number by which the frequency of each pair is divided, within the context of
    pretraining. Longer contexts have other factors and are not supported."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings of a layer (Su et al. 2021, "RoFormer")."""

    theta: float
    """Base of the frequencies."""
    fraction: float = 1.0
    """Fraction of a head's dimensions that is rotated."""
    scaling: RopeScaling | None = None
    is_interleaved: bool = False
    """Whether the rotated pairs are adjacent dimensions, not one of each half."""

    @property
    def attention_factor(self) -> float:
        """Factor of the rotated dimensions of queries and keys."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), in all layers.

    Keys and values of all heads are projections of one vector per token, the latent. A rotated key,
    which all heads share, is appended to each head's key. `ModelShape.head_dim` is the size of a
    head's queries and keys, and `num_kv_heads` equals `num_heads`.
    """

    q_lora_rank: int | None
    """Size of the latent of the queries; None if queries are projections of the hidden states."""
    kv_lora_rank: int
    """Size of the latent of keys and values."""
    qk_nope_head_dim: int
    """Dimensions of a head's queries and keys without rotary positions, which come first."""
    qk_rope_head_dim: int
    """Dimensions of a head's queries and keys with rotary positions."""
    v_head_dim: int
    """Dimensions of a head's values."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms of the latents."""

    @property
    def head_dim(self) -> int:
        """Dimensions of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Numbers per token and layer in a KV cache: the latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LayerShape:
    """Parts of one decoder layer in which the layers of a model may differ."""

    rope: Rope | None = None
    """Rotary positions; None for a layer without them."""
    sliding_window: int | None = None
    """Number of tokens to which a token attends, including itself; None for all tokens before it.
    """
    has_experts: bool = False
    """Whether the feed-forward network is the model's mixture of experts."""
    has_delta_net: bool = False
    """Whether the layer has the model's gated delta net instead of attention."""

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention."""
        return not self.has_delta_net

    @property
    def is_dense(self) -> bool:
        """Whether the feed-forward network has no experts."""
        return not self.has_experts


@dataclass(frozen=True)
class Experts:
    """Mixture of experts, in the layers with `LayerShape.has_experts` (Shazeer et al. 2017)."""

    count: int
    """Number of experts."""
    per_token: int
    """Number of experts that the router chooses for a token."""
    ffn_hidden_size: int
    """Hidden size of each expert."""
    normalizes_weights: bool = True
    """Whether the weights of a token's experts are scaled to sum to one."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to the scores of the experts; the scores of the chosen
    experts are their weights."""
    has_correction_bias: bool = False
    """Whether the router adds a bias to the scores before it chooses experts. The bias balances the
    load of the experts; it is not trained by gradients (DeepSeek-V3, section 2.1.2)."""
    groups: int = 1
    """Number of groups of experts."""
    groups_per_token: int = 1
    """Number of groups from which the router chooses a token's experts."""
    scores_per_group: int = 2
    """Number of best scores of a group whose sum ranks the group."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    shared_count: int = 0
    """Number of shared experts, which process every token. Together they are one network."""
    shared_ffn_hidden_size: int | None = None
    """Hidden size of each shared expert; None for that of the other experts."""
    has_biases: bool = False
    """Whether both linear layers of an expert have biases."""
    has_router_bias: bool = False
    """Whether the router's linear layer has a bias, which is trained like its weight."""
    has_shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by a sigmoid gate of each token."""

    @property
    def shared_size(self) -> int:
        """Hidden size of all shared experts together; 0 without shared experts."""
        return self.shared_count * (self.shared_ffn_hidden_size or self.ffn_hidden_size)


DELTA_NET_CHUNK_TOKENS = 64
"""Tokens of a sequence that a gated delta net computes together. Larger chunks need fewer
sequential steps, but more operations and memory."""


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net, in the layers with `LayerShape.has_delta_net` (Yang et al. 2024).

    Each query head is paired with a key head. `value_heads / key_heads` consecutive value heads use
    the same query and key.
    """

    key_heads: int
    """Number of key heads, and of query heads."""
    value_heads: int
    """Number of value heads, a multiple of `key_heads`. Each has a state of its own."""
    key_dim: int
    """Number of dimensions of a key head, and of a query head."""
    value_dim: int
    """Number of dimensions of a value head."""
    conv_width: int
    """Number of tokens that the convolution over queries, keys and values covers."""

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and parts of a decoder-only transformer, independent of any framework."""

    layers: tuple[LayerShape, ...]
    """The decoder layers."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Hidden size of the feed-forward network in layers without experts."""
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    family: str = "llama"
    """Key of `families.WEIGHTS`, which contains the names of the weights."""
    normalization: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"] = "silu"
    """quick_gelu: x sigmoid(1.702 x)."""
    gated: bool = True
    """Whether the feed-forward network multiplies an activated gate by a second projection."""
    gate_limit: float | None = None
    """Upper limit of the gate, and limit of the magnitude of the second projection, before the
    activation; None for no limits."""
    projection_offset: float = 0.0
    """Number that is added to the second projection of a gated network."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    attention_output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    ffn_bias: bool = False
    """Whether both linear layers of a feed-forward network without experts have a bias."""
    qk_norm: Literal["head", "projection"] | None = None
    """Normalization of queries and keys: each head, or all heads of a token together."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Norms before attention and feed-forward network, after them (before their output is added to
    the residual stream), or both."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    parallel_residual: bool = False
    """Whether the feed-forward network reads the layer's input instead of attention's output."""
    embedding_scale: float | None = 1.0
    """Factor of the token embeddings in the first layer's input; None for sqrt(hidden_size)."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and feed-forward network."""
    attention_scale: float | None = None
    """Factor of the attention scores; None for 1 / sqrt(head_dim). Latent attention ignores it; see
    `softmax_scale`."""
    attention_softcap: float | None = None
    """Soft cap c of the attention scores, c tanh(score / c); None for no cap."""
    attention_sinks: bool = False
    """Whether each head has a learned score that is added to the denominator of its softmax."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_softcap: float | None = None
    """Soft cap of the logits, after their factor; None for no cap."""
    learned_positions: bool = False
    """Whether the model adds learned position embeddings to the token embeddings."""
    latent_attention: LatentAttention | None = None
    """Multi-head latent attention; None for multi-head or grouped-query attention."""
    experts: Experts | None = None
    """Mixture of experts of the layers that have one; None if no layer has one."""
    delta_net: DeltaNet | None = None
    """Gated delta net of the layers that have one; None if no layer has one."""
    attention_gate: bool = False
    """Whether each head's attention output is multiplied by the sigmoid of a gate, a second output
    of the query projection."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer that has experts; 0 for a dense model."""
        return 0 if self.experts is None else self.experts.count

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts.

        Recorded expert routing contains these layers, in this order.
        """
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_experts)

    @property
    def embedding_factor(self) -> float:
        """Factor of the token embeddings in the first layer's input."""
        return self.hidden_size**0.5 if self.embedding_scale is None else self.embedding_scale

    @property
    def has_plain_scores(self) -> bool:
        """Whether attention is a softmax of scaled scores, which fused kernels compute."""
        return self.attention_softcap is None and not self.attention_sinks

    @property
    def softmax_scale(self) -> float | None:
        """Factor of the attention scores; None for 1 / sqrt(head_dim).

        With latent attention, YaRN's `mscale_all_dim` scales queries and keys also in the
        dimensions that are not rotated, as in the model code of DeepSeek-V2.
        """
        if self.latent_attention is None:
            return self.attention_scale
        rope = self.layers[0].rope
        scaling = None if rope is None else rope.scaling
        mscale = 1.0
        if scaling is not None and scaling.mscale_all_dim:
            mscale = compute_mscale(scaling.factor, scaling.mscale_all_dim)
        return mscale**2 / self.head_dim**0.5

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head in which `Rope.fraction` counts the rotated ones."""
        latent = self.latent_attention
        return self.head_dim if latent is None else latent.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        latent = self.latent_attention
        return self.head_dim if latent is None else latent.v_head_dim

    @property
    def has_query_latent(self) -> bool:
        """Whether latent attention computes the queries from a latent of their own."""
        return self.latent_attention is not None and self.latent_attention.q_lora_rank is not None

    @property
    def lacks_query_latent(self) -> bool:
        """Whether the queries are projections of the hidden states."""
        return not self.has_query_latent

    @property
    def has_windows(self) -> bool:
        """Whether a layer has a sliding window."""
        return any(layer.sliding_window is not None for layer in self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Number of decoder layers with attention."""
        return sum(layer.has_attention for layer in self.layers)

    @property
    def common_layer(self) -> LayerShape | None:
        """The shape of all layers; None if they differ."""
        return self.layers[0] if len(set(self.layers)) == 1 else None

    def kv_heads_on_rank(self, tensor: int) -> int:
        """Return the number of KV heads that each of `tensor` tensor-parallel ranks holds.

        With more ranks than KV heads, each head is on several consecutive ranks.
        """
        return max(1, self.num_kv_heads // tensor)

    def with_layers(self, count: int) -> "ModelShape":
        """Return the shape of the model's first `count` layers.

        A count above the number of layers repeats the layers.
        """
        repeats = -(-count // self.num_layers)
        return dataclasses.replace(self, layers=(self.layers * repeats)[:count])


def compute_inverse_frequencies(rope: Rope, head_dim: int) -> list[float]:
    """Return the frequency of each rotated pair of a head's dimensions, in radians per position.

    See Su et al. 2021, "RoFormer", section 3.2.2.
    """
    rotated = int(head_dim * rope.fraction)
    # theta_i = base^(-2i / d)
    frequencies = [rope.theta ** (-pair / rotated) for pair in range(0, rotated, 2)]
    scaling = rope.scaling
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "yarn":
        return _scale_yarn(frequencies, rope.theta, scaling)
    if scaling.kind == "longrope":
        # Ding et al. 2024, "LongRoPE", section 3
        pairs = zip(frequencies, scaling.short_factors, strict=True)
        return [frequency / factor for frequency, factor in pairs]
    return [_scale(item, scaling) for item in frequencies]


def compute_mscale(factor: float, weight: float) -> float:
    """Return 0.1 w ln(factor) + 1, YaRN's factor of queries and keys for w = 1.

    See Peng et al. 2023, "YaRN", section 3.4. Other weights w are the entries `mscale` and
    `mscale_all_dim` of DeepSeek-V2's configurations.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scale(frequency: float, scaling: RopeScaling) -> float:
    """Return a frequency divided by `factor`; llama3 does not scale high frequencies.

    llama3 interpolates between scaled low frequencies and unscaled high frequencies as in the model
    code of Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.4.2).
    """
    scaled = frequency / scaling.factor
    if scaling.kind == "linear":
        return scaled
    turns = scaling.original_positions * frequency / (2 * math.pi)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    unscaled_weight = min(1.0, max(0.0, (turns - low) / (high - low)))
    return unscaled_weight * frequency + (1 - unscaled_weight) * scaled


def _scale_yarn(frequencies: list[float], theta: float, scaling: RopeScaling) -> list[float]:
    """Return the frequencies of YaRN (Peng et al. 2023, "YaRN", section 3.2).

    The share of the scaled frequency rises linearly with the index of the pair, from 0 at the pair
    that makes `beta_fast` turns within the original context to 1 at the pair that makes
    `beta_slow` turns.
    """
    rotated = 2 * len(frequencies)

    def find_pair(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this number of turns."""
        # Solved for i: original_positions * theta^(-2i / d) / (2 pi) = turns.
        ratio = scaling.original_positions / (turns * 2 * math.pi)
        return rotated * math.log(ratio) / (2 * math.log(theta))

    first, last = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    span = last - first or 0.001
    shares = [min(1.0, max(0.0, (pair - first) / span)) for pair in range(len(frequencies))]
    return [
        share * frequency / scaling.factor + (1 - share) * frequency
        for share, frequency in zip(shares, frequencies, strict=True)
    ]
