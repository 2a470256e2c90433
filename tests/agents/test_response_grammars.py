"""Grammars of requested responses: which texts they allow, in every format of tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aligner.agents.protocols.requests import ChatRequest
from aligner.agents.response_grammars import (
    CallRules,
    build_request_grammar,
    build_response_grammar,
    detect_reasoning,
)
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import ToolCall, detect_tool_format, parse_turn
from aligner.errors import AlignerError
from tests.data.chat_models import QUESTION, TEMPLATES, WEATHER, chat_model

CLOCK = {"type": "function", "function": {"name": "clock"}}
FORMATS = {"qwen": "hermes", "llama": "llama3", "mistral": "mistral"}
"""A chat template for each format of tool calls."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LYON = ("weather", {"city": "Lyon"})
NOW = ("clock", {})


def write_calls(tool_format: str, *calls: tuple[str, Any]) -> str:
    """Return calls as the model writes them."""
    key = "parameters" if tool_format == "llama3" else "arguments"
    objects = [{"name": name, key: arguments} for name, arguments in calls]
    if tool_format == "mistral":
        return f"[TOOL_CALLS] {json.dumps(objects)}"
    texts = [json.dumps(value) for value in objects]
    if tool_format == "llama3":
        return "; ".join(texts)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def allows(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Return whether a response may consist of a text."""
    stop = tokenizer.eos_token_ids
    tokens = [*tokenizer.encode(text).tolist(), stop[0]]
    try:
        tokenizer.grammar_vocabulary.compute_masks(grammar, stop, tokens)
    except ValueError:
        return False
    return True


def build(
    tokenizer: Tokenizer,
    schema: dict[str, Any] | None = None,
    calls: CallRules | None = None,
) -> str:
    prompt = tokenizer.chat_template.render([QUESTION], add_generation_prompt=True)
    return build_response_grammar(
        tokenizer,
        schema=schema,
        calls=calls,
        tool_format=detect_tool_format(tokenizer),
        reasoning=detect_reasoning(tokenizer, prompt),
    )


@pytest.mark.parametrize("kind", ["bytes", "first", "prepending"])
@pytest.mark.parametrize("template", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_have_arguments_of_their_schema(kind, template, is_parallel):
    tokenizer, tool_format = chat_model(kind, template), FORMATS[template]
    grammar = build(tokenizer, calls=CallRules([WEATHER, CLOCK], True, is_parallel))
    for calls in ([LYON], [NOW]):
        text = write_calls(tool_format, *calls)
        # The tokenizer itself puts a space before a text; a response has none there.
        tokens = tokenizer.encode_observation(tokenizer.encode("a"), text)
        stop = tokenizer.eos_token_ids
        tokenizer.grammar_vocabulary.compute_masks(grammar, stop, [*tokens.tolist(), stop[0]])
        parsed = parse_turn(text, tool_format).calls
        assert [(c.name, c.arguments) for c in parsed if isinstance(c, ToolCall)] == calls
    if kind != "bytes":
        return
    assert allows(tokenizer, grammar, write_calls(tool_format, LYON, NOW)) is is_parallel
    for refused in (
        "",
        "It rains.",
        '{"a": 1}',
        write_calls(tool_format, ("other", {})),
        write_calls(tool_format, ("weather", {"city": 1})),
        write_calls(tool_format, ("weather", {})),
        "It rains. " + write_calls(tool_format, LYON),
    ):
        assert not allows(tokenizer, grammar, refused), refused


@pytest.mark.parametrize("template", FORMATS)
def test_optional_single_call_allows_text_or_one_call(template):
    tokenizer, tool_format = chat_model("bytes", template), FORMATS[template]
    grammar = build(tokenizer, calls=CallRules([WEATHER, CLOCK], False, False))
    for text in ("", "It rains.", write_calls(tool_format, LYON)):
        assert allows(tokenizer, grammar, text), text
    assert not allows(tokenizer, grammar, write_calls(tool_format, LYON, NOW))
    if tool_format != "llama3":
        assert allows(tokenizer, grammar, "Let me see. " + write_calls(tool_format, LYON))
        twice = write_calls(tool_format, LYON) + write_calls(tool_format, NOW)
        assert not allows(tokenizer, grammar, twice)


@pytest.mark.parametrize("template", FORMATS)
def test_json_content_may_be_replaced_by_calls(template):
    tokenizer, tool_format = chat_model("bytes", template), FORMATS[template]
    grammar = build(tokenizer, SCHEMA, CallRules([WEATHER], False, True))
    assert allows(tokenizer, grammar, '{"a": 1}')
    assert allows(tokenizer, grammar, write_calls(tool_format, LYON, LYON))
    assert not allows(tokenizer, grammar, "It rains.")


@pytest.mark.parametrize(
    ("template", "prefixes", "refused"),
    [
        ("qwen", [""], "<think>a</think>"),
        ("reasons", ["", "<think>\nIs {it}?\n</think>\n\n"], "a</think>"),
        ("begins_to_reason", ["Is {it}?\n</think>\n\n", "</think>"], ""),
    ],
)
def test_reasoning_before_json_is_free(template, prefixes, refused):
    tokenizer = chat_model("bytes", template)
    grammar = build(tokenizer, SCHEMA)
    for prefix in prefixes:
        assert allows(tokenizer, grammar, prefix + '{"a": 1}'), prefix
        assert not allows(tokenizer, grammar, prefix + "yes"), prefix
    assert not allows(tokenizer, grammar, refused + '{"a": 1}')


def test_closed_reasoning_in_prompt_is_not_reopened():
    tokenizer = chat_model("bytes", "reasons")
    prompt = tokenizer.chat_template.render([QUESTION], add_generation_prompt=True)
    assert detect_reasoning(tokenizer, prompt) == "optional"
    assert detect_reasoning(tokenizer, prompt + "<think>\n\n</think>\n\n") == "none"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": (WEATHER,)},
        {"tools": (WEATHER,), "tool_choice": "none", "parallel_tool_calls": False},
        {"parallel_tool_calls": False},
    ],
)
def test_unconstrained_request_has_no_grammar(fields):
    request = ChatRequest(id="a", model="m", messages=(QUESTION,), **fields)
    # neither the tokenizer nor the chat template is read
    assert build_request_grammar(request, "", None, None) is None


def test_special_tokens_of_tags_are_used():
    # In `TEMPLATES`, the tag of Mistral is a special token, and that of Hermes is plain text.
    tokenizer = chat_model("bytes", "mistral")
    grammar = build(tokenizer, calls=CallRules([WEATHER], True, True))
    assert f"<[{tokenizer.find_special_token('[TOOL_CALLS]')}]>" in grammar
    assert tokenizer.find_special_token("<tool_call>") is None


def test_problem_of_a_schema_names_its_field():
    tokenizer = chat_model("bytes", "qwen")
    with pytest.raises(AlignerError, match=r'^response_format.*: Unimplemented keys: \["not"\]$'):
        build(tokenizer, {"not": {"type": "string"}})
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": 5}}}}
    with pytest.raises(AlignerError, match=r"^tools\.1\.function\.parameters: "):
        build(tokenizer, calls=CallRules([WEATHER, bad], True, True))


def test_required_call_without_known_format_is_refused():
    tokenizer = chat_model("bytes", TEMPLATES["chatml"])
    with pytest.raises(AlignerError, match=r"^tool_choice: .* in no known format"):
        build(tokenizer, calls=CallRules([WEATHER], True, True))
