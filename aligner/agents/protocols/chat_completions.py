"""OpenAI's chat completions: `/v1/chat/completions`."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from aligner.agents.protocols.function_calls import (
    convert_function,
    convert_function_messages,
    format_function_call,
)
from aligner.agents.protocols.openai_completions import (
    CompletionBody,
    CompletionResponse,
    build_common_arguments,
)
from aligner.agents.protocols.requests import (
    Answer,
    AnswerToken,
    ChatRequest,
    JsonFormat,
    NamedTool,
    RequestError,
    ToolChoice,
)
from aligner.agents.protocols.wire_format import (
    RequestContext,
    WireFormat,
    parse_body,
)
from aligner.file_limits import parse_json


class _NamedFunction(BaseModel):
    """The field `function` of a named tool choice, or a value of `function_call`."""

    name: str


class _NamedToolChoice(BaseModel):
    """A value of `tool_choice` that names a function."""

    type: Literal["function"] = "function"
    function: _NamedFunction


class _JsonSchemaFormat(BaseModel, extra="allow"):
    """The field `json_schema` of a response format."""

    # the field `schema` of the JSON object; the name `schema` belongs to pydantic
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class _ResponseFormat(BaseModel):
    """The field `response_format` of a request."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchemaFormat | None = None


class _ChatBody(CompletionBody):
    """The body of a request for a chat completion."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    # vLLM's older field for a JSON schema
    guided_json: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # OpenAI's older fields for tools
    functions: list[dict[str, Any]] | None = None
    function_call: Literal["auto", "none"] | _NamedFunction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class _ChatCompletion(CompletionResponse[ChatRequest]):
    """A parsed request for a chat completion."""

    def __init__(self, request: ChatRequest, *, has_functions: bool) -> None:
        """Create a parsed request; `has_functions` selects OpenAI's older format of calls."""
        super().__init__(request)
        self._has_functions = has_functions

    object_type = "chat.completion"
    event_type = "chat.completion.chunk"
    empty_content: Mapping[str, Any] = {"delta": {}}

    def build_content(self, answer: Answer) -> dict[str, Any]:
        """See `CompletionResponse.build_content`."""
        if self._has_functions:
            return {"message": format_function_call(answer.message)}
        return {"message": answer.message}

    def get_finish_reason(self, answer: Answer) -> str:
        """See `CompletionResponse.get_finish_reason`."""
        if self._has_functions and answer.tool_calls:
            return "function_call"
        return super().get_finish_reason(answer)

    def build_event_content(self, answer: Answer) -> dict[str, Any]:
        """See `CompletionResponse.build_event_content`."""
        if self._has_functions:
            return {"delta": format_function_call(answer.message)}
        delta = answer.message
        if answer.tool_calls:
            # clients merge the deltas of a call by its index
            delta["tool_calls"] = [
                {"index": call_index, **call} for call_index, call in enumerate(delta["tool_calls"])
            ]
        return {"delta": delta}

    def build_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log-probs of an answer; None if the request does not ask for them."""
        if not self._request.logprobs:
            return None
        return {
            "content": [
                _format_token(token)
                | {"top_logprobs": [_format_token(other) for other in token.top_logprobs]}
                for token in answer.tokens
            ]
        }


def _format_token(token: AnswerToken) -> dict[str, Any]:
    """Return the JSON object of a token, without alternatives."""
    return {"token": token.text, "logprob": token.logprob, "bytes": [*token.text.encode()]}


def _parse(content: bytes, context: RequestContext) -> _ChatCompletion:
    """Parse a body; see `WireFormat.parse`."""
    body = parse_body(_ChatBody, content)
    _check_continuation(body)
    functions = body.functions or ()
    if functions and body.tools:
        raise RequestError(400, "functions: must be left out if there are tools", param="functions")
    request = ChatRequest(
        **build_common_arguments(body, context.response_id)
        | {"max_tokens": body.max_completion_tokens or body.max_tokens},
        messages=convert_function_messages(body.messages),
        tools=tuple(body.tools or map(convert_function, functions)),
        tool_choice=_convert_tool_choice(body.function_call or body.tool_choice),
        # a message has only one call in the older format
        parallel_tool_calls=body.parallel_tool_calls is not False and not functions,
        response_format=_convert_response_format(body),
        chat_template_kwargs=body.chat_template_kwargs or {},
        continue_final_message=bool(body.continue_final_message),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )
    return _ChatCompletion(request, has_functions=bool(functions))


def _check_continuation(body: _ChatBody) -> None:
    """Raise RequestError if a body asks for no new message of the assistant, and for no
    continuation of the last one, or for both."""
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise RequestError(
                400,
                "add_generation_prompt=true: must be false with continue_final_message=true",
                param="add_generation_prompt",
            )
    elif body.add_generation_prompt is False:
        raise RequestError(
            400,
            "add_generation_prompt=false: is supported only with continue_final_message=true",
            "unsupported",
            "add_generation_prompt",
        )


def _convert_tool_choice(
    choice: Literal["auto", "none", "required"] | _NamedToolChoice | _NamedFunction | None,
) -> ToolChoice:
    """Return the tool choice of a body, `tool_choice` or the older `function_call`."""
    if isinstance(choice, _NamedToolChoice):
        return NamedTool(choice.function.name)
    if isinstance(choice, _NamedFunction):
        return NamedTool(choice.name)
    return choice or "auto"


def _convert_response_format(body: _ChatBody) -> JsonFormat | None:
    """Return the response format of a body. Raises RequestError if its JSON schema is missing."""
    if body.guided_json is not None:
        return JsonFormat(_parse_schema(body.guided_json))
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return JsonFormat()
    schema = response_format.json_schema
    if schema is None or schema.json_schema is None:
        raise RequestError(
            400,
            "response_format.json_schema.schema: must be a JSON schema, because the type is"
            " json_schema",
            param="response_format",
        )
    return JsonFormat(schema.json_schema)


def _parse_schema(schema: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return a JSON schema, which may be the text of a JSON object."""
    try:
        value = parse_json(schema) if isinstance(schema, str) else schema
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise RequestError(400, "guided_json: must be a JSON schema", param="guided_json")
    return value


CHAT_COMPLETIONS = WireFormat("chat/completions", "chatcmpl", _parse)
