"""What clients of OpenAI's API send and get: requests as they are checked, answers and errors as
they are worded."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from aligner.data.tool_calls import ToolCall
from aligner.errors import AlignerError

MODEL = "policy"
"""What `/v1/models` lists; requests may name any other."""
FinishReason = Literal["stop", "length", "tool_calls"]
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
"""What would change the distribution that the run learns from, or the model cannot do, and changes
no answer's form."""


class Refused(AlignerError):
    """A request that gets no answer: why, and the status and the code that its client is told."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def content(self) -> dict[str, Any]:
        """The error as OpenAI words it."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class CompletionBody(BaseModel, extra="allow"):
    """What both kinds of requests have in common."""

    model: str = MODEL
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def ignored(self) -> list[str]:
        """What it asks for and does not get."""
        return [name for name in _IGNORED if (self.model_extra or {}).get(name) is not None]

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probs of its tokens are wanted with an answer."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Raise Refused for what is asked for, cannot be had and would be missed."""


class TextBody(CompletionBody):
    """A request to `/v1/completions`."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=0)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """As `CompletionBody`."""
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
        """As `CompletionBody`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def calls_tools(self) -> bool:
        """Whether calls in the answer are told as such."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wants_logprobs(self) -> bool:
        """As `CompletionBody`."""
        return bool(self.logprobs)

    def refuse(self) -> None:
        """As `CompletionBody`."""
        if (kind := (self.response_format or {}).get("type", "text")) != "text":
            raise Refused(
                400,
                f"response_format={kind!r}: is not supported; must be text",
                "unsupported",
            )


class ModelChatBody(ChatBody):
    """A request to `/v1/chat/completions` of a model that is served by itself, which draws as it is
    asked to."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def refuse(self) -> None:
        """As `CompletionBody`."""
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
    """What an agent says that its episode is worth, more than what it has said before."""

    reward: float


BodyT = TypeVar("BodyT", bound=BaseModel)


def parsed(kind: type[BodyT], content: bytes) -> BodyT:
    """What a request of a kind says. Raises Refused, naming the first field that is wrong."""
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the request body"
        got = repr(first["input"])
        raise Refused(
            400, f"{place}: {first['msg']}; got {got if len(got) <= 100 else got[:100] + '…'}"
        ) from None
    if isinstance(body, CompletionBody):
        body.refuse()
    return body


@dataclass(frozen=True)
class DrawnToken:
    """A token of an answer: its text and its log-probability at the run's temperature."""

    text: str
    logprob: float
    likeliest: tuple["DrawnToken", ...] = ()
    """What could have come in its place, where that was asked for: the most probable first."""

    def told(self) -> dict[str, Any]:
        """As a chat's log-probs have it, without the others."""
        return {"token": self.text, "logprob": self.logprob, "bytes": [*self.text.encode()]}


@dataclass(frozen=True)
class Answer:
    """What the policy said to a request."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: tuple[DrawnToken, ...] = ()
    content: str | None = None
    """Where it calls tools: what it says beside that."""
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
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
    """The response to a request whose id is `name`."""
    is_chat = isinstance(body, ChatBody)
    choices = []
    for index, answer in enumerate(answers):
        said = {"message": answer.message} if is_chat else {"text": answer.text}
        choices.append(
            {
                "index": index,
                **said,
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
    """The same response as server-sent events: each answer in one piece, once it is complete."""
    is_chat = isinstance(body, ChatBody)
    head = _head(name, body, "chat.completion.chunk" if is_chat else "text_completion")
    for index, answer in enumerate(answers):
        said: dict[str, Any] = {"text": answer.text}
        if is_chat:
            delta = answer.message
            if answer.calls:
                delta["tool_calls"] = [
                    {"index": at, **call} for at, call in enumerate(delta["tool_calls"])
                ]
            said = {"delta": delta}
        choice = {
            "index": index,
            **said,
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
    return {"id": name, "object": kind, "created": 0, "model": body.model}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, drawn = answers[0].prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def _logprobs(body: CompletionBody, answer: Answer) -> dict[str, Any] | None:
    if not body.wants_logprobs:
        return None
    if isinstance(body, ChatBody):
        return {
            "content": [
                token.told() | {"top_logprobs": [each.told() for each in token.likeliest]}
                for token in answer.tokens
            ]
        }
    texts, logprobs = (
        [token.text for token in answer.tokens],
        [token.logprob for token in answer.tokens],
    )
    offsets = [len("".join(texts[:at])) for at in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }
