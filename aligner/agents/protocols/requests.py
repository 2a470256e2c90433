"""Requests to a model and its answers, independent of the wire format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from aligner.data.tool_calls import ToolCall
from aligner.errors import AlignerError, UnsupportedError

FinishReason = Literal["stop", "length", "tool_calls"]


class RequestError(AlignerError):
    """Error of a request, with the HTTP status and OpenAI's error code for the client."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        """Create an error.

        Args:
            status: The HTTP status.
            message: Description of the error for the client.
            code: OpenAI's error code.
            param: Name of the invalid field.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def build_refusal(error: AlignerError) -> RequestError:
    """Return the error of a request that cannot be answered, whose cause is the request itself."""
    if isinstance(error, RequestError):
        return error
    code = "unsupported" if isinstance(error, UnsupportedError) else None
    return RequestError(400, str(error), code)


@dataclass(frozen=True)
class NamedTool:
    """The tool that the answer must call."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool
"""Whether the answer may (`auto`), must not (`none`) or must (`required`) call tools, or which tool
it must call."""


@dataclass(frozen=True)
class JsonFormat:
    """The requirement that the text of an answer is a JSON value."""

    schema: Mapping[str, Any] | None = None
    """JSON schema of the value; None permits any JSON object."""


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """Sampling parameters of a request; None for each parameter that the request does not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None

    @property
    def names(self) -> list[str]:
        """Names of the parameters that the request sets."""
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Fields of both chat and text requests."""

    id: str
    """Id of the response."""
    model: str
    """Name of the model in the request, which the response repeats."""
    n: int = 1
    """Number of answers."""
    max_tokens: int | None = None
    """Maximum number of tokens of an answer; None if the request sets no limit."""
    min_tokens: int = 0
    """Minimum number of tokens before the end of an answer."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, which does not contain them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Whether the model's end-of-sequence tokens do not end an answer."""
    sampling: SamplingParameters = SamplingParameters()
    logprobs: bool = False
    """Whether the answer must contain the log-probs of its tokens."""
    top_logprobs: int = 0
    """Number of most probable tokens to return for each position."""
    stream: bool = False
    """Whether the response consists of server-sent events."""
    include_usage: bool = False
    """Whether a stream of chat or text completions ends with the token counts."""
    ignored_fields: tuple[str, ...] = ()
    """Names of the fields of the request that have no effect."""
    is_trained: bool = True
    """Whether a run trains on the answers (header `X-Aligner-Train`)."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ModelRequest):
    """A request for the assistant's next message in a conversation."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages in OpenAI's format for chat completions."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in OpenAI's format for chat completions."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """Whether the answer may contain more than one tool call."""
    response_format: JsonFormat | None = None
    """Required format of the answer's text; None permits any text."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    continue_final_message: bool = False
    """Whether the answer continues the last message instead of following it."""

    @property
    def context_messages(self) -> tuple[Mapping[str, Any], ...]:
        """The messages without the one that the answer continues."""
        return self.messages[:-1] if self.continue_final_message else self.messages

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar must restrict the tokens of the answer."""
        if self.response_format is not None or self.tool_choice not in ("auto", "none"):
            return True
        may_call_tools = bool(self.tools) and self.tool_choice == "auto"
        return may_call_tools and not self.parallel_tool_calls

    @property
    def should_parse_tool_calls(self) -> bool:
        """Whether tool calls in the generated text become tool calls of the answer."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True, kw_only=True)
class TextRequest(ModelRequest):
    """A request for the continuations of one or more texts.

    The answers to it are `n` answers to the first text, then `n` answers to the second, and so on.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    """The texts, or the token ids of each."""
    echo: bool = False
    """Whether an answer begins with its prompt. Then `max_tokens` may be 0."""

    @property
    def prompt(self) -> str | tuple[int, ...]:
        """The text of a request for the continuation of only one, or its token ids."""
        (prompt,) = self.prompts
        return prompt


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer."""

    text: str
    logprob: float | None
    """Log-prob of the token at the sampling temperature; None for the first token of an echoed
    prompt, and for all of its tokens if the request does not ask for log-probs."""
    top_logprobs: tuple["AnswerToken", ...] = ()
    """Most probable tokens at this position, in descending order; empty if not requested."""


@dataclass(frozen=True)
class Answer:
    """The model's answer to a request."""

    text: str
    """The generated text, including the text of tool calls."""
    finish_reason: FinishReason
    prompt_tokens: int
    """Number of input tokens."""
    tokens: tuple[AnswerToken, ...] = ()
    """The generated tokens, after the echoed ones."""
    echoed_tokens: int = 0
    """Number of prompt tokens at the start of `tokens`, whose text `text` begins with."""
    content: str | None = None
    """Text outside the tool calls; None for an answer without tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Parsed tool calls of the answer."""
    stop_string: str | None = None
    """The string of `ModelRequest.stop` that ended the answer; None if another limit ended it."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message in OpenAI's format."""
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
