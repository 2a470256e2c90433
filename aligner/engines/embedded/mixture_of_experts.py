"""Mixture of experts of a layer (Shazeer et al. 2017, "Outrageously Large Neural Networks")."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded.feed_forward import Activation
from aligner.engines.embedded.forward_context import ForwardContext
from aligner.engines.embedded.matmuls import Matmuls
from aligner.engines.embedded.tensor_parallel import TensorParallelRanks
from aligner.models.expert_choice import choose_experts, compute_scores, compute_weights
from aligner.models.shape import Experts


class MixtureOfExperts:
    """Computes the experts of the layers that have them.

    The experts are distributed over groups of ranks (expert parallelism). The ranks of a group
    split the intermediate dimension of each of their experts. An all-reduce over all ranks
    completes the sum.
    """

    def __init__(
        self,
        experts: Experts,
        weights: Mapping[str, Tensor],
        ranks: TensorParallelRanks,
        matmuls: Matmuls,
        activation: Activation,
        expert_parallel_size: int = 1,
    ) -> None:
        """Create the experts of a model.

        Args:
            experts: Dimensions and parts of the mixture of experts.
            weights: The decoder's current weights, by their names.
            ranks: Tensor-parallel ranks of the replica.
            matmuls: Matmuls of the decoder.
            activation: Activation function of the experts.
            expert_parallel_size: Number of groups of ranks; all experts of a layer are divided
                evenly between them.
        """
        self._experts = experts
        self._weights = weights
        self._ranks = ranks
        self._matmuls = matmuls
        self._activation = activation
        group, self._rank_in_group = divmod(ranks.rank, ranks.size // expert_parallel_size)
        self._rank_experts = experts.count // expert_parallel_size
        self._first_expert = group * self._rank_experts

    def apply(self, layer: int, x: Tensor, context: ForwardContext) -> Tensor:
        """Compute the weighted sum of the experts of each token of x [N, hidden]. Collective.

        The routing is appended to `Step.expert_routing`, unless this is None.
        """
        prefix = f"decoder.layers.{layer}.mlp."
        expert_ids, weights = self._route(x, prefix)
        expert_routing = context.step.expert_routing
        if expert_routing is not None:
            index_dtype = torch.uint8 if self._experts.count <= 256 else torch.int16
            expert_routing.append(expert_ids.to(index_dtype))

        output = torch.zeros_like(x)
        for index in range(self._rank_experts):
            self._add_expert(output, index, x, expert_ids, weights, prefix + "experts.")
        if self._experts.shared_size:
            output += self._apply_shared_experts(x, prefix + "shared_experts.")
        return self._ranks.all_reduce(output)

    def _route(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
        """Return the ids, int64 [N, K], and the weights, float32 [N, K], of the tokens' experts."""
        scores = compute_scores(self._matmuls.linear(x, prefix + "router"), self._experts)
        bias = self._weights.get(prefix + "router.expert_bias")
        expert_ids = choose_experts(scores, self._experts, bias)
        return expert_ids, compute_weights(scores, expert_ids, self._experts)

    def _add_expert(
        self,
        output: Tensor,
        index: int,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        prefix: str,
    ) -> None:
        """Add the weighted output of an expert to the output of its tokens, in place.

        Args:
            output: Sum of the experts' outputs, [N, hidden].
            index: Index of the expert among those of this rank.
            x: Input of the experts, [N, hidden].
            expert_ids: Ids of each token's experts, int64 [N, K].
            weights: Weights of each token's experts, float32 [N, K].
            prefix: Prefix of the names of the experts' weights.
        """
        # `slot` is the index of the expert among the K experts of a token; it selects the weight.
        token_indices, slot = (expert_ids == self._first_expert + index).nonzero(as_tuple=True)
        if not len(token_indices):
            return
        hidden = self._matmuls.expert_linear(x[token_indices], prefix + "linear_fc1", index)
        # The all-reduce sums the ranks' outputs, so one rank of the group adds the bias.
        expert_output = self._matmuls.expert_linear(
            self._activation.apply(hidden),
            prefix + "linear_fc2",
            index,
            with_bias=self._rank_in_group == 0,
        )
        expert_weights = weights[token_indices, slot, None].to(x.dtype)
        output.index_add_(0, token_indices, expert_output * expert_weights)

    def _apply_shared_experts(self, x: Tensor, prefix: str) -> Tensor:
        """Compute this rank's part of the shared experts' output, which the ranks have to sum.

        Source: Dai et al. 2024, "DeepSeekMoE", section 3.2.
        """
        hidden = self._matmuls.linear(x, prefix + "linear_fc1")
        output = self._matmuls.linear(self._activation.apply(hidden), prefix + "linear_fc2")
        if self._experts.has_shared_gate:
            output = output * F.linear(x, self._weights[prefix + "gate_weight"]).sigmoid()
        return output
