"""Parsing of tool calls in generated text, and tool schemas of Python functions."""

from __future__ import annotations

import json
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.tool_calls import (
    AssistantTurn,
    MalformedCall,
    ToolCall,
    ToolFormat,
    build_tool_schema,
    detect_tool_format,
    parse_turn,
    renders_call_ids,
)
from aligner.errors import ConfigError
from tests.data.chat_models import chat_model

FORMS: tuple[ToolFormat, ...] = ("hermes", "llama3", "mistral")
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "; ",
    "]",
    "}",
    '"',
    "\\",
    "</s>",
    "\n",
    "é",
]


def calls(text: str, form: ToolFormat) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call.name, call.arguments)
        for call in parse_turn(text, form).calls
        if isinstance(call, ToolCall)
    ]


def problem(text: str, form: ToolFormat) -> str:
    (call,) = parse_turn(text, form).calls
    assert isinstance(call, MalformedCall)
    return call.problem


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("qwen", "hermes"),
        ("reasons", "hermes"),
        ("begins_to_reason", "hermes"),
        ("llama", "llama3"),
        ("mistral", "mistral"),
        ("chatml", None),
        ("phi", None),
        ("{{ messages[1].tool_calls[0].function.arguments + 1 }}", None),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "prepending"])
def test_tool_call_format_is_detected_from_template(
    kind: str, template: str, form: ToolFormat | None
) -> None:
    assert detect_tool_format(chat_model(kind, template)) == form


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen", False),
        ("chatml", False),
        ("llama", False),
        ("mistral", True),
        # the id of the answer only
        ("{% for m in messages %}{{ m.tool_call_id }}{% endfor %}", True),
        # with tools, another template applies
        ("{% if tools %}{% for m in messages %}{{ m.tool_calls }}{% endfor %}{% endif %}", True),
        ("{{ raise_exception('no calls') }}", True),
    ],
)
def test_rendered_call_ids_are_detected(template: str, expected: bool) -> None:
    assert renders_call_ids(chat_model("bytes", template)) is expected


def test_invented_call_ids_differ_by_key_turn_and_call() -> None:
    text = '<tool_call>{"name": "a"}</tool_call>' * 2
    found = [
        call.id
        for key in ("", "first", "second")
        for turn in (1, 3)
        for call in parse_turn(text, "hermes", turn, id_key=key).calls
        if isinstance(call, ToolCall)
    ]
    assert len({*found}) == len(found) == 12
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in found)
    assert found[:2] == ["000010000", "000010001"]


def test_tool_calls_are_separated_from_text() -> None:
    one, two = '{"name": "a", "arguments": {"x": [1, null]}}', '{"arguments":{},"name":"b"}'
    turn = parse_turn(
        f"\nFirst.\n<tool_call>\n{one}\n</tool_call>\n<tool_call>{two}</tool_call> Then.",
        "hermes",
        turn=7,
    )
    assert turn.calls == (
        ToolCall("000070000", "a", {"x": [1, None]}),
        ToolCall("000070001", "b", {}),
    )
    assert turn.content == "First.\nThen." and turn.messages[0]["content"] == turn.content
    turn = parse_turn(
        'Yes.[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "abcdefghi"}, {"name": "b"}]',
        "mistral",
    )
    assert (
        turn.calls == (ToolCall("abcdefghi", "a", {}), ToolCall("000000001", "b", {}))
        and turn.content == "Yes."
    )
    assert turn.calls[0].to_message("4") == {
        "role": "tool",
        "name": "a",
        "tool_call_id": "abcdefghi",
        "content": "4",
    }
    assert calls('<|python_tag|>{"name": "a", "parameters": {"x": 1}}', "llama3") == [
        ("a", {"x": 1})
    ]
    assert calls(
        ' {"type": "function", "name": "a", "parameters": {}} ; {"name": "b", "arguments": {}};',
        "llama3",
    ) == [
        ("a", {}),
        ("b", {}),
    ]


def test_text_without_tool_call_is_unchanged_content() -> None:
    for form in (*FORMS, None):
        for text in ("", " plain \n", '{"answer": 4}', "{", "the name is a", "</tool_call>"):
            assert parse_turn(text, form) == AssistantTurn(text, text)
            assert parse_turn(text, form).messages == [{"role": "assistant", "content": text}]


def test_tool_calls_in_reasoning_are_ignored() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert not parse_turn(f"<think>I could {call}", "hermes").calls
    turn = parse_turn(f"<think>\nI could {call}\n</think>\n\nWell.\n{call}", "hermes")
    assert len(turn.calls) == 1 and turn.content == f"<think>\nI could {call}\n</think>\n\nWell."
    assert (
        turn.messages[2]["reasoning_content"] == f"I could {call}"
        and turn.messages[2]["content"] == "Well."
    )
    begun = parse_turn("hm\n</think>\n\nWell.", "hermes").messages
    assert [message.get("reasoning_content") for message in begun] == [None, "hm"] and begun[1][
        "content"
    ] == "Well."


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": }}</tool_call>',
            "not valid JSON: Expecting value",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {}}',
            "</tool_call> must follow the JSON object",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a"}{"name": "b"}</tool_call>',
            "</tool_call> must follow the JSON object",
        ),
        ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object with the `name` of a tool"),
        (
            "hermes",
            '<tool_call>{"arguments": {}}</tool_call>',
            "must be a JSON object with the `name` of a tool",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
            "the arguments must be a JSON object",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
            "not valid JSON",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
            "not valid JSON",
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
            "not valid JSON",
        ),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
            "not valid JSON",
        ),
        (
            "llama3",
            '{"name": "a", "parameters": {}} and more',
            "there is text after the JSON object",
        ),
        ("llama3", '<|python_tag|>search.call(query="x")', "not valid JSON"),
        ("llama3", '{"name": "a", "parameters": 3}', "the arguments must be a JSON object"),
        (
            "mistral",
            '[TOOL_CALLS]{"name": "a"}',
            "must be followed by a list of calls, and nothing else",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "a"}] and more',
            "must be followed by a list of calls, and nothing else",
        ),
        ("mistral", "[TOOL_CALLS]", "not valid JSON"),
    ],
)
def test_malformed_tool_call_error_shows_format(form: ToolFormat, text: str, message: str) -> None:
    error = problem(text, form)
    forms = {
        "hermes": '<tool_call>{"name": "TOOL"',
        "llama3": '{"name": "TOOL", "parameters"',
        "mistral": "[TOOL_CALLS][{",
    }
    assert message in error and f"Write a call as {forms[form]}" in error and len(error) < 500
    assert parse_turn(text, form).messages == [{"role": "assistant", "content": text}]


def test_malformed_tool_call_keeps_valid_calls() -> None:
    good, bad = (
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>',
        "<tool_call>{a}</tool_call>",
    )
    turn = parse_turn(good + bad + good, "hermes")
    assert [type(call) for call in turn.calls] == [ToolCall, MalformedCall, ToolCall]
    assert turn.messages == [{"role": "assistant", "content": turn.text}]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(MARKS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*MARKS, "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["a", "look_up"]), st.dictionaries(st.text(max_size=3), JSON, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(wanted=CALLS, form=st.sampled_from(FORMS), spaced=st.booleans())
def test_parsed_tool_calls_equal_serialized_calls(
    wanted: list[Any], form: ToolFormat, spaced: bool
) -> None:
    key = "parameters" if form == "llama3" else "arguments"
    written = [
        json.dumps({"name": name, key: arguments}, indent=2 if spaced else None)
        for name, arguments in wanted
    ]
    text = {
        "hermes": "".join(f"<tool_call>{each}</tool_call>" for each in written),
        "llama3": ";".join(written),
        "mistral": f"[TOOL_CALLS][{','.join(written)}]",
    }[form]
    assert calls(text, form) == wanted
    assert len(
        {call.id for call in parse_turn(text, form).calls if isinstance(call, ToolCall)}
    ) == len(wanted)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [*MARKS, '{"name": ', '"a"', '"arguments": ', "{", "[", "<think>", "</think>", "x"]
        )
    )
)
def test_any_text_is_parsed_without_loss_or_error(pieces: list[str]) -> None:
    text = "".join(pieces)
    for form in FORMS:
        turn = parse_turn(text, form)
        assert (
            turn.text == text
            and turn.messages[0 if len(turn.messages) == 1 else -1]["role"] == "assistant"
        )
        assert turn.calls or turn.content == text


def look_up(
    name: str, limit: int = 3, exact: bool = False, at: Optional[float] = None, kind: Literal["a", "b"] = "a",  # noqa: UP045
    tags: list[str] | None = None, more: dict[str, int] | None = None,
) -> str:  # fmt: skip
    """Look a name up.

    Args:
        name: The name.
        limit: How many to find
            at most.
        exact: Whether it must be the same.
        at: When.
        kind: Of what kind.
        tags: With which tags.
        more: What else.
    """
    return name


class Unknown:
    """A type without a JSON schema."""


def test_tool_schema_uses_signature_and_docstring() -> None:
    described = build_tool_schema(look_up)
    assert described["type"] == "function" and described["function"]["name"] == "look_up"
    assert described["function"]["description"] == "Look a name up."
    parameters = described["function"]["parameters"]
    assert parameters["required"] == ["name"] and parameters["type"] == "object"
    kinds = {name: value.get("type") for name, value in parameters["properties"].items()}
    assert kinds == {
        "name": "string", "limit": "integer", "exact": "boolean", "at": "number", "kind": "string", "tags": "array",
        "more": "object",
    }  # fmt: skip
    assert parameters["properties"]["kind"]["enum"] == ["a", "b"]
    assert parameters["properties"]["limit"]["description"] == "How many to find at most."
    assert parameters["properties"]["tags"]["items"] == {"type": "string"}


def test_function_without_schema_is_refused_with_reason() -> None:
    def odd(value: Unknown) -> None:
        """Do.

        Args:
            value: A value.
        """

    def bare(value):
        """Do.

        Args:
            value: A value.
        """

    def unread(value: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Do.

        Args:
            value: A value.
        """

    def silent(value: int) -> None:
        pass

    def short(value: int) -> None:
        """Do."""

    for function, lacking in [
        (odd, "Unknown"),
        (bare, "value is missing a type hint"),
        (unread, "Nowhere"),
        (silent, "no docstring"),
        (short, "no description for the argument 'value'"),
    ]:
        with pytest.raises(
            ConfigError,
            match=rf"{function.__name__}: cannot derive a tool schema from the function: (?s:.)*{lacking}",
        ):
            build_tool_schema(function)
