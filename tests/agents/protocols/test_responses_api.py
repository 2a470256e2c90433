"""`/v1/responses`, used with OpenAI's client, whose types validate responses and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from aligner.data.tool_calls import ToolCall
from tests.agents.protocols.scripted_model import ScriptedModel, call_answer, text_answer

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": True,
}
CALLS = (ToolCall("a1", "look", {"at": "here"}), ToolCall("a2", "look", {"at": "there"}))


@pytest.fixture
def client(model: ScriptedModel) -> OpenAI:
    return OpenAI(base_url=model.url, api_key="key", max_retries=0)


def validate(response: Response) -> None:
    # the client itself does not validate
    Response.model_validate(response.to_dict(), strict=False)


def test_tool_loop_sends_the_messages_of_chat_completions(model, client):
    model.answers = [call_answer(*CALLS, content="I look."), text_answer("yes")]
    items: list[Any] = [{"role": "user", "content": "why?"}]
    first = client.responses.create(
        model="m", instructions="be brief", input=items, tools=[LOOK], max_output_tokens=9
    )
    validate(first)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert first.status == "completed" and first.usage.total_tokens == 8
    assert first.output_text == "I look."

    items += [item.to_dict() for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": "a1", "output": "a wall"},
        {
            "type": "function_call_output",
            "call_id": "a2",
            "output": [{"type": "input_text", "text": "a door"}],
        },
        {"type": "reasoning", "id": "r1", "summary": []},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "so?"}]},
    ]
    second = client.responses.create(
        model="m", instructions="be brief", input=items, tools=[LOOK], temperature=0.5
    )
    validate(second)
    assert second.output_text == "yes"

    chat_request, request = model.requests
    function = {name: LOOK[name] for name in ("name", "description", "parameters", "strict")}
    assert request.tools == ({"type": "function", "function": function},)
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "why?"},
        call_answer(*CALLS, content="I look.").message,
        {"role": "tool", "tool_call_id": "a1", "content": "a wall"},
        {"role": "tool", "tool_call_id": "a2", "content": "a door"},
        {"role": "user", "content": "so?"},
    )
    assert chat_request.max_tokens == 9 and request.sampling.names == ["temperature"]


def test_previous_response_is_continued_without_its_instructions(model, client):
    model.answers = [call_answer(CALLS[0]), text_answer("yes"), text_answer("no")]
    first = client.responses.create(model="m", instructions="one", input="why?", tools=[LOOK])
    output = {"type": "function_call_output", "call_id": "a1", "output": "a wall"}
    second = client.responses.create(model="m", previous_response_id=first.id, input=[output])
    client.responses.create(
        model="m", instructions="two", previous_response_id=second.id, input="really?"
    )
    assert second.previous_response_id == first.id
    assert model.requests[2].messages == (
        {"role": "system", "content": "two"},
        {"role": "user", "content": "why?"},
        call_answer(CALLS[0]).message,
        {"role": "tool", "tool_call_id": "a1", "content": "a wall"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "really?"},
    )


def test_stored_response_is_retrieved_and_deleted(model, client):
    model.answers = [call_answer(CALLS[0], content="I look."), text_answer("no")]
    first = client.responses.create(model="m", input="why?", tools=[LOOK])
    client.responses.create(model="m", input="why?")
    assert client.responses.retrieve(first.id) == first
    with pytest.raises(BadRequestError, match="stream"):
        client.responses.retrieve(first.id, stream=True)
    client.responses.delete(first.id)
    for use in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.create(model="m", previous_response_id=first.id, input="so?"),
    ):
        with pytest.raises(NotFoundError, match=first.id):
            use()


def test_item_reference_is_resolved(model, client):
    model.answers = [text_answer("yes"), text_answer("no")]
    first = client.responses.create(model="m", input="why?")
    items: list[Any] = [
        {"role": "user", "content": "why?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "really?"},
    ]
    client.responses.create(model="m", input=items)
    assert model.requests[1].messages[1] == {"role": "assistant", "content": "yes"}


def test_unknown_or_unstored_previous_response_is_not_found(model, client):
    model.answers = [text_answer("yes")]
    unstored = client.responses.create(model="m", input="why?", store=False)
    for response_id in ("resp-other", unstored.id):
        with pytest.raises(NotFoundError) as raised:
            client.responses.create(model="m", input="so?", previous_response_id=response_id)
        assert raised.value.code == "previous_response_not_found"
        assert raised.value.param == "previous_response_id"


def test_stream_has_the_events_of_openai(model, client):
    model.answers = [call_answer(CALLS[0], content="I look.")] * 2
    body = {"model": "m", "input": "why?", "tools": [LOOK]}
    events = model.stream("responses", body)
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = [
        *("created", "in_progress"),
        *("output_item.added", *message, "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        "completed",
    ]
    assert [name for name, _ in events] == [f"response.{name}" for name in expected]
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == [*range(len(events))]
    adapter = TypeAdapter(ResponseStreamEvent)
    for _, data in events:
        adapter.validate_python(data)

    with client.responses.stream(**body) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert deltas == ["I look."] and final.output_text == "I look."
    (function_call,) = [item for item in final.output if item.type == "function_call"]
    assert json.loads(function_call.arguments) == {"at": "here"}


def test_truncated_response_is_incomplete(model, client):
    model.answers = [text_answer("ye", "length")] * 2
    response = client.responses.create(model="m", input="why?")
    validate(response)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert model.stream("responses", {"input": "why?"})[-1][0] == "response.incomplete"


def test_logprobs_are_returned_on_request(model, client):
    model.answers = [text_answer("yes")]
    response = client.responses.create(
        model="m", input="why?", include=["message.output_text.logprobs"], top_logprobs=2
    )
    validate(response)
    tokens = response.output[0].content[0].logprobs
    assert [token.token for token in tokens] == ["y", "e", "s"]
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)
def test_invalid_field_is_refused(client, fields, param):
    with pytest.raises(BadRequestError) as raised:
        client.post("/responses", body={"input": "why?", **fields}, cast_to=object)
    assert raised.value.param == param


def test_null_and_neutral_fields_are_accepted(model, client):
    model.answers = [text_answer("yes")] * 2
    nullable = [
        *("model", "instructions", "previous_response_id", "store", "stream", "tools", "text"),
        *("tool_choice", "parallel_tool_calls", "max_output_tokens", "temperature", "top_p"),
        *("top_logprobs", "include", "metadata", "reasoning", "truncation", "background"),
    ]
    neutral = {"text": {"format": {"type": "text"}}, "truncation": "disabled", "tools": []}
    for fields in (dict.fromkeys(nullable), neutral):
        client.post("/responses", body={"input": "why?", **fields}, cast_to=object)
