"""Chat messages as chat templates take them, from the forms in which data sets and clients write
them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.errors import AlignerError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field for the reasoning of an assistant's message; aligner uses the first."""
USUAL_ROLES = frozenset(("system", "user", "assistant", "tool"))


def normalized_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect.

    Entries with the value null are removed at any depth: `datasets` adds them to give all rows one
    schema, and OpenAI's clients send `content: null` next to tool calls. Arguments of tool calls
    that are JSON text, as on OpenAI's wire, become objects; nulls inside the text are values, and
    stay. A call without arguments has none (`{}`). The reasoning of a message is also available as
    `reasoning_content`.

    Raises:
        AlignerError: The arguments of a tool call are not the JSON text of an object.
    """
    return [_normalized(message, index) for index, message in enumerate(messages)]


def normalized_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of tools, which may be given as JSON text; None without tools.

    Raises:
        AlignerError: The value is not a list of JSON objects.
    """
    if isinstance(tools, str) and not tools.strip():
        return None
    tools = _decoded(tools, "tools")
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(each, Mapping) for each in tools):
        raise AlignerError("`tools` must be a list of JSON objects (tool schemas)")
    return [dict(tool) for tool in tools]


def normalized_variables(variables: Any) -> dict[str, Any]:
    """Return `chat_template_kwargs`, which may be given as JSON text; empty for None.

    Raises:
        AlignerError: The value is not a JSON object.
    """
    variables = _decoded(variables, "chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise AlignerError(
            f"`chat_template_kwargs` must be a JSON object, got {type(variables).__name__}"
        )
    return dict(variables)


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the entries of its objects that are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(entry) for entry in value]
    return value


def _decoded(value: Any, field: str) -> Any:
    """Return the JSON value of a field that may be given as text, in which nulls are values."""
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except ValueError as error:
        raise AlignerError(f"`{field}` is not valid JSON: {error}") from error


def _normalized(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    normal: dict[str, Any] = without_nulls(message)
    if not normal.get("tool_calls", True):
        del normal["tool_calls"]
    calls = normal.get("tool_calls")
    if isinstance(calls, list):
        normal["tool_calls"] = [
            _with_decoded_arguments(call, f"messages[{index}].tool_calls[{place}]")
            for place, call in enumerate(calls)
        ]
    reasoning = next((normal[name] for name in REASONING if normal.get(name)), None)
    if reasoning is not None:
        normal[REASONING[0]] = reasoning
    return normal


def _with_decoded_arguments(call: Any, where: str) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        inner = call["function"]
        return {**call, "function": _with_decoded_arguments(inner, f"{where}.function")}
    # Templates read the arguments of every call.
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return {**call, "arguments": arguments}
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise AlignerError(f"{where}.arguments: not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise AlignerError(
            f"{where}.arguments: must be a JSON object, got {type(decoded).__name__}"
        )
    return {**call, "arguments": decoded}
