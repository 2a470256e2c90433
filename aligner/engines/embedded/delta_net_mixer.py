"""Gated delta net of a layer (Yang et al. 2024, "Gated Delta Networks").

As in attention, the decoding rows continue their states, and prompts start from a state of zeros.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded.delta_net_states import DeltaNetStates
from aligner.engines.embedded.forward_context import ForwardContext, concatenate_tokens
from aligner.engines.embedded.matmuls import Matmuls
from aligner.models import delta_net
from aligner.models.shape import DeltaNet, ModelShape
from aligner.models.weight_slices import weight_table


class DeltaNetMixer:
    """Computes the gated delta nets of a model for this rank's heads."""

    def __init__(
        self,
        shape: ModelShape,
        net: DeltaNet,
        weights: Mapping[str, Tensor],
        tensor_parallel_size: int,
        matmuls: Matmuls,
    ) -> None:
        """Create the delta nets of a model.

        Args:
            shape: Dimensions of the model.
            net: Dimensions of the delta nets.
            weights: The decoder's current weights, by their names.
            tensor_parallel_size: Number of tensor-parallel ranks.
            matmuls: Matmuls of the decoder.
        """
        self._net = net
        self._epsilon = shape.norm_epsilon
        self._key_heads = net.key_heads // tensor_parallel_size
        self._channels = net.channels // tensor_parallel_size
        self._weights = weights
        self._matmuls = matmuls
        # Some checkpoints interleave the projections by key head. The engine keeps the order of the
        # checkpoint's file.
        self._is_interleaved = any(
            "in_proj_qkvz" in spec.parameter and spec.part == "whole"
            for spec in weight_table(shape)
        )

    def mix(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute a layer's delta net of x [N, hidden], with the output projection. Collective.

        The decoding rows update their states, and prompts leave theirs in their rows of the states.

        Returns:
            [N, hidden].
        """
        assert context.step.tokens_per_row == 1, "a state of a delta net advances by one token"
        states = context.cache.delta_nets
        assert states is not None
        prefix = f"decoder.layers.{layer}.self_attention."
        index = context.cache.layer_indices[layer]
        rows = context.num_decoding_tokens
        parts = []
        if rows:
            state_rows = context.step.state_rows
            assert state_rows is not None
            parts.append(self._decode(x[:rows], prefix, state_rows, states, index))
        if context.step.prompts is not None:
            parts.append(self._prefill(x[rows:], prefix, context, states, index))
        mixed = concatenate_tokens(parts)
        return self._matmuls.row_parallel_linear(mixed, prefix + "out_proj")

    def _decode(
        self, x: Tensor, prefix: str, rows: Tensor, states: DeltaNetStates, index: int
    ) -> Tensor:
        """Compute the outputs of one token of each decoding row, and update the rows' states.

        Args:
            x: Normalized inputs, [R, hidden].
            prefix: Prefix of the names of the layer's weights.
            rows: Rows of the states, int64 [R].
            states: States of all layers.
            index: Index of the layer in `states`.

        Returns:
            The input of the output projection, [R, H * V].
        """
        history = states.histories[index]
        state = states.states[index]
        channels, gate, beta, log_decay = self._project(x, prefix)
        row_history = history[rows]
        convolved = delta_net.convolve(
            channels[:, None], self._weights[prefix + "conv_weight"], row_history
        )
        history[rows] = torch.cat((row_history, channels[:, None]), 1)[:, 1:]

        query, key, value = (part[:, 0] for part in delta_net.split_channels(convolved, self._net))
        output, state[rows] = delta_net.apply_step(query, key, value, beta, log_decay, state[rows])
        return self._normalize_output(output, gate, prefix)

    def _prefill(
        self, x: Tensor, prefix: str, context: ForwardContext, states: DeltaNetStates, index: int
    ) -> Tensor:
        """Compute the outputs of all tokens of the prompts, and write the states after them.

        Args:
            x: Normalized inputs of the packed prompts, [N, hidden].
            prefix: Prefix of the names of the layer's weights.
            context: Context of the forward pass.
            states: States of all layers.
            index: Index of the layer in `states`.

        Returns:
            The input of the output projection, [N, H * V].
        """
        prompts = context.step.prompts
        assert prompts is not None and context.prompt_token_indices is not None
        channels, gate, beta, log_decay = self._project(x, prefix)
        channel_rows = context.pad_prompts(channels)
        convolved = delta_net.convolve(channel_rows, self._weights[prefix + "conv_weight"])
        query, key, value = delta_net.split_channels(convolved, self._net)
        # Zeros after a prompt mean beta 0 and a decay of 1, which do not change its state.
        output, state = delta_net.apply_chunked_rule(
            query, key, value, context.pad_prompts(beta), context.pad_prompts(log_decay)
        )
        assert state is not None
        # Prompts that are only scored have no rows.
        if len(prompts.state_rows):
            history = self._select_history(channel_rows, prompts.lengths)
            states.histories[index, prompts.state_rows] = history[prompts.prompt_indices]
            states.states[index, prompts.state_rows] = state[prompts.prompt_indices]
        return self._normalize_output(output[context.prompt_token_indices], gate, prefix)

    def _select_history(self, channels: Tensor, lengths: Tensor) -> Tensor:
        """Return the last inputs of the convolution of each prompt.

        Args:
            channels: Inputs of the convolution, [U, P, channels].
            lengths: Number of tokens of each prompt, int64 [U].

        Returns:
            [U, width - 1, channels].
        """
        # With width - 1 zeros before the prompt, token t is entry t + width - 1. The last width - 1
        # tokens of a prompt of n tokens therefore begin at entry n.
        history_length = self._net.conv_width - 1
        entries = lengths[:, None] + torch.arange(history_length, device=channels.device)
        with_zeros = F.pad(channels, (0, 0, history_length, 0))
        prompt_indices = torch.arange(len(lengths), device=channels.device)[:, None]
        return with_zeros[prompt_indices, entries]

    def _project(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
            beta, decay, self._weights[prefix + "a_log"], self._weights[prefix + "dt_bias"]
        )
        gate = gate.reshape(len(x), -1, net.value_dim)
        return channels, gate, strength, log_decay

    def _normalize_output(self, output: Tensor, gate: Tensor, prefix: str) -> Tensor:
        """Return the gated norm of the rule's outputs [N, H, V], as [N, H * V]."""
        normed = delta_net.normalize_output(
            output, gate, self._weights[prefix + "norm_weight"], self._epsilon
        )
        return normed.flatten(1)
