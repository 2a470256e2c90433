"""What a pipeline stage holds while a model is trained, or only asked: what its layers keep, and what an operation needs.

How many micro-batches are in flight is Korthikanti et al. 2022, section 4.2.3: as many as there are stages behind, and
(P-1)/(P·m) more for the interleaved schedule of m chunks (Narayanan et al. 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, stage_layers
from aligner.placement.devices import Device
from aligner.placement.memory.layer import FP32, Layer
from aligner.schema import MegatronModelConfig, ParallelConfig, TrainedModelConfig

_CPU_BLOCK = 1 << 21
"""Logits that a CPU works on at a time: `megatron/logprobs.py`."""


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
        each = {"none": layer.outside + layer.core, "selective": layer.outside, "full": layer.input}[recompute]
        if recompute != "none":  # what is computed anew is there for one layer of one micro-batch
            again = self._tokens * (layer.core + (layer.outside - layer.input if recompute == "full" else 0))
        saved = in_flight * each * sum(map(len, stage_layers(self.shape.num_layers, self._layout, self.stage)))
        work, sent = self._backward_work, self._layout.virtual_pipeline
        if self._is_last:
            # The head's part is gone when the first layer is computed anew.
            again, work, sent = max(again, self._ending), max(work, self._head_work), sent - 1
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
        """Of all micro-batches whose backward pass is still to come, counted by whole stages of layers."""
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
    def _logits(self) -> float:
        """Numbers of a chunk of logits."""
        chunk = min(self._tokens, getattr(self.settings, "logprob_chunk_tokens", self._tokens))
        return chunk * self.shape.vocab_size / self._layout.tensor

    @property
    def _ending(self) -> float:
        """Bytes that the last norm and the head keep: the states that are projected, and logits of the last chunk."""
        norm = self._tokens * self._layer.norm
        if self.head == "scalar":
            return norm + self._tokens * self._layer.input
        return norm + self._hidden + FP32 * self._logits

    @property
    def _head_work(self) -> float:
        """Gradients of the states and of the projection, which is added up in fp32, and the entropy's part of the logits."""
        if self.head == "scalar":
            return self._hidden
        narrow = self.device.itemsize if self.device.itemsize < FP32 else 0
        weight = self.shape.vocab_size * self.shape.hidden_size / self._layout.tensor
        logits = self._logits if self.device.gpus else min(self._logits, _CPU_BLOCK)
        return self._hidden + (weight + logits) * (FP32 + narrow)

    @property
    def _backward_work(self) -> float:
        """Gradients on both sides of an activation function, a matrix's input, gathered, and its gradient."""
        inside = _feed_forward(self.shape) / self._layout.tensor
        cut = self._layout.expert_tensor_size if self.shape.num_experts else self._layout.tensor
        matrix = self.shape.hidden_size * (2 if self.shape.gated else 1) * self.shape.ffn_hidden_size / cut
        return self.device.itemsize * (self._tokens * (2 * self.shape.hidden_size + 1.5 * inside) + matrix)


def forward_work(shape: ModelShape, tensor: int, tokens: int, itemsize: int) -> float:
    """Bytes of a layer's pass without gradients: residual stream, a norm's output, and both sides of the activation."""
    return tokens * itemsize * (4 * shape.hidden_size + 2 * _feed_forward(shape) / tensor)


def _feed_forward(shape: ModelShape) -> int:
    """Numbers a token behind the first matrix of a feed-forward network, or of all the token's experts'."""
    return (2 if shape.gated else 1) * shape.ffn_hidden_size * max(1, shape.experts_per_token)
