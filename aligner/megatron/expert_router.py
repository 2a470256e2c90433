"""Choice of the experts of each token, with replay of the routing that an engine has recorded."""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from aligner.megatron.decoder_layers import DecoderLayer
from aligner.megatron.packing import PackedSequences, RoutingReplay
from aligner.megatron.sharded_parameters import mark_for_sequence_parallelism
from aligner.models.expert_choice import choose_experts, compute_scores, compute_weights
from aligner.models.shape import Experts


class ExpertRouter(TopKRouter):
    """Router that chooses and weighs experts as the embedded engine and transformers do.

    megatron-core's own functions normalize all sigmoid scores, and rank groups of experts by
    another number of scores than some models.
    """

    def __init__(self, *arguments: Any, experts: Experts, **keywords: Any) -> None:
        """Create a router.

        Args:
            *arguments: Arguments of megatron-core's router.
            experts: The mixture of experts.
            **keywords: Keyword arguments of megatron-core's router.
        """
        super().__init__(*arguments, **keywords)
        self._experts = experts
        if experts.has_correction_bias:
            # A parameter, unlike megatron-core's buffer of this name, has a place in the weight
            # table. Without gradients it gets neither a gradient buffer nor an optimizer state.
            self.expert_bias = nn.Parameter(torch.zeros(experts.count), requires_grad=False)
        if experts.has_router_bias:
            self.bias = nn.Parameter(torch.zeros(experts.count))
            mark_for_sequence_parallelism(self.bias, is_enabled=self.config.sequence_parallel)
        self.routing_replay: RoutingReplay | None = None
        """Recorded routing of the micro-batch of the current pass."""
        self.routing_index = 0
        """Index of the layer among the layers with experts."""

    def keep_bias_in_float32(self) -> None:
        """Convert the correction bias to float32.

        The differences of its values are small compared with the values.
        """
        if self.expert_bias is not None:
            self.expert_bias.data = self.expert_bias.data.float()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts, and which experts each token has.

        Args:
            logits: Output of the router's matmul, [T, 1, experts].
            padding_mask: Ignored.

        Returns:
            float32 [T, experts], zero for other experts than the token's, and bool [T, experts].
        """
        scores = compute_scores(logits.flatten(0, 1), self._experts)
        expert_ids = choose_experts(scores, self._experts, self.expert_bias)
        if self.routing_replay is not None:
            expert_ids = self._replay(expert_ids, self.routing_replay)
        weights = compute_weights(scores, expert_ids, self._experts)
        return (
            torch.zeros_like(scores).scatter(1, expert_ids, weights),
            torch.zeros_like(scores, dtype=torch.bool).scatter(1, expert_ids, True),
        )

    def _replay(self, expert_ids: Tensor, routing_replay: RoutingReplay) -> Tensor:
        """Return the expert ids, int64 [T, K], with recorded ids where they exist.

        The method also counts the tokens for which the router has chosen other experts.
        """
        token_index = routing_replay.token_index
        recorded_ids = routing_replay.experts[:, self.routing_index].to(expert_ids)
        router_ids = expert_ids[token_index]
        # Only the set of experts matters. Keeping the router's order of an equal set also keeps the
        # rounding of the sum of their weights.
        is_mismatch = (router_ids.sort(-1).values != recorded_ids.sort(-1).values).any(-1)
        routing_replay.mismatch_counts.append(is_mismatch.sum())
        replayed = torch.where(is_mismatch[:, None], recorded_ids, router_ids)
        return expert_ids.index_copy(0, token_index, replayed)


class ExpertsLayer(DecoderLayer):
    """Layer with experts that replays the routing that a micro-batch contains.

    The micro-batch is an argument of every forward pass, including passes that recompute
    activations, so the layer keeps no state between passes. megatron-core's RouterReplay keeps
    recorded routing in global lists of the process. Micro-batches in flight, several models in a
    process, and passes without a backward pass would mix up their entries.
    """

    def __init__(self, *arguments: Any, routing_index: int, **keywords: Any) -> None:
        """Create a layer.

        Args:
            *arguments: Arguments of megatron-core's layer.
            routing_index: Index of the layer among the layers with experts.
            **keywords: Keyword arguments of megatron-core's layer.
        """
        super().__init__(*arguments, **keywords)
        self.mlp.router.routing_index = routing_index

    def forward(
        self,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [T, 1, H], with megatron-core's (output, context) convention.

        Args:
            hidden_states: [T, 1, H].
            packed_seq_params: The micro-batch, with recorded routing or without.
            **kwargs: Other arguments of megatron-core's layer.
        """
        if packed_seq_params is not None:
            self.mlp.router.routing_replay = packed_seq_params.routing_replay
        try:
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, packed_seq_params=packed_seq_params, **kwargs
            )
            return output
        finally:
            self.mlp.router.routing_replay = None
