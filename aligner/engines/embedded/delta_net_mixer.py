"""Gated delta net of the embedded engine's decoder.

As in attention, the decoding rows continue their states, and prompts start from a state of zeros.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from aligner.engines.embedded.matmuls import Matmuls
from aligner.models import delta_net
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table


class DeltaNetMixer:
    """Computes the gated delta nets of a model for this rank's heads."""

    def __init__(self, shape: ModelShape, tensor_parallel_size: int, matmuls: Matmuls) -> None:
        assert shape.delta_net is not None
        self._net = shape.delta_net
        self._epsilon = shape.norm_epsilon
        self._key_heads = self._net.key_heads // tensor_parallel_size
        self._channels = self._net.channels // tensor_parallel_size
        self._matmuls = matmuls
        # Some checkpoints interleave the projections by key head. The engine keeps the order of the
        # checkpoint's file.
        self._is_interleaved = any(
            "in_proj_qkvz" in spec.parameter and spec.part == "whole"
            for spec in weight_table(shape)
        )

    def mix_rows(
        self,
        x: Tensor,
        prefix: str,
        weights: Mapping[str, Tensor],
        rows: Tensor,
        history: Tensor,
        state: Tensor,
    ) -> Tensor:
        """Compute the outputs of one token of each decoding row, and update the rows' states.

        Args:
            x: Normalized inputs, [R, hidden].
            prefix: Prefix of the names of the layer's weights.
            weights: Weights of the decoder, by their names.
            rows: Rows of the states, int64 [R].
            history: Last inputs of the layer's convolution, [rows, width - 1, channels].
            state: States of the layer, [rows, H, K, V].

        Returns:
            The input of the output projection, [R, H * V].
        """
        channels, gate, beta, log_decay = self._project(x, prefix, weights)
        row_history = history[rows]
        convolved = delta_net.convolve(
            channels[:, None], weights[prefix + "conv_weight"], row_history
        )
        history[rows] = torch.cat((row_history, channels[:, None]), 1)[:, 1:]

        query, key, value = (part[:, 0] for part in delta_net.split_channels(convolved, self._net))
        output, state[rows] = delta_net.apply_step(query, key, value, beta, log_decay, state[rows])
        return self._finish(output, gate, prefix, weights)

    def mix_prompts(
        self,
        x: Tensor,
        prefix: str,
        weights: Mapping[str, Tensor],
        lengths: Tensor,
        max_length: int,
        token_indices: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the outputs of all tokens of prompts, and the states after the prompts.

        Args:
            x: Normalized inputs of the packed prompts, [N, hidden].
            prefix: Prefix of the names of the layer's weights.
            weights: Weights of the decoder, by their names.
            lengths: Number of tokens of each prompt, int64 [U].
            max_length: Number of tokens of the longest prompt, P.
            token_indices: Prompt and position of each token, int64 [N] each.

        Returns:
            The input of the output projection, [N, H * V]; the last inputs of the convolution of
            each prompt, [U, width - 1, channels]; the state after each prompt, [U, H, K, V].
        """
        channels, gate, beta, log_decay = self._project(x, prefix, weights)

        def pad(packed: Tensor) -> Tensor:
            # From [N, ...] to [U, P, ...]. Zeros behind a prompt mean beta 0 and a decay of 1,
            # which do not change its state.
            padded = packed.new_zeros(len(lengths), max_length, *packed.shape[1:])
            return padded.index_put_(token_indices, packed)

        rows = pad(channels)
        # Token t of a prompt is entry t + width - 1 behind the zeros before the prompt, so its last
        # width - 1 tokens begin at the entry of its length.
        history_length = self._net.conv_width - 1
        entries = lengths[:, None] + torch.arange(history_length, device=x.device)
        with_zeros = torch.nn.functional.pad(rows, (0, 0, history_length, 0))
        prompt_indices = torch.arange(len(lengths), device=x.device)[:, None]
        history = with_zeros[prompt_indices, entries]

        convolved = delta_net.convolve(rows, weights[prefix + "conv_weight"])
        query, key, value = delta_net.split_channels(convolved, self._net)
        output, state = delta_net.apply_chunked_rule(query, key, value, pad(beta), pad(log_decay))
        assert state is not None
        return self._finish(output[token_indices], gate, prefix, weights), history, state

    def _project(
        self, x: Tensor, prefix: str, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the convolution and the rule for x [N, hidden].

        Returns:
            The channels of the convolution [N, channels], the output gates [N, H, V], and the
            strengths of the corrections and the logarithms of the decays, [N, H] each.
        """
        net = self._net
        values_per_key = net.value_heads // net.key_heads
        projected = self._matmuls.linear(x, prefix + "in_proj_qkvz")
        gates = self._matmuls.linear(x, prefix + "in_proj_ba")
        if self._is_interleaved:
            value_width = values_per_key * net.value_dim
            groups = projected.unflatten(1, (self._key_heads, -1))
            *parts, gate = groups.split((net.key_dim, net.key_dim, value_width, value_width), -1)
            channels = torch.cat([part.flatten(1) for part in parts], 1)
            halves = gates.unflatten(1, (self._key_heads, -1)).split(values_per_key, -1)
            beta, decay = (half.flatten(1) for half in halves)
        else:
            channels, gate = projected.tensor_split((self._channels,), 1)
            beta, decay = gates.chunk(2, 1)
        strength, log_decay = delta_net.compute_gates(
            beta, decay, weights[prefix + "a_log"], weights[prefix + "dt_bias"]
        )
        gate = gate.reshape(len(x), -1, net.value_dim)
        return channels, gate, strength, log_decay

    def _finish(
        self, output: Tensor, gate: Tensor, prefix: str, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the gated norm of the rule's outputs [N, H, V], as [N, H * V]."""
        normed = delta_net.normalize_output(
            output, gate, weights[prefix + "norm_weight"], self._epsilon
        )
        return normed.flatten(1)
