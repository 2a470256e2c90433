"""What one decoder layer keeps for its backward pass, a token at a time.

The accounting is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (sections
4.1 and 4.2): what each operator saves, and how tensor and sequence parallelism cut it. It differs from their
s·b·h·(34/t + 5·a·s/(h·t)) bytes where our layers do: attention is fused and keeps no scores, there is no dropout, keys and
values may have fewer heads than queries, feed-forward networks may be gated, and micro-batches are packed, so that it is
tokens that are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from aligner.models.shape import ModelShape
from aligner.placement.devices import Device
from aligner.schema import ParallelConfig

FP32 = 4


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
        """All but the attention core's part, which recompute=selective computes anew."""
        norm_inputs = 1 if self.shape.parallel_residual else 2
        network = self._experts if self.shape.num_experts else self.between
        return norm_inputs * self.norm + 2 * self.input + self._projections + network

    @property
    def core(self) -> float:
        """Queries, keys and values in rows of one sequence each, the result, its normalizers, and a mask if there is one."""
        queries, keys = self._heads
        numbers = 2 * queries + 2 * keys * self.layout.context + self._mask
        return self.device.itemsize * numbers + FP32 * self.shape.num_heads / self.layout.tensor

    @property
    def norm(self) -> float:
        """The input of a norm. torch's RMS norm on a CPU is made of several operators, which compute and keep fp32."""
        composite = self.shape.normalization == "rms" and not self.device.gpus
        return self._stream * (2 * FP32 if composite else self.device.itemsize)

    @property
    def between(self) -> float:
        """What lies between the two matrices of a feed-forward network: what is activated and what the second takes."""
        return self.device.itemsize * self._activated / self.layout.tensor

    @property
    def _stream(self) -> float:
        return self.shape.hidden_size / (self.layout.tensor if self.layout.sequence else 1)

    @property
    def _heads(self) -> tuple[float, float]:
        """Numbers of the rank's queries, and of its keys; values are as many."""
        width = self.shape.head_dim / self.layout.tensor
        return self.shape.num_heads * width, self.shape.num_kv_heads * width

    @property
    def _projections(self) -> float:
        """Queries, keys and values on their way to the attention core, and its result as the next matrix takes it."""
        (queries, keys), rotary = self._heads, self.shape.position == "rotary"
        fused = queries + 2 * keys
        if self.layout.context > 1:  # keys and values of all context ranks
            numbers = queries + 2 * keys * self.layout.context
        else:
            numbers = fused + (queries + keys if rotary else 0)
        if rotary:  # sine and cosine, for queries and for keys, on every tensor rank
            numbers += 4 * self.shape.head_dim * self.shape.rotary_fraction
        if self.shape.qk_norm:
            numbers += queries + (fused if self.layout.context > 1 else 0)
            numbers += 0 if self.device.gpus else queries + keys
        return self.device.itemsize * (numbers + queries)

    @property
    def _mask(self) -> float:
        """Numbers: context ranks tell each query which keys it sees; a window is one mask for all rows of a micro-batch."""
        if self.layout.context > 1:
            return self.row
        window = self.shape.sliding_window
        return self.row**2 / self.tokens if window is not None and window < self.row else 0

    @property
    def _activated(self) -> int:
        """Numbers. Gate and up are two; on GPUs the activated gate is kept too."""
        fused = self.shape.activation == "silu" and not self.shape.linear_bias and not self.device.gpus
        parts = 2 if not self.shape.gated else 3 if fused else 4
        return parts * self.shape.ffn_hidden_size

    @property
    def _experts(self) -> float:
        """A copy of the token for each of its experts, and what lies inside these, which are taken to be used evenly."""
        inside = self.layout.expert_tensor_size
        copies = self.shape.experts_per_token * inside / self.layout.tensor
        weighted = self.shape.ffn_hidden_size if self.device.gpus else 0
        numbers = self.shape.hidden_size + (self._activated + weighted) / inside
        choice = (FP32 + 1) * self.shape.num_experts + 4 * FP32 * self.shape.experts_per_token
        return self.device.itemsize * copies * numbers + choice / self.layout.tensor
