"""Wire format of the OpenAI-compatible endpoints: checked requests, answers and errors.

The pydantic models validate the bodies of requests. `format_response` and `format_events` format
answers as JSON objects or server-sent events, and `RequestError` formats errors.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from aligner.data.tool_calls import ToolCall
from aligner.errors import AlignerError

MODEL_NAME = "policy"
"""Model name that `/v1/models` lists; requests may contain any other name."""
FinishReason = Literal["stop", "length", "tool_calls"]

# Request parameters that are ignored. They would change the distribution that the run trains on, or
# request what the model does not support, but the format of the answer does not depend on them.
_IGNORED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "reasoning_effort",
    "parallel_tool_calls",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class RequestError(AlignerError):
    """Error of a request, with the HTTP status and OpenAI's error code for the client."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """Return the error as a JSON object in OpenAI's format."""
        error_type = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": error_type, "param": None, "code": self.code}
        }


class _StreamOptions(BaseModel):
    """The field `stream_options` of a request."""

    include_usage: bool = False


class CompletionBody(BaseModel, extra="allow"):
    """Fields of both text and chat completion requests; unknown fields are accepted."""

    model: str = MODEL_NAME
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens of the answer; None if the request sets no limit."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the answer, which does not contain them; empty ones are left out."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(string for string in strings if string)

    @property
    def ignored_parameters(self) -> list[str]:
        """Names of the ignored parameters that the request sets."""
        # pydantic collects the fields that the model does not define in `model_extra`
        extra_fields = self.model_extra or {}
        return [name for name in _IGNORED_PARAMETERS if extra_fields.get(name) is not None]

    @property
    def should_return_logprobs(self) -> bool:
        """Whether the answer must contain the log-probs of its tokens."""
        raise NotImplementedError

    def check_supported(self) -> None:
        """Raise RequestError if the request needs a feature that the endpoint does not support."""


class TextBody(CompletionBody):
    """A request to `/v1/completions`."""

    prompt: str | list[int]
    # number of alternatives per token: the endpoint reports only the sampled token
    logprobs: int | None = Field(None, ge=0, le=0)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def should_return_logprobs(self) -> bool:
        """See `CompletionBody.should_return_logprobs`."""
        return self.logprobs is not None


class ChatBody(CompletionBody):
    """A request to `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0)
    response_format: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """See `CompletionBody.token_limit`; `max_completion_tokens` has precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def should_parse_tool_calls(self) -> bool:
        """Whether tool calls in the generated text become `tool_calls` of the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def should_return_logprobs(self) -> bool:
        """See `CompletionBody.should_return_logprobs`."""
        return bool(self.logprobs)

    def check_supported(self) -> None:
        """See `CompletionBody.check_supported`; the only supported response format is text."""
        response_format = (self.response_format or {}).get("type", "text")
        if response_format != "text":
            raise RequestError(
                400,
                f"response_format={response_format!r}: is not supported; must be text",
                "unsupported",
            )


class ModelChatBody(ChatBody):
    """A request to `/v1/chat/completions` of `aligner serve-model`.

    In contrast to the endpoint of a run, the request's own sampling parameters apply.
    """

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def check_supported(self) -> None:
        """See `CompletionBody.check_supported`; tools are not supported."""
        super().check_supported()
        if self.tools:
            raise RequestError(
                400, "tools: are not supported; a response has no tool calls", "unsupported"
            )
        # alternatives are computed from the logits of one token, without the engine's sampler
        if self.top_logprobs and (self.token_limit, self.top_p) != (1, 1):
            raise RequestError(
                400,
                f"top_logprobs={self.top_logprobs}: is supported only with max_tokens=1 and without"
                " top_p",
                "unsupported",
            )


class RewardBody(BaseModel):
    """A request to `/v1/reward`, which adds to the reward of the agent's episode."""

    reward: float


BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_body(body_type: type[BodyT], content: bytes) -> BodyT:
    """Validate the body of a request, and return it as an object of type `body_type`.

    Raises RequestError, with the name of the first invalid field, if the body is invalid.
    """
    try:
        body = body_type.model_validate_json(content)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_context=False)[0]
        # errors of the body itself, such as invalid JSON, have no location
        field = ".".join(map(str, first_error["loc"])) or "the request body"
        value = repr(first_error["input"])
        # shorten the value, because it may be a whole conversation
        if len(value) > 100:
            value = value[:100] + "…"
        raise RequestError(400, f"{field}: {first_error['msg']}; got {value}") from None
    if isinstance(body, CompletionBody):
        body.check_supported()
    return body


@dataclass(frozen=True)
class AnswerToken:
    """A generated token of an answer."""

    text: str
    logprob: float
    """Log-prob of the token at the sampling temperature."""
    top_logprobs: tuple["AnswerToken", ...] = ()
    """Most probable tokens at this position, in descending order; empty if not requested."""

    def to_json(self) -> dict[str, Any]:
        """Return the token's JSON object for a chat answer's log-probs, without alternatives."""
        return {"token": self.text, "logprob": self.logprob, "bytes": [*self.text.encode()]}


@dataclass(frozen=True)
class Answer:
    """The model's answer to a request."""

    text: str
    """The generated text, including the text of tool calls."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Number of input tokens."""
    tokens: tuple[AnswerToken, ...] = ()
    """The generated tokens."""
    content: str | None = None
    """Text outside the tool calls; None for an answer without tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Parsed tool calls of the answer."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        tool_calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in self.tool_calls
        ]
        # OpenAI's format has null, not an empty text, as the content of a pure tool call
        return {"role": "assistant", "content": self.content or None, "tool_calls": tool_calls}


def format_response(
    response_id: str, body: CompletionBody, answers: Sequence[Answer]
) -> dict[str, Any]:
    """Return the JSON object that answers a request."""
    is_chat = isinstance(body, ChatBody)
    choices = []
    for index, answer in enumerate(answers):
        content = {"message": answer.message} if is_chat else {"text": answer.text}
        choices.append(
            {
                "index": index,
                **content,
                "finish_reason": answer.finish_reason,
                "logprobs": _build_logprobs(body, answer),
            }
        )
    return {
        **_build_common_fields(
            response_id, body, "chat.completion" if is_chat else "text_completion"
        ),
        "choices": choices,
        "usage": _build_usage(answers),
    }


def format_events(
    response_id: str, body: CompletionBody, answers: Sequence[Answer]
) -> Iterator[str]:
    """Yield the server-sent events that answer a request.

    Each complete answer is one event, and its finish reason is a second one.
    """
    is_chat = isinstance(body, ChatBody)
    common_fields = _build_common_fields(
        response_id, body, "chat.completion.chunk" if is_chat else "text_completion"
    )
    for index, answer in enumerate(answers):
        content: dict[str, Any] = {"text": answer.text}
        if is_chat:
            delta = answer.message
            if answer.tool_calls:
                # clients merge the deltas of a call by its index
                delta["tool_calls"] = [
                    {"index": call_index, **call}
                    for call_index, call in enumerate(delta["tool_calls"])
                ]
            content = {"delta": delta}
        choice = {
            "index": index,
            **content,
            "finish_reason": None,
            "logprobs": _build_logprobs(body, answer),
        }
        yield _format_event({**common_fields, "choices": [choice]})

        empty_content: Mapping[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        last_choice = {
            "index": index,
            **empty_content,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        yield _format_event({**common_fields, "choices": [last_choice]})

    if body.stream_options is not None and body.stream_options.include_usage:
        yield _format_event({**common_fields, "choices": [], "usage": _build_usage(answers)})
    yield "data: [DONE]\n\n"


def _build_common_fields(
    response_id: str, body: CompletionBody, object_type: str
) -> dict[str, Any]:
    """Return the fields that every response object starts with.

    `created` is 0, so that a response does not depend on the time.
    """
    return {"id": response_id, "object": object_type, "created": 0, "model": body.model}


def _format_event(content: Mapping[str, Any]) -> str:
    """Format an object as a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def _build_usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the token counts of a request; all of its answers have the same prompt."""
    prompt_tokens = answers[0].prompt_tokens
    generated_tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
    }


def _build_logprobs(body: CompletionBody, answer: Answer) -> dict[str, Any] | None:
    """Return the log-probs of an answer in the format of its endpoint; None if not requested."""
    if not body.should_return_logprobs:
        return None
    if isinstance(body, ChatBody):
        return {
            "content": [
                token.to_json()
                | {"top_logprobs": [alternative.to_json() for alternative in token.top_logprobs]}
                for token in answer.tokens
            ]
        }

    texts = [token.text for token in answer.tokens]
    # number of characters before each token
    offsets = [len("".join(texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in answer.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
