"""Linear layers that megatron-core lacks: biases in some layers only, and replicated layers."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from aligner.megatron.sharded_parameters import mark_for_sequence_parallelism


class BiasedColumnParallelLinear(ColumnParallelLinear):
    """megatron-core's column-parallel layer, with a bias whatever `add_bias_linear` is.

    megatron-core has one setting for the biases of all layers, but many models have only some.
    """

    def __init__(self, *arguments: Any, bias: bool, **keywords: Any) -> None:
        super().__init__(*arguments, bias=True, **keywords)


class BiasedRowParallelLinear(RowParallelLinear):
    """megatron-core's row-parallel layer, with a bias whatever `add_bias_linear` is."""

    def __init__(self, *arguments: Any, bias: bool, **keywords: Any) -> None:
        super().__init__(*arguments, bias=True, **keywords)


class BiasedExpertOutput(BiasedRowParallelLinear):
    """Second linear layer of an expert with biases, which one rank holds as a whole."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # No collective follows the layer. megatron-core adds the bias to the output in place, which
        # autograd does not allow for the output of a collective, even of one rank.
        self.explicit_expert_comm = True


class ReplicatedLinear(nn.Module):
    """Linear layer without a bias, which every tensor rank holds whole."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.sequence_parallel = config.sequence_parallel
        mark_for_sequence_parallelism(self.weight, is_enabled=config.sequence_parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the outputs [S, 1, out] of x [S, 1, in], with megatron-core's (output, bias)
        convention."""
        return F.linear(x, self.weight), None
