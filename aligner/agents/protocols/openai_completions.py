"""Fields that OpenAI's chat completions and text completions share."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from pydantic import BaseModel, Field

from aligner.agents.protocols.requests import (
    Answer,
    ModelRequest,
    RequestError,
    SamplingParameters,
)
from aligner.agents.protocols.wire_format import ParsedRequest, RequestT, format_event

DEFAULT_MODEL = "policy"
"""Model name in the response to a request without one."""

IGNORED_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "priority",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "verbosity",
)
"""Known fields that have no effect. The format of a response does not depend on them."""

REFUSED_FIELDS: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "allowed_token_ids": [],
    "audio": {},
    "bad_words": [],
    "best_of": 1,
    "chat_template": "",
    "continue_final_message": False,
    "documents": [],
    "echo": False,
    "function_call": "none",
    "functions": [],
    "guided_choice": [],
    "guided_grammar": "",
    "guided_regex": "",
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "modalities": ["text"],
    "prompt_logprobs": 0,
    "structured_outputs": {},
    "suffix": "",
    "truncate_prompt_tokens": 0,
    "use_beam_search": False,
    "web_search_options": {},
}
"""Fields that would change a response, and that are not supported, with the value of each that is
accepted because it has no effect."""


class _StreamOptions(BaseModel):
    """The field `stream_options` of a request."""

    include_usage: bool | None = None


class CompletionBody(BaseModel, extra="allow"):
    """Fields of both text and chat completion requests; unknown fields are accepted."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    # -1 is vLLM's value for "all tokens"
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CommonArguments(TypedDict):
    """Arguments of `ModelRequest` that `build_common_arguments` returns."""

    id: str
    model: str
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    sampling: SamplingParameters
    stream: bool
    include_usage: bool
    ignored_fields: tuple[str, ...]


def build_common_arguments(body: CompletionBody, response_id: str) -> CommonArguments:
    """Return the arguments of `ModelRequest` that text and chat requests have in common.

    Raises RequestError if the body sets a field that is not supported.
    """
    ignored_fields = split_extra_fields(body.model_extra, REFUSED_FIELDS)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    options = body.stream_options
    return {
        "id": response_id,
        "model": body.model or DEFAULT_MODEL,
        "n": body.n or 1,
        "max_tokens": body.max_tokens,
        "min_tokens": body.min_tokens or 0,
        "stop": tuple(string for string in stop if string),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "sampling": SamplingParameters(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=body.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias,
        ),
        "stream": bool(body.stream),
        "include_usage": options is not None and bool(options.include_usage),
        "ignored_fields": ignored_fields,
    }


def split_extra_fields(
    extra_fields: Mapping[str, Any] | None, refused_fields: Mapping[str, Any]
) -> tuple[str, ...]:
    """Refuse fields that are not supported, and return the names of the ignored fields.

    Args:
        extra_fields: Fields that the body has and its pydantic model does not define
            (`model_extra`). Fields with the value null count as missing.
        refused_fields: Fields that are refused, with the value of each that is accepted because it
            has no effect.

    Raises:
        RequestError: A field is refused.
    """
    ignored_fields = []
    for name, value in (extra_fields or {}).items():
        if value is None:
            continue
        if name not in refused_fields:
            ignored_fields.append(name)
        elif value != refused_fields[name]:
            raise RequestError(
                400,
                f"{name}: is not supported; leave it out, or set {refused_fields[name]!r}",
                "unsupported",
                name,
            )
    return tuple(ignored_fields)


def build_common_fields(request: ModelRequest, object_type: str) -> dict[str, Any]:
    """Return the fields that every response object starts with.

    `created` is 0, so that a response does not depend on the time.
    """
    return {"id": request.id, "object": object_type, "created": 0, "model": request.model}


def build_usage(request: ModelRequest, answers: Sequence[Answer]) -> dict[str, int]:
    """Return the token counts of a request."""
    # each prompt has `n` consecutive answers
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[:: request.n])
    generated_tokens = sum(len(answer.tokens) - answer.echoed_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
    }


class CompletionResponse(ParsedRequest[RequestT]):
    """A parsed request for chat or text completions, whose responses differ only in the content of
    a choice."""

    object_type: str
    """Type of the JSON object of a response."""
    event_type: str
    """Type of the JSON object of a server-sent event."""
    empty_content: Mapping[str, Any]
    """Content of an event that has only the finish reason."""

    @abstractmethod
    def build_content(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that contain an answer."""

    @abstractmethod
    def build_event_content(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of an event's choice that contain an answer."""

    @abstractmethod
    def build_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log-probs of an answer; None if the request does not ask for them."""

    def get_finish_reason(self, answer: Answer) -> str:
        """Return the finish reason of an answer in the format of the response."""
        return answer.finish_reason

    def format_response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `ParsedRequest.format_response`."""
        choices = [
            {
                "index": index,
                **self.build_content(answer),
                "finish_reason": self.get_finish_reason(answer),
                "logprobs": self.build_logprobs(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {
            **build_common_fields(self._request, self.object_type),
            "choices": choices,
            "usage": build_usage(self._request, answers),
        }

    def format_events(self, answers: Sequence[Answer]) -> Iterator[str]:
        """See `ParsedRequest.format_events`.

        Each complete answer is one event, and its finish reason is a second one.
        """
        common_fields = build_common_fields(self._request, self.event_type)
        for index, answer in enumerate(answers):
            choice = {
                "index": index,
                **self.build_event_content(answer),
                "finish_reason": None,
                "logprobs": self.build_logprobs(answer),
            }
            yield format_event({**common_fields, "choices": [choice]})

            last_choice = {
                "index": index,
                **self.empty_content,
                "finish_reason": self.get_finish_reason(answer),
                "logprobs": None,
            }
            yield format_event({**common_fields, "choices": [last_choice]})

        if self._request.include_usage:
            yield format_event(
                {**common_fields, "choices": [], "usage": build_usage(self._request, answers)}
            )
        yield "data: [DONE]\n\n"
