"""Messages as clients send them: as chat templates take them, and whether they are those that were
said before."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aligner.agents.openai_protocol import Refused

_REASONING = re.compile(r"\A.*</think>\s*", re.DOTALL)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Messages of a request as chat templates take them: contents are texts, arguments of calls are
    objects.

    Raises Refused for one without a role, with a content other than text, and with a call that is
    none.
    """
    return tuple(_template_message(message, place) for place, message in enumerate(messages))


def _template_message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise Refused(400, f"messages.{place}.role: must be a string, got {message.get('role')!r}")
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = _content(message, place)
    if found.get("tool_calls"):
        try:
            found["tool_calls"] = [_template_call(call) for call in found["tool_calls"]]
        except (KeyError, TypeError, AttributeError):
            raise Refused(
                400,
                f"messages.{place}.tool_calls: each must be a function call with `name` and"
                " `arguments`",
            ) from None
    else:
        found.pop("tool_calls", None)
    return found


def _content(message: Mapping[str, Any], place: int) -> str:
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(
            400,
            f"messages.{place}.content: must be a string or a list of text parts, got"
            f" {str(content)[:100]!r}",
        )
    return content or ""


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "function": {
            **function,
            "name": function["name"],
            "arguments": _value(function["arguments"]),
        },
    }


def _value(arguments: Any) -> Any:
    """The arguments of a call, which come as JSON, as a value; what is no JSON as it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def compared(message: Mapping[str, Any], rules: Collection[str]) -> str:
    """A message of a request as a text that is equal for those that are the same by the rules
    (`environment.matching`)."""
    content = _content(message, 0)
    if "reasoning" in rules and message.get("role") == "assistant":
        content = _REASONING.sub("", content)
    if "whitespace" in rules:
        content = " ".join(content.split())
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        arguments = _value(arguments) if "arguments" in rules else arguments
        calls.append([call.get("id"), call["function"]["name"], arguments])
    return json.dumps(
        [message.get("role"), content, calls, message.get("tool_call_id")], sort_keys=True
    )
