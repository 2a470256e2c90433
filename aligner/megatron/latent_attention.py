"""Multi-head latent attention over packed micro-batches (DeepSeek-AI 2024, "DeepSeek-V2", 2.1).

The parameters have the names of megatron-core's `MLASelfAttention`, but the module is our own:

- Rotary positions are those of our packed micro-batches, with every kind of scaling.
- megatron-core's local layers split the projections to the latents over the tensor ranks. The
  gradient of the rotated key, which all heads share, is then that of each rank's heads alone. Here,
  every tensor rank holds these projections whole, as with transformer-engine. This also makes the
  gathers of sequence parallelism smaller: ranks exchange latents instead of hidden states.

Shapes: T is the number of tokens of a context rank, and S = T, or T/TP with sequence parallelism.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from aligner.megatron.linear_layers import ReplicatedLinear
from aligner.megatron.packing import PackedSequences, require_packed
from aligner.megatron.rotary_positions import apply_rotation
from aligner.models.shape import LatentAttention, Rope


class LatentSelfAttention(MegatronModule):
    """Multi-head latent attention, as the `self_attention` module of megatron-core's layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        latent: LatentAttention,
        rope: Rope | None,
        norm: type[nn.Module],
        core_attention: ModuleSpec,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        """Create the attention of a layer, without weights.

        Args:
            config: Configuration of the model.
            layer_number: Number of the layer, from 1.
            latent: Dimensions of the attention.
            rope: Rotary positions; None for a layer without them.
            norm: Class of the norms of the latents.
            core_attention: Spec of the attention between queries, keys and values. It must not
                rotate them.
            pg_collection: Process groups.
        """
        super().__init__(config)
        self._latent = latent
        self._rope = rope
        self._group = pg_collection.tp
        self._recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        heads = config.num_attention_heads
        query_size = heads * latent.head_dim
        if latent.q_lora_rank is None:
            self.linear_q_proj = self._build_column_parallel(config.hidden_size, query_size)
        else:
            self.linear_q_down_proj = ReplicatedLinear(
                config, config.hidden_size, latent.q_lora_rank
            )
            self.q_layernorm = norm(config, latent.q_lora_rank, eps=latent.norm_epsilon)
            self.linear_q_up_proj = self._build_column_parallel(latent.q_lora_rank, query_size)
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, latent.cached_dim)
        self.kv_layernorm = norm(config, latent.kv_lora_rank, eps=latent.norm_epsilon)
        self.linear_kv_up_proj = self._build_column_parallel(
            latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        )
        self.core_attention = build_module(core_attention, config=config, layer_number=layer_number)
        self.linear_proj = RowParallelLinear(
            heads * latent.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self._group,
        )

    def _build_column_parallel(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self._group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output [S, 1, H], with megatron-core's (output, bias) convention.

        With `recompute=selective`, the backward pass computes queries, keys, values and attention
        again, because they are many times larger than the latents.

        Args:
            hidden_states: [S, 1, H].
            attention_mask: Ignored.
            packed_seq_params: Description of the packed micro-batch.
            **_: Other arguments of megatron-core's attention, which are ignored.

        Raises:
            TypeError: If `packed_seq_params` is not a PackedSequences.
        """
        packed = require_packed(packed_seq_params, "latent attention")
        latent = self._latent
        query_latent = hidden_states
        if latent.q_lora_rank is not None:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        key_latent, shared_key = self.linear_kv_down_proj(hidden_states)[0].split(
            (latent.kv_lora_rank, latent.qk_rope_head_dim), -1
        )
        key_latent = self.kv_layernorm(key_latent)
        # Each tensor rank computes the shared key's gradient from its own heads. The backward pass
        # of both functions sums these gradients.
        if self.config.sequence_parallel:
            shared_key = gather_from_sequence_parallel_region(shared_key, group=self._group)
        else:
            shared_key = copy_to_tensor_model_parallel_region(shared_key, group=self._group)

        def attend(query_latent: Tensor, key_latent: Tensor, shared_key: Tensor) -> Tensor:
            """Call `_attend`; only tensors are arguments of a checkpointed function."""
            return self._attend(query_latent, key_latent, shared_key, packed)

        if self._recomputes and self.training:
            attended = tensor_parallel.checkpoint(
                attend, False, query_latent, key_latent, shared_key
            )
        else:
            attended = attend(query_latent, key_latent, shared_key)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _attend(
        self,
        query_latent: Tensor,
        key_latent: Tensor,
        shared_key: Tensor,
        packed: PackedSequences,
    ) -> Tensor:
        """Return the attention output of this rank's heads, [T, 1, heads / TP · v_head_dim].

        Args:
            query_latent: Normalized latent of the queries, or the hidden states, [S, 1, …].
            key_latent: Normalized latent of keys and values, [S, 1, kv_lora_rank].
            shared_key: Key that all heads share, before its rotation, [T, 1, qk_rope_head_dim].
            packed: Description of the packed micro-batch.
        """
        latent = self._latent
        tokens = len(shared_key)
        has_query_latent = latent.q_lora_rank is not None
        project = self.linear_q_up_proj if has_query_latent else self.linear_q_proj
        query = project(query_latent)[0].view(tokens, -1, latent.head_dim)
        keys_and_values = self.linear_kv_up_proj(key_latent)[0].view(
            tokens, -1, latent.qk_nope_head_dim + latent.v_head_dim
        )
        key, value = keys_and_values.split((latent.qk_nope_head_dim, latent.v_head_dim), -1)
        if self._rope is not None:
            query, rotated = query.split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1)
            size = latent.qk_rope_head_dim
            query = torch.cat((query, apply_rotation(rotated, self._rope, size, packed)), -1)
            shared_key = apply_rotation(shared_key, self._rope, size, packed)
        key = torch.cat((key, shared_key.expand(-1, key.shape[1], -1)), -1)
        # Fused kernels require values as long as keys.
        value = F.pad(value, (0, latent.head_dim - latent.v_head_dim))
        attended: Tensor = self.core_attention(query, key, value, None, packed_seq_params=packed)
        attended = attended.view(tokens, -1, latent.head_dim)[..., : latent.v_head_dim]
        return attended.flatten(1)[:, None]
