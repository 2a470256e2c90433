"""OpenAI's Responses API: `/v1/responses`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from aligner.agents.protocols.openai_completions import (
    DEFAULT_MODEL,
    REFUSED_FIELDS,
    split_extra_fields,
)
from aligner.agents.protocols.requests import (
    Answer,
    AnswerToken,
    ChatRequest,
    JsonFormat,
    NamedTool,
    RequestError,
    SamplingParameters,
    ToolChoice,
)
from aligner.agents.protocols.response_store import Items, ResponseStore
from aligner.agents.protocols.wire_format import (
    ParsedRequest,
    RequestContext,
    WireFormat,
    format_named_event,
    parse_body,
)

# fields that are refused, with the value of each that is accepted because it has no effect
_REFUSED_FIELDS = {
    **REFUSED_FIELDS,
    "background": False,
    "conversation": "",
    "prompt": {},
    "truncation": "disabled",
}


class _NamedToolChoice(BaseModel):
    """A value of `tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class _TextFormat(BaseModel):
    """The field `text.format` of a request."""

    type: Literal["text", "json_object", "json_schema"]
    # the field `schema` of the JSON object; the name `schema` belongs to pydantic
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class _TextSettings(BaseModel):
    """The field `text` of a request."""

    format: _TextFormat | None = None


class _Tool(BaseModel):
    """A tool of a request."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ResponseBody(BaseModel, extra="allow"):
    """The body of a request for a response."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: _TextSettings | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Response(ParsedRequest[ChatRequest]):
    """A parsed request for a response."""

    def __init__(
        self, request: ChatRequest, body: _ResponseBody, items: Items, store: ResponseStore
    ) -> None:
        """Create a parsed request.

        Args:
            request: The request, independent of the wire format.
            body: The body of the request.
            items: Items of the conversation, without instructions.
            store: Store for the response.
        """
        super().__init__(request)
        self._body = body
        self._items = items
        self._store = store

    def record(self, answers: Sequence[Answer]) -> None:
        """See `ParsedRequest.record`; stores the response for later requests."""
        if self._body.store is not False:
            self._store.add(self.format_response(answers), self._items)

    def format_response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `ParsedRequest.format_response`; there is only one answer."""
        (answer,) = answers
        is_complete = answer.finish_reason != "length"
        return self._build_response(
            "completed" if is_complete else "incomplete", self._build_output(answer), answer
        )

    def format_events(self, answers: Sequence[Answer]) -> Iterator[str]:
        """See `ParsedRequest.format_events`; there is only one answer."""
        for number, event in enumerate(self._build_events(answers)):
            yield format_named_event({**event, "sequence_number": number})

    def _build_events(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream without their numbers."""
        initial = self._build_response("in_progress", [], None)
        yield {"type": "response.created", "response": initial}
        yield {"type": "response.in_progress", "response": initial}
        final = self.format_response(answers)
        for index, item in enumerate(final["output"]):
            position = {"output_index": index, "item_id": item["id"]}
            empty_content: dict[str, Any] = {"arguments": ""}
            if item["type"] == "message":
                empty_content = {"content": []}
            yield {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**item, **empty_content, "status": "in_progress"},
            }
            if item["type"] == "message":
                (part,) = item["content"]
                yield from _build_text_events(part, position)
            else:
                event = {"type": "response.function_call_arguments", **position}
                yield {**event, "type": f"{event['type']}.delta", "delta": item["arguments"]}
                yield {
                    **event,
                    "type": f"{event['type']}.done",
                    "name": item["name"],
                    "arguments": item["arguments"],
                }
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{final['status']}", "response": final}

    def _build_output(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the items of an answer: a message, function calls, or both."""
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        items: list[dict[str, Any]] = []
        text = answer.content if answer.tool_calls else answer.text
        if text or not answer.tool_calls:
            part: dict[str, Any] = {
                "type": "output_text",
                "text": text,
                "annotations": [],
                "logprobs": [],
            }
            if self._request.logprobs:
                part["logprobs"] = [_format_token(token) for token in answer.tokens]
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{self._request.id}",
                    "role": "assistant",
                    "status": status,
                    "content": [part],
                }
            )
        for index, call in enumerate(answer.tool_calls):
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{self._request.id}-{index}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": json.dumps(call.arguments),
                    "status": status,
                }
            )
        return items

    def _build_response(self, status: str, output: Items, answer: Answer | None) -> dict[str, Any]:
        """Return a response object.

        `created_at` is 0, so that a response does not depend on the time.

        Args:
            status: `in_progress`, `completed` or `incomplete`.
            output: Items of the response.
            answer: The answer, for the token counts; None while it is in progress.
        """
        body = self._body
        is_incomplete = status == "incomplete"
        return {
            "id": self._request.id,
            "object": "response",
            "created_at": 0,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._request.model,
            "output": output,
            "parallel_tool_calls": self._request.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": _dump(body.text) if body.text is not None else {"format": {"type": "text"}},
            "tool_choice": _dump_tool_choice(body),
            "tools": [_dump(tool) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if answer is None else _build_usage(answer),
        }


def _build_text_events(
    part: Mapping[str, Any], position: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the events of the text of a message; the complete text is one delta."""
    place = {**position, "content_index": 0}
    empty_part = {**part, "text": "", "logprobs": []}
    yield {"type": "response.content_part.added", **place, "part": empty_part}
    text_fields = {**place, "logprobs": part["logprobs"]}
    yield {"type": "response.output_text.delta", **text_fields, "delta": part["text"]}
    yield {"type": "response.output_text.done", **text_fields, "text": part["text"]}
    yield {"type": "response.content_part.done", **place, "part": part}


def _dump(settings: BaseModel) -> dict[str, Any]:
    """Return a part of a request as in its body."""
    return settings.model_dump(by_alias=True, exclude_unset=True)


def _dump_tool_choice(body: _ResponseBody) -> Any:
    """Return the tool choice of a body as JSON."""
    choice = body.tool_choice
    return _dump(choice) if isinstance(choice, BaseModel) else choice or "auto"


def _build_usage(answer: Answer) -> dict[str, Any]:
    """Return the token counts of an answer."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(answer.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + len(answer.tokens),
    }


def _format_token(token: AnswerToken) -> dict[str, Any]:
    """Return a token with its alternatives as JSON."""
    return {
        **_format_alternative(token),
        "top_logprobs": [_format_alternative(other) for other in token.top_logprobs],
    }


def _format_alternative(token: AnswerToken) -> dict[str, Any]:
    """Return a token without its alternatives as JSON."""
    return {"token": token.text, "logprob": token.logprob, "bytes": [*token.text.encode()]}


def _parse(content: bytes, context: RequestContext) -> _Response:
    """Parse a body; see `WireFormat.parse`."""
    body = parse_body(_ResponseBody, content)
    ignored_fields = split_extra_fields(body.model_extra, _REFUSED_FIELDS)
    store = context.stored_responses
    items: list[Mapping[str, Any]] = []
    if body.previous_response_id is not None:
        items += store.get_items(body.previous_response_id)
    if isinstance(body.input, str):
        items.append({"role": "user", "content": body.input})
    else:
        items += [_resolve_reference(item, store) for item in body.input]

    messages = _convert_items(items)
    # instructions apply only to this response, so they are not part of the stored items
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise RequestError(400, "input: must not be empty", param="input")

    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    request = ChatRequest(
        id=context.response_id,
        model=body.model or DEFAULT_MODEL,
        messages=tuple(messages),
        max_tokens=body.max_output_tokens,
        sampling=SamplingParameters(temperature=body.temperature, top_p=body.top_p),
        logprobs=wants_logprobs or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs or 0,
        stream=bool(body.stream),
        ignored_fields=ignored_fields,
        tools=tuple(map(_convert_tool, body.tools or ())),
        tool_choice=_convert_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_convert_text_format(body),
        chat_template_kwargs=body.chat_template_kwargs or {},
    )
    return _Response(request, body, items, store)


def _resolve_reference(item: Mapping[str, Any], store: ResponseStore) -> Mapping[str, Any]:
    """Return an item, or the stored item to which it refers."""
    if item.get("type") == "item_reference":
        return store.get_item(str(item.get("id")))
    return item


def _convert_items(items: Items) -> list[dict[str, Any]]:
    """Return the chat messages that items represent.

    The calls that follow an assistant's message, or each other, belong to one message.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        try:
            if kind == "message":
                messages.append({"role": item["role"], "content": _convert_content(item, index)})
            elif kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                content = _convert_content({"content": item["output"]}, index)
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                )
            # the reasoning of the model's own answers is part of their text
            elif kind != "reasoning":
                raise RequestError(
                    400,
                    f"input.{index}.type={kind!r}: is not supported; must be message,"
                    " function_call, function_call_output, reasoning or item_reference",
                    "unsupported",
                    "input",
                )
        except KeyError as error:
            raise RequestError(
                400, f"input.{index}.{error.args[0]}: Field required", param="input"
            ) from None
    return messages


def _convert_content(item: Mapping[str, Any], index: int) -> str:
    """Return the text of a message, or of the output of a function call.

    Args:
        item: An item with `content`: a string, or a list of parts.
        index: Index of the item for error messages.
    """
    content = item["content"]
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        raise RequestError(
            400,
            f"input.{index}: must have a string or a list of text parts as its content, got"
            f" {str(content)[:100]!r}",
            param="input",
        )
    return "".join(part["text"] for part in content)


def _convert_tool(tool: _Tool) -> dict[str, Any]:
    """Return a tool in the format of chat completions."""
    function = tool.model_dump(exclude_none=True)
    return {"type": function.pop("type"), "function": function}


def _convert_tool_choice(body: _ResponseBody) -> ToolChoice:
    """Return the tool choice of a body."""
    if isinstance(body.tool_choice, _NamedToolChoice):
        return NamedTool(body.tool_choice.name)
    return body.tool_choice or "auto"


def _convert_text_format(body: _ResponseBody) -> JsonFormat | None:
    """Return the text format of a body. Raises RequestError if its JSON schema is missing."""
    text_format = None if body.text is None else body.text.format
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return JsonFormat()
    if text_format.json_schema is None:
        raise RequestError(
            400,
            "text.format.schema: must be a JSON schema, because the type is json_schema",
            param="text.format.schema",
        )
    return JsonFormat(text_format.json_schema)


RESPONSES = WireFormat("responses", "resp", _parse)
