"""Transfer of weights that stay in float32 when all others are sent with 16 bits per element.

These are the weights that are not trained: correction biases of routers, whose differences are
small compared with their values. Their bits are sent as twice as many elements of 16 bits, so that
plans, messages and checksums need no second data type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aligner.models.weight_slices import TensorSpec


def widen_specs(table: Sequence[TensorSpec], itemsize: int) -> tuple[TensorSpec, ...]:
    """Return a weight table whose float32 weights have the sizes that they have in a transfer.

    Args:
        table: The model's weight table.
        itemsize: Bytes per element during the transfer.
    """
    factor = torch.float32.itemsize // itemsize
    return tuple(
        spec
        if spec.is_trained
        else replace(spec, shape=(*spec.shape[:-1], factor * spec.shape[-1]))
        for spec in table
    )


def view_bits(
    tensor: Tensor, name: str, specs: Mapping[str, TensorSpec], dtype: torch.dtype
) -> Tensor:
    """Return a weight as the elements that are sent: the bits of a float32 weight, or the weight.

    Args:
        tensor: A slice of the weight, or its bits.
        name: Name of the weight.
        specs: The weights of the transfer by name.
        dtype: Data type of the elements during the transfer.
    """
    if specs[name].is_trained or tensor.dtype != torch.float32:
        return tensor
    return tensor.view(dtype)
