"""`functions` and `function_call`, OpenAI's older format of tools, used with OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from aligner.agents.protocols.requests import NamedTool
from aligner.data.tool_calls import ToolCall
from tests.agents.protocols.scripted_model import ScriptedModel, call_answer, text_answer

LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
USER: dict[str, Any] = {"role": "user", "content": "why?"}


@pytest.fixture
def client(model: ScriptedModel) -> OpenAI:
    return OpenAI(base_url=model.url, api_key="key", max_retries=0)


def test_function_loop_has_tools_and_tool_messages(model, client):
    model.answers = [call_answer(ToolCall("a1", "look", {"at": "here"})), text_answer("yes")]
    (choice,) = client.chat.completions.create(model="m", messages=[USER], functions=[LOOK]).choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.model_dump() == {
        "name": "look",
        "arguments": '{"at": "here"}',
    }

    messages = [
        USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "function", "name": "look", "content": "a wall"},
    ]
    (choice,) = client.chat.completions.create(
        model="m", messages=messages, functions=[LOOK], function_call={"name": "look"}
    ).choices
    assert choice.finish_reason == "stop" and choice.message.content == "yes"

    first, second = model.requests
    assert first.tools == ({"type": "function", "function": LOOK},)
    assert not first.parallel_tool_calls and second.tool_choice == NamedTool("look")
    _, call, result = second.messages
    assert call["tool_calls"][0]["function"]["name"] == "look" and "function_call" not in call
    assert (result["role"], result["content"]) == ("tool", "a wall")
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_stream_has_function_call(model, client):
    model.answers = [call_answer(ToolCall("a1", "look", {"at": "here"}))]
    chunks = client.chat.completions.create(
        model="m", messages=[USER], functions=[LOOK], stream=True
    )
    first, last = (chunk.choices[0] for chunk in chunks)
    assert first.delta.function_call.name == "look" and last.finish_reason == "function_call"


def test_functions_and_tools_together_are_refused(client):
    tools: Any = [{"type": "function", "function": LOOK}]
    with pytest.raises(BadRequestError, match="functions: must be left out"):
        client.chat.completions.create(model="m", messages=[USER], functions=[LOOK], tools=tools)
