"""What a pipeline stage holds while a model is trained, or only asked: what its layers keep, and
what an operation needs.

The accounting is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (sections 4.1 and 4.2): what each operator saves, and how tensor and sequence
parallelism cut it. It differs from their s·b·h·(34/t + 5·a·s/(h·t)) bytes where our layers do:
attention is fused and keeps no scores, there is no dropout, keys and values may have fewer heads
than queries, feed-forward networks may be gated, and micro-batches are packed, so that it is tokens
that are counted. How many micro-batches are in flight is section 4.2.3: as many as there are stages
behind, and (P-1)/(P·m) more for the interleaved schedule of m chunks (Narayanan et al. 2021).
"""

import math
from dataclasses import dataclass

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, stage_layers
from aligner.placement.roles import Device
from aligner.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig

FP32 = 4
_CPU_BLOCK = 1 << 21
"""Logits that a CPU works on at a time: `megatron/logprobs.py`."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer on one rank. Its properties are bytes a token of the rank's micro-batches."""

    shape: ModelShape
    layout: ParallelConfig
    device: Device
    row: int
    """Tokens of the longest sequence: as long are the rows that attention computes on."""
    tokens: int
    """Of a micro-batch, on one context rank."""

    @property
    def input(self) -> float:
        """The residual stream, all that recompute=full keeps."""
        return self.device.itemsize * self._stream

    @property
    def outside(self) -> float:
        """All but what the attention core keeps, but with its inputs: what recompute=selective
        keeps."""
        norm_inputs = 1 if self.shape.parallel_residual else 2
        # Between a feed-forward network's matrices lie what is activated and what the second takes.
        dense = self.device.itemsize * self._activated / self.layout.tensor
        network = self._experts if self.shape.num_experts else dense
        attended = self.device.itemsize * self._heads[0]
        return (
            (norm_inputs + 2) * self.input
            + self.core_inputs
            + self._normed_heads
            + attended
            + network
        )

    @property
    def core_inputs(self) -> float:
        """Queries, keys and values as one matrix gives them; queries once more where they do not
        lie in one piece there."""
        queries, keys = self._heads
        apart = self.shape.num_kv_heads > self.layout.tensor and not self.device.gpus
        again = queries + keys if self.shape.qk_norm else queries if apart else 0
        return self.device.itemsize * (queries + 2 * keys + again)

    @property
    def core(self) -> float:
        """Rotated queries and keys, and values as they came; over rows of a sequence each, these
        rows and the result too."""
        (queries, keys), everywhere = self._heads, self.layout.context
        if everywhere > 1:  # keys and values of all context ranks
            numbers = queries + 2 * keys * everywhere
        else:
            numbers = (
                queries + 2 * keys + (queries + keys if self.shape.position == "rotary" else 0)
            )
        if not self._over_trees:
            numbers += 2 * queries + 2 * keys * everywhere + self._mask
        return self.device.itemsize * numbers + FP32 * self.shape.num_heads / self.layout.tensor

    @property
    def _over_trees(self) -> bool:
        """As `megatron/runner.py` has it."""
        shape = self.shape
        return (
            not self.device.gpus
            and self.layout.context == 1
            and shape.sliding_window is None
            and not shape.num_experts
        )

    @property
    def _stream(self) -> float:
        return self.shape.hidden_size / (self.layout.tensor if self.layout.sequence else 1)

    @property
    def _heads(self) -> tuple[float, float]:
        """Numbers of the rank's queries, and of its keys; values are as many."""
        width = self.shape.head_dim / self.layout.tensor
        return self.shape.num_heads * width, self.shape.num_kv_heads * width

    @property
    def _normed_heads(self) -> float:
        """What norms of queries and keys keep."""
        queries, keys = self._heads
        return self.device.itemsize * (queries + keys) if self.shape.qk_norm else 0

    @property
    def _mask(self) -> float:
        """Numbers: context ranks tell each query which keys it sees; a window is one mask for all
        rows of a micro-batch."""
        if self.layout.context > 1:
            return self.row
        window = self.shape.sliding_window
        return self.row**2 / self.tokens if window is not None and window < self.row else 0

    @property
    def _activated(self) -> int:
        """Numbers. Gate and up are two; on GPUs the activated gate is kept too."""
        fused = (
            self.shape.activation == "silu" and not self.shape.linear_bias and not self.device.gpus
        )
        parts = 2 if not self.shape.gated else 3 if fused else 4
        return parts * self.shape.ffn_hidden_size

    @property
    def _experts(self) -> float:
        """A copy of the token for each of its experts, and what lies inside these, which are taken
        to be used evenly."""
        inside = self.layout.expert_tensor_size
        copies = self.shape.experts_per_token * inside / self.layout.tensor
        weighted = self.shape.ffn_hidden_size if self.device.gpus else 0
        numbers = self.shape.hidden_size + (self._activated + weighted) / inside
        choice = (FP32 + 1) * self.shape.num_experts + 4 * FP32 * self.shape.experts_per_token
        return self.device.itemsize * copies * numbers + choice / self.layout.tensor


@dataclass(frozen=True)
class Load:
    """How many tokens a model is given at a time."""

    micro_batch: int
    """Of a micro-batch, on all context ranks together."""
    total: int
    """Of all micro-batches that a data rank has in one update."""
    longest: int
    """Of a sequence."""


@dataclass(frozen=True)
class Activations:
    """Bytes on a device at the fullest moment of an update."""

    saved: int
    """What autograd keeps, of all micro-batches in flight."""
    outputs: int
    """What the schedule keeps of what went to the next stage."""
    work: int
    """Of the operation that needs the most beside them."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.saved + self.outputs + self.work


@dataclass(frozen=True)
class Stage:
    """A pipeline stage of a model, with its load."""

    shape: ModelShape
    head: Head
    settings: MegatronModelConfig
    stage: int
    load: Load
    device: Device

    def training(self) -> Activations:
        """Of an update."""
        assert isinstance(self.settings, TrainedModelConfig)
        layer, recompute = self._layer, self.settings.recompute
        in_flight, again = self._tokens_in_flight, 0.0
        whole = layer.outside - layer.core_inputs + layer.core
        kept = {"none": whole, "selective": layer.outside, "full": layer.input}
        if recompute != "none":  # what is computed anew is there for one layer of one micro-batch
            again = self._tokens * (whole - layer.input if recompute == "full" else layer.core)
        saved = (
            in_flight
            * kept[recompute]
            * sum(map(len, stage_layers(self.shape.num_layers, self._layout, self.stage)))
        )
        work, sent = self._backward_work, self._layout.virtual_pipeline
        if self.stage == 0:
            work = max(work, self._embedding * self.device.itemsize)  # its gradient is made whole
        if self._is_last:
            # The head's part is gone when the first layer is computed anew.
            again, work, sent = max(again, self._head_kept), max(work, self._head_work), sent - 1
        return Activations(int(saved + again), int(in_flight * layer.input * sent), int(work))

    def scoring(self) -> int:
        """Of a forward pass without gradients."""
        work = forward_work(self.shape, self._layout.tensor, self._tokens, self.device.itemsize)
        if self._is_last and self.head == "vocabulary":
            work = max(work, self._hidden + self._logits * (FP32 + self.device.itemsize))
        return int(work)

    @property
    def _layout(self) -> ParallelConfig:
        return self.settings.parallel

    @property
    def _is_last(self) -> bool:
        return self.stage == self._layout.pipeline - 1

    @property
    def _tokens(self) -> int:
        """Of a micro-batch, on one context rank."""
        return math.ceil(min(self.load.micro_batch, self.load.total) / self._layout.context)

    @property
    def _tokens_in_flight(self) -> int:
        """Of all micro-batches whose backward pass is still to come, counted by whole stages of
        layers."""
        after, chunks = self._layout.pipeline - self.stage - 1, self._layout.virtual_pipeline
        held = after + 1.0
        if chunks > 1:
            held = (2 * after + (chunks - 1) * self._layout.pipeline + 1) / chunks
        return math.ceil(min(held * self.load.micro_batch, self.load.total) / self._layout.context)

    @property
    def _layer(self) -> Layer:
        return Layer(self.shape, self._layout, self.device, self.load.longest, self._tokens)

    @property
    def _hidden(self) -> float:
        """Bytes of whole hidden states of a micro-batch."""
        return self._tokens * self.device.itemsize * self.shape.hidden_size

    @property
    def _embedding(self) -> float:
        """Numbers of the rank's part of the vocabulary's table."""
        return self.shape.vocab_size * self.shape.hidden_size / self._layout.tensor

    @property
    def _logits(self) -> float:
        """Numbers of a chunk of logits."""
        chunk = min(self._tokens, getattr(self.settings, "logprob_chunk_tokens", self._tokens))
        return chunk * self.shape.vocab_size / self._layout.tensor

    @property
    def _head_kept(self) -> float:
        """Bytes that the last norm and the head keep: the states that are projected, and logits of
        the last chunk."""
        norm = self._tokens * self._layer.input
        if self.head == "scalar":
            return norm + self._tokens * self._layer.input
        return norm + self._hidden + FP32 * self._logits

    @property
    def _head_work(self) -> float:
        """Gradients of the states and, in 16 bits, a chunk's of the projection; and the entropy's
        part of the logits."""
        if self.head == "scalar":
            return self._hidden
        narrow = self.device.itemsize if self.device.itemsize < FP32 else 0
        logits = self._logits if self.device.gpus else min(self._logits, _CPU_BLOCK)
        return self._hidden + self._embedding * narrow + logits * (FP32 + narrow)

    @property
    def _backward_work(self) -> float:
        """Gradients on both sides of an activation function, a matrix's input, gathered, and its
        gradient."""
        inside = _feed_forward(self.shape) / self._layout.tensor
        cut = self._layout.expert_tensor_size if self.shape.num_experts else self._layout.tensor
        matrix = (
            self.shape.hidden_size
            * (2 if self.shape.gated else 1)
            * self.shape.ffn_hidden_size
            / cut
        )
        return self.device.itemsize * (
            self._tokens * (2 * self.shape.hidden_size + 1.5 * inside) + matrix
        )


def forward_work(shape: ModelShape, tensor: int, tokens: int, itemsize: int) -> float:
    """Bytes of a layer's pass without gradients: residual stream, a norm's output, and both sides
    of the activation."""
    return tokens * itemsize * (4 * shape.hidden_size + 2 * _feed_forward(shape) / tensor)


def _feed_forward(shape: ModelShape) -> int:
    """Numbers a token behind the first matrix of a feed-forward network, or of all the token's
    experts'."""
    return (2 if shape.gated else 1) * shape.ffn_hidden_size * max(1, shape.experts_per_token)
