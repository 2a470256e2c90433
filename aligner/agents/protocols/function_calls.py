"""OpenAI's older format of tool calls in chat completions: `functions` and `function_call`.

Requests are converted to tools and tool calls, and answers are converted back.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def convert_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `functions` as a tool."""
    return {"type": "function", "function": function}


def convert_function_messages(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], ...]:
    """Return messages with tool calls instead of function calls.

    Messages in the older format have no ids. A call gets an id from the index of its message, and
    the result that follows gets the same id.
    """
    converted: list[Mapping[str, Any]] = []
    call_id = ""
    for index, message in enumerate(messages):
        if message.get("role") == "function":
            converted.append({**message, "role": "tool", "tool_call_id": call_id})
        elif (function_call := message.get("function_call")) is not None:
            # Mistral's templates require nine alphanumeric characters
            call_id = f"{index:09d}"
            call = {"id": call_id, "type": "function", "function": function_call}
            other_fields = {key: value for key, value in message.items() if key != "function_call"}
            converted.append({**other_fields, "tool_calls": [call]})
        else:
            converted.append(message)
    return tuple(converted)


def format_function_call(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer with `function_call` instead of its tool call, if it has one."""
    formatted = dict(message)
    if calls := formatted.pop("tool_calls", None):
        (call,) = calls
        formatted["function_call"] = call["function"]
    return formatted
