"""What models, tools and people wrote, as text of a page: nothing invisible, no line that a browser
chokes on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_TEXT, LONGEST_LINE = 100_000, 4_000
_KEPT = frozenset("\n\t")
_DIFFERENCES = {
    "engine \N{MINUS SIGN} trainer log-prob": ("engine_logprob", "trainer_logprob"),
    "trainer \N{MINUS SIGN} reference log-prob": ("trainer_logprob", "reference_logprob"),
}
_NAMES = {
    "engine_logprob": "engine log-prob",
    "trainer_logprob": "trainer log-prob",
    "reference_logprob": "reference log-prob",
    "advantage": "advantage",
    "entropy": "entropy",
    "version": "weight version",
}
_NO_QUANTITIES = ("step", "group", "sample", "branch", "token_id", "text", "file_row_number")


@dataclass(frozen=True)
class Turn:
    """A message of a transcript."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of the tools that it calls."""


def printable(text: str, limit: int = LONGEST_TEXT) -> str:
    """Control characters, marks that turn the direction of writing and the like escaped, and no
    longer than the limit."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(
            c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode()
            for c in shown
        )
    return shown + (f" … {len(text) - limit} more characters" if len(text) > limit else "")


def turns(messages: str | None) -> list[Turn]:
    """The turns of a transcript as it is stored, JSON; none of what is no transcript."""
    try:
        entries = json.loads(messages) if messages else []
    except ValueError:
        entries = []
    known = (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )
    return [
        Turn(str(each.get("role", "")), printable(_text(each.get("content"))), _calls(each))
        for each in known
    ]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            _text(part["text"] if isinstance(part, dict) and "text" in part else part)
            for part in content
        )
    return (
        content
        if isinstance(content, str)
        else ""
        if content is None
        else json.dumps(content, ensure_ascii=False)
    )


def _calls(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    calls = message.get("tool_calls")
    functions = (
        [call.get("function", call) for call in calls if isinstance(call, dict)]
        if isinstance(calls, list)
        else []
    )
    known = [function for function in functions if isinstance(function, dict)]
    return tuple(
        (printable(str(each.get("name", ""))), printable(_text(each.get("arguments"))))
        for each in known
    )


def token_columns(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """A response's tokens for the page: `id` and `text` [R], and `columns` [R] by name, what was
    recorded and differences."""
    lists = {
        name: values
        for name, values in tokens.items()
        if name not in _NO_QUANTITIES and isinstance(values, list)
    }
    order = (*_NAMES, *sorted(lists.keys() - _NAMES.keys()))
    known = [name for name in order if any(value is not None for value in lists.get(name, ()))]
    columns = {_NAMES.get(name, name): lists[name] for name in known}
    for name, (one, other) in _DIFFERENCES.items():
        pairs = list(zip(lists.get(one, ()), lists.get(other, ()), strict=False))
        if any(None not in pair for pair in pairs):
            columns[name] = [None if a is None or b is None else a - b for a, b in pairs]
    if "drawn" in columns:
        columns["from environment"] = [int(not value) for value in columns.pop("drawn")]
    texts = [printable(text or "") for text in tokens.get("text") or ()]
    return {"id": tokens.get("token_id") or [], "text": texts, "columns": columns}
