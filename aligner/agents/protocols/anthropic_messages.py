"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from aligner.agents.protocols.openai_completions import split_extra_fields
from aligner.agents.protocols.requests import (
    Answer,
    ChatRequest,
    JsonFormat,
    NamedTool,
    RequestError,
    SamplingParameters,
    ToolChoice,
)
from aligner.agents.protocols.wire_format import (
    ParsedRequest,
    RequestContext,
    WireFormat,
    format_named_event,
    parse_body,
)

# fields that are refused, with the value of each that is accepted because it has no effect
_REFUSED_FIELDS: Mapping[str, Any] = {"container": "", "context_management": {}, "mcp_servers": []}
# types of errors by HTTP status
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class _Message(BaseModel):
    """A message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Tool(BaseModel):
    """A tool of a request; server tools have other types, and are not supported."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(BaseModel):
    """The field `tool_choice` of a request."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(BaseModel):
    """The field `output_config.format` of a request."""

    type: Literal["json_schema"]
    # the field `schema` of the JSON object; the name `schema` belongs to pydantic
    json_schema: dict[str, Any] = Field(alias="schema")


class _OutputConfig(BaseModel):
    """The field `output_config` of a request."""

    format: _OutputFormat | None = None


class _PromptBody(BaseModel, extra="allow"):
    """The fields of a request that describe the prompt."""

    model: str
    messages: list[_Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _MessagesBody(_PromptBody):
    """The body of a request for a message."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)


class _AnthropicMessage(ParsedRequest[ChatRequest]):
    """A parsed request for a message."""

    def format_response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `ParsedRequest.format_response`; there is only one answer."""
        (answer,) = answers
        return {
            "id": self._request.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": _build_content(answer),
            **_build_stop_fields(answer),
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.tokens)},
        }

    def format_events(self, answers: Sequence[Answer]) -> Iterator[str]:
        """See `ParsedRequest.format_events`; there is only one answer."""
        return map(format_named_event, self._build_events(answers))

    def _build_events(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream. The complete content of a block is one event."""
        (answer,) = answers
        final = self.format_response(answers)
        initial = {
            **final,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
        }
        yield {"type": "message_start", "message": initial}
        for index, block in enumerate(final["content"]):
            if block["type"] == "text":
                empty_block = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                empty_block = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_start", "index": index, "content_block": empty_block}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {
            "type": "message_delta",
            "delta": _build_stop_fields(answer),
            "usage": {"output_tokens": len(answer.tokens)},
        }
        yield {"type": "message_stop"}


def _build_content(answer: Answer) -> list[dict[str, Any]]:
    """Return the content blocks of an answer."""
    text = answer.content if answer.tool_calls else answer.text
    blocks: list[dict[str, Any]] = []
    if text:
        blocks.append({"type": "text", "text": text})
    for call in answer.tool_calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )
    return blocks


def _build_stop_fields(answer: Answer) -> dict[str, Any]:
    """Return the reason why an answer ended."""
    reason = "end_turn"
    if answer.tool_calls:
        reason = "tool_use"
    elif answer.finish_reason == "length":
        reason = "max_tokens"
    elif answer.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string}


def _parse(content: bytes, context: RequestContext) -> _AnthropicMessage:
    """Parse a body; see `WireFormat.parse`."""
    body = parse_body(_MessagesBody, content)
    request = ChatRequest(
        id=context.response_id,
        model=body.model,
        max_tokens=body.max_tokens,
        stop=tuple(string for string in body.stop_sequences or () if string),
        sampling=SamplingParameters(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
        ),
        stream=bool(body.stream),
        **_build_prompt_arguments(body),
    )
    return _AnthropicMessage(request)


def parse_count_request(content: bytes) -> ChatRequest:
    """Return the request whose input tokens a body of `count_tokens` asks for.

    Raises RequestError if the body is invalid.
    """
    body = parse_body(_PromptBody, content)
    return ChatRequest(id="", model=body.model, **_build_prompt_arguments(body))


def _build_prompt_arguments(body: _PromptBody) -> dict[str, Any]:
    """Return the arguments of `ChatRequest` that describe the prompt."""
    ignored_fields = split_extra_fields(body.model_extra, _REFUSED_FIELDS)
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _get_text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _convert_message(message, index)
    choice = body.tool_choice
    output_format = None if body.output_config is None else body.output_config.format
    return {
        "messages": tuple(messages),
        # a prefilled answer
        "continue_final_message": messages[-1]["role"] == "assistant",
        "tools": tuple(map(_convert_tool, body.tools or ())),
        "tool_choice": _convert_tool_choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "response_format": None if output_format is None else JsonFormat(output_format.json_schema),
        "chat_template_kwargs": body.chat_template_kwargs or {},
        "ignored_fields": ignored_fields,
    }


def _convert_message(message: _Message, index: int) -> list[dict[str, Any]]:
    """Return a message in the format of chat completions.

    A user's message may contain results of tools, which become messages of their own.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    converted: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for position, block in enumerate(message.content):
        place = f"messages.{index}.content.{position}"
        kind = block.get("type")
        try:
            if kind == "text":
                texts.append(_get_text([block], place))
            elif kind == "tool_use" and message.role == "assistant":
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": function})
            elif kind == "tool_result" and message.role == "user":
                result = {
                    "role": "tool",
                    "tool_call_id": block["tool_use_id"],
                    "content": _get_text(block.get("content") or "", place),
                }
                # keep the order of texts and results
                if texts:
                    converted.append({"role": "user", "content": "".join(texts)})
                    texts = []
                converted.append(result)
            # the reasoning of the model's own answers is part of their text
            elif kind not in ("thinking", "redacted_thinking"):
                raise RequestError(
                    400,
                    f"{place}.type={kind!r}: is not supported for the role {message.role}",
                    "unsupported",
                    place,
                )
        except KeyError as error:
            raise RequestError(
                400, f"{place}.{error.args[0]}: Field required", param=place
            ) from None
    if message.role == "assistant":
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
        return [answer | {"tool_calls": calls}] if calls else [answer]
    if texts or not converted:
        converted.append({"role": message.role, "content": "".join(texts)})
    return converted


def _get_text(content: str | Sequence[Mapping[str, Any]], place: str) -> str:
    """Return the text of content blocks; `place` is their place in the body."""
    if isinstance(content, str):
        return content
    if not all(
        isinstance(block, Mapping)
        and block.get("type") == "text"
        and isinstance(block.get("text"), str)
        for block in content
    ):
        raise RequestError(
            400,
            f"{place}: must be a string or a list of text blocks, got {str(content)[:100]!r}",
            "unsupported",
            place,
        )
    return "".join(block["text"] for block in content)


def _convert_tool(tool: _Tool) -> dict[str, Any]:
    """Return a tool in the format of chat completions."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def _convert_tool_choice(choice: _ToolChoice | None) -> ToolChoice:
    """Return the tool choice of a body. Raises RequestError if a named tool has no name."""
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise RequestError(400, "tool_choice.name: Field required", param="tool_choice.name")
    return NamedTool(choice.name)


def format_anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return an error as a JSON object in Anthropic's format."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if error.code == "context_length_exceeded":
        # frameworks recognize the beginning of Anthropic's message
        message = f"prompt is too long: {message}"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(error.status, default), "message": message},
    }


ANTHROPIC_MESSAGES = WireFormat("messages", "msg", _parse)
