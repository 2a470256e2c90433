"""What an assistant's text asks for: tool calls in the formats that chat templates write, and tools
as templates take them.

A call that is not well formed is no error but a value, which says what to tell the model.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aligner.errors import AlignerError, ConfigError

if TYPE_CHECKING:  # what calls tools for an episode has no need of torch
    from aligner.data.tokenizer import Tokenizer

ToolFormat = Literal["hermes", "llama3", "mistral"]
"""Hermes and Qwen: `<tool_call>{…}</tool_call>`; Llama 3: a JSON object alone; Mistral:
`[TOOL_CALLS][{…}]`."""

_FORMS: dict[ToolFormat, str] = {
    "hermes": '<tool_call>{"name": "TOOL", "arguments": {…}}</tool_call>',
    "llama3": '{"name": "TOOL", "parameters": {…}}',
    "mistral": '[TOOL_CALLS][{"name": "TOOL", "arguments": {…}}]',
}
_OPENING, _CLOSING, _PYTHON_TAG, _TOOL_CALLS = (
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
)
THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. Its `id` is the model's own where it wrote one, else nine digits, as
    Mistral's templates want."""

    id: str
    name: str
    arguments: dict[str, Any]

    def answered(self, content: str) -> dict[str, Any]:
        """The message by which the tool's answer comes into the conversation."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


@dataclass(frozen=True)
class MalformedCall:
    """What was meant as a call and is none."""

    text: str
    problem: str
    """What to tell the model: what is wrong, and the form that a call has."""


@dataclass(frozen=True)
class AssistantTurn:
    """What an assistant said, its end-of-turn token left out."""

    text: str
    content: str
    """The text without its calls and the space around them; all of it where there are none."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages that this can be to a chat template, the usual one first.

        With `tool_calls` where all calls are well formed; as plain text; and where it reasons each
        with that apart, which is the only way in which some templates keep it.
        """
        calls = [call for call in self.calls if isinstance(call, ToolCall)]
        found: list[dict[str, Any]] = [{"role": "assistant", "content": self.text}]
        if calls and len(calls) == len(self.calls):
            functions = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
            found.insert(0, {"role": "assistant", "content": self.content, "tool_calls": functions})
        return found + [
            _reasoning_apart(message) for message in found if _THOUGHT in message["content"]
        ]


def _reasoning_apart(message: dict[str, Any]) -> dict[str, Any]:
    thought, _, said = message["content"].partition(_THOUGHT)
    reasoning = thought.strip("\n").removeprefix(THINK).strip("\n")
    return message | {"reasoning_content": reasoning, "content": said.lstrip("\n")}


def parse_turn(
    text: str, form: ToolFormat | None, turn: int = 0, *, reasons: bool = False
) -> AssistantTurn:
    """What an assistant's text says and calls; nothing is called where `form` is None, nor within
    reasoning (`<think>`).

    `turn` is the message's place in its conversation, which makes the ids of its calls differ from
    those of other turns. `reasons` where the prompt has begun the reasoning that the text goes on
    with.
    """
    thought, end, said = text.rpartition(_THOUGHT)
    if form is None or (not end and (reasons or THINK in text)):
        return AssistantTurn(text, text)
    content, written = _PARSERS[form](said)
    if not written:
        return AssistantTurn(text, text)
    calls = [
        each if isinstance(each, MalformedCall) else _call(each, form, turn, place)
        for place, each in enumerate(written)
    ]
    first, *behind = content
    parts = [(thought + end + first).strip(), *(part.strip() for part in behind)]
    return AssistantTurn(text, "\n".join(part for part in parts if part), tuple(calls))


def format_of(tokenizer: "Tokenizer") -> ToolFormat | None:
    """The format in which the model's chat template writes tool calls; None where it writes none of
    those known.

    Found by having the template word a call. Raises ConfigError for a model without a template.
    """
    template = tokenizer.chat_template
    asked, probe = (
        {"role": "user", "content": "probe"},
        ToolCall("000010000", "probe", {"number": 1, "text": "probe"}),
    )
    try:
        before = template.render([asked], add_generation_prompt=True)
        called = template.render(
            [asked, AssistantTurn("", "", (probe,)).messages[0]], add_generation_prompt=False
        )
    except AlignerError:
        return None
    written = called[len(os.path.commonprefix([before, called])) :]  # noqa: RUF071  (of characters)
    for token in tokenizer.eos_token_ids:
        written = written.partition(tokenizer.decode([token], skip_special_tokens=False))[0]
    for form in _PARSERS:
        calls = parse_turn(written, form).calls
        if [(call.name, call.arguments) for call in calls if isinstance(call, ToolCall)] == [
            (probe.name, probe.arguments)
        ]:
            return form
    return None


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """A function as chat templates describe it to a model: its name, its docstring and its
    arguments as a JSON schema.

    Every argument must have an annotation and a line in the docstring's `Args:`. Raises ConfigError
    where one has none, for an annotation that JSON has no type for, and where transformers, which
    knows how, is not installed.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise ConfigError(
            f"{name}: a function as a tool requires the transformers package; install it with pip"
            f" install 'aligner[tools]': {error}"
        ) from error
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # of several types, and annotations are the user's own code
        raise ConfigError(
            f"{name}: cannot derive a tool schema from the function: {error}"
        ) from error
    return schema


_Written = tuple[list[str], list[Any]]
"""What lies around calls, one text or more, and the calls: JSON, or MalformedCall where it cannot
be read."""


def _hermes(text: str) -> _Written:
    content, calls, place = [], [], 0
    while (opening := text.find(_OPENING, place)) >= 0:
        content.append(text[place:opening])
        start = opening + len(_OPENING)
        try:
            value, end = _json_at(text, start)
            if not text[end:].lstrip().startswith(_CLOSING):
                raise ValueError(f"{_CLOSING} must follow the JSON object")
        except ValueError as error:
            closing = text.find(_CLOSING, start)
            end = len(text) if closing < 0 else closing
            value = _malformed(text[start:end], str(error), "hermes")
        calls.append(value)
        closing = text.find(_CLOSING, end)
        place = len(text) if closing < 0 else closing + len(_CLOSING)
    return [*content, text[place:]], calls


def _llama3(text: str) -> _Written:
    stripped = text.strip()
    body, calls, place = stripped.removeprefix(_PYTHON_TAG), [], 0
    is_call = (
        body.startswith("{")
        and '"name"' in body
        and ('"parameters"' in body or '"arguments"' in body)
    )
    if body == stripped and not is_call:
        return [text], []
    try:
        while place < len(body):  # objects with semicolons between them
            value, end = _json_at(body, place)
            rest = body[end:].lstrip()
            if rest and not rest.startswith(";"):
                raise ValueError("there is text behind the JSON object")
            calls.append(value)
            place = len(body) - len(rest.removeprefix(";"))
    except ValueError as error:
        calls = [_malformed(body, str(error), "llama3")]
    return [""], calls


def _mistral(text: str) -> _Written:
    before, found, body = text.partition(_TOOL_CALLS)
    if not found:
        return [text], []
    try:
        calls, end = _json_at(body, 0)
        if not isinstance(calls, list) or not calls or body[end:].strip():
            raise ValueError(f"{_TOOL_CALLS} must be followed by a list of calls, and nothing else")
    except ValueError as error:
        calls = [_malformed(body, str(error), "mistral")]
    return [before], calls


_PARSERS: Mapping[ToolFormat, Callable[[str], _Written]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
}


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at a place or behind space there, and where it ends. ValueError
    where there is none."""
    start = len(text) - len(text[place:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {getattr(error, 'msg', error)}") from error


def _call(value: Any, form: ToolFormat, turn: int, place: int) -> ToolCall | MalformedCall:
    name, arguments, own_id = None, None, None
    if isinstance(value, dict):
        name, own_id = value.get("name"), value.get("id")
        arguments = value.get("arguments", value.get("parameters", {}))
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    # JSON can escape half of a character, and Python reads NaN
    except (ValueError, RecursionError) as error:
        return _malformed(repr(value), f"not valid JSON: {error}", form)
    if not isinstance(name, str) or not name:
        return _malformed(text, "a call must be a JSON object with the `name` of a tool", form)
    if not isinstance(arguments, dict):
        return _malformed(text, "the arguments must be a JSON object", form)
    return ToolCall(
        own_id if isinstance(own_id, str) and own_id else f"{turn:05d}{place:04d}", name, arguments
    )


def _malformed(text: str, reason: str, form: ToolFormat) -> MalformedCall:
    shown = text if len(text) <= 200 else text[:197] + "..."
    return MalformedCall(
        text, f"This tool call cannot be read, {reason}: {shown}\nWrite a call as {_FORMS[form]}"
    )
