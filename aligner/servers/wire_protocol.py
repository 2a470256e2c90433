"""The wire protocol: every endpoint's tensors, and how errors travel.

Names, dtypes and shapes are NeMo-Aligner's; what we add is optional. `docs/endpoints.md` tells the
same to a reader.
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

from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.types import FinishReason, KeptTokens, Sample, kept_by, of_responses
from aligner.errors import AlignerError

PROTOCOL_VERSION = 2

Arrays = Mapping[str, NDArray]


class RequestError(AlignerError):
    """A request that the server refuses; nothing has changed by it."""


class InstanceError(AlignerError):
    """A request for another start of this server: what its sender relies on may be gone. Nothing
    has changed by it."""


class WeightsError(AlignerError):
    """A request that the weights which serve are too old for. Nothing has changed by it; newer ones
    may come."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of an endpoint. A dimension is a number or a name: B rows, S tokens, S-1 token
    transitions."""

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
    """Batching models are called with `infer_batch` and have B as their first dimension, the others
    with `infer_sample`."""
    concurrent_requests: int = 1
    """Requests that are served at a time; for a batching model, `server.concurrent_requests`."""


def _of_request(name: str, dtype: type[np.generic], batching: bool) -> TensorSpec:
    """An optional tensor with one value a request; a batching model wants it in every row."""
    return TensorSpec(name, dtype, ("B", 1) if batching else (1,), optional=True)


REQUEST_NUMBER = "request_number"
"""A tensor that a server returns as it was sent, by which a client recognises its own answer."""


def with_request_number(spec: EndpointSpec) -> EndpointSpec:
    """Return the endpoint with an optional request number among its inputs and outputs."""
    number = _of_request(REQUEST_NUMBER, np.int64, spec.batching)
    return replace(spec, inputs=(*spec.inputs, number), outputs=(*spec.outputs, number))


def _order(batching: bool) -> tuple[TensorSpec, ...]:
    """What our clients add: the update a request follows or is, the start of the server it is for,
    and its trace."""
    return (
        _of_request("sequence_number", np.int64, batching),
        _of_request("instance", np.bytes_, batching),
        _of_request("trace_id", np.bytes_, batching),
    )


TOKENS = TensorSpec("tokens", np.int64, ("B", "S"))
LENGTHS = TensorSpec("sequence_lengths", np.int64, ("B", 1))
# The scores, and what each of P sources has given, where there are several.
REWARDS = (
    TensorSpec("rewards", np.float32, ("B", 1)),
    TensorSpec("reward_parts", np.float32, ("B", "P"), optional=True),
)
# Of the scores what tokens get that end steps, not a number for others; where the reward gives any.
STEP_REWARDS = TensorSpec("step_rewards", np.float32, ("B", "S-1"), optional=True)
# Where a response begins, and what the data says about its prompt (a JSON object a row).
RESPONSES = (
    TensorSpec("prompt_lengths", np.int64, ("B", 1), optional=True),
    TensorSpec("metadata", np.bytes_, ("B", 1), optional=True),
)

CRITIC_INFER = EndpointSpec(
    "critic_infer",
    (TOKENS, LENGTHS, *_order(batching=True)),
    (TensorSpec("values", np.float32, ("B", "S")),),
    batching=True,
)
CRITIC_INFER_WITH_REWARD = replace(
    CRITIC_INFER,
    inputs=(*CRITIC_INFER.inputs, *RESPONSES),
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
        *_order(batching=False),
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
        *RESPONSES,
        _of_request("sequence_number", np.int64, batching=True),
        _of_request("trace_id", np.bytes_, batching=True),
    ),
    (*REWARDS, STEP_REWARDS),
    batching=True,
)
TEACHER_LOGPROBS = EndpointSpec(
    "teacher_logprobs",
    (
        TOKENS,
        LENGTHS,
        *RESPONSES,
        _of_request("temperature", np.float32, batching=True),
        _of_request("top_k", np.int64, batching=True),
        _of_request("sequence_number", np.int64, batching=True),
        _of_request("trace_id", np.bytes_, batching=True),
    ),
    (
        TensorSpec("logprobs", np.float32, ("B", "S-1")),
        # Where `top_k` asks for them: the most probable tokens, their log-probs, and that of all
        # others together.
        TensorSpec("top_ids", np.int32, ("B", "S-1", "K"), optional=True),
        TensorSpec("top_logprobs", np.float32, ("B", "S-1", "K"), optional=True),
        TensorSpec("rest_logprobs", np.float32, ("B", "S-1"), optional=True),
    ),
    batching=True,
)
_FINISH_CODES: dict[FinishReason, int] = {"unfinished": -1, "length": 0, "stop": 1}
# Each prompt's samples in a row: what has been drawn of them.
DRAWN = (
    TensorSpec("responses", np.int64, ("N", "R")),
    TensorSpec("response_lengths", np.int64, ("N", 1)),
    TensorSpec("logprobs", np.float32, ("N", "R")),
    TensorSpec("weight_versions", np.int64, ("N", "R")),
    TensorSpec("stopped", np.int64, ("N", 1)),
)
# Where the engine tells what it drew among (counts, 0 for the whole vocabulary, and the ids one
# after another), and the experts of every token of a begun response but its last. Of episodes:
# which tokens the model drew, what environments gave.
ALSO_DRAWN = (
    TensorSpec("kept_counts", np.int64, ("N", "R"), optional=True),
    TensorSpec("kept_ids", np.int32, ("I",), optional=True),
    TensorSpec("routes", np.int16, ("N", "T", "L", "K"), optional=True),
    TensorSpec("drawn", np.bool_, ("N", "R"), optional=True),
    TensorSpec("rewards", np.float32, ("N", "R"), optional=True),
)
# How many branches each sample has, and those that have some, whole: `samples_to_tensors` of them
# as safetensors.
BRANCHES = (
    TensorSpec("branches", np.uint8, ("Q",), optional=True),
    TensorSpec("branch_counts", np.int64, ("N", 1), optional=True),
)
# What each sample's policy read first, where that is not its prompt, as of agents.
READ = (
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
        RESPONSES[1],
        TensorSpec("weight_version", np.int64, (1,), optional=True),
        *(replace(spec, optional=True) for spec in (*DRAWN, *ALSO_DRAWN, *BRANCHES)),
        TensorSpec("enough", np.int64, (1,), optional=True),
        TensorSpec("due", np.int64, ("B", 1), optional=True),
        TensorSpec("first_prompt", np.int64, (1,), optional=True),
        TensorSpec("instance", np.bytes_, (1,), optional=True),
        TensorSpec("trace_id", np.bytes_, (1,), optional=True),
    ),
    (*DRAWN, *ALSO_DRAWN, *BRANCHES, *READ),
    batching=False,
)
CONTROL = EndpointSpec(
    "control",
    (TensorSpec("request", np.bytes_, (1,)),),
    (TensorSpec("response", np.bytes_, (1,)),),
    batching=False,
    # a trainer has one operation at a time that waits for the ranks; health need not wait for it
    concurrent_requests=2,
)


def text_array(text: str) -> NDArray:
    """A string as a bytes tensor [1]."""
    return np.array([text.encode()], dtype=object)


def array_text(array: NDArray) -> str:
    """The string in a bytes tensor [1]. Raises RequestError when it is not UTF-8."""
    value = array.ravel()[0]
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"got bytes that are not valid UTF-8: {error}") from error


def column_texts(name: str, column: NDArray) -> list[str]:
    """The texts of a tensor [B, 1] of bytes. Raises RequestError for what is not UTF-8."""
    try:
        return [bytes(entry).decode() for entry in column[:, 0]]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: got bytes that are not valid UTF-8: {error}") from error


def json_objects(texts: Sequence[str]) -> list[dict[str, Any]]:
    """What the data says about each row's prompt. Raises RequestError for what is no JSON
    object."""
    objects = []
    for row, text in enumerate(texts):
        try:
            value = json.loads(text)
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


def response_tensors(samples: Sequence[Sample], asked: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Their responses, as `DRAWN`, `ALSO_DRAWN`, `BRANCHES` and `READ` name and shape them; zeros
    behind a response.

    `asked` are the prompts, int64 [P], that each was asked for; without them `READ` is not told.
    """

    def padded(rows: Iterable[Tensor]) -> Tensor:
        block = pad_sequence(list(rows), batch_first=True)
        return block if block.shape[1] else block.new_zeros(len(samples), 1)

    tensors = {
        "responses": padded(sample.response for sample in samples),
        "response_lengths": torch.tensor([[len(sample.response)] for sample in samples]),
        "logprobs": padded(sample.engine_logprobs for sample in samples),
        "weight_versions": padded(sample.weight_versions for sample in samples),
        "stopped": torch.tensor([[_FINISH_CODES[sample.finish_reason]] for sample in samples]),
    }
    if (kept := kept_by(samples)) is not None:
        tensors["kept_counts"] = padded(
            kept.counts.split([len(sample.response) for sample in samples])
        )
        # Triton knows no empty tensors
        tensors["kept_ids"] = kept.ids if len(kept.ids) else kept.ids.new_zeros(1)
    for name in ("drawn", "rewards"):
        if (told := of_responses(samples, name)) is not None:
            tensors[name] = padded(told.split([len(sample.response) for sample in samples]))
    if branched := [sample for sample in samples if sample.branches]:
        tensors["branches"] = torch.frombuffer(
            bytearray(save(samples_to_tensors(branched))), dtype=torch.uint8
        )
        tensors["branch_counts"] = torch.tensor([[len(sample.branches)] for sample in samples])
    prompts = [sample.tokens[: sample.prompt_length] for sample in samples]
    plain = zip(samples, prompts, asked, strict=False)  # others are in `branches`, whole
    if any(
        not sample.branches and not torch.equal(prompt, wanted) for sample, prompt, wanted in plain
    ):
        tensors["read"], tensors["read_lengths"] = (
            padded(prompts),
            torch.tensor([[len(prompt)] for prompt in prompts]),
        )
    routed = [sample.routes for sample in samples if sample.routes is not None]
    if routed and all(sample.routes is not None for sample in samples if len(sample.response)):
        none = routed[0][:0]
        tensors["routes"] = padded(
            none if sample.routes is None else sample.routes for sample in samples
        ).short()
    return tensors


def with_responses(samples: Sequence[Sample], tensors: Mapping[str, Tensor]) -> list[Sample]:
    """The same samples with the responses, and branches, that `response_tensors` made these of."""
    reasons = {code: reason for reason, code in _FINISH_CODES.items()}
    kept = routes = None
    if "kept_counts" in tensors:
        counts = tensors["kept_counts"]
        flat = KeptTokens.in_order(counts.flatten(), tensors["kept_ids"])
        kept = replace(flat, counts=counts, starts=flat.starts.view(counts.shape))
    if "routes" in tensors:
        routes = tensors["routes"]
        routes = routes if bool((routes > 255).any()) else routes.byte()
    branched: Iterator[Sample] = iter(())
    if "branches" in tensors:
        branched = iter(samples_from_tensors(load(tensors["branches"].numpy().tobytes())))
    changed = []
    for row, sample in enumerate(samples):
        if "branch_counts" in tensors and bool(tensors["branch_counts"][row, 0]):
            changed.append(replace(next(branched), metadata=sample.metadata))
            continue
        length = int(tensors["response_lengths"][row, 0])
        prompt = sample.asked
        if "read" in tensors:
            prompt = tensors["read"][row, : int(tensors["read_lengths"][row, 0])]
        changed.append(
            replace(
                sample,
                tokens=torch.cat([prompt, tensors["responses"][row, :length]]),
                prompt_length=len(prompt),
                engine_logprobs=tensors["logprobs"][row, :length],
                weight_versions=tensors["weight_versions"][row, :length],
                finish_reason=reasons[int(tensors["stopped"][row, 0])],
                kept=None if kept is None else kept.at((row, slice(length))),
                routes=(
                    None
                    if routes is None or not length
                    else routes[row, : len(prompt) + length - 1]
                ),
                drawn=tensors["drawn"][row, :length] if "drawn" in tensors else None,
                rewards=tensors["rewards"][row, :length] if "rewards" in tensors else None,
            )
        )
    return changed


_ERROR_MARK = "EndpointError: "
# gRPC sends errors as metadata, 8 KiB at most in all, where every byte of a non-ASCII character
# becomes three.
_MESSAGE_BYTES = 1500


class EndpointError(Exception):
    """An error as the server hands it to Triton, which wraps it in tracebacks: JSON that a client
    finds in them."""

    def __init__(self, error: Exception) -> None:
        told = {"type": type(error).__name__, "message": _shortened(str(error))}
        super().__init__(json.dumps(told, ensure_ascii=False))


def _shortened(message: str) -> str:
    """The message, without its middle where that makes it too long; what is no Unicode is
    escaped."""
    text = message = message.encode(errors="backslashreplace").decode()
    kept = len(message)
    while len(json.dumps(text, ensure_ascii=False).encode()) > _MESSAGE_BYTES:
        kept = min(kept, _MESSAGE_BYTES) * 3 // 4
        begin, end = message[: kept - kept // 2], message[len(message) - kept // 2 :]
        text = f"{begin} … {len(message) - kept} characters omitted … {end}"
    return text


def told_error(text: str) -> tuple[str, str]:
    """(type, message) of the server's error in Triton's text; ("Triton", text) when Triton itself
    refused."""
    _, mark, told = text.partition(_ERROR_MARK)
    if not mark:
        return "Triton", text
    fields, _ = json.JSONDecoder().raw_decode(told)
    return fields["type"], fields["message"]
