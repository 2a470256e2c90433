"""Attributes of parameters from which megatron-core reads how the tensor ranks divide them."""

from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn


def shard_first_dim(values: Tensor) -> nn.Parameter:
    """Return a parameter of which each tensor rank has a slice of the first dimension.

    Args:
        values: Initial values of this rank's slice.
    """
    parameter = nn.Parameter(values)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def mark_for_sequence_parallelism(parameter: nn.Parameter, *, is_enabled: bool) -> None:
    """Let megatron-core sum the gradients of a parameter that every tensor rank holds whole.

    With sequence parallelism, each tensor rank sees a part of the tokens. megatron-core's
    `finalize_model_grads` then sums the gradients of marked parameters over the tensor ranks.

    Args:
        parameter: Parameter of a module whose input is divided by sequence parallelism.
        is_enabled: Whether the model uses sequence parallelism.
    """
    parameter.sequence_parallel = is_enabled  # type: ignore[attr-defined]
