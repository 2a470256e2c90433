"""Matrices in eight bits a number: blocks of 32 with a power of two each (OCP Microscaling Formats
1.0, MXFP8 and MXINT8)."""

from typing import Literal

import torch
from torch import Tensor

from aligner.models.weight_blocks import BLOCK

Format = Literal["mxfp8", "mxint8"]
_NOT_A_NUMBER = 255
"""The scale of a block in which something is not finite."""
_BIAS = 127
_LARGEST_EXPONENT = {"mxfp8": 8, "mxint8": 0}
"""Of an element's power of two."""
_FP8_MAX = 448.0


def quantized_width(width: int) -> int:
    """Bytes of a quantized row of so many numbers: one each, and one for the scale of each
    block."""
    return width + -(-width // BLOCK)


def quantize(rows: Tensor, kind: Format) -> Tensor:
    """uint8 [R, quantized_width(W)] for numbers [R, W]: each row's elements, then its blocks'
    scales.

    A block's scale is two to the power of floor(log2 of its largest magnitude) less the format's
    own largest exponent (section 6.3 there), stored with a bias of 127; elements are rounded to the
    nearest, ties to even, and saturate. A block in which something is not finite becomes one of
    NaN.
    """
    width = rows.shape[1]
    blocks = torch.nn.functional.pad(rows.float(), (0, -width % BLOCK)).view(len(rows), -1, BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = (torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT[kind]).clamp(
        1 - _BIAS, _BIAS - 1
    )
    scaled = blocks * _power_of_two(-exponents)[..., None]
    if kind == "mxfp8":
        elements = scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        elements = (scaled * 64).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    scales = torch.where(largest.isfinite(), exponents + _BIAS, _NOT_A_NUMBER).to(torch.uint8)
    return torch.cat((elements.flatten(1)[:, :width], scales), dim=1)


def dequantize(packed: Tensor, width: int, kind: Format, dtype: torch.dtype) -> Tensor:
    """Numbers [R, `width`] of what `quantize` gave; exact in bfloat16 and float32."""
    elements, scales = packed[:, :width].contiguous(), packed[:, width:].int()
    numbers = (
        elements.view(torch.float8_e4m3fn).float()
        if kind == "mxfp8"
        else elements.view(torch.int8).float() / 64
    )
    factors = torch.where(scales == _NOT_A_NUMBER, torch.nan, _power_of_two(scales - _BIAS))
    blocks = (
        torch.nn.functional.pad(numbers, (0, -width % BLOCK)).view(len(packed), -1, BLOCK)
        * factors[..., None]
    )
    return blocks.flatten(1)[:, :width].to(dtype)


def _power_of_two(exponents: Tensor) -> Tensor:
    """float32; exact, of exponents from -126 to 127."""
    return ((exponents.int() + _BIAS) << 23).view(torch.float32)
