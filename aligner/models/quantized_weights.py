"""How the files of quantized models store weights, by the names and shapes of their tensors.

Supported are two methods, whose weights `data/dequantization.py` reads in bf16:

- mxfp4, of gpt-oss: 4-bit numbers with one scale for 32 of them (Open Compute Project 2023, "OCP
  Microscaling Formats (MX) Specification", section 5). The weights of a layer's experts, [E, in,
  out], are stored as `<name>_blocks`, uint8 [E, out, in / 32, 16], with two numbers in a byte, and
  `<name>_scales`, uint8 [E, out, in / 32], the exponents.
- fp8, of DeepSeek-V3 and Qwen3: 8-bit numbers with one scale for a block of 128 x 128 (DeepSeek-AI
  2024, "DeepSeek-V3 Technical Report", section 3.3). A weight [out, in] is stored as `<name>` and
  `<name>_scale_inv`, the factors of the blocks.

The module reads no files and does not import torch.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aligner.errors import ConfigError

MXFP4_GROUP = 32
"""Number of values with a common scale in mxfp4."""
FP8_BLOCK = 128
"""Number of rows, and of columns, of a block with a common scale in fp8."""
METHODS = ("mxfp4", "fp8")
"""Supported values of `quant_method`."""

_BLOCKS = "_blocks"
_SCALES = "_scales"
_FACTORS = "_scale_inv"
# Supported dtypes of weights that are not quantized.
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredWeight:
    """Tensors of the files that store a weight, or several fused weights."""

    method: Literal["plain", "mxfp4", "fp8"]
    """Quantization method; "plain" for a tensor that is not quantized."""
    name: str
    """Name in the files, without a suffix."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors: that of the values, and that of the scales if there are any."""
        if self.method == "mxfp4":
            return self.name + _BLOCKS, self.name + _SCALES
        if self.method == "fp8":
            return self.name, self.name + _FACTORS
        return (self.name,)

    def expect_tensors(
        self, shape: Sequence[int]
    ) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Return the shape and the allowed dtypes of each tensor, by its name.

        Args:
            shape: Shape of the weight.
        """
        if self.method == "plain":
            return {self.name: (tuple(shape), _FLOATS)}
        values, scales = self.names
        if self.method == "fp8":
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            return {values: (tuple(shape), ("F8_E4M3",)), scales: (blocks, ("F32", "BF16"))}
        experts, inputs, outputs = shape
        groups = (experts, outputs, inputs // MXFP4_GROUP)
        return {values: ((*groups, MXFP4_GROUP // 2), ("U8",)), scales: (groups, ("U8",))}


def find_stored_weight(name: str, shape: Sequence[int], files: Container[str]) -> StoredWeight:
    """Return how the files of a directory store a weight.

    Args:
        name: Hugging Face name of the tensor.
        shape: Shape of the tensor if it is not quantized.
        files: Names of all tensors of the files.
    """
    plain = name_in_files(name, files)
    if plain in files:
        is_scaled = len(shape) == 2 and plain + _FACTORS in files
        return StoredWeight("fp8" if is_scaled else "plain", plain)
    blocks = name_in_files(name + _BLOCKS, files)
    if len(shape) == 3 and blocks in files:
        return StoredWeight("mxfp4", blocks.removesuffix(_BLOCKS))
    return StoredWeight("plain", plain)


def name_in_files(name: str, files: Container[str]) -> str:
    """Return the name of a tensor in the files of a directory.

    Checkpoints of the base model without a head lack the first component of the name, such as
    `transformer.`.
    """
    bare = name.partition(".")[2]
    return bare if name not in files and bare in files else name


def check_quantization(config: Mapping[str, Any], origin: str) -> None:
    """Raise ConfigError if a config.json asks for a quantization that is not supported."""
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if value is None:
            continue
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        if key == "compression_config" or method not in METHODS:
            raise ConfigError(
                f"{origin}: {key} with quant_method={method!r}: is not supported; supported:"
                f" {', '.join(METHODS)}, and weights in float32, bfloat16 or float16; set a"
                " directory with such weights"
            )
        size = value.get("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
        if method == "fp8" and size != [FP8_BLOCK, FP8_BLOCK]:
            raise ConfigError(
                f"{origin}: {key}: weight_block_size={size!r} is not supported; supported:"
                f" {[FP8_BLOCK, FP8_BLOCK]}"
            )


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model whose weights have been dequantized."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
