"""Wire format of the OpenAI-compatible endpoints: checked requests, answers and errors.

The pydantic models validate the bodies of requests. `answered` and `streamed` format answers as
JSON objects or server-sent events, and `Refused` formats errors.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from aligner.data.tool_calls import ToolCall
from aligner.errors import AlignerError

MODEL = "policy"
"""Model name that `/v1/models` lists; requests may contain any other name."""
FinishReason = Literal["stop", "length", "tool_calls"]
# Request parameters that are ignored. They would change the distribution that the run trains on, or
# request what the model does not support, but the format of the answer does not depend on them.
_IGNORED = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "logit_bias",
        "reasoning_effort",
        "parallel_tool_calls",
    ),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class Refused(AlignerError):
    """Error of a request, with the HTTP status and OpenAI's error code for the client."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def content(self) -> dict[str, Any]:
        """Return the error as a JSON object in OpenAI's format."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class _StreamOptions(BaseModel):
    """The field `stream_options` of a request."""

    include_usage: bool = False


class CompletionBody(BaseModel, extra="allow"):
    """Fields of both text and chat completion requests; unknown fields are accepted."""

    model: str = MODEL
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None if the request sets no limit."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts, which end the answer; empty texts are left out."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def ignored(self) -> list[str]:
        """Names of the ignored parameters that the request sets."""
        return [name for name in _IGNORED if (self.model_extra or {}).get(name) is not None]

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer must contain the log-probs of its tokens."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Raise Refused if the request needs a feature that the endpoint does not support."""


class TextBody(CompletionBody):
    """A request to `/v1/completions`."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=0)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """See `CompletionBody.wants_logprobs`."""
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
    def limit(self) -> int | None:
        """See `CompletionBody.limit`; `max_completion_tokens` has precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def calls_tools(self) -> bool:
        """Whether tool calls in the generated text become `tool_calls` of the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wants_logprobs(self) -> bool:
        """See `CompletionBody.wants_logprobs`."""
        return bool(self.logprobs)

    def refuse(self) -> None:
        """See `CompletionBody.refuse`; the only supported response format is text."""
        if (kind := (self.response_format or {}).get("type", "text")) != "text":
            raise Refused(
                400,
                f"response_format={kind!r}: is not supported; must be text",
                "unsupported",
            )


class ModelChatBody(ChatBody):
    """A request to `/v1/chat/completions` of `aligner serve-model`.

    In contrast to the endpoint of a run, the request's own sampling parameters apply.
    """

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def refuse(self) -> None:
        """See `CompletionBody.refuse`; stop texts and tools are not supported."""
        super().refuse()
        if self.stops or self.tools:
            raise Refused(
                400,
                "stop, tools: are not supported; a response ends at the model's own stop tokens and"
                " has no tool calls",
                "unsupported",
            )
        if self.top_logprobs and (self.limit, self.top_p) != (1, 1):
            raise Refused(
                400,
                f"top_logprobs={self.top_logprobs}: is supported only with max_tokens=1 and without"
                " top_p",
                "unsupported",
            )


class RewardBody(BaseModel):
    """A request to `/v1/reward`, which adds to the reward of the agent's episode."""

    reward: float


BodyT = TypeVar("BodyT", bound=BaseModel)


def parsed(kind: type[BodyT], content: bytes) -> BodyT:
    """Validate the body of a request, and return it as an object of type `kind`.

    Raises Refused, with the name of the first invalid field, if the body is invalid.
    """
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "the request body"
        value = repr(first["input"])
        raise Refused(
            400, f"{field}: {first['msg']}; got {value if len(value) <= 100 else value[:100] + '…'}"
        ) from None
    if isinstance(body, CompletionBody):
        body.refuse()
    return body


@dataclass(frozen=True)
class DrawnToken:
    """A generated token of an answer."""

    text: str
    logprob: float
    """Log-prob of the token at the sampling temperature."""
    likeliest: tuple["DrawnToken", ...] = ()
    """Most probable tokens at this position, in descending order; empty if not requested."""

    def told(self) -> dict[str, Any]:
        """Return the token as in a chat answer's log-probs, without its alternatives."""
        return {"token": self.text, "logprob": self.logprob, "bytes": [*self.text.encode()]}


@dataclass(frozen=True)
class Answer:
    """The model's answer to a request."""

    text: str
    """The generated text, including the text of tool calls."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Number of input tokens."""
    tokens: tuple[DrawnToken, ...] = ()
    """The generated tokens."""
    content: str | None = None
    """Text outside the tool calls; None for an answer without tool calls."""
    calls: tuple[ToolCall, ...] = ()
    """Parsed tool calls of the answer."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        if not self.calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.content or None, "tool_calls": calls}


def answered(name: str, body: CompletionBody, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON object that answers a request; `name` is its id."""
    is_chat = isinstance(body, ChatBody)
    choices = []
    for index, answer in enumerate(answers):
        content = {"message": answer.message} if is_chat else {"text": answer.text}
        choices.append(
            {
                "index": index,
                **content,
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(body, answer),
            }
        )
    return {
        **_head(name, body, "chat.completion" if is_chat else "text_completion"),
        "choices": choices,
        "usage": _usage(answers),
    }


def streamed(name: str, body: CompletionBody, answers: Sequence[Answer]) -> Iterator[str]:
    """Yield the server-sent events that answer a request; `name` is its id.

    Each complete answer is one event, and its finish reason is a second one.
    """
    is_chat = isinstance(body, ChatBody)
    head = _head(name, body, "chat.completion.chunk" if is_chat else "text_completion")
    for index, answer in enumerate(answers):
        content: dict[str, Any] = {"text": answer.text}
        if is_chat:
            delta = answer.message
            if answer.calls:
                delta["tool_calls"] = [
                    {"index": call_index, **call}
                    for call_index, call in enumerate(delta["tool_calls"])
                ]
            content = {"delta": delta}
        choice = {
            "index": index,
            **content,
            "finish_reason": None,
            "logprobs": _logprobs(body, answer),
        }
        yield _event({**head, "choices": [choice]})
        end: Mapping[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        yield _event(
            {
                **head,
                "choices": [
                    {"index": index, **end, "finish_reason": answer.finish_reason, "logprobs": None}
                ],
            }
        )
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answers)})
    yield "data: [DONE]\n\n"


def _head(name: str, body: CompletionBody, kind: str) -> dict[str, Any]:
    """Return the fields that every response object starts with.

    `created` is 0, so that a response does not depend on the time.
    """
    return {"id": name, "object": kind, "created": 0, "model": body.model}


def _event(content: Mapping[str, Any]) -> str:
    """Format an object as a server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the token counts of a request; all of its answers have the same prompt."""
    prompt_tokens = answers[0].prompt_tokens
    generated_tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
    }


def _logprobs(body: CompletionBody, answer: Answer) -> dict[str, Any] | None:
    """Return the log-probs of an answer in the format of its endpoint; None if not requested."""
    if not body.wants_logprobs:
        return None
    if isinstance(body, ChatBody):
        return {
            "content": [
                token.told()
                | {"top_logprobs": [alternative.told() for alternative in token.likeliest]}
                for token in answer.tokens
            ]
        }
    texts = [token.text for token in answer.tokens]
    logprobs = [token.logprob for token in answer.tokens]
    offsets = [len("".join(texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }
