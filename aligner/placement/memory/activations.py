"""Activation memory of a pipeline stage, in training and in scoring.

The accounting follows sections 4.1 and 4.2 of Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models": the tensors that each operator saves for the backward
pass, and how tensor and sequence parallelism shard them. The result differs from their s·b·h·(34/t
+ 5·a·s/(h·t)) bytes per layer because our layers differ: attention is fused and saves no scores,
there is no dropout, keys and values may have fewer heads than queries, feed-forward networks may be
gated, and micro-batches are packed, so that tokens are counted instead of sequences. The number of
micro-batches in flight follows their section 4.2.3: one per stage from this one to the last, and
(P-1)/(P·m) more for the interleaved schedule with m chunks (Narayanan et al. 2021).
"""

import math
from dataclasses import dataclass

from aligner.models.pipeline_stages import stage_layers
from aligner.models.shape import DELTA_NET_CHUNK_TOKENS, DeltaNet, LayerShape, ModelShape
from aligner.models.weight_slices import Head
from aligner.placement.roles import Device
from aligner.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig

FP32 = 4
# Number of logits that a CPU processes at a time (`megatron/logprobs.py`).
_CPU_BLOCK = 1 << 21
# Number of attention scores of a block, and of the float32 tensors with these scores, in models
# with soft caps or sinks (`models/score_attention.py`).
_SCORE_BLOCK = 1 << 22
_SCORE_TENSORS = 3


@dataclass(frozen=True)
class Layer:
    """Saved activations of a decoder layer on one rank.

    The public properties are bytes per token of the rank's micro-batches.
    """

    shape: ModelShape
    kind: LayerShape
    """Parts of this layer."""
    layout: ParallelConfig
    device: Device
    longest_tokens: int
    """Tokens of the longest sequence, which is the length of the rows in attention."""
    tokens: int
    """Tokens of a micro-batch on one context rank."""

    @property
    def residual_bytes(self) -> float:
        """The residual stream, which is all that `recompute=full` saves."""
        return self.device.itemsize * self._residual_width

    @property
    def outside_core_bytes(self) -> float:
        """All activations except those of the attention core.

        This includes the inputs of the attention core. `recompute=selective` saves these
        activations.
        """
        # With a parallel residual, attention and feed-forward network have one norm in common.
        norm_inputs = 4 if self.shape.norm_placement == "both" else 2
        if self.shape.parallel_residual:
            norm_inputs = 1
        # A feed-forward network saves the input of the activation function and its output.
        width = self._activation_parts * self.shape.ffn_hidden_size
        dense = self.device.itemsize * width / self.layout.tensor
        network = self._expert_bytes if self.kind.has_experts else dense
        if self.kind.has_delta_net:
            mixer = self._delta_net_output_bytes
        else:
            value_share = self.shape.value_dim / self.shape.head_dim
            attention_output = self.device.itemsize * self._head_widths[0] * value_share
            mixer = self._norm_bytes + self._latent_bytes + attention_output + self._gate_bytes
        return (norm_inputs + 2) * self.residual_bytes + self.core_input_bytes + mixer + network

    @property
    def core_input_bytes(self) -> float:
        """Queries, keys and values, the output of one matmul.

        Normalized or non-contiguous tensors are saved once more. With latent attention, the core
        begins with the latents, and has the gathered key of all heads as a further input. The core
        of a delta net begins with the inputs of the convolution and two numbers for each head.
        """
        if self.kind.has_delta_net:
            net = self._delta_net
            width = net.channels + 2 * net.value_heads
            return self.device.itemsize * width / self.layout.tensor
        latent = self.shape.latent_attention
        if latent is not None:
            shared_key = latent.qk_rope_head_dim if self.layout.sequence else 0
            return self.device.itemsize * shared_key
        queries, keys = self._head_widths
        copied_width = 0 if self.device.is_gpu or self._has_one_group else queries
        extra = queries + keys if self.shape.qk_norm else copied_width
        return self.device.itemsize * (queries + 2 * keys + extra)

    @property
    def core_bytes(self) -> float:
        """Activations that the attention core saves.

        These are rotated queries and keys, values, and one fp32 number per head. If sequences are
        rows of a batch, the rows and the output are saved, too.
        """
        if self.kind.has_delta_net:
            # the inputs, too, because their copy into rows saves them
            return self.core_input_bytes + self._delta_rule_bytes
        queries, keys = self._head_widths
        context_ranks = self.layout.context
        has_latents = self.shape.latent_attention is not None
        if context_ranks > 1:  # each rank gathers the keys and values of all context ranks
            width = queries + 2 * keys * context_ranks
        else:
            # latent attention saves no queries and keys before their rotation
            is_rotated = any(layer.rope for layer in self.shape.layers) and not has_latents
            rotated_width = queries + keys if is_rotated else 0
            width = queries + 2 * keys + rotated_width
        if not self._uses_tree_attention:
            width += 2 * queries + 2 * keys * context_ranks + self._mask_width
        elif has_latents:
            width += queries  # the output, whose heads are longer than the values
        return self.device.itemsize * width + FP32 * self.shape.num_heads / self.layout.tensor

    @property
    def _delta_net(self) -> DeltaNet:
        """The delta net of the model, which must have one."""
        assert self.shape.delta_net is not None
        return self.shape.delta_net

    @property
    def _delta_rule_bytes(self) -> float:
        """Bytes that the convolution and the chunked rule of a delta net save, all of them fp32.

        See `aligner.models.delta_net`.
        """
        net = self._delta_net
        chunk = min(DELTA_NET_CHUNK_TOKENS, self.longest_tokens)
        heads = net.value_heads
        # The padded inputs of the convolution, its output before and after the activation.
        padding = (net.conv_width - 1) / self.longest_tokens
        channels = net.channels * (3 + padding)
        # The keys, the queries, and the keys times beta. If there is more than one chunk, the
        # products of queries and keys with the decays, the latter except in the last chunk.
        chunks = math.ceil(self.longest_tokens / chunk)
        decayed = 2 - 1 / chunks if chunks > 1 else 0
        keys = (3 + decayed) * heads * net.key_dim
        # Five matrices of a chunk: the scores, the system, and their factors.
        matrices = 5 * heads * chunk
        # Both sides of the system, and the corrections.
        system = heads * (2 * (net.key_dim + net.value_dim) + net.value_dim)
        states = heads * net.key_dim * net.value_dim / chunk
        # The norms of queries and keys, the decays and betas.
        scalars = 2 * net.key_heads + 6 * heads
        width = channels + keys + matrices + system + states + scalars
        return FP32 * width / self.layout.tensor

    @property
    def _delta_net_output_bytes(self) -> float:
        """Bytes that the gated norm and the output projection of a delta net save."""
        net = self._delta_net
        values = net.value_heads * net.value_dim
        # The output, the gate, and three products of the norm in fp32; the projection's input.
        norm = FP32 * (5 * values + net.value_heads)
        return (norm + self.device.itemsize * values) / self.layout.tensor

    @property
    def _gate_bytes(self) -> float:
        """Bytes that the gate of the attention output saves.

        These are the gate itself, its sigmoid in fp32, and the output before the gate is applied.
        """
        if not self.shape.attention_gate:
            return 0
        return (FP32 + 2 * self.device.itemsize) * self._head_widths[0]

    @property
    def _uses_tree_attention(self) -> bool:
        """Whether rows may share their common prefix in attention, see `megatron/runner.py`."""
        shape = self.shape
        return (
            not self.device.is_gpu
            and self.layout.context == 1
            and shape.has_plain_scores
            and not shape.has_windows
            and not shape.num_experts
            and shape.delta_net is None
        )

    @property
    def _residual_width(self) -> float:
        """Width of the residual stream on this rank."""
        return self.shape.hidden_size / (self.layout.tensor if self.layout.sequence else 1)

    @property
    def _head_widths(self) -> tuple[float, float]:
        """Widths of the rank's queries and of its keys; values are as wide as keys."""
        shape = self.shape
        tensor = self.layout.tensor
        keys = shape.kv_heads_on_rank(tensor) * shape.head_dim
        return shape.num_heads * shape.head_dim / tensor, keys

    @property
    def _has_one_group(self) -> bool:
        """Whether the rank has one KV head. The queries and the key are then contiguous in the
        output of the matmul."""
        return self.shape.kv_heads_on_rank(self.layout.tensor) == 1

    @property
    def _latent_bytes(self) -> float:
        """Bytes of the latents of latent attention, before and after their norms."""
        latent = self.shape.latent_attention
        if latent is None:
            return 0
        width = 2 * (latent.q_lora_rank or 0) + latent.cached_dim + latent.kv_lora_rank
        shards = self.layout.tensor if self.layout.sequence else 1
        return self.device.itemsize * width / shards

    @property
    def _norm_bytes(self) -> float:
        """Bytes that the norms of queries and keys save."""
        # On CPUs, norms of heads save their inputs, which are views of the matmul's output.
        if self.shape.qk_norm == "head" and self._has_one_group and not self.device.is_gpu:
            return 0
        queries, keys = self._head_widths
        return self.device.itemsize * (queries + keys) if self.shape.qk_norm else 0

    @property
    def _mask_width(self) -> float:
        """Elements of the attention mask per token.

        With context parallelism, each query has a mask over all keys. A sliding window has one mask
        for all rows of a micro-batch.
        """
        if self.layout.context > 1:
            return self.longest_tokens
        has_mask = any(
            layer.sliding_window is not None and layer.sliding_window < self.longest_tokens
            for layer in self.shape.layers
        )
        return self.longest_tokens**2 / self.tokens if has_mask else 0

    @property
    def _activation_parts(self) -> int:
        """Tensors that a feed-forward network saves around its activation function.

        A gated network has two inputs, gate and up. On GPUs, the activated gate is saved, too.
        """
        # The CPU backend fuses SwiGLU without biases, and recomputes the activated gate.
        is_fused = (
            self.shape.activation == "silu" and not self.shape.ffn_bias and not self.device.is_gpu
        )
        gated_parts = 3 if is_fused else 4
        if self.shape.gate_limit is not None:
            # also both limited projections, the sigmoid and the weighted result
            gated_parts = 8
        return gated_parts if self.shape.gated else 2

    @property
    def _expert_bytes(self) -> float:
        """Bytes of a mixture-of-experts network, if the experts are used evenly."""
        experts = self.shape.experts
        assert experts is not None
        tensor_ranks = self.layout.expert_tensor_size
        # Each token is copied for each of its experts.
        copies = experts.per_token * tensor_ranks / self.layout.tensor
        weighted_width = experts.ffn_hidden_size if self.device.is_gpu else 0
        saved_width = self._activation_parts * experts.ffn_hidden_size + weighted_width
        width = self.shape.hidden_size + saved_width / tensor_ranks
        # The router saves an fp32 probability and a boolean for each expert, and four numbers of
        # 4 bytes for each expert that it has selected.
        router_bytes = (FP32 + 1) * experts.count + 4 * FP32 * experts.per_token
        shared_width = self._activation_parts * experts.shared_size / self.layout.tensor
        if experts.has_shared_gate:  # saves the network's output
            shared_width += self._residual_width
        return (
            self.device.itemsize * (copies * width + shared_width)
            + router_bytes / self.layout.tensor
        )


@dataclass(frozen=True)
class BatchLoad:
    """Numbers of tokens that a model processes at a time."""

    micro_batch_tokens: int
    """Tokens of a micro-batch on all context ranks together."""
    total: int
    """Tokens of all micro-batches of a data rank in one update."""
    longest_tokens: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True)
class Activations:
    """Bytes on a device at the time of an update with the largest memory use."""

    saved: int
    """Tensors that autograd saves for all micro-batches in flight."""
    outputs: int
    """Outputs to the next stage, which the schedule keeps."""
    work: int
    """Temporary tensors of the operation that needs the most."""

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return self.saved + self.outputs + self.work


@dataclass(frozen=True)
class StageActivations:
    """Activation memory of a pipeline stage of a model, for a given batch size."""

    shape: ModelShape
    head: Head
    settings: MegatronModelConfig
    stage: int
    load: BatchLoad
    device: Device

    def training_activations(self) -> Activations:
        """Return the activation memory of a training update."""
        assert isinstance(self.settings, TrainedModelConfig)
        in_flight = self._tokens_in_flight
        recomputed = 0.0
        saved = 0.0
        chunks = stage_layers(self.shape, self._layout, self.stage)
        layers = [self._build_layer(self.shape.layers[index]) for each in chunks for index in each]
        freed = 0.0
        for layer in reversed(layers):
            saved_bytes, recomputed_bytes = self._compute_layer_bytes(layer)
            saved += in_flight * saved_bytes
            # Recomputed activations exist for one layer and one micro-batch at a time, after the
            # backward pass has freed those of the later layers.
            recomputed = max(recomputed, self._tokens * (recomputed_bytes - freed))
            freed += saved_bytes

        work = self._backward_work_bytes + self._score_work_bytes
        sent_chunks = self._layout.virtual_pipeline
        if self.stage == 0:
            work = max(work, self._embedding_elements * self.device.itemsize)  # a dense gradient
        if self._is_last:
            # The head's tensors are freed before the first layer is recomputed.
            recomputed = max(recomputed, self._head_saved_bytes)
            work = max(work, self._head_work_bytes)
            # The last chunk's output goes to the head instead of another stage.
            sent_chunks = sent_chunks - 1
        return Activations(
            int(saved + recomputed),
            int(in_flight * self._residual_bytes * sent_chunks),
            int(work),
        )

    def _compute_layer_bytes(self, layer: Layer) -> tuple[float, float]:
        """Return the bytes per token that a layer saves in training, and those that the backward
        pass computes again."""
        # The inputs of the core are saved for its recomputation only.
        all_bytes = layer.outside_core_bytes - layer.core_input_bytes + layer.core_bytes
        assert isinstance(self.settings, TrainedModelConfig)
        if self.settings.recompute == "full":
            return layer.residual_bytes, all_bytes - layer.residual_bytes
        if self.settings.recompute == "selective":
            return layer.outside_core_bytes, layer.core_bytes
        return all_bytes, 0.0

    def scoring_bytes(self) -> int:
        """Return the bytes of a forward pass without gradients."""
        work = self._score_work_bytes + compute_forward_work_bytes(
            self.shape, self._layout.tensor, self._tokens, self.device.itemsize
        )
        if self._is_last and self.head == "vocabulary":
            # a chunk of logits in the model's dtype, and its copy in fp32 for the softmax
            logit_bytes = self._chunk_logit_count * (FP32 + self.device.itemsize)
            work = max(work, self._hidden_bytes + logit_bytes)
        return int(work)

    @property
    def _layout(self) -> ParallelConfig:
        return self.settings.parallel

    @property
    def _is_last(self) -> bool:
        return self.stage == self._layout.pipeline - 1

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch on one context rank."""
        return math.ceil(min(self.load.micro_batch_tokens, self.load.total) / self._layout.context)

    @property
    def _tokens_in_flight(self) -> int:
        """Tokens of all micro-batches whose backward pass is pending, counted in complete stages.

        With m chunks per stage, a stage first runs 2·(P-p-1) + (m-1)·P forward passes of single
        chunks (Narayanan et al. 2021).
        """
        later_stages = self._layout.pipeline - self.stage - 1
        chunks = self._layout.virtual_pipeline
        micro_batches = later_stages + 1.0
        if chunks > 1:
            micro_batches = (2 * later_stages + (chunks - 1) * self._layout.pipeline + 1) / chunks
        return math.ceil(
            min(micro_batches * self.load.micro_batch_tokens, self.load.total)
            / self._layout.context
        )

    def _build_layer(self, kind: LayerShape) -> Layer:
        return Layer(
            self.shape, kind, self._layout, self.device, self.load.longest_tokens, self._tokens
        )

    @property
    def _residual_bytes(self) -> float:
        """Bytes per token of the residual stream."""
        return self._build_layer(self.shape.layers[0]).residual_bytes

    @property
    def _hidden_bytes(self) -> float:
        """Bytes of the complete hidden states of a micro-batch."""
        return self._tokens * self.device.itemsize * self.shape.hidden_size

    @property
    def _embedding_elements(self) -> float:
        """Elements of the rank's shard of the embedding."""
        return self.shape.vocab_size * self.shape.hidden_size / self._layout.tensor

    @property
    def _chunk_logit_count(self) -> float:
        """Elements of a chunk of logits."""
        chunk = min(self._tokens, getattr(self.settings, "logprob_chunk_tokens", self._tokens))
        return chunk * self.shape.vocab_size / self._layout.tensor

    @property
    def _head_saved_bytes(self) -> float:
        """Bytes that the last norm and the head save.

        These are the hidden states that are projected, and the logits of the last chunk.
        """
        norm = self._tokens * self._residual_bytes
        if self.head == "scalar":
            return norm + self._tokens * self._residual_bytes
        return norm + self._hidden_bytes + FP32 * self._chunk_logit_count

    @property
    def _head_work_bytes(self) -> float:
        """Bytes of temporary tensors of the head's backward pass.

        These are the gradients of the hidden states and of the logits and, with 16 bits, a chunk's
        gradient of the projection.
        """
        if self.head == "scalar":
            return self._hidden_bytes
        # fp32 models need no second copy in the dtype of the weights.
        narrow_itemsize = self.device.itemsize if self.device.itemsize < FP32 else 0
        logits = (
            self._chunk_logit_count
            if self.device.is_gpu
            else min(self._chunk_logit_count, _CPU_BLOCK)
        )
        # A soft cap has a derivative for each logit.
        slope_itemsize = 0 if self.shape.logit_softcap is None else FP32
        return (
            self._hidden_bytes
            + self._embedding_elements * narrow_itemsize
            + logits * (FP32 + narrow_itemsize + slope_itemsize)
        )

    @property
    def _score_work_bytes(self) -> float:
        """Bytes of a block of attention scores, in models whose attention has separate scores."""
        if self.shape.has_plain_scores:
            return 0
        heads = self.shape.num_heads / self._layout.tensor
        scores = heads * self._tokens * self.load.longest_tokens
        return FP32 * _SCORE_TENSORS * min(_SCORE_BLOCK, scores)

    @property
    def _backward_work_bytes(self) -> float:
        """Bytes of temporary tensors of a layer's backward pass.

        These are gradients on both sides of the activation function, the gathered input of a
        matrix, and the matrix's gradient.
        """
        inner_width = _feed_forward_width(self.shape) / self._layout.tensor
        experts = self.shape.experts
        rows = _dense_width(self.shape) / self._layout.tensor
        if experts is not None:
            rows = max(rows, experts.ffn_hidden_size / self._layout.expert_tensor_size)
        # Gate and up projections are one matrix.
        projections = 2 if self.shape.gated else 1
        matrix = self.shape.hidden_size * projections * rows
        token_width = 2 * self.shape.hidden_size + 1.5 * inner_width
        return self.device.itemsize * (self._tokens * token_width + matrix)


def compute_forward_work_bytes(shape: ModelShape, tensor: int, tokens: int, itemsize: int) -> float:
    """Return the bytes of temporary tensors of a layer's forward pass without gradients.

    These are the residual stream, the output of a norm, and both sides of the activation function,
    or the queries, keys and values of latent attention with their copies as rows.
    """
    inner_width = 2 * _feed_forward_width(shape)
    if shape.latent_attention is not None:
        inner_width = max(inner_width, 7 * shape.num_heads * shape.head_dim)
    width = 4 * shape.hidden_size + inner_width / tensor
    return tokens * itemsize * width


def _feed_forward_width(shape: ModelShape) -> int:
    """Return the elements per token after the first matrix of a feed-forward network.

    For a mixture of experts, this is the sum over all experts of the token. The largest network of
    a model counts.
    """
    width = _dense_width(shape)
    if shape.experts is not None:
        width = max(width, shape.experts.ffn_hidden_size * shape.experts.per_token)
    return (2 if shape.gated else 1) * width


def _dense_width(shape: ModelShape) -> int:
    """Return the hidden size of the largest feed-forward network that processes all tokens.

    These are the networks of layers without experts, and shared experts.
    """
    dense = shape.ffn_hidden_size if any(layer.is_dense for layer in shape.layers) else 0
    return max(dense, 0 if shape.experts is None else shape.experts.shared_size)
