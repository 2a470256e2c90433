"""The wire protocol: tensors of every endpoint, their conversion, and the transport of errors.

Names, dtypes and shapes are NeMo-Aligner's. All additions of aligner are optional.
`docs/endpoints.md` describes the protocol for users.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.data.collectives import (
    grammar_spans_from_bytes,
    grammar_spans_to_tensor,
    reports_to_tensor,
    samples_from_tensors,
    samples_to_tensors,
    with_reports,
)
from aligner.data.types import (
    FinishReason,
    Grammar,
    GrammarSpan,
    GuidedTokens,
    Sample,
    SamplingSupport,
    concatenate_response_values,
    concatenate_support,
)
from aligner.errors import AlignerError
from aligner.file_limits import parse_json

PROTOCOL_VERSION = 2

Arrays = Mapping[str, NDArray]


class RequestError(AlignerError):
    """The server refuses an invalid request. The request has changed nothing."""


class InstanceError(AlignerError):
    """The request is for an earlier start of this server, and has changed nothing.

    State that the sender relies on may be lost.
    """


class WeightsError(AlignerError):
    """The request requires newer weights than the engine has, and has changed nothing.

    Newer weights may follow.
    """


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor of an endpoint.

    A dimension is a number or a name: B is the number of rows, S the number of tokens per row, and
    S-1 the number of transitions between tokens.
    """

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
    """Whether clients call the model with PyTriton's `infer_batch`, and B is the first dimension of
    its tensors. Clients call other models with `infer_sample`."""
    concurrent_requests: int = 1
    """Number of requests that are served at a time. For a batching model,
    `server.concurrent_requests` applies instead."""


def _create_per_request_spec(name: str, dtype: type[np.generic], batching: bool) -> TensorSpec:
    """Return an optional tensor with one value per request.

    A batching model requires the same value in every row.
    """
    return TensorSpec(name, dtype, ("B", 1) if batching else (1,), optional=True)


REQUEST_NUMBER = "request_number"
"""Name of a tensor that the server returns unchanged: clients recognize the answer to their
request."""


def with_request_number(spec: EndpointSpec) -> EndpointSpec:
    """Return the endpoint with an optional request number among its inputs and outputs."""
    number = _create_per_request_spec(REQUEST_NUMBER, np.int64, spec.batching)
    return replace(spec, inputs=(*spec.inputs, number), outputs=(*spec.outputs, number))


def _create_ordering_specs(batching: bool) -> tuple[TensorSpec, ...]:
    """Return the optional inputs that aligner's clients add.

    The sequence number is the number of the update, or of the update that the request follows.
    `instance` is the start of the server that the request is for. `trace_id` identifies the request
    in the server's log.
    """
    return (
        _create_per_request_spec("sequence_number", np.int64, batching),
        _create_per_request_spec("instance", np.bytes_, batching),
        _create_per_request_spec("trace_id", np.bytes_, batching),
    )


TOKENS = TensorSpec("tokens", np.int64, ("B", "S"))
LENGTHS = TensorSpec("sequence_lengths", np.int64, ("B", 1))
# The scores, and the score of each of the P reward sources if there are several.
REWARDS = (
    TensorSpec("rewards", np.float32, ("B", 1)),
    TensorSpec("reward_parts", np.float32, ("B", "P"), optional=True),
)
# Rewards of the tokens that end steps, and NaN for other tokens; only if a source rewards steps.
STEP_REWARDS = TensorSpec("step_rewards", np.float32, ("B", "S-1"), optional=True)
# Length of each prompt, and the fields of its record (one JSON object per row).
PROMPT_TENSORS = (
    TensorSpec("prompt_lengths", np.int64, ("B", 1), optional=True),
    TensorSpec("metadata", np.bytes_, ("B", 1), optional=True),
)

CRITIC_INFER = EndpointSpec(
    "critic_infer",
    (TOKENS, LENGTHS, *_create_ordering_specs(batching=True)),
    (TensorSpec("values", np.float32, ("B", "S")),),
    batching=True,
)
CRITIC_INFER_WITH_REWARD = replace(
    CRITIC_INFER,
    inputs=(*CRITIC_INFER.inputs, *PROMPT_TENSORS),
    outputs=(*CRITIC_INFER.outputs, *REWARDS),
)
CRITIC_TRAIN = EndpointSpec(
    "critic_train",
    (
        TOKENS,
        TensorSpec("returns", np.float32, ("B", "S-1")),
        TensorSpec("prev_values", np.float32, ("B", "S-1")),
        TensorSpec("mask", np.float32, ("B", "S-1")),
        TensorSpec("run_id", np.bytes_, (1,), optional=True),
        *_create_ordering_specs(batching=False),
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
        replace(TOKENS, optional=True),
        replace(LENGTHS, optional=True),
        TensorSpec("sentences", np.bytes_, ("B", 1), optional=True),
        *PROMPT_TENSORS,
        _create_per_request_spec("sequence_number", np.int64, batching=True),
        _create_per_request_spec("trace_id", np.bytes_, batching=True),
    ),
    (*REWARDS, STEP_REWARDS),
    batching=True,
)
TEACHER_LOGPROBS = EndpointSpec(
    "teacher_logprobs",
    (
        TOKENS,
        LENGTHS,
        *PROMPT_TENSORS,
        _create_per_request_spec("temperature", np.float32, batching=True),
        _create_per_request_spec("top_k", np.int64, batching=True),
        # The tokens of each row that follow a grammar; see `grammars_to_texts`.
        TensorSpec("grammars", np.bytes_, ("B", 1), optional=True),
        _create_per_request_spec("sequence_number", np.int64, batching=True),
        _create_per_request_spec("trace_id", np.bytes_, batching=True),
    ),
    (
        TensorSpec("logprobs", np.float32, ("B", "S-1")),
        # With `top_k`: the K most probable tokens, their log-probs, and the log of the total
        # probability of all other tokens.
        TensorSpec("top_ids", np.int32, ("B", "S-1", "K"), optional=True),
        TensorSpec("top_logprobs", np.float32, ("B", "S-1", "K"), optional=True),
        TensorSpec("rest_logprobs", np.float32, ("B", "S-1"), optional=True),
    ),
    batching=True,
)
_FINISH_CODES: dict[FinishReason, int] = {"unfinished": -1, "length": 0, "stop": 1}
# The tokens generated so far. The samples of a prompt are adjacent rows.
RESPONSE_TENSORS = (
    TensorSpec("responses", np.int64, ("N", "R")),
    TensorSpec("response_lengths", np.int64, ("N", 1)),
    TensorSpec("logprobs", np.float32, ("N", "R")),
    TensorSpec("weight_versions", np.int64, ("N", "R")),
    TensorSpec("stopped", np.int64, ("N", 1)),
)
# Sampling support: the number of candidate tokens at each position (0 for the whole vocabulary),
# and the candidates' ids one after another. Routing replay: the experts of every token except the
# last one. Episodes: which tokens the policy generated, and the environment's rewards.
OPTIONAL_RESPONSE_TENSORS = (
    TensorSpec("kept_counts", np.int64, ("N", "R"), optional=True),
    TensorSpec("kept_ids", np.int32, ("I",), optional=True),
    TensorSpec("routes", np.int16, ("N", "T", "L", "K"), optional=True),
    TensorSpec("drawn", np.bool_, ("N", "R"), optional=True),
    TensorSpec("rewards", np.float32, ("N", "R"), optional=True),
    TensorSpec("grammars", np.uint8, ("G",), optional=True),
)
# The number of branches of each sample, and all samples with branches: the result of
# `samples_to_tensors` as safetensors.
BRANCH_TENSORS = (
    TensorSpec("branches", np.uint8, ("Q",), optional=True),
    TensorSpec("branch_counts", np.int64, ("N", 1), optional=True),
)
# The failures and metrics of episodes: a JSON list in UTF-8 with one entry per sample.
REPORT_TENSORS = (TensorSpec("reports", np.uint8, ("J",), optional=True),)
# The tokens before each response, if an agent has written its own prompt.
POLICY_PROMPT_TENSORS = (
    TensorSpec("read", np.int64, ("N", "P"), optional=True),
    TensorSpec("read_lengths", np.int64, ("N", 1), optional=True),
)
GENERATE = EndpointSpec(
    "generate",
    (
        TOKENS,
        LENGTHS,
        TensorSpec("prompt_ids", np.int64, ("B", 1)),
        TensorSpec("samples_per_prompt", np.int64, (1,)),
        TensorSpec("options", np.bytes_, (1,)),
        PROMPT_TENSORS[1],
        TensorSpec("weight_version", np.int64, (1,), optional=True),
        *(
            replace(spec, optional=True)
            for spec in (
                *RESPONSE_TENSORS,
                *OPTIONAL_RESPONSE_TENSORS,
                *BRANCH_TENSORS,
                *POLICY_PROMPT_TENSORS,
                *REPORT_TENSORS,
            )
        ),
        TensorSpec("enough", np.int64, (1,), optional=True),
        TensorSpec("due", np.int64, ("B", 1), optional=True),
        TensorSpec("first_prompt", np.int64, (1,), optional=True),
        TensorSpec("instance", np.bytes_, (1,), optional=True),
        TensorSpec("trace_id", np.bytes_, (1,), optional=True),
    ),
    (
        *RESPONSE_TENSORS,
        *OPTIONAL_RESPONSE_TENSORS,
        *BRANCH_TENSORS,
        *REPORT_TENSORS,
        *POLICY_PROMPT_TENSORS,
    ),
    batching=False,
)
CONTROL = EndpointSpec(
    "control",
    (TensorSpec("request", np.bytes_, (1,)),),
    (TensorSpec("response", np.bytes_, (1,)),),
    batching=False,
    # The trainer sends one operation at a time that waits for the ranks. The second slot is for
    # health checks during such an operation.
    concurrent_requests=2,
)


def encode_text(text: str) -> NDArray:
    """Return a string as a bytes tensor [1]."""
    return np.array([text.encode()], dtype=object)


def decode_text(array: NDArray) -> str:
    """Return the string in a bytes tensor [1]. Raise RequestError if it is not valid UTF-8."""
    value = array.ravel()[0]
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"got bytes that are not valid UTF-8: {error}") from error


def decode_text_column(name: str, column: NDArray) -> list[str]:
    """Return the strings in a bytes tensor [B, 1]. Raise RequestError if one is not valid UTF-8.

    Args:
        name: Name of the tensor, for the error.
        column: The tensor.
    """
    try:
        return [bytes(entry).decode() for entry in column[:, 0]]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: got bytes that are not valid UTF-8: {error}") from error


def parse_metadata(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse the JSON object of each row's prompt record. Raise RequestError for other texts."""
    objects = []
    for row, text in enumerate(texts):
        try:
            value = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"metadata: row {row} is not valid JSON ({error}), must be a JSON object"
            ) from error
        if not isinstance(value, dict):
            raise RequestError(
                f"metadata: row {row} is {type(value).__name__}, must be a JSON object"
            )
        objects.append(value)
    return objects


def grammars_to_texts(guided_tokens: GuidedTokens) -> list[str]:
    """Return the tokens of each row that follow a grammar as JSON.

    A text is a list of spans: the index of the first token in the row, the index after the last
    one, the grammar, and its stop tokens.
    """
    texts = []
    for row in guided_tokens.spans:
        entries = []
        for span in row[row >= 0].unique().tolist():
            # Entry t of the row belongs to token t+1.
            positions = (row == span).nonzero()[:, 0] + 1
            grammar = guided_tokens.grammars[span]
            entries.append(
                [int(positions[0]), int(positions[-1]) + 1, grammar.text, grammar.stop_token_ids]
            )
        texts.append(json.dumps(entries))
    return texts


def grammars_from_texts(texts: Sequence[str], width: int) -> GuidedTokens:
    """Return the grammars of rows of `width` tokens, [B, width-1]: the inverse of
    `grammars_to_texts`."""
    spans = torch.full((len(texts), width - 1), -1)
    grammars: list[Grammar] = []
    for row, text in enumerate(texts):
        for start, end, grammar, stop_token_ids in parse_json(text):
            spans[row, start - 1 : end - 1] = len(grammars)
            grammars.append(Grammar(grammar, tuple(stop_token_ids)))
    return GuidedTokens(spans, tuple(grammars))


def responses_to_tensors(
    samples: Sequence[Sample], prompts: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return the responses of samples as the tensors of the endpoint `generate`.

    The result has the tensors in RESPONSE_TENSORS, and those in OPTIONAL_RESPONSE_TENSORS,
    BRANCH_TENSORS, REPORT_TENSORS and POLICY_PROMPT_TENSORS that apply. Responses are zero-padded
    on the right.

    Args:
        samples: N samples.
        prompts: The prompt that each sample was requested for, int64 [P]. Without prompts, the
            result has no POLICY_PROMPT_TENSORS.
    """

    def pad_rows(rows: Iterable[Tensor]) -> Tensor:
        block = pad_sequence(list(rows), batch_first=True)
        return block if block.shape[1] else block.new_zeros(len(samples), 1)

    tensors = {
        "responses": pad_rows(sample.response for sample in samples),
        "response_lengths": torch.tensor([[len(sample.response)] for sample in samples]),
        "logprobs": pad_rows(sample.engine_logprobs for sample in samples),
        "weight_versions": pad_rows(sample.weight_versions for sample in samples),
        "stopped": torch.tensor([[_FINISH_CODES[sample.finish_reason]] for sample in samples]),
    }

    response_lengths = [len(sample.response) for sample in samples]
    if (support := concatenate_support(samples)) is not None:
        tensors["kept_counts"] = pad_rows(support.counts.split(response_lengths))
        # Triton does not support empty tensors.
        tensors["kept_ids"] = support.ids if len(support.ids) else support.ids.new_zeros(1)
    if (generated_mask := concatenate_response_values(samples, "generated_mask")) is not None:
        tensors["drawn"] = pad_rows(generated_mask.split(response_lengths))
    if (rewards := concatenate_response_values(samples, "rewards")) is not None:
        tensors["rewards"] = pad_rows(rewards.split(response_lengths))
    if (grammars := grammar_spans_to_tensor(samples)) is not None:
        tensors["grammars"] = grammars

    if branched_samples := [sample for sample in samples if sample.branches]:
        tensors["branches"] = torch.frombuffer(
            bytearray(save(samples_to_tensors(branched_samples))), dtype=torch.uint8
        )
        tensors["branch_counts"] = torch.tensor([[len(sample.branches)] for sample in samples])
    if (reports := reports_to_tensor(samples)) is not None:
        tensors["reports"] = reports

    policy_prompts = [sample.tokens[: sample.prompt_length] for sample in samples]
    # Samples with branches are complete in `branches`.
    pairs = zip(samples, policy_prompts, prompts, strict=False)
    if any(
        not sample.branches and not torch.equal(prompt, requested)
        for sample, prompt, requested in pairs
    ):
        tensors["read"] = pad_rows(policy_prompts)
        tensors["read_lengths"] = torch.tensor([[len(prompt)] for prompt in policy_prompts])

    # A sample without a response has no expert routing. All other samples must have them.
    recorded_routing = [
        sample.expert_routing for sample in samples if sample.expert_routing is not None
    ]
    if recorded_routing and all(
        sample.expert_routing is not None for sample in samples if len(sample.response)
    ):
        empty_routing = recorded_routing[0][:0]
        tensors["routes"] = pad_rows(
            empty_routing if sample.expert_routing is None else sample.expert_routing
            for sample in samples
        ).short()
    return tensors


def responses_from_tensors(
    samples: Sequence[Sample], tensors: Mapping[str, Tensor]
) -> list[Sample]:
    """Return the samples with the responses, branches and reports in the tensors.

    This function is the inverse of `responses_to_tensors`.
    """
    reasons = {code: reason for reason, code in _FINISH_CODES.items()}

    support = expert_routing = None
    if "kept_counts" in tensors:
        counts = tensors["kept_counts"]
        support = SamplingSupport.from_counts(counts.flatten(), tensors["kept_ids"])
        support = replace(support, counts=counts, starts=support.starts.view(counts.shape))
    if "routes" in tensors:
        expert_routing = tensors["routes"]
        # Expert ids are int16 on the wire, and uint8 in samples where they fit.
        if not bool((expert_routing > 255).any()):
            expert_routing = expert_routing.byte()

    grammar_spans: list[tuple[GrammarSpan, ...]] = [()] * len(samples)
    if "grammars" in tensors:
        grammar_spans = grammar_spans_from_bytes(
            tensors["grammars"].numpy().tobytes(), len(samples)
        )

    branched_samples: Iterator[Sample] = iter(())
    if "branches" in tensors:
        branched_samples = iter(samples_from_tensors(load(tensors["branches"].numpy().tobytes())))

    updated = []
    for row, sample in enumerate(samples):
        if "branch_counts" in tensors and bool(tensors["branch_counts"][row, 0]):
            branched_sample = replace(next(branched_samples), metadata=sample.metadata)
            updated.append(branched_sample.with_data_prompt(sample.initial_prompt))
            continue
        length = int(tensors["response_lengths"][row, 0])
        prompt = sample.initial_prompt
        if "read" in tensors:
            prompt = tensors["read"][row, : int(tensors["read_lengths"][row, 0])]
        response_sample = replace(
            sample,
            tokens=torch.cat([prompt, tensors["responses"][row, :length]]),
            prompt_length=len(prompt),
            engine_logprobs=tensors["logprobs"][row, :length],
            weight_versions=tensors["weight_versions"][row, :length],
            finish_reason=reasons[int(tensors["stopped"][row, 0])],
            sampling_support=None if support is None else support.select((row, slice(length))),
            expert_routing=(
                None
                if expert_routing is None or not length
                else expert_routing[row, : len(prompt) + length - 1]
            ),
            generated_mask=tensors["drawn"][row, :length] if "drawn" in tensors else None,
            rewards=tensors["rewards"][row, :length] if "rewards" in tensors else None,
            grammar_spans=grammar_spans[row],
        )
        updated.append(response_sample.with_data_prompt(sample.initial_prompt))
    return with_reports(updated, tensors.get("reports"))


_ERROR_PREFIX = "EndpointError: "
# gRPC sends errors as metadata, which has at most 8 KiB in total. It encodes every byte of a
# non-ASCII character as three bytes.
_MAX_ERROR_BYTES = 1500


class EndpointError(Exception):
    """An error in the form in which the server passes it to Triton.

    Its message is JSON. Triton wraps the message in tracebacks, in which `parse_error` finds it.
    """

    def __init__(self, error: Exception) -> None:
        fields = {"type": type(error).__name__, "message": _shorten(str(error))}
        super().__init__(json.dumps(fields, ensure_ascii=False))


def _shorten(message: str) -> str:
    """Return the message, with its middle omitted if it is too long.

    Invalid Unicode is escaped.
    """
    text = message = message.encode(errors="backslashreplace").decode()
    kept_length = len(message)
    while len(json.dumps(text, ensure_ascii=False).encode()) > _MAX_ERROR_BYTES:
        kept_length = min(kept_length, _MAX_ERROR_BYTES) * 3 // 4
        begin = message[: kept_length - kept_length // 2]
        end = message[len(message) - kept_length // 2 :]
        text = f"{begin} … {len(message) - kept_length} characters omitted … {end}"
    return text


def parse_error(text: str) -> tuple[str, str]:
    """Return type and message of the server's error in Triton's message.

    If the error is Triton's own, the result is ("Triton", text).
    """
    _, prefix, payload = text.partition(_ERROR_PREFIX)
    if not prefix:
        return "Triton", text
    fields, _ = json.JSONDecoder().raw_decode(payload)
    return fields["type"], fields["message"]
