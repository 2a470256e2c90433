"""Errors of the trainer's and the engine's results, relative to the results of transformers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table

TOLERANCE = 1e-5
"""Largest error of a result; of a tensor, relative to its largest element."""
MAX_ROUNDING = 1e-3
"""Largest difference between float32 and float64 that counts as a rounding error. Other experts,
which float64 might choose, change results by more."""


@dataclass(frozen=True)
class Check:
    """One row of a proof: the largest error of a kind of result at a layout."""

    name: str
    error: float
    tolerance: float
    worst: str = ""
    """Name of the tensor with the largest error; empty if the result is not a set of tensors."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; false for NaN."""
        return self.error <= self.tolerance


def relative_error(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Return the largest difference, relative to the largest element of `scale`."""
    largest = scale.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found - expected).abs().max() / largest)


def choose_tolerance(rounding: float) -> float:
    """Return the tolerance of a result, from the rounding error of transformers.

    Two implementations in float32 differ by up to the sum of their rounding errors. The tolerance
    is therefore twice the rounding error of transformers, if that is above `TOLERANCE`.

    Args:
        rounding: Error of the result of transformers in float32, against float64; see
            `reference.measure_rounding`.
    """
    return max(TOLERANCE, 2 * rounding) if rounding <= MAX_ROUNDING else TOLERANCE


def may_be_rounding(errors: Iterable[float]) -> bool:
    """Return whether some errors are too large, and none is too large for a rounding error."""
    errors = list(errors)
    return any(error > TOLERANCE for error in errors) and all(
        error <= 2 * MAX_ROUNDING for error in errors
    )


def compute_tensor_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the relative error of each tensor."""
    return {name: relative_error(found[name], tensor, tensor) for name, tensor in expected.items()}


def compute_slice_errors(
    shape: ModelShape, parts: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the relative error of each tensor of a model's files over all ranks' slices.

    Args:
        shape: The model's shape.
        parts: For each rank, its slices and their values by the name of the weight.
        tensors: Expected tensors, by their names in the files. Weights that are not trained may be
            missing.

    Raises:
        ValueError: A tensor is in no rank's slices, or a slice has a wrong shape.
    """
    table = {spec.name: spec for spec in weight_table(shape)}
    errors: dict[str, float] = {}
    for part in parts:
        for name, (cut, found) in part.items():
            stored = table[name].stored_range
            whole = tensors[stored.name]
            expected = whole[stored.locate(table[name].shape)]
            if cut.axis is not None:
                expected = expected.narrow(cut.axis, cut.start, cut.stop - cut.start)
            if found.shape != expected.shape:
                raise ValueError(f"{name}: has shape {found.shape}, expected {expected.shape}")
            error = relative_error(torch.from_numpy(found), expected, whole)
            errors[stored.name] = max(errors.get(stored.name, 0.0), error)
    required = {
        spec.stored_range.name
        for spec in table.values()
        if spec.is_trained or spec.stored_range.name in tensors
    }
    if missing := required - errors.keys():
        raise ValueError(f"no rank has a slice of {', '.join(sorted(missing))}")
    return errors


def check_tensors(name: str, errors: Mapping[str, float], tolerances: Mapping[str, float]) -> Check:
    """Return the check of a set of tensors, with the name of the worst one.

    Args:
        name: Name of the check.
        errors: Relative error of each tensor.
        tolerances: Tolerance of each tensor.
    """
    # max of NaN would depend on the order
    worst = max(
        errors,
        key=lambda tensor: (
            math.inf if math.isnan(errors[tensor]) else errors[tensor] - tolerances[tensor]
        ),
    )
    return Check(name, errors[worst], tolerances[worst], worst)


def find_first_wrong_layer(
    found: Tensor, expected: Tensor, tolerance: float
) -> tuple[int, float] | None:
    """Return the first layer whose output deviates, and the error relative to its largest value.

    Args:
        found: Outputs of the layers [layers, B, S, H].
        expected: Outputs of the layers of transformers, of the same shape.
        tolerance: Largest relative error of an output that agrees.

    Returns:
        The index of the layer and its error; None if all layers agree.
    """
    for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        error = relative_error(ours, theirs, theirs)
        if not error <= tolerance:
            return layer, error
    return None
