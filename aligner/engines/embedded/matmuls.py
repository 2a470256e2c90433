"""Matmuls with the model's weights.

On CPUs, the matmuls can use packed copies of the weights, which have the memory layout that oneDNN
reads.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.engines.embedded.tensor_parallel import TensorParallelRanks
from aligner.models import batch_invariant

# Minimum number of rows of a matmul with packed weights. With AVX-512, a matmul with a single row
# takes half the time with packed weights; without AVX-512 it takes longer.
_MIN_PACKED_ROWS = 1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2
# Number of rows for which weights are packed; packed weights work for any other number too.
_PACKED_FOR_ROWS = 256


class Matmuls:
    """Matmuls x @ weight.T + bias with the decoder's current weights.

    Weights are identified by their megatron-core names without `.weight` and `.bias`.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        ranks: TensorParallelRanks,
        *,
        exact: bool,
        packed: bool,
    ) -> None:
        """Create the matmuls of a decoder.

        Args:
            weights: The decoder's current weights, by their names.
            ranks: Tensor-parallel ranks of the replica.
            exact: Whether to use batch-invariant kernels (`engine.exact`); packed copies are then
                disabled.
            packed: Whether to multiply with packed copies on CPUs. A copy is made when its weight
                is first used.
        """
        self._weights = weights
        self._ranks = ranks
        self._unpacked_linear = batch_invariant.linear if exact else F.linear
        # The packed kernels are not batch-invariant.
        self._packed_dtypes = _packed_dtypes() if packed and not exact else ()
        self._packed_weights: dict[str, Tensor] = {}
        """Packed copies by the name of the layer."""

    def discard_packed_weights(self) -> None:
        """Discard the packed copies of the weights.

        Call this method whenever the values of the weights change.
        """
        self._packed_weights.clear()

    def linear(self, x: Tensor, name: str, *, with_bias: bool = True) -> Tensor:
        """Compute a linear layer, from x [N, inputs] to [N, outputs].

        Args:
            x: Inputs [N, inputs].
            name: Name of the layer's weights.
            with_bias: Whether to add the layer's bias, if it has one.
        """
        weight = self._weights[name + ".weight"]
        bias = self._weights.get(name + ".bias") if with_bias else None
        if (
            len(x) < _MIN_PACKED_ROWS
            or weight.device.type != "cpu"
            or weight.dtype not in self._packed_dtypes
        ):
            return self._unpacked_linear(x, weight, bias)

        packed_weight = self._packed_weights.get(name)
        if packed_weight is None:
            # Pack at first use: some weights, such as position embeddings, never reach a matmul.
            packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            self._packed_weights[name] = packed_weight
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")
        return output

    def row_parallel_linear(self, x: Tensor, name: str) -> Tensor:
        """Compute a linear layer whose inputs are split over the tensor-parallel ranks. Collective.

        Args:
            x: This rank's inputs, [N, inputs / TP].
            name: Name of the layer's weights.

        Returns:
            The complete outputs [N, outputs] on every rank.
        """
        if self._ranks.size == 1:
            return self.linear(x, name)
        # Each rank would add the bias; it is added once, after the all-reduce.
        total = self._ranks.all_reduce(self.linear(x, name, with_bias=False))
        bias = self._weights.get(name + ".bias")
        return total if bias is None else total + bias

    def expert_linear(self, x: Tensor, name: str, index: int, *, with_bias: bool = True) -> Tensor:
        """Compute a linear layer of one expert, from x [N, inputs] to [N, outputs].

        The weights of this rank's experts are stacked, [experts, outputs, inputs], and are never
        packed.

        Args:
            x: Inputs [N, inputs].
            name: Name of the stacked weights.
            index: Index of the expert among those of this rank.
            with_bias: Whether to add the expert's bias, if it has one.
        """
        biases = self._weights.get(name + ".bias") if with_bias else None
        bias = None if biases is None else biases[index]
        return self._unpacked_linear(x, self._weights[name + ".weight"][index], bias)


def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """Return the data types for which oneDNN supports packed weights on this machine.

    bfloat16 is included only if the processor has instructions for it.
    """
    if not torch.backends.mkldnn.is_available():
        return ()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)
