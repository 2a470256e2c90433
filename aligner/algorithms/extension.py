"""Lookup of the parts of an online algorithm.

Built-in parts are found by their names, and custom functions by `module:callable`. The result of a
custom function is checked on every call, so that a wrong shape or type is reported with the key
that names the function.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.advantages import ESTIMATORS, AdvantageEstimator
from aligner.algorithms.policy_losses import LOSSES, LossContext, OnlineLoss
from aligner.algorithms.selections import SELECTIONS, CustomSelection
from aligner.data.types import Experience, ScoredSamples, Stats
from aligner.errors import AlignerError, ConfigError
from aligner.schema import AlgorithmConfig
from aligner.user_code import import_object
from aligner.values import split_callable_name

_log = logging.getLogger(__name__)


def require_functions(settings: AlgorithmConfig) -> None:
    """Raise ConfigError if a function that the section `algorithm` names does not exist."""
    find_selection(settings.train_on)
    find_estimator(settings.advantage)
    find_loss(settings.loss)


def find_selection(name: str) -> CustomSelection | None:
    """Return the custom selection that `algorithm.train_on` names; None for a built-in selection.

    Raises:
        ConfigError: The function does not exist or cannot be imported.
    """
    # Built-in selections need only scores; the trainer applies them before it computes log-probs.
    if name in SELECTIONS:
        return None
    label, function = _import_function("train_on", name)

    def select(samples: ScoredSamples) -> Tensor:
        """Return the row indices that the function selects, int64, after checking them."""
        rows = _call_function(label, function, samples)
        count = len(samples.tokens)
        _require(
            label,
            isinstance(rows, Tensor) and rows.ndim == 1 and not rows.is_floating_point(),
            rows,
            "an integer tensor [N] of row indices",
        )
        allowed = f"distinct row indices from 0 to {count - 1}"
        _require(
            label,
            bool(((rows >= 0) & (rows < count)).all()) and len(rows.unique()) == len(rows),
            rows.tolist(),
            allowed,
        )
        return rows.long()

    return select


def find_estimator(name: str) -> AdvantageEstimator:
    """Return the advantage estimator that `algorithm.advantage` names.

    Raises:
        ConfigError: The function does not exist or cannot be imported.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    label, function = _import_function("advantage", name)

    def estimate(
        samples: ScoredSamples, settings: AlgorithmConfig
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the function's advantages, and its returns if a critic is trained, after checking
        their shapes."""
        result = _call_function(label, function, samples, settings)
        response_shape = samples.mask.shape[:1]
        token_shape = samples.mask.shape
        if samples.values is None:
            _require_tensor(
                label, "the advantages", result, (response_shape, token_shape), samples.mask
            )
            return result

        _require(
            label,
            isinstance(result, tuple) and len(result) == 2,
            result,
            "a tuple of advantages and returns, because a critic is trained",
        )
        _require_tensor(
            label, "the advantages", result[0], (response_shape, token_shape), samples.mask
        )
        _require_tensor(label, "the returns", result[1], (token_shape,), samples.mask)
        return result

    return estimate


def find_loss(name: str) -> OnlineLoss:
    """Return the loss that `algorithm.loss` names.

    Raises:
        ConfigError: The function does not exist or cannot be imported.
    """
    if name in LOSSES:
        return LOSSES[name]
    label, function = _import_function("loss", name)

    def loss(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
        """Return the function's loss and statistics, after checking their shapes."""
        result = _call_function(label, function, logprobs, rows, context)
        _require(
            label,
            isinstance(result, tuple) and len(result) == 2,
            result,
            "a tuple of the loss and a dict of statistics",
        )
        value, stats = result
        _require_tensor(label, "the loss", value, ((),))
        _require(
            label,
            value.requires_grad or not logprobs.requires_grad,
            value,
            "a differentiable loss",
        )
        _require(label, isinstance(stats, dict), stats, "a dict of statistics")
        for statistic, number in stats.items():
            _require_tensor(label, f"the statistic {statistic}", number, ((),))
        # Statistics must not keep the autograd graph of the loss alive.
        return value, {statistic: number.detach() for statistic, number in stats.items()}

    return loss


def _import_function(key: str, name: str) -> tuple[str, Callable[..., Any]]:
    """Return a custom function's label for messages, and the function itself.

    Args:
        key: Key of the section `algorithm`.
        name: Value of the key, `module:callable`.
    """
    label = f"algorithm.{key}={name}"
    location = split_callable_name(name)
    if location is None:
        raise ConfigError(f"{label}: must be a built-in name or module:callable")
    module, attribute = location
    try:
        function = import_object(module, attribute)
    except ConfigError as error:
        raise ConfigError(
            f"{label}: {error}; the module must be importable from the working directory or"
            f" PYTHONPATH, and must define {attribute!r}"
        ) from error
    if not callable(function):
        raise ConfigError(f"{label}: {attribute!r} must be callable, got {type(function).__name__}")
    return label, function


def _call_function(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a custom function; raise AlignerError if the function raises."""
    try:
        return function(*arguments)
    except Exception as error:  # a custom function may raise any exception
        _log.exception("%s failed", label)
        raise AlignerError(
            f"{label}: the function raised {type(error).__name__}: {error}"
        ) from error


def _require(label: str, is_valid: bool, result: object, allowed: str) -> None:
    """Raise AlignerError with the invalid result and the allowed results if `is_valid` is false."""
    if not is_valid:
        shown = (
            f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        )
        raise AlignerError(f"{label}: the function returned {shown[:200]}, must be {allowed}")


def _require_tensor(
    label: str,
    description: str,
    result: object,
    shapes: tuple[tuple[int, ...], ...],
    mask: Tensor | None = None,
) -> None:
    """Raise AlignerError unless the result is a finite tensor of one of the shapes.

    If the result has the shape of `mask`, only its values where the mask is true must be finite.
    """
    allowed = " or ".join(str(list(shape)) for shape in shapes)
    has_valid_shape = isinstance(result, Tensor) and tuple(result.shape) in shapes
    _require(label, has_valid_shape, result, f"{description} as a tensor of shape {allowed}")
    assert isinstance(result, Tensor)
    numbers = result if mask is None or result.shape != mask.shape else result[mask]
    if not bool(torch.isfinite(numbers).all()):
        raise AlignerError(
            f"{label}: {description} must be finite, got"
            f" {numbers[~torch.isfinite(numbers)][0].item()}"
        )
