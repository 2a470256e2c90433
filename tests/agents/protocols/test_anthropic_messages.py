"""`/v1/messages`: translation to chat messages, and Anthropic's responses, events and errors."""

from __future__ import annotations

from typing import Any

import pytest

from aligner.data.tool_calls import ToolCall
from tests.agents.protocols.scripted_model import ScriptedModel, call_answer, text_answer

CALLS = (ToolCall("a1", "look", {"at": "here"}), ToolCall("a2", "look", {"at": "there"}))
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
USER = {"role": "user", "content": "why?"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}


def test_tool_loop_sends_the_messages_of_chat_completions(model: ScriptedModel) -> None:
    model.answers = [call_answer(*CALLS, content="I look."), text_answer("yes")]
    body = {**BODY, "system": [{"type": "text", "text": "be brief"}], "tools": [LOOK]}
    status, first = model.post("messages", body)
    assert status == 200
    assert first == {
        "id": "msg-episode-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a1", "name": "look", "input": {"at": "here"}},
            {"type": "tool_use", "id": "a2", "name": "look", "input": {"at": "there"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 1},
    }
    results = [
        {"type": "tool_result", "tool_use_id": "a1", "content": "a wall"},
        {
            "type": "tool_result",
            "tool_use_id": "a2",
            "content": [{"type": "text", "text": "a door"}],
        },
        {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "thinking"}, *first["content"]]},
        {"role": "user", "content": results},
    ]
    status, second = model.post(
        "messages", {**body, "messages": messages, "stop_sequences": ["x"], "top_k": 3}
    )
    assert second["content"] == [{"type": "text", "text": "yes"}]
    assert second["stop_reason"] == "end_turn"

    request = model.requests[1]
    function = {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": LOOK["input_schema"],
    }
    assert request.tools == ({"type": "function", "function": function},)
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        USER,
        call_answer(*CALLS, content="I look.").message,
        {"role": "tool", "tool_call_id": "a1", "content": "a wall"},
        {"role": "tool", "tool_call_id": "a2", "content": "a door"},
        {"role": "user", "content": "so?"},
    )
    assert (request.max_tokens, request.stop, request.sampling.names) == (9, ("x",), ["top_k"])


def test_stream_has_the_events_of_anthropic(model: ScriptedModel) -> None:
    model.answers = [call_answer(CALLS[0], content="I look.")]
    events = model.stream("messages", {**BODY, "tools": [LOOK]})
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    names = ["message_start", *block, *block, "message_delta", "message_stop"]
    assert [name for name, _ in events] == [data["type"] for _, data in events] == names
    data = [event for _, event in events]
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    assert data[2]["delta"] == {"type": "text_delta", "text": "I look."}
    assert data[4]["content_block"]["input"] == {}
    assert data[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"at": "here"}'}
    assert data[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert data[7]["usage"] == {"output_tokens": 1}


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (text_answer("yes", "length"), "max_tokens", None),
        (text_answer("yes", stop_string="x"), "stop_sequence", "x"),
    ],
)
def test_stop_reason_names_the_limit(model: ScriptedModel, answer, reason, sequence) -> None:
    model.answers = [answer]
    _, message = model.post("messages", BODY)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_input_tokens_are_counted(model: ScriptedModel) -> None:
    body = {"model": "m", "system": "be brief", "messages": [USER]}
    assert model.post("messages/count_tokens", body) == (200, {"input_tokens": 2})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_invalid_field_is_refused_in_the_format_of_anthropic(
    model: ScriptedModel, fields, field
) -> None:
    status, content = model.post("messages", {**BODY, **fields})
    assert status == 400 and content["type"] == "error"
    assert content["error"]["type"] == "invalid_request_error"
    assert field in content["error"]["message"]


def test_client_of_anthropic_reads_messages_streams_and_errors(model: ScriptedModel) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(
        base_url=model.url.removesuffix("/v1"), api_key="key", max_retries=0
    )
    model.answers = [call_answer(CALLS[0], content="I look."), call_answer(CALLS[1])]
    message = client.messages.create(**BODY, tools=[LOOK])
    anthropic.types.Message.model_validate(message.to_dict())
    assert [block.type for block in message.content] == ["text", "tool_use"]
    with client.messages.stream(**BODY, tools=[LOOK]) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == {"at": "there"} and final.stop_reason == "tool_use"
    assert client.messages.count_tokens(model="m", messages=[USER]).input_tokens == 1
    with pytest.raises(anthropic.BadRequestError, match="not supported for the role user"):
        client.messages.create(**{**BODY, "messages": [{"role": "user", "content": [{}]}]})


def test_last_message_of_assistant_is_continued(model: ScriptedModel) -> None:
    model.answers = [text_answer("es")]
    body = {**BODY, "messages": [USER, {"role": "assistant", "content": "y"}]}
    status, message = model.post("messages", body)
    assert status == 200 and message["content"] == [{"type": "text", "text": "es"}]
    (request,) = model.requests
    assert request.continue_final_message and request.context_messages == (USER,)
