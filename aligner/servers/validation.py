"""Validation of requests on rank 0, before any rank works on them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load

from aligner.data.collectives import grammar_spans_from_bytes, samples_from_tensors
from aligner.data.episode_reports import EpisodeReport
from aligner.file_limits import parse_json
from aligner.servers.wire_protocol import (
    GENERATE,
    RESPONSE_TENSORS,
    REWARD_MODEL,
    TEACHER_LOGPROBS,
    Arrays,
    EndpointSpec,
    RequestError,
    TensorSpec,
)

# Exceptions that the parser of samples raises for invalid bytes.
_PARSE_ERRORS = (
    SafetensorError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
# Limit on the text of a request, for each token that the request may have. Tokens of real
# tokenizers have fewer bytes on average.
_MAX_TEXT_BYTES_PER_TOKEN = 16
# Minimum values of the integers in control requests.
_MINIMUMS = {"step": 0, "sequence_number": -1, "port": 1, "generation": 0, "version": 0}


@dataclass(frozen=True)
class Limits:
    """Limits of requests to a model."""

    vocab_size: int
    """Size of the vocabulary; token ids are smaller."""
    max_sequence_length: int
    """Maximum number of tokens in a row."""
    max_request_tokens: int = 2**22
    """Maximum number of tokens in a request, including padding."""


def validate(endpoint: EndpointSpec, arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError unless the request is valid for the endpoint and the model.

    The error contains the name of the tensor, its value and the allowed values.
    """
    _check_names(endpoint, arrays)

    sizes: dict[str, int] = {}
    for spec in endpoint.inputs:
        if spec.name in arrays:
            _check_tensor(spec, arrays[spec.name], sizes)
    if "B" in sizes:
        _check_batch(sizes, limits)

    _check_content(arrays, limits)
    if endpoint is GENERATE:
        _check_partial_rollouts(arrays, limits)
    if endpoint is TEACHER_LOGPROBS:
        _check_scored_tokens(arrays)
        _check_row_grammars(arrays, limits)


def _check_names(endpoint: EndpointSpec, arrays: Arrays) -> None:
    """Raise RequestError if tensors are unknown or missing."""
    known_names = [spec.name for spec in endpoint.inputs]
    unknown = sorted(set(arrays) - set(known_names))
    if unknown:
        raise RequestError(
            f"{endpoint.name}: unknown tensor {', '.join(unknown)}; allowed:"
            f" {', '.join(known_names)}"
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
    """Raise RequestError unless dtype and shape are as specified.

    Args:
        spec: Specification of the tensor.
        array: The tensor.
        sizes: Sizes of the named dimensions of the previous tensors, with which the shape must
            agree. New names are added.
    """
    if array.dtype.kind not in "SO" if spec.dtype is np.bytes_ else array.dtype != spec.dtype:
        raise RequestError(
            f"{spec.name}: got dtype {array.dtype}, allowed: {np.dtype(spec.dtype).name}"
        )
    allowed_shape = f"[{', '.join(map(str, spec.shape))}]"
    if array.ndim != len(spec.shape):
        raise RequestError(f"{spec.name}: got shape {list(array.shape)}, allowed: {allowed_shape}")
    for dimension, size in zip(spec.shape, array.shape, strict=True):
        if isinstance(dimension, int):
            expected = dimension
        elif dimension == "S-1":
            expected = sizes["S"] - 1
        else:
            expected = sizes.setdefault(dimension, size)
        if size != expected:
            known_sizes = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise RequestError(
                f"{spec.name}: got shape {list(array.shape)}, allowed: {allowed_shape}"
                + (f" with {known_sizes}" if known_sizes else "")
            )


def _check_batch(sizes: Mapping[str, int], limits: Limits) -> None:
    """Raise RequestError if the number of rows or tokens is not allowed."""
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
    """Raise RequestError if a value in the tensors is not allowed."""
    max_text_bytes = _MAX_TEXT_BYTES_PER_TOKEN * limits.max_request_tokens
    for name, array in arrays.items():
        if array.dtype.kind in "SO" and (text_bytes := sum(map(len, array.flat))) > max_text_bytes:
            raise RequestError(
                f"{name}: got {text_bytes} bytes, allowed: at most {max_text_bytes} per request"
            )
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
        # Before the first update, a request for values has the number -1. Only these requests have
        # sequence lengths.
        number = int(arrays["sequence_number"].flat[0])
        minimum = -1 if "sequence_lengths" in arrays else 0
        if number < minimum:
            raise RequestError(f"sequence_number: got {number}, allowed: {minimum} or greater")


def _check_scored_tokens(arrays: Arrays) -> None:
    """Raise RequestError if a request for teacher log-probs is not valid."""
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


def _check_row_grammars(arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError if the grammars of rows are not valid; the grammars themselves are not
    compiled here."""
    if "grammars" not in arrays:
        return
    lengths = arrays["sequence_lengths"][:, 0].tolist()
    try:
        for column, length in zip(arrays["grammars"], lengths, strict=True):
            previous_end = 1
            for start, end, grammar, stop_token_ids in parse_json(bytes(column[0])):
                if not previous_end <= start < end <= length or not isinstance(grammar, str):
                    raise ValueError(f"got the span [{start}, {end}) in a row of {length} tokens")
                if not all(0 <= token < limits.vocab_size for token in stop_token_ids):
                    raise ValueError("a stop token is not in the vocabulary")
                previous_end = end
    except _PARSE_ERRORS as error:
        raise RequestError(
            f"grammars: cannot be parsed ({error!r:.200}), allowed: a JSON list of"
            " [start, end, grammar, stop tokens] per row, in order, with start of at least 1"
        ) from error


def _check_partial_rollouts(arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError if the samples of a request to `generate` are not valid."""
    prompts = len(arrays["tokens"])
    samples_per_prompt = int(arrays["samples_per_prompt"][0])
    if samples_per_prompt < 1:
        raise RequestError(f"samples_per_prompt: got {samples_per_prompt}, allowed: at least 1")
    if "enough" in arrays:
        _check_range("enough", arrays["enough"], 1, prompts, "1 to B")
    if "due" in arrays:
        _check_range("due", arrays["due"], 0, 1, "1 means that the prompt is due")

    # A request has either all tensors of a partial rollout, or none of them.
    missing = [spec.name for spec in RESPONSE_TENSORS if spec.name not in arrays]
    if len(missing) == len(RESPONSE_TENSORS):
        return
    if missing:
        raise RequestError(
            f"generate: missing tensor {', '.join(missing)}; a partial rollout requires all of"
            f" {', '.join(spec.name for spec in RESPONSE_TENSORS)}"
        )

    rows, width = arrays["responses"].shape
    if rows != prompts * samples_per_prompt or not width:
        raise RequestError(
            f"responses: got shape {[rows, width]}, allowed: [N, R] with"
            f" N={prompts * samples_per_prompt} (B x samples_per_prompt) and R > 0"
        )
    _check_range("responses", arrays["responses"], 0, limits.vocab_size - 1, "token ids")
    _check_range("stopped", arrays["stopped"], -1, 1, "-1 means an unfinished response")
    _check_range("response_lengths", arrays["response_lengths"], 0, width, "0 to R")
    if (arrays["response_lengths"][arrays["stopped"] >= 0] == 0).any():
        raise RequestError("response_lengths: got 0 for a finished response, allowed: at least 1")
    _check_optional_tensors(arrays, limits)
    _check_policy_prompts(arrays, limits)
    _check_grammars(arrays)
    _check_branches(arrays, limits)
    _check_reports(arrays)


def _check_optional_tensors(arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError if the sampling support or the expert routing is not valid."""
    if ("kept_counts" in arrays) != ("kept_ids" in arrays):
        raise RequestError(
            "generate: got only one of kept_counts and kept_ids, allowed: both or neither"
        )
    if "kept_counts" in arrays:
        counts = arrays["kept_counts"]
        ids = arrays["kept_ids"]
        _check_range("kept_counts", counts, 0, limits.vocab_size, "the size of the vocabulary")
        _check_range("kept_ids", ids, 0, limits.vocab_size - 1, "token ids")
        # Without any candidates, `kept_ids` has one unused entry: Triton has no empty tensors.
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
        # A response without tokens has no routes. A sample with branches is complete in `branches`.
        has_routes = (responses > 0) & (arrays.get("branch_counts", np.zeros_like(responses)) == 0)
        max_tokens = int((prompts + responses - 1)[has_routes].max(initial=0))
        if arrays["routes"].shape[1] < max_tokens or arrays["routes"].min(initial=0) < 0:
            raise RequestError(
                f"routes: got shape {list(arrays['routes'].shape)}, allowed: expert ids >= 0 for at"
                f" least T={max_tokens} tokens per row"
            )


def _check_policy_prompts(arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError if the prompts that agents have written are not valid."""
    if ("read" in arrays) != ("read_lengths" in arrays):
        raise RequestError(
            "generate: got only one of read and read_lengths, allowed: both or neither"
        )
    if "read" in arrays:
        _check_range("read", arrays["read"], 0, limits.vocab_size - 1, "token ids")
        _check_range("read_lengths", arrays["read_lengths"], 1, arrays["read"].shape[1], "1 to P")


def _check_grammars(arrays: Arrays) -> None:
    """Raise RequestError if the grammar spans of responses are not valid."""
    if "grammars" not in arrays:
        return
    lengths = arrays["response_lengths"][:, 0].tolist()
    try:
        spans_of_rows = grammar_spans_from_bytes(arrays["grammars"].tobytes(), len(lengths))
        for spans, length in zip(spans_of_rows, lengths, strict=True):
            if any(not 0 <= span.start < span.end <= length for span in spans):
                raise ValueError("a span is not in its response")
    except _PARSE_ERRORS as error:
        raise RequestError(
            f"grammars: cannot be parsed ({error!r:.200}), allowed: grammar spans as JSON"
        ) from error


def _check_branches(arrays: Arrays, limits: Limits) -> None:
    """Raise RequestError if the branches of episodes are not valid."""
    if ("branches" in arrays) != ("branch_counts" in arrays):
        raise RequestError(
            "generate: got only one of branches and branch_counts, allowed: both or neither"
        )
    if "branches" not in arrays:
        return
    try:
        samples = samples_from_tensors(load(arrays["branches"].tobytes()))
    except _PARSE_ERRORS as error:
        raise RequestError(
            f"branches: cannot be parsed ({error!r:.200}), allowed: samples as safetensors"
        ) from error
    expected_counts = [int(count) for count in arrays["branch_counts"][:, 0] if count]
    if expected_counts != [len(sample.branches) for sample in samples]:
        raise RequestError(
            f"branches: got {[len(sample.branches) for sample in samples]} branches per sample,"
            f" allowed: {expected_counts}, as in branch_counts"
        )
    if any(
        branch.finish_reason == "unfinished" for sample in samples for branch in sample.branches
    ):
        raise RequestError(
            "branches: got an unfinished branch, allowed: only an episode's last sequence may be"
            " unfinished"
        )
    for sequence in (sequence for sample in samples for sequence in sample.sequences):
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


def _check_reports(arrays: Arrays) -> None:
    """Raise RequestError if the reports of episodes are not valid."""
    if "reports" not in arrays:
        return
    try:
        reports = parse_json(arrays["reports"].tobytes())
        if len(reports) != len(arrays["responses"]):
            raise ValueError(f"{len(reports)} reports for {len(arrays['responses'])} samples")
        for fields in reports:
            if fields is not None:
                EpisodeReport.from_json(fields)
    except _PARSE_ERRORS as error:
        raise RequestError(
            f"reports: cannot be parsed ({error!r:.200}), allowed: a JSON list with a report or"
            " null for each sample"
        ) from error


def _check_range(name: str, array: NDArray, low: int, high: int, meaning: str) -> None:
    """Raise RequestError unless all values are between `low` and `high`, inclusive."""
    smallest = int(array.min())
    largest = int(array.max())
    if smallest < low or largest > high:
        raise RequestError(
            f"{name}: got {smallest if smallest < low else largest}, allowed: {low} to {high}"
            f" ({meaning})"
        )


def parse_control_request(
    text: str, operations: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """Parse a request to the endpoint `control`: its `op`, and the arguments of the operation.

    Args:
        text: The request in JSON.
        operations: Operations in addition to `health` and `shutdown`. The parameters of their
            functions are the arguments of a request.

    Raises:
        RequestError: The operation is unknown, or its arguments are not valid.
    """
    try:
        request = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"control: request is not valid JSON: {error}") from error
    op = request.get("op") if isinstance(request, dict) else None
    allowed = ("health", "shutdown", *operations)
    if not isinstance(op, str) or op not in allowed:
        raise RequestError(f"control: got op {op!r}, allowed: {', '.join(allowed)}")
    parameters = inspect.signature(operations[op]).parameters.values() if op in operations else ()
    expected = {
        "op",
        *(parameter.name for parameter in parameters if parameter.default is parameter.empty),
    }
    optional = {"instance", *(parameter.name for parameter in parameters)}
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
    for name in _MINIMUMS.keys() & set(request):
        value = request[name]
        minimum = _MINIMUMS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
            raise RequestError(
                f"control: {op}: {name}: got {value!r:.99}, allowed: an integer from {minimum} to"
                " 2^63 - 1"
            )
    return request
