"""What a request must be before any rank works on it."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from aligner.data.collectives import samples_from_tensors
from aligner.servers.wire_protocol import (
    DRAWN,
    GENERATE,
    REWARD_MODEL,
    TEACHER_LOGPROBS,
    Arrays,
    EndpointSpec,
    RequestError,
    TensorSpec,
)

_NO_SAMPLES = (
    SafetensorError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What bytes raise that are no samples."""
_BYTES_A_TOKEN = 16
"""Text of a request, in bytes for each token that it may have: far beyond what any tokenizer makes
of one."""
_LOWEST = {"step": 0, "sequence_number": -1, "port": 1, "generation": 0, "version": 0}
"""Numbers of control requests, and the lowest allowed."""


@dataclass(frozen=True)
class Limits:
    """What the served model takes."""

    vocab_size: int
    max_sequence_length: int
    max_request_tokens: int = 2**22


def validate(endpoint: EndpointSpec, arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError, naming tensor, got and allowed, unless the request fits the endpoint and
    the model."""
    _check_names(endpoint, arrays)
    sizes: dict[str, int] = {}
    for spec in endpoint.inputs:
        if spec.name in arrays:
            _check_tensor(spec, arrays[spec.name], sizes)
    if "B" in sizes:
        _check_batch(sizes, limits)
    _check_content(arrays, limits)
    if endpoint is GENERATE:
        _check_samples(arrays, limits)
    if endpoint is TEACHER_LOGPROBS:
        _check_scored_tokens(arrays)


def _check_names(endpoint: EndpointSpec, arrays: Arrays) -> None:
    known = [spec.name for spec in endpoint.inputs]
    unknown = sorted(set(arrays) - set(known))
    if unknown:
        raise RequestError(
            f"{endpoint.name}: unknown tensor {', '.join(unknown)}; allowed: {', '.join(known)}"
        )
    missing = [
        spec.name for spec in endpoint.inputs if not spec.optional and spec.name not in arrays
    ]
    if missing:
        raise RequestError(
            f"{endpoint.name}: missing tensor {', '.join(missing)}; got:"
            f" {', '.join(sorted(arrays)) or 'none'}"
        )
    if endpoint is REWARD_MODEL and ("sentences" in arrays) == ("tokens" in arrays):
        raise RequestError(
            "reward_model: got both or neither of tokens and sentences, allowed: exactly one of the"
            " two tensors"
        )
    if "tokens" in arrays and endpoint is REWARD_MODEL and "sequence_lengths" not in arrays:
        raise RequestError(
            "reward_model: missing tensor sequence_lengths, which is required with the tensor"
            " tokens"
        )


def _check_tensor(spec: TensorSpec, array: NDArray, sizes: dict[str, int]) -> None:
    """Check dtype and shape; named dimensions must agree with those of the tensors before, kept in
    `sizes`."""
    if array.dtype.kind not in "SO" if spec.dtype is np.bytes_ else array.dtype != spec.dtype:
        raise RequestError(
            f"{spec.name}: got dtype {array.dtype}, allowed: {np.dtype(spec.dtype).name}"
        )
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
                f"{spec.name}: got shape {list(array.shape)}, allowed: {shown}"
                + (f" with {known}" if known else "")
            )


def _check_batch(sizes: Mapping[str, int], limits: Limits) -> None:
    if sizes["B"] < 1:
        raise RequestError("the batch is empty: got B=0, allowed: at least 1")
    if not 1 <= sizes.get("S", 1) <= limits.max_sequence_length:
        raise RequestError(
            f"tokens: got S={sizes['S']}, allowed: 1 to {limits.max_sequence_length}"
        )
    if sizes["B"] * sizes.get("S", 1) > limits.max_request_tokens:
        raise RequestError(
            f"tokens: got B={sizes['B']} rows of S={sizes['S']}, allowed: at most"
            f" {limits.max_request_tokens} tokens per request (server.max_request_tokens)"
        )


def _check_content(arrays: Arrays, limits: Limits) -> None:
    longest = _BYTES_A_TOKEN * limits.max_request_tokens
    for name, array in arrays.items():
        if array.dtype.kind in "SO" and (got := sum(map(len, array.flat))) > longest:
            raise RequestError(f"{name}: got {got} bytes, allowed: at most {longest} per request")
    if "tokens" in arrays:
        _check_range("tokens", arrays["tokens"], 0, limits.vocab_size - 1, "token ids")
        if "sequence_lengths" in arrays:
            _check_range(
                "sequence_lengths",
                arrays["sequence_lengths"],
                1,
                arrays["tokens"].shape[1],
                "1 to S",
            )
    if "prompt_lengths" in arrays:
        if "sequence_lengths" not in arrays:
            raise RequestError(
                "prompt_lengths: requires tokens and sequence_lengths, got no sequence_lengths"
            )
        excess = arrays["prompt_lengths"] - arrays["sequence_lengths"]
        if arrays["prompt_lengths"].min() < 0 or excess.max() > 0:
            raise RequestError(
                f"prompt_lengths: got {arrays['prompt_lengths'].ravel().tolist()}, allowed: 0 to"
                " the row's sequence length"
            )
    for name in ("returns", "prev_values"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            raise RequestError(f"{name}: got NaN or infinity, allowed: finite numbers")
    if "mask" in arrays:
        if not np.isin(arrays["mask"], (0.0, 1.0)).all():
            raise RequestError("mask: got values other than 0 and 1, allowed: 0 or 1")
        if not arrays["mask"].any():
            raise RequestError(
                "mask: got only zeros, allowed: at least one 1 (a token to train on)"
            )
    for name in ("sequence_number", "instance", "trace_id", "temperature", "top_k"):
        if name in arrays and (arrays[name] != arrays[name].flat[0]).any():
            raise RequestError(
                f"{name}: got different values, allowed: the same value in every row"
            )
    if "sequence_number" in arrays:
        # Values may be asked for before the first update.
        number, lowest = (
            int(arrays["sequence_number"].flat[0]),
            (-1 if "sequence_lengths" in arrays else 0),
        )
        if number < lowest:
            raise RequestError(f"sequence_number: got {number}, allowed: {lowest} or greater")


def _check_scored_tokens(arrays: Arrays) -> None:
    if arrays["tokens"].shape[1] < 2:
        raise RequestError(
            "tokens: got S=1, allowed: at least 2, because the first token has no log-prob"
        )
    if "temperature" in arrays and not 0 < (
        temperature := float(arrays["temperature"].flat[0])
    ) < float("inf"):
        raise RequestError(f"temperature: got {temperature:g}, allowed: a finite number above 0")
    if "top_k" in arrays and (count := int(arrays["top_k"].flat[0])) < 1:
        raise RequestError(f"top_k: got {count}, allowed: at least 1")


def _check_samples(arrays: Arrays, limits: Limits) -> None:
    prompts, each = len(arrays["tokens"]), int(arrays["samples_per_prompt"][0])
    if each < 1:
        raise RequestError(f"samples_per_prompt: got {each}, allowed: at least 1")
    if "enough" in arrays:
        _check_range("enough", arrays["enough"], 1, prompts, "1 to B")
    if "due" in arrays:
        _check_range("due", arrays["due"], 0, 1, "1 means that the prompt is due")
    missing = [spec.name for spec in DRAWN if spec.name not in arrays]
    if len(missing) == len(DRAWN):
        return
    if missing:
        raise RequestError(
            f"generate: missing tensor {', '.join(missing)}; a partial rollout requires all of"
            f" {', '.join(spec.name for spec in DRAWN)}"
        )
    rows, width = arrays["responses"].shape
    if rows != prompts * each or not width:
        raise RequestError(
            f"responses: got shape {[rows, width]}, allowed: [N, R] with N={prompts * each} (B x"
            " samples_per_prompt) and R > 0"
        )
    _check_range("responses", arrays["responses"], 0, limits.vocab_size - 1, "token ids")
    _check_range("stopped", arrays["stopped"], -1, 1, "-1 means an unfinished response")
    _check_range("response_lengths", arrays["response_lengths"], 0, width, "0 to R")
    if (arrays["response_lengths"][arrays["stopped"] >= 0] == 0).any():
        raise RequestError("response_lengths: got 0 for a finished response, allowed: at least 1")
    _check_also_drawn(arrays, limits)
    _check_branches(arrays, limits)


def _check_also_drawn(arrays: Arrays, limits: Limits) -> None:
    if ("kept_counts" in arrays) != ("kept_ids" in arrays):
        raise RequestError(
            "generate: got only one of kept_counts and kept_ids, allowed: both or neither"
        )
    if "kept_counts" in arrays:
        counts, ids = arrays["kept_counts"], arrays["kept_ids"]
        _check_range("kept_counts", counts, 0, limits.vocab_size, "the size of the vocabulary")
        _check_range("kept_ids", ids, 0, limits.vocab_size - 1, "token ids")
        if max(int(counts.sum()), 1) != len(ids):
            raise RequestError(
                f"kept_ids: got {len(ids)} ids, allowed: {int(counts.sum())}, the sum of"
                " kept_counts"
            )
    if "routes" in arrays:
        prompts = np.repeat(
            arrays["sequence_lengths"], len(arrays["responses"]) // len(arrays["tokens"]), 0
        )
        responses = arrays["response_lengths"]
        # What is not begun has none, however long its prompt; a branch has a prompt of its own.
        told = (responses > 0) & (arrays.get("branch_counts", np.zeros_like(responses)) == 0)
        longest = int((prompts + responses - 1)[told].max(initial=0))
        if arrays["routes"].shape[1] < longest or arrays["routes"].min(initial=0) < 0:
            raise RequestError(
                f"routes: got shape {list(arrays['routes'].shape)}, allowed: expert ids >= 0 for at"
                f" least T={longest} tokens per row"
            )


def _check_branches(arrays: Arrays, limits: Limits) -> None:
    if ("branches" in arrays) != ("branch_counts" in arrays):
        raise RequestError(
            "generate: got only one of branches and branch_counts, allowed: both or neither"
        )
    if "branches" not in arrays:
        return
    try:
        samples = samples_from_tensors(load(arrays["branches"].tobytes()))
    except _NO_SAMPLES as error:
        raise RequestError(
            f"branches: cannot be parsed ({error!r:.200}), allowed: samples as safetensors"
        ) from error
    told = [int(count) for count in arrays["branch_counts"][:, 0] if count]
    if told != [len(sample.branches) for sample in samples]:
        raise RequestError(
            f"branches: got {[len(sample.branches) for sample in samples]} branches per sample,"
            f" allowed: {told}, as in branch_counts"
        )
    if any(
        branch.finish_reason == "unfinished" for sample in samples for branch in sample.branches
    ):
        raise RequestError(
            "branches: got an unfinished branch, allowed: only an episode's last sequence may be"
            " unfinished"
        )
    for sequence in (each for sample in samples for each in sample.sequences):
        if (
            not 0 < len(sequence.tokens) <= limits.max_sequence_length
            or not sequence.prompt_length > 0
        ):
            raise RequestError(
                f"branches: got a sequence of {len(sequence.tokens)} tokens with a prompt of"
                f" {sequence.prompt_length} tokens, allowed: 1 to {limits.max_sequence_length}"
                " tokens, with a prompt of at least 1 token"
            )
        _check_range("branches", sequence.tokens.numpy(), 0, limits.vocab_size - 1, "token ids")


def _check_range(name: str, array: NDArray, low: int, high: int, meaning: str) -> None:
    smallest, largest = int(array.min()), int(array.max())
    if smallest < low or largest > high:
        raise RequestError(
            f"{name}: got {smallest if smallest < low else largest}, allowed: {low} to {high}"
            f" ({meaning})"
        )


def control_request(text: str, operations: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """A request of the endpoint `control`: its `op`, and what the operation of that name takes.

    Raises RequestError unless it is `health`, `shutdown` or one of `operations` with its arguments.
    """
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"control: request is not valid JSON: {error}") from error
    op = request.get("op") if isinstance(request, dict) else None
    allowed = ("health", "shutdown", *operations)
    if not isinstance(op, str) or op not in allowed:
        raise RequestError(f"control: got op {op!r}, allowed: {', '.join(allowed)}")
    parameters = inspect.signature(operations[op]).parameters.values() if op in operations else ()
    expected = {"op", *(each.name for each in parameters if each.default is each.empty)}
    optional = {"instance", *(each.name for each in parameters)}
    if not expected <= set(request) <= expected | optional:
        raise RequestError(
            f"control: {op}: got keys {', '.join(sorted(request))}, expected:"
            f" {', '.join(sorted(expected))}"
        )
    for name in {"instance", "run_id", "host"} & set(request):
        if not isinstance(request[name], str):
            raise RequestError(
                f"control: {op}: {name}: got {request[name]!r:.99}, allowed: a string"
            )
    for name in _LOWEST.keys() & set(request):
        value, lowest = request[name], _LOWEST[name]
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**63:
            raise RequestError(
                f"control: {op}: {name}: got {value!r:.99}, allowed: an integer from {lowest} to"
                " 2^63 - 1"
            )
    return request
