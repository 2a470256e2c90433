"""The wire protocol: every endpoint's tensors, and the checks that a request passes before any rank works on it.

Names, dtypes and shapes are NeMo-Aligner's; what we add is optional. `docs/endpoints.md` tells the same to a reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aligner.errors import AlignerError

PROTOCOL_VERSION = 1

Arrays = Mapping[str, NDArray]


class RequestError(AlignerError):
    """A request that the server refuses; nothing has changed by it."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of an endpoint. A dimension is a number or a name: B rows, S tokens, S-1 token transitions."""

    name: str
    dtype: type[np.generic]
    shape: tuple[int | str, ...]
    optional: bool = False


@dataclass(frozen=True)
class EndpointSpec:
    """A Triton model: its tensors, and how clients call it."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: bool
    """Batching models are called with `infer_batch` and have B as their first dimension, the others with `infer_sample`."""


TOKENS = TensorSpec("tokens", np.int64, ("B", "S"))
LENGTHS = TensorSpec("sequence_lengths", np.int64, ("B", 1))

CRITIC_INFER = EndpointSpec("critic_infer", (TOKENS, LENGTHS), (TensorSpec("values", np.float32, ("B", "S")),), batching=True)
CRITIC_TRAIN = EndpointSpec(
    "critic_train",
    (
        TOKENS,
        TensorSpec("returns", np.float32, ("B", "S-1")),
        TensorSpec("prev_values", np.float32, ("B", "S-1")),
        TensorSpec("mask", np.float32, ("B", "S-1")),
        TensorSpec("sequence_number", np.int64, (1,), optional=True),
        TensorSpec("run_id", np.bytes_, (1,), optional=True),
    ),
    (TensorSpec("loss_mean", np.float32, (1,)), TensorSpec("stats", np.bytes_, (1,))),
    batching=False,
)
CRITIC_SAVE = EndpointSpec(
    "critic_save",
    (TensorSpec("dummy_var", np.int64, (1,)),),
    (TensorSpec("status", np.int64, (1,)),),
    batching=False,
)
REWARD_MODEL = EndpointSpec(
    "reward_model",
    (
        TensorSpec("tokens", np.int64, ("B", "S"), optional=True),
        TensorSpec("sequence_lengths", np.int64, ("B", 1), optional=True),
        TensorSpec("prompt_lengths", np.int64, ("B", 1), optional=True),
        TensorSpec("sentences", np.bytes_, ("B", 1), optional=True),
    ),
    (TensorSpec("rewards", np.float32, ("B", 1)),),
    batching=True,
)
CONTROL = EndpointSpec(
    "control",
    (TensorSpec("request", np.bytes_, (1,)),),
    (TensorSpec("response", np.bytes_, (1,)),),
    batching=False,
)

CONTROL_OPERATIONS = ("health", "version", "checkpoint", "begin_checkpoint", "finish_checkpoint", "restore", "shutdown")


@dataclass(frozen=True)
class Limits:
    """What the served model takes."""

    vocab_size: int
    max_sequence_length: int
    max_batch_size: int


def validate(endpoint: EndpointSpec, arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError, naming tensor, got and allowed, unless the request fits the endpoint and the model."""
    _check_names(endpoint, arrays)
    sizes: dict[str, int] = {}
    for spec in endpoint.inputs:
        if spec.name in arrays:
            _check_tensor(spec, arrays[spec.name], sizes)
    if "B" in sizes:
        _check_batch(sizes, limits)
    _check_content(arrays, limits)


def _check_names(endpoint: EndpointSpec, arrays: Arrays) -> None:
    known = [spec.name for spec in endpoint.inputs]
    unknown = sorted(set(arrays) - set(known))
    if unknown:
        raise RequestError(f"{endpoint.name}: unknown tensor {', '.join(unknown)}; allowed: {', '.join(known)}")
    missing = [spec.name for spec in endpoint.inputs if not spec.optional and spec.name not in arrays]
    if missing:
        raise RequestError(f"{endpoint.name}: missing tensor {', '.join(missing)}; got: {', '.join(sorted(arrays)) or 'none'}")
    if endpoint is REWARD_MODEL and ("sentences" in arrays) == ("tokens" in arrays):
        raise RequestError("reward_model: got both or neither of tokens and sentences, allowed: exactly one of them")
    if "tokens" in arrays and endpoint is REWARD_MODEL and "sequence_lengths" not in arrays:
        raise RequestError("reward_model: missing tensor sequence_lengths, which tokens need")


def _check_tensor(spec: TensorSpec, array: NDArray, sizes: dict[str, int]) -> None:
    """Check dtype and shape; named dimensions must agree with those of the tensors before, kept in `sizes`."""
    is_bytes = array.dtype.kind in "SO"
    if is_bytes if spec.dtype is not np.bytes_ else not is_bytes:
        raise RequestError(f"{spec.name}: got dtype {array.dtype}, allowed: {np.dtype(spec.dtype).name}")
    if not is_bytes and array.dtype != spec.dtype:
        raise RequestError(f"{spec.name}: got dtype {array.dtype}, allowed: {np.dtype(spec.dtype).name}")
    shown = f"[{', '.join(map(str, spec.shape))}]"
    if array.ndim != len(spec.shape):
        raise RequestError(f"{spec.name}: got shape {list(array.shape)}, allowed: {shown}")
    for dimension, got in zip(spec.shape, array.shape, strict=True):
        if isinstance(dimension, int):
            expected = dimension
        elif dimension == "S-1":
            expected = sizes["S"] - 1
        else:
            expected = sizes.setdefault(dimension, got)
        if got != expected:
            known = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise RequestError(
                f"{spec.name}: got shape {list(array.shape)}, allowed: {shown}" + (f" with {known}" if known else "")
            )


def _check_batch(sizes: Mapping[str, int], limits: Limits) -> None:
    if sizes["B"] < 1:
        raise RequestError("the batch is empty: B=0, allowed: at least 1")
    if not 1 <= sizes.get("S", 1) <= limits.max_sequence_length:
        raise RequestError(f"tokens: got S={sizes['S']}, allowed: 1 to {limits.max_sequence_length}")


def _check_content(arrays: Arrays, limits: Limits) -> None:
    if "tokens" in arrays:
        _check_range("tokens", arrays["tokens"], 0, limits.vocab_size - 1, "the vocabulary's ids")
        width = arrays["tokens"].shape[1]
        if "sequence_lengths" in arrays:
            _check_range("sequence_lengths", arrays["sequence_lengths"], 1, width, "1 to S")
    if "prompt_lengths" in arrays:
        if "sequence_lengths" not in arrays:
            raise RequestError("prompt_lengths: got it without sequence_lengths, allowed: together with tokens")
        excess = arrays["prompt_lengths"] - arrays["sequence_lengths"]
        if arrays["prompt_lengths"].min() < 0 or excess.max() > 0:
            raise RequestError(
                f"prompt_lengths: got {arrays['prompt_lengths'].ravel().tolist()}, allowed: 0 to the sequence's length"
            )
    for name in ("returns", "prev_values"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            raise RequestError(f"{name}: got NaN or infinity, allowed: finite numbers")
    if "mask" in arrays:
        if not np.isin(arrays["mask"], (0.0, 1.0)).all():
            raise RequestError("mask: got a value other than 0 and 1, allowed: 0 or 1")
        if not arrays["mask"].any():
            raise RequestError("mask: got no token to train on, allowed: at least one 1")
    if "sequence_number" in arrays and arrays["sequence_number"][0] < 0:
        raise RequestError(f"sequence_number: got {arrays['sequence_number'][0]}, allowed: 0 and up")


def _check_range(name: str, array: NDArray, low: int, high: int, meaning: str) -> None:
    smallest, largest = int(array.min()), int(array.max())
    if smallest < low or largest > high:
        raise RequestError(f"{name}: got {smallest if smallest < low else largest}, allowed: {low} to {high} ({meaning})")


def text_array(text: str) -> NDArray:
    """A string as a bytes tensor [1]."""
    return np.array([text.encode()], dtype=object)


def array_text(array: NDArray) -> str:
    """The string in a bytes tensor [1]. Raises RequestError when it is not UTF-8."""
    value = array.ravel()[0]
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"got bytes that are not UTF-8 text: {error}") from error


_ERROR_MARK = "EndpointError: "


class EndpointError(Exception):
    """An error as the server hands it to Triton, which wraps it in tracebacks: JSON that a client finds in them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(json.dumps({"type": type(error).__name__, "message": str(error)}, ensure_ascii=False))


def told_error(text: str) -> tuple[str, str]:
    """(type, message) of the server's error in Triton's text; ("Triton", text) when Triton itself refused."""
    _, mark, told = text.partition(_ERROR_MARK)
    if not mark:
        return "Triton", text
    fields, _ = json.JSONDecoder().raw_decode(told)
    return fields["type"], fields["message"]
