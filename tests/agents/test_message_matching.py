"""Messages that a client sends back match the original ones according to the configured rules."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from aligner.agents.message_matching import (
    build_comparison_key,
    describe_difference,
    to_template_messages,
)
from aligner.agents.protocols.requests import RequestError
from aligner.schema.environment import MATCHING_CHOICES


def key_of(message: dict[str, Any], rules: Collection[str], *, compares_ids: bool = True) -> str:
    return build_comparison_key(message, rules, compares_ids=compares_ids)


def call(arguments: str, name: str = "look", call_id: str = "000010000") -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def text(content: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("said", "sent", "rule"),
    [
        (call('{"at": "é", "b": 1}'), call(json.dumps({"b": 1, "at": "é"})), "arguments"),
        (call('{"at": [6.0, {"b": 1e2}]}'), call('{"at": [6, {"b": 100}]}'), "arguments"),
        (text("<think>\nwhy\n</think>\n\nyes"), text("yes"), "reasoning"),
        (text("why\n</think>\n\nyes"), text("yes", reasoning_content="why"), "reasoning"),
        (text(" yes\n\nno"), text("yes no "), "whitespace"),
    ],
)
def test_rewritten_message_matches_only_by_its_rule(said, sent, rule):
    assert key_of(said, [rule]) == key_of(sent, [rule])
    others = [each for each in MATCHING_CHOICES if each != rule]
    assert key_of(said, others) != key_of(sent, others)


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (
            text("yes"),
            text(
                [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}],
                refusal=None,
                audio=None,
            ),
        ),
        (call("{}"), {**call("{}"), "content": "", "function_call": None}),
    ],
)
def test_client_fields_do_not_affect_matching(said, sent):
    assert key_of(said, []) == key_of(sent, [])


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (text("yes"), text("yes", role="user")),
        (text("yes"), text("no")),
        (call("{}"), call("{}", name="find")),
        (call('{"at": 1}'), call('{"at": 2}')),
        (call('{"at": 1}'), call('{"at": true}')),
        (call('{"at": 1}'), call('{"at": "1"}')),
        (call('{"at": 1.5}'), call('{"at": 1}')),
        (text("<think>why</think>yes", role="user"), text("yes", role="user")),
        (
            {"role": "tool", "content": "1", "tool_call_id": "a"},
            {"role": "tool", "content": "1", "tool_call_id": "b"},
        ),
    ],
)
def test_different_messages_do_not_match(said, sent):
    assert key_of(said, MATCHING_CHOICES) != key_of(sent, MATCHING_CHOICES)


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (call("{}"), call("{}", call_id="call_7f3a")),
        (
            {"role": "tool", "content": "1", "tool_call_id": "000010000"},
            {"role": "tool", "content": "1", "tool_call_id": "call_7f3a"},
        ),
    ],
)
def test_replaced_call_ids_match_unless_the_model_reads_them(said, sent):
    assert key_of(said, [], compares_ids=False) == key_of(sent, [], compares_ids=False)
    assert key_of(said, []) != key_of(sent, [])


@pytest.mark.parametrize(
    ("said", "sent", "difference"),
    [
        (text("yes"), text("no"), 'messages.3.content was "yes", and is now "no"'),
        (
            text("yes"),
            text("yes", role="user"),
            'messages.3.role was "assistant", and is now "user"',
        ),
        (
            call('{"at": 1}'),
            call('{"at": 2}'),
            'messages.3.tool_calls was [["000010000", "look", {"at": 1}]], and is now'
            ' [["000010000", "look", {"at": 2}]]',
        ),
        (
            text("a" * 100 + "b" + "c" * 100),
            text("a" * 100 + "d"),
            f'messages.3.content was …{"a" * 40}b{"c" * 39}…, and is now …{"a" * 40}d"',
        ),
    ],
)
def test_difference_names_message_field_and_both_values(said, sent, difference):
    keys = [key_of(message, MATCHING_CHOICES) for message in (said, sent)]
    assert describe_difference(3, *keys) == difference


def test_template_messages_have_parsed_arguments():
    sent = [
        text([{"type": "text", "text": "yes"}], role="user", name=None),
        call('{"at": 1}'),
        call("no JSON"),
    ]
    found = to_template_messages(sent)
    assert found[0] == {"role": "user", "content": "yes"}
    assert found[1]["content"] == "" and found[1]["tool_calls"][0]["function"]["arguments"] == {
        "at": 1
    }
    assert found[2]["tool_calls"][0]["function"]["arguments"] == "no JSON"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "yes"},
        text(7),
        text([{"type": "image_url"}]),
        {"role": "assistant", "tool_calls": ["look"]},
    ],
)
def test_malformed_or_non_text_message_is_refused(message):
    with pytest.raises(RequestError, match=r"messages\.0"):
        to_template_messages([message])
