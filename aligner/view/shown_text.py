"""Conversion of untrusted text, written by models, tools and people, for pages.

Invisible characters are escaped. Very long texts and lines are truncated, because browsers cannot
display them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.file_limits import parse_json

MAX_TEXT_LENGTH = 100_000
"""Maximum length of a displayed text in characters."""
MAX_LINE_LENGTH = 4_000
"""Maximum length of a displayed line in characters."""
# Unprintable characters that are not escaped.
_WHITESPACE = frozenset("\n\t")
# Columns that are computed as differences of two recorded quantities.
_DIFFERENCE_COLUMNS = {
    "engine \N{MINUS SIGN} trainer log-prob": ("engine_logprob", "trainer_logprob"),
    "trainer \N{MINUS SIGN} reference log-prob": ("trainer_logprob", "reference_logprob"),
}
# Displayed names of recorded quantities, in the order of the columns.
_COLUMN_NAMES = {
    "engine_logprob": "engine log-prob",
    "trainer_logprob": "trainer log-prob",
    "reference_logprob": "reference log-prob",
    "advantage": "advantage",
    "entropy": "entropy",
    "version": "weight version",
}
# Columns of the token files that are not quantities of tokens.
_OTHER_COLUMNS = ("step", "group", "sample", "branch", "token_id", "text", "file_row_number")


@dataclass(frozen=True)
class Turn:
    """A message of a transcript."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of the tool calls."""


def printable(text: str, limit: int = MAX_TEXT_LENGTH) -> str:
    """Return a text with escaped control characters, bidirectional marks and similar characters.

    Characters beyond `limit` are replaced by the number of these characters.
    """
    escaped = text[:limit]
    if not escaped.isprintable():
        escaped = "".join(
            c if c.isprintable() or c in _WHITESPACE else c.encode("unicode_escape").decode()
            for c in escaped
        )
    return escaped + (f" … {len(text) - limit} more characters" if len(text) > limit else "")


def parse_turns(messages: str | None) -> list[Turn]:
    """Return the turns of a stored transcript, a JSON list of messages; an empty list for anything
    else."""
    try:
        entries = parse_json(messages) if messages else []
    except ValueError:
        entries = []
    valid_messages = (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
    return [
        Turn(
            str(message.get("role", "")),
            printable(_content_text(message.get("content"))),
            _parse_tool_calls(message),
        )
        for message in valid_messages
    ]


def _content_text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts; JSON for other
    values."""
    if isinstance(content, list):
        return "\n".join(
            _content_text(part["text"] if isinstance(part, dict) and "text" in part else part)
            for part in content
        )
    return (
        content
        if isinstance(content, str)
        else ""
        if content is None
        else json.dumps(content, ensure_ascii=False)
    )


def _parse_tool_calls(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the names and arguments of a message's tool calls."""
    calls = message.get("tool_calls")
    functions = (
        [call.get("function", call) for call in calls if isinstance(call, dict)]
        if isinstance(calls, list)
        else []
    )
    valid_functions = [function for function in functions if isinstance(function, dict)]
    return tuple(
        (
            printable(str(function.get("name", ""))),
            printable(_content_text(function.get("arguments"))),
        )
        for function in valid_functions
    )


def token_columns(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's tokens for the page.

    Args:
        tokens: The values of a response's R tokens by column.

    Returns:
        `id` [R], `text` [R], and `columns`: the recorded quantities and their differences, [R], by
        displayed name.
    """
    quantities = {
        name: values
        for name, values in tokens.items()
        if name not in _OTHER_COLUMNS and isinstance(values, list)
    }
    order = (*_COLUMN_NAMES, *sorted(quantities.keys() - _COLUMN_NAMES.keys()))
    recorded_names = [
        name for name in order if any(value is not None for value in quantities.get(name, ()))
    ]
    columns = {_COLUMN_NAMES.get(name, name): quantities[name] for name in recorded_names}
    for name, (minuend, subtrahend) in _DIFFERENCE_COLUMNS.items():
        pairs = list(zip(quantities.get(minuend, ()), quantities.get(subtrahend, ()), strict=False))
        if any(None not in pair for pair in pairs):
            columns[name] = [None if a is None or b is None else a - b for a, b in pairs]
    # `drawn` is false for tokens of an environment or tool.
    if "drawn" in columns:
        columns["from environment"] = [int(not value) for value in columns.pop("drawn")]
    texts = [printable(text or "") for text in tokens.get("text") or ()]
    return {"id": tokens.get("token_id") or [], "text": texts, "columns": columns}
