"""Which weights travel in blocks of eight bits a number (`engine.publish`), and whether layouts
leave the blocks whole."""

from collections.abc import Iterable, Iterator

from aligner.models.weight_slices import Slice, TensorSpec

BLOCK_FORMATS = ("mxfp8", "mxint8")
BLOCK = 32
"""Numbers, along a matrix's last dimension, that share a scale."""


def is_in_blocks(spec: TensorSpec) -> bool:
    """Whether a tensor is quantized: matrices of the layers are, but for those that choose
    experts."""
    return spec.layer is not None and len(spec.shape) == 2 and "router" not in spec.parameter


def block_problems(table: Iterable[TensorSpec], slices: Iterable[Slice]) -> Iterator[str]:
    """One line for each slice that begins or ends within a block."""
    specs = {spec.name: spec for spec in table if is_in_blocks(spec)}
    for piece in slices:
        spec = specs.get(piece.name)
        if spec is None or piece.axis != 1:
            continue
        if piece.start % BLOCK or (piece.stop % BLOCK and piece.stop < spec.shape[1]):
            yield (
                f"{spec.name} {spec.shape} is cut into columns {piece.start} to {piece.stop},"
                f" within a block of {BLOCK}"
            )
