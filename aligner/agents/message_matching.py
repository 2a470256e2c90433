"""Conversion of clients' chat messages for the chat template, and their comparison.

The comparison decides whether a request of an agent continues an earlier turn.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aligner.agents.protocols.requests import ChatRequest, RequestError
from aligner.data.chat_template import REASONING_FIELDS
from aligner.file_limits import parse_json

# The reasoning at the start of an answer, up to its last end tag. Some templates put the start tag
# into the prompt, so the answer may contain only the end tag.
_REASONING_PREFIX = re.compile(r"\A.*</think>\s*", re.DOTALL)

# number of characters of a value in the description of a difference
_SHOWN_CHARACTERS = 80


def to_template_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Convert the messages of a request to the format of chat templates.

    Contents become strings, and JSON arguments of tool calls become objects. Raises RequestError if
    a message has no role, has content other than text, or has an invalid tool call.
    """
    return tuple(_to_template_message(message, index) for index, message in enumerate(messages))


def get_continued_text(request: ChatRequest) -> str:
    """Return the text of the last message, which the answer continues.

    Raises RequestError if the message is not a text of the assistant.
    """
    message = request.messages[-1]
    other_fields = [
        name for name in ("tool_calls", "function_call", *REASONING_FIELDS) if message.get(name)
    ]
    if message.get("role") != "assistant" or other_fields:
        found = f"the field {other_fields[0]}" if other_fields else f"role {message.get('role')!r}"
        raise RequestError(
            400,
            "messages: the answer can continue the last message only if it is a text of the"
            f" assistant; it has {found}",
            "unsupported",
            "messages",
        )
    return _get_text(message, len(request.messages) - 1)


def _to_template_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Convert one message; `index` is its index in the request."""
    if not isinstance(message.get("role"), str):
        raise RequestError(
            400, f"messages.{index}.role: must be a string, got {message.get('role')!r}"
        )
    # chat templates test whether a field exists; clients send null for missing fields
    template_message = {key: value for key, value in message.items() if value is not None}
    template_message["content"] = _get_text(message, index)
    if template_message.get("tool_calls"):
        try:
            template_message["tool_calls"] = [
                _to_template_call(call) for call in template_message["tool_calls"]
            ]
        except (KeyError, TypeError, AttributeError):
            raise RequestError(
                400,
                f"messages.{index}.tool_calls: each must be a function call with `name` and"
                " `arguments`",
            ) from None
    else:
        template_message.pop("tool_calls", None)
    return template_message


def _get_text(message: Mapping[str, Any], index: int) -> str:
    """Return the text of a message; `index` is its index in the request."""
    content = message.get("content")
    # OpenAI's format allows a list of parts, such as texts and images, in place of a string
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(
            400,
            f"messages.{index}.content: must be a string or a list of text parts, got"
            f" {str(content)[:100]!r}",
        )
    return content or ""


def _to_template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with parsed arguments."""
    function = call["function"]
    return {
        **call,
        "function": {
            **function,
            "name": function["name"],
            "arguments": _parse_arguments(function["arguments"]),
        },
    }


def _parse_arguments(arguments: Any) -> Any:
    """Parse the arguments of a call; return invalid JSON, and any other value, unchanged."""
    try:
        return parse_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _normalize_numbers(value: Any) -> Any:
    """Return a JSON value in which equal numbers have the same type: `6.0` and `1e2` become 6 and
    100."""
    if isinstance(value, dict):
        return {name: _normalize_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


_KEY_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
"""Fields of a message that its comparison key contains, in order."""


def describe_difference(index: int, earlier_key: str, key: str) -> str:
    """Return in which field two messages differ, and both values.

    Args:
        index: Index of both messages in their conversations.
        earlier_key: Comparison key of the earlier message.
        key: Comparison key of the other message, which differs.
    """
    for field, earlier_value, value in zip(
        _KEY_FIELDS, json.loads(earlier_key), json.loads(key), strict=True
    ):
        if earlier_value != value:
            earlier_text, text = _shorten_to_difference(
                json.dumps(earlier_value, ensure_ascii=False), json.dumps(value, ensure_ascii=False)
            )
            return f"messages.{index}.{field} was {earlier_text}, and is now {text}"
    raise ValueError("the keys are equal")


def _shorten_to_difference(first: str, second: str) -> tuple[str, str]:
    """Return the parts of two different texts around their first different character."""
    pairs = enumerate(zip(first, second, strict=False))
    common = next((index for index, (one, other) in pairs if one != other), 0)
    start = max(0, common - _SHOWN_CHARACTERS // 2)
    shortened = []
    for text in (first, second):
        end = start + _SHOWN_CHARACTERS
        shortened.append("…" * (start > 0) + text[start:end] + "…" * (len(text) > end))
    return shortened[0], shortened[1]


def build_comparison_key(
    message: Mapping[str, Any], rules: Collection[str], *, compares_ids: bool
) -> str:
    """Return a text that is equal for two messages if the rules consider them equal.

    Args:
        message: A message of a request.
        rules: Differences to ignore (`environment.matching`): "reasoning", "whitespace" and
            "arguments" (the formatting of the JSON arguments of tool calls).
        compares_ids: Whether the ids of tool calls must be equal. Without it, a framework may
            replace the ids by its own; the model must then not read them.
    """
    # the messages have been validated, so the index for an error message is not needed
    content = _get_text(message, 0)
    if "reasoning" in rules and message.get("role") == "assistant":
        content = _REASONING_PREFIX.sub("", content)
    if "whitespace" in rules:
        content = " ".join(content.split())

    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        # parsed arguments are equal even if their JSON texts differ in spaces, order or the
        # notation of numbers
        if "arguments" in rules:
            arguments = _normalize_numbers(_parse_arguments(arguments))
        call_key = [call["function"]["name"], arguments]
        calls.append([call.get("id"), *call_key] if compares_ids else call_key)
    call_id = message.get("tool_call_id") if compares_ids else None

    # in the order of `_KEY_FIELDS`
    return json.dumps([message.get("role"), content, calls, call_id], sort_keys=True)
