"""Tool calls in an assistant's text, and tool schemas for chat templates.

`parse_turn` parses the formats in which chat templates write tool calls. A malformed call is not an
error but a value, `MalformedCall`, which contains the message for the model.
"""

import hashlib
import json
import os
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aligner.errors import AlignerError, ConfigError

if TYPE_CHECKING:  # environment workers, which call the tools of an episode, do not import torch
    from aligner.data.tokenizer import Tokenizer

ToolFormat = Literal["hermes", "llama3", "mistral"]
"""Format of tool calls. Hermes and Qwen: `<tool_call>{…}</tool_call>`; Llama 3: a JSON object
alone; Mistral: `[TOOL_CALLS][{…}]`."""

# Example of a correct call, which messages about malformed calls show to the model.
_EXAMPLES: dict[ToolFormat, str] = {
    "hermes": '<tool_call>{"name": "TOOL", "arguments": {…}}</tool_call>',
    "llama3": '{"name": "TOOL", "parameters": {…}}',
    "mistral": '[TOOL_CALLS][{"name": "TOOL", "arguments": {…}}]',
}
_CALL_START = "<tool_call>"
_CALL_END = "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"

# length and characters of the ids of calls: Mistral's templates require nine alphanumeric ones
_ID_LENGTH = 9
_ID_CHARACTERS = string.digits + string.ascii_letters

THINK_START = "<think>"
"""Start of the reasoning in an assistant's text."""
THINK_END = "</think>"
"""End of the reasoning in an assistant's text."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    id: str
    """Id that the model wrote; an id of nine characters (see `parse_turn`) if it wrote none."""
    name: str
    arguments: dict[str, Any]

    def to_message(self, content: str) -> dict[str, Any]:
        """Return the chat message that answers the call with the tool's result."""
        return {"role": "tool", "name": self.name, "tool_call_id": self.id, "content": content}


@dataclass(frozen=True)
class MalformedCall:
    """A text that the model meant as a tool call, and that cannot be parsed."""

    text: str
    problem: str
    """Message for the model, which describes the problem and the correct form of a call."""


@dataclass(frozen=True)
class AssistantTurn:
    """An assistant's turn, without its end-of-turn token."""

    text: str
    content: str
    """Text without the tool calls and the whitespace around them; the whole text if there are no
    calls."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Chat messages that can represent this turn, the usual one first.

        They are the message with `tool_calls`, if all calls are well formed, and the message with
        plain text. If the turn contains reasoning, each of the two also occurs with the reasoning
        in its own field, because some templates drop reasoning inside the content.
        """
        calls = [call for call in self.calls if isinstance(call, ToolCall)]
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": self.text}]
        if calls and len(calls) == len(self.calls):
            functions = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
            messages.insert(
                0, {"role": "assistant", "content": self.content, "tool_calls": functions}
            )
        return messages + [
            _separate_reasoning(message) for message in messages if THINK_END in message["content"]
        ]


def _separate_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the reasoning of its content in `reasoning_content`."""
    thought, _, answer = message["content"].partition(THINK_END)
    reasoning = thought.strip("\n").removeprefix(THINK_START).strip("\n")
    return message | {"reasoning_content": reasoning, "content": answer.lstrip("\n")}


def parse_turn(
    text: str,
    tool_format: ToolFormat | None,
    turn: int = 0,
    *,
    is_reasoning: bool = False,
    id_key: str = "",
) -> AssistantTurn:
    """Parse the tool calls in an assistant's text.

    Calls inside reasoning (`<think>`) are not parsed. A call without an id gets an id of nine
    alphanumeric characters, which Mistral's templates require. It depends on `turn`, on the index
    of the call in the turn, and on `id_key`.

    Args:
        text: The text of the turn, without its end-of-turn token.
        tool_format: The format of tool calls; None parses no calls.
        turn: The index of the message in its conversation. It distinguishes the ids of calls in
            different turns.
        is_reasoning: Whether the prompt ends inside reasoning that the text continues.
        id_key: Text that distinguishes the ids of calls in different conversations; without it, two
            answers to the same conversation have calls with equal ids.
    """
    thought, think_end, answer = text.rpartition(THINK_END)
    # Reasoning that does not end contains no call.
    if tool_format is None or (not think_end and (is_reasoning or THINK_START in text)):
        return AssistantTurn(text, text)
    content, values = _PARSERS[tool_format](answer)
    if not values:
        return AssistantTurn(text, text)

    calls = [
        value
        if isinstance(value, MalformedCall)
        else _parse_call(value, tool_format, _build_call_id(turn, index, id_key))
        for index, value in enumerate(values)
    ]
    first, *others = content
    parts = [(thought + think_end + first).strip(), *(part.strip() for part in others)]
    return AssistantTurn(text, "\n".join(part for part in parts if part), tuple(calls))


def detect_tool_format(tokenizer: "Tokenizer") -> ToolFormat | None:
    """Return the format in which the model's chat template writes tool calls.

    The template renders an example call, which is then parsed in each format. The result is None if
    the template writes no calls, or writes them in another format.

    Raises:
        ConfigError: The model has no chat template.
    """
    template = tokenizer.chat_template
    question = {"role": "user", "content": "probe"}
    call = ToolCall("000010000", "probe", {"number": 1, "text": "probe"})
    try:
        prompt = template.render([question], add_generation_prompt=True)
        conversation = template.render(
            [question, AssistantTurn("", "", (call,)).messages[0]], add_generation_prompt=False
        )
    except AlignerError:
        return None

    # The text of the call follows the prompt and ends before an EOS token.
    prefix_length = len(os.path.commonprefix([prompt, conversation]))  # noqa: RUF071  (of characters)
    call_text = conversation[prefix_length:]
    for token in tokenizer.eos_token_ids:
        call_text = call_text.partition(tokenizer.decode([token], skip_special_tokens=False))[0]
    for tool_format in _PARSERS:
        calls = parse_turn(call_text, tool_format).calls
        if [
            (parsed.name, parsed.arguments) for parsed in calls if isinstance(parsed, ToolCall)
        ] == [(call.name, call.arguments)]:
            return tool_format
    return None


def renders_call_ids(tokenizer: "Tokenizer") -> bool:
    """Return whether the model's chat template writes the ids of tool calls.

    The template renders an example call and its answer with two different ids. The result is True
    if the texts differ, and also if the template cannot render the example.

    Raises:
        ConfigError: The model has no chat template.
    """
    template = tokenizer.chat_template
    # a model may have a template of its own for conversations with tools
    tools = [{"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}]

    def render(call_id: str) -> str:
        call = ToolCall(call_id, "probe", {"number": 1})
        messages = [
            {"role": "user", "content": "probe"},
            AssistantTurn("", "", (call,)).messages[0],
            call.to_message("probe"),
        ]
        return template.render(messages, tools, add_generation_prompt=True)

    try:
        return render("abcdefgh1") != render("abcdefgh2")
    except AlignerError:
        return True


def build_tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema that describes a Python function to the model as a tool.

    The schema contains the function's name, its docstring and its arguments. Every argument must
    have an annotation, and an entry in the section `Args:` of the docstring.

    Raises:
        ConfigError: An argument lacks its annotation or its description, JSON has no type for an
            annotation, or the package transformers, which derives the schema, is not installed.
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


# The texts around the calls, at least one, and the calls: JSON values, or MalformedCall for a call
# that is not valid JSON.
_ParseResult = tuple[list[str], list[Any]]


def _parse_hermes(text: str) -> _ParseResult:
    content = []
    calls = []
    position = 0
    while (call_start := text.find(_CALL_START, position)) >= 0:
        content.append(text[position:call_start])
        start = call_start + len(_CALL_START)
        try:
            value, end = _parse_json(text, start)
            if not text[end:].lstrip().startswith(_CALL_END):
                raise ValueError(f"{_CALL_END} must follow the JSON object")
        except ValueError as error:
            call_end = text.find(_CALL_END, start)
            end = len(text) if call_end < 0 else call_end
            value = _build_malformed_call(text[start:end], str(error), "hermes")
        calls.append(value)
        call_end = text.find(_CALL_END, end)
        position = len(text) if call_end < 0 else call_end + len(_CALL_END)
    return [*content, text[position:]], calls


def _parse_llama3(text: str) -> _ParseResult:
    stripped = text.strip()
    body = stripped.removeprefix(_PYTHON_TAG)
    calls = []
    position = 0
    # Without the tag, a JSON object with a name and arguments is a call; other JSON is an answer.
    is_call = (
        body.startswith("{")
        and '"name"' in body
        and ('"parameters"' in body or '"arguments"' in body)
    )
    if body == stripped and not is_call:
        return [text], []
    try:
        while position < len(body):  # objects with semicolons between them
            value, end = _parse_json(body, position)
            rest = body[end:].lstrip()
            if rest and not rest.startswith(";"):
                raise ValueError("there is text after the JSON object")
            calls.append(value)
            position = len(body) - len(rest.removeprefix(";"))
    except ValueError as error:
        calls = [_build_malformed_call(body, str(error), "llama3")]
    return [""], calls


def _parse_mistral(text: str) -> _ParseResult:
    before, marker, body = text.partition(_TOOL_CALLS)
    if not marker:
        return [text], []
    try:
        calls, end = _parse_json(body, 0)
        if not isinstance(calls, list) or not calls or body[end:].strip():
            raise ValueError(f"{_TOOL_CALLS} must be followed by a list of calls, and nothing else")
    except ValueError as error:
        calls = [_build_malformed_call(body, str(error), "mistral")]
    return [before], calls


# `detect_tool_format` tries the formats in this order: llama3, which has no marker, comes last.
_PARSERS: Mapping[ToolFormat, Callable[[str], _ParseResult]] = {
    "hermes": _parse_hermes,
    "mistral": _parse_mistral,
    "llama3": _parse_llama3,
}


def _parse_json(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after optional whitespace, and the position of its end.

    Raises:
        ValueError: There is no valid JSON value.
    """
    start = len(text) - len(text[position:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {getattr(error, 'msg', error)}") from error


def _build_call_id(turn: int, index: int, id_key: str) -> str:
    """Return the id of a call that the model wrote without one; see `parse_turn`."""
    if not id_key:
        return f"{turn:05d}{index:04d}"
    digest = hashlib.sha256(f"{turn} {index} {id_key}".encode()).digest()
    number = int.from_bytes(digest, "big")
    characters = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters.append(_ID_CHARACTERS[digit])
    return "".join(characters)


def _parse_call(value: Any, tool_format: ToolFormat, default_id: str) -> ToolCall | MalformedCall:
    """Return the call that a JSON value describes.

    Args:
        value: The JSON value.
        tool_format: The format of the call.
        default_id: The id of the call if the model wrote none.
    """
    name = None
    arguments = None
    call_id = None
    if isinstance(value, dict):
        name = value.get("name")
        call_id = value.get("id")
        arguments = value.get("arguments", value.get("parameters", {}))
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    # JSON can escape half of a surrogate pair, and Python's parser accepts NaN.
    except (ValueError, RecursionError) as error:
        return _build_malformed_call(repr(value), f"not valid JSON: {error}", tool_format)
    if not isinstance(name, str) or not name:
        return _build_malformed_call(
            text, "a call must be a JSON object with the `name` of a tool", tool_format
        )
    if not isinstance(arguments, dict):
        return _build_malformed_call(text, "the arguments must be a JSON object", tool_format)
    return ToolCall(
        call_id if isinstance(call_id, str) and call_id else default_id, name, arguments
    )


def _build_malformed_call(text: str, reason: str, tool_format: ToolFormat) -> MalformedCall:
    excerpt = text if len(text) <= 200 else text[:197] + "..."
    return MalformedCall(
        text,
        f"This tool call cannot be read, {reason}: {excerpt}\n"
        f"Write a call as {_EXAMPLES[tool_format]}",
    )
