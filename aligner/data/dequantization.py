"""Slices of quantized weights in safetensors files, as bf16 tensors.

`models/quantized_weights.py` describes the formats. Only the values and scales of the slice are
read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.models.quantized_weights import FP8_BLOCK, MXFP4_GROUP, StoredWeight

# Values of the 4-bit numbers, by their bits: sign, two bits of exponent, one bit of mantissa (Open
# Compute Project 2023, section 5.3.3).
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Exponent of a scale that is stored as 0 (section 5.4.1).
_EXPONENT_BIAS = 127


def read_range(
    stored: StoredWeight, open_slice: Callable[[str], Any], index: Sequence[int | slice]
) -> Tensor:
    """Return a range of a weight, dequantized if necessary.

    Args:
        stored: How the files store the weight.
        open_slice: Function that returns safetensors' lazy slice of a tensor by its name.
        index: Index of the range in the weight, with starts and stops.
    """
    if stored.method == "plain":
        tensor: Tensor = open_slice(stored.name)[tuple(index)]
        return tensor
    values, scales = map(open_slice, stored.names)
    if stored.method == "fp8":
        return _read_fp8(values, scales, index)
    expert, inputs, outputs = index
    if isinstance(expert, int):
        return _read_mxfp4(values, scales, expert, inputs, outputs)
    experts = range(expert.start, expert.stop)
    return torch.stack([_read_mxfp4(values, scales, each, inputs, outputs) for each in experts])


def _read_mxfp4(
    blocks: Any, scales: Any, expert: int, inputs: int | slice, outputs: int | slice
) -> Tensor:
    """Return a range of the matrix of an expert, bf16 [in, out].

    Args:
        blocks: Lazy slice of uint8 [E, out, in / 32, 16].
        scales: Lazy slice of uint8 [E, out, in / 32].
        expert: Index of the expert.
        inputs: Range of the inputs.
        outputs: Range of the outputs, possibly with a step.
    """
    assert isinstance(inputs, slice)
    # the groups that contain the range
    first = inputs.start // MXFP4_GROUP
    groups = slice(first, -(-inputs.stop // MXFP4_GROUP))
    packed: Tensor = blocks[expert, outputs, groups]
    exponents = scales[expert, outputs, groups].to(torch.int32) - _EXPONENT_BIAS
    magnitudes = torch.tensor(_FP4_VALUES)
    table = torch.cat([magnitudes, -magnitudes])
    # The first number of a byte has its low bits. [out, groups, 16, 2]
    numbers = torch.stack([packed & 15, packed >> 4], -1)
    values = table[numbers.int()].flatten(-2)
    # The products are exact in bf16, which has more bits of mantissa.
    scaled = torch.ldexp(values, exponents[..., None]).flatten(-2)
    offset = first * MXFP4_GROUP
    return scaled[:, inputs.start - offset : inputs.stop - offset].T.to(torch.bfloat16)


def _read_fp8(values: Any, factors: Any, index: Sequence[int | slice]) -> Tensor:
    """Return a range of a matrix, bf16 [out, in].

    Args:
        values: Lazy slice of 8-bit numbers [out, in].
        factors: Lazy slice of the factors of the blocks, [out / 128, in / 128].
        index: Ranges of the outputs and of the inputs.
    """
    tensor: Tensor = values[tuple(index)].float()
    scale: Tensor = factors[:, :].float()
    for axis, piece in enumerate(index):
        assert isinstance(piece, slice)
        indices = torch.arange(piece.start, piece.stop, piece.step or 1)
        scale = scale.index_select(axis, indices // FP8_BLOCK)
    return (tensor * scale).to(torch.bfloat16)
