"""Parts of an online algorithm by name: the built-in ones, and functions of the user's own
(`module:callable`)."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.advantages import ESTIMATORS, Estimate
from aligner.algorithms.online_losses import LOSSES, LossContext, OnlineLoss
from aligner.algorithms.selections import SELECTIONS, Select
from aligner.data.types import Experience, ScoredSamples, Stats
from aligner.errors import AlignerError, ConfigError
from aligner.schema import AlgorithmConfig
from aligner.user_code import imported
from aligner.values import callable_place

_log = logging.getLogger(__name__)


def require_functions(settings: AlgorithmConfig) -> None:
    """Raise ConfigError where one of the algorithm's functions is not there."""
    find_selection(settings.train_on)
    find_estimator(settings.advantage)
    find_loss(settings.loss)


def find_selection(name: str) -> Select | None:
    """A user's own selection; None where `algorithm.train_on` names a built-in one. Raises
    ConfigError as the others do."""
    if name in SELECTIONS:
        return None
    key, function = _own("train_on", name)

    def select(samples: ScoredSamples) -> Tensor:
        rows, count = _called(key, function, samples), len(samples.tokens)
        _require(
            key,
            isinstance(rows, Tensor) and rows.ndim == 1 and not rows.is_floating_point(),
            rows,
            "an integer tensor [N] of row indices",
        )
        allowed = f"distinct row indices from 0 to {count - 1}"
        _require(
            key,
            bool(((rows >= 0) & (rows < count)).all()) and len(rows.unique()) == len(rows),
            rows.tolist(),
            allowed,
        )
        return rows.long()

    return select


def find_estimator(name: str) -> Estimate:
    """The estimator that `algorithm.advantage` names. Raises ConfigError where it is not there."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    key, function = _own("advantage", name)

    def estimate(
        samples: ScoredSamples, settings: AlgorithmConfig
    ) -> Tensor | tuple[Tensor, Tensor]:
        found = _called(key, function, samples, settings)
        rows, of_tokens = samples.mask.shape[:1], samples.mask.shape
        if samples.values is None:
            _require_tensor(key, "the advantages", found, (rows, of_tokens), samples.mask)
            return found
        _require(
            key,
            isinstance(found, tuple) and len(found) == 2,
            found,
            "a tuple of advantages and returns, because a critic is trained",
        )
        _require_tensor(key, "the advantages", found[0], (rows, of_tokens), samples.mask)
        _require_tensor(key, "the returns", found[1], (of_tokens,), samples.mask)
        return found

    return estimate


def find_loss(name: str) -> OnlineLoss:
    """The loss that `algorithm.loss` names. Raises ConfigError where it is not there."""
    if name in LOSSES:
        return LOSSES[name]
    key, function = _own("loss", name)

    def loss(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
        found = _called(key, function, logprobs, rows, context)
        _require(
            key,
            isinstance(found, tuple) and len(found) == 2,
            found,
            "a tuple of the loss and a dict of statistics",
        )
        value, stats = found
        _require_tensor(key, "the loss", value, ((),))
        _require(
            key, value.requires_grad or not logprobs.requires_grad, value, "a differentiable loss"
        )
        _require(key, isinstance(stats, dict), stats, "a dict of statistics")
        for statistic, number in stats.items():
            _require_tensor(key, f"the statistic {statistic}", number, ((),))
        return value, {statistic: number.detach() for statistic, number in stats.items()}

    return loss


def _own(key: str, name: str) -> tuple[str, Callable[..., Any]]:
    """A function of the user's own, and how messages call it."""
    called = f"algorithm.{key}={name}"
    place = callable_place(name)
    if place is None:
        raise ConfigError(f"{called}: must be a built-in name or module:callable")
    module, attribute = place
    try:
        function = imported(module, attribute)
    except ConfigError as error:
        raise ConfigError(
            f"{called}: {error}; the module must be importable from the working directory or"
            f" PYTHONPATH, and must define {attribute!r}"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{called}: {attribute!r} must be callable, got {type(function).__name__}"
        )
    return called, function


def _called(key: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # the function is the user's, and fails in its own ways
        _log.exception("%s failed", key)
        raise AlignerError(f"{key}: the function raised {type(error).__name__}: {error}") from error


def _require(key: str, holds: bool, found: object, allowed: str) -> None:
    if not holds:
        shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise AlignerError(f"{key}: the function returned {shown[:200]}, must be {allowed}")


def _require_tensor(
    key: str,
    what: str,
    found: object,
    shapes: tuple[tuple[int, ...], ...],
    mask: Tensor | None = None,
) -> None:
    """Numbers of one of these shapes, finite within the mask where they are numbers of tokens."""
    allowed = " or ".join(str(list(shape)) for shape in shapes)
    fits = isinstance(found, Tensor) and tuple(found.shape) in shapes
    _require(key, fits, found, f"{what} as a tensor of shape {allowed}")
    assert isinstance(found, Tensor)
    numbers = found if mask is None or found.shape != mask.shape else found[mask]
    if not bool(torch.isfinite(numbers).all()):
        raise AlignerError(
            f"{key}: {what} must be finite, got {numbers[~torch.isfinite(numbers)][0].item()}"
        )
