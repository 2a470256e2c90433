"""Layer with a gated delta net, which replaces attention in megatron-core's layer specs.

megatron-core's own layer requires another package's kernels and rejects packed micro-batches.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from aligner.megatron.packing import PackedSequences, require_packed
from aligner.megatron.sharded_parameters import shard_first_dim
from aligner.models import delta_net
from aligner.models.shape import DeltaNet


class GatedDeltaNet(nn.Module):
    """Gated delta net over each sequence of a packed micro-batch.

    Each tensor rank has the same number of key heads, with all their value heads. The input
    projections interleave their outputs by key head: the query, the key, the values and the output
    gates; and the strengths of the corrections and the decays.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        net: DeltaNet,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        """Create the layer with uninitialized weights.

        Args:
            config: Configuration of the model.
            net: Dimensions of the delta net.
            layer_number: Ignored; megatron-core passes it.
            pg_collection: Process groups of the model.
        """
        super().__init__()
        self._net = net
        self._epsilon = config.layernorm_epsilon
        self._group = pg_collection.tp
        self._recomputes_core = config.recompute_granularity == "selective"
        ranks = config.tensor_model_parallel_size
        self._key_heads = net.key_heads // ranks
        value_width = net.value_heads * net.value_dim
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self._group,
        }
        self.in_proj_qkvz = ColumnParallelLinear(
            config.hidden_size, net.channels + value_width, gather_output=False, **options
        )
        self.in_proj_ba = ColumnParallelLinear(
            config.hidden_size, 2 * net.value_heads, gather_output=False, **options
        )
        self.out_proj = RowParallelLinear(
            value_width, config.hidden_size, input_is_parallel=True, **options
        )
        self.conv_weight = shard_first_dim(torch.empty(net.channels // ranks, 1, net.conv_width))
        self.dt_bias = shard_first_dim(torch.empty(net.value_heads // ranks))
        self.a_log = shard_first_dim(torch.empty(net.value_heads // ranks))
        self.norm_weight = nn.Parameter(torch.ones(net.value_dim))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output [T, 1, H], with megatron-core's (output, bias) convention.

        With sequence parallelism, the input and the output have T/TP tokens.

        Args:
            hidden_states: [T, 1, H].
            attention_mask: Ignored.
            packed_seq_params: Description of the packed micro-batch.

        Raises:
            TypeError: If `packed_seq_params` is not a PackedSequences.
        """
        packed = require_packed(packed_seq_params, "a gated delta net")
        channels, gate, beta, decay = self._project(hidden_states)
        apply_rule = partial(self._apply_rule, packed)
        if self._recomputes_core and self.training:
            output = tensor_parallel.checkpoint(apply_rule, False, channels, beta, decay)
        else:
            output = apply_rule(channels, beta, decay)

        # Each rank computes the part of the weight's gradient that its heads contribute.
        norm_weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._group)
        normed = delta_net.normalize_output(
            output, gate.reshape(output.shape), norm_weight, self._epsilon
        )
        return self.out_proj(normed.flatten(1)[:, None])[0], None

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the projections of the hidden states [T, 1, H] for this rank's heads.

        Returns:
            The inputs of the convolution [T, channels / TP], the output gates, and the projections
            for the strengths of the corrections and for the decays, [T, value heads / TP] each.
        """
        net = self._net
        values_per_key = net.value_heads // net.key_heads
        value_width = values_per_key * net.value_dim
        projected = self.in_proj_qkvz(hidden_states)[0]
        groups = projected.flatten(0, 1).unflatten(-1, (self._key_heads, -1))
        query, key, value, gate = groups.split(
            (net.key_dim, net.key_dim, value_width, value_width), -1
        )
        gates = self.in_proj_ba(hidden_states)[0].flatten(0, 1)
        beta, decay = gates.unflatten(-1, (self._key_heads, -1)).split(values_per_key, -1)
        # The order of the convolution's weights: all queries, all keys, all values.
        channels = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
        return channels, gate, beta.flatten(1), decay.flatten(1)

    def _apply_rule(
        self, packed: PackedSequences, channels: Tensor, beta: Tensor, decay: Tensor
    ) -> Tensor:
        """Return the outputs of the delta rule.

        Args:
            packed: Description of the packed micro-batch.
            channels: Inputs of the convolution, [T, channels / TP].
            beta: Projections for the strengths of the corrections, [T, value heads / TP].
            decay: Projections for the decays, [T, value heads / TP].

        Returns:
            float32 [T, value heads / TP, value dim].
        """
        convolved = delta_net.convolve(packed.to_query_rows(channels), self.conv_weight)
        query, key, value = delta_net.split_channels(convolved, self._net)
        strength, log_decay = delta_net.compute_gates(beta, decay, self.a_log, self.dt_bias)
        # Padding follows the tokens of a row, so it changes no token's output.
        output, _ = delta_net.apply_chunked_rule(
            query,
            key,
            value,
            packed.to_query_rows(strength),
            packed.to_query_rows(log_decay),
            needs_state=False,
        )
        return packed.from_query_rows(output)
