"""Agents that send invalid requests, and record the answers."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openai import APIStatusError, OpenAI

from tests.agents.openai_agents import TOOLS


def send_request(url: str, key: str, body: bytes | None) -> tuple[int, Any]:
    """Send a request, a GET if `body` is None, and return the status and the JSON of the answer."""
    # some clients write the name of the scheme in lower case
    headers = {"Authorization": f"bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers), timeout=30
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def pokes(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Send invalid requests one after another, then a valid one."""
    user = {"role": "user", "content": "why?"}
    chats = {
        "garbage": b"{",
        "no object": b"[1]",
        "no messages": {"messages": []},
        "no role": {"messages": [{"content": "why?"}]},
        "image": {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        },
        "bad call": {"messages": [user, {"role": "assistant", "tool_calls": [{}]}, user]},
        "none": {"messages": [user], "n": 0},
        "half a character": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "megabytes": {"messages": [{"role": "user", "content": "x" * 3_000_000}]},
        "too long": {"messages": [{"role": "user", "content": "x" * 5_000}]},
    }
    answers = {}
    for name, body in chats.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answers[name] = send_request(f"{base_url}/chat/completions", api_key, content)
    right = json.dumps({"messages": [user]}).encode()
    answers["another's key"] = send_request(f"{base_url}/chat/completions", "sk-other", right)
    answers["another's address"] = send_request(
        f"{base_url.replace('/0-0-0/', '/0-0-9/')}/chat/completions", api_key, right
    )
    answers["no such path"] = send_request(f"{base_url}/embeddings", api_key, right)
    answers["no such method"] = send_request(f"{base_url}/chat/completions", api_key, None)
    texts = {
        "no token": {"prompt": [10**6]},
        "echo": {"prompt": "why?", "echo": True},
        "several": {"prompt": ["why?", "when?"]},
    }
    for name, text_body in texts.items():
        answers[name] = send_request(
            f"{base_url}/completions", api_key, json.dumps(text_body).encode()
        )
    answers["no reward"] = send_request(f"{base_url}/reward", api_key, b'{"reward": "NaN"}')
    answers["models"] = send_request(f"{base_url}/models", api_key, None)
    answers["right"] = send_request(f"{base_url}/chat/completions", api_key, right)
    Path(task["log"]).write_text(json.dumps(answers))


def streams(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Request answers plain and streamed, as chat and as completion."""
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "why 0?"}]
    chunks = list(
        own.chat.completions.create(
            model="any",
            messages=messages,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    text = own.completions.create(model="any", prompt="<|user|>", logprobs=0, max_tokens=4).choices[
        0
    ]
    streamed = own.completions.create(model="any", prompt="yes", stream=True, max_tokens=4)
    stopped = own.chat.completions.create(
        model="any", messages=messages, tools=TOOLS, stop=["look"], n=2
    ).choices
    content = {
        "finish": choices[-1].finish_reason,
        "called": [
            [call.function.name, call.function.arguments] for call in calls if call.function
        ],
        "usage": [chunk.usage.completion_tokens for chunk in chunks if chunk.usage],
        "text": [text.text, text.finish_reason, text.logprobs.tokens if text.logprobs else None],
        "streamed": "".join(choice.text for chunk in streamed for choice in chunk.choices),
        "stopped": [[choice.message.content, choice.finish_reason] for choice in stopped],
    }
    Path(task["log"]).write_text(json.dumps(content))


def leaves(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Disconnect before the answer, and send the request again."""
    place = urlsplit(base_url)
    body = json.dumps({"messages": [{"role": "user", "content": "why?"}], "max_tokens": 60})
    headers = {"Authorization": f"Bearer {api_key}"}
    for _ in range(3):
        connection = http.client.HTTPConnection(place.netloc)
        connection.request("POST", f"{place.path}/chat/completions", body, headers)
        connection.close()
    OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(
        model="any", messages=[{"role": "user", "content": "why?"}], max_tokens=60
    )


def after_the_end(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Use an endpoint after its episode: the second agent sends a request to the first agent's
    address."""
    own, file = OpenAI(base_url=base_url, api_key=api_key, max_retries=0), Path(task["log"])
    own.completions.create(model="any", prompt="yes", max_tokens=2)
    if task["at"] == 0:
        file.write_text(json.dumps([base_url, api_key]))
        return
    end = time.monotonic() + 20
    while time.monotonic() < end:
        time.sleep(0.1)
        if not file.exists() or not file.read_text():
            continue
        try:
            OpenAI(
                base_url=json.loads(file.read_text())[0], api_key=json.loads(file.read_text())[1]
            ).models.list()
        except APIStatusError as error:
            file.with_suffix(".told").write_text(str(error.status_code))
            return


def changes_its_mind(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Send another request in the second run of the same task."""
    mark = Path(task["mark"])
    text = "two" if mark.exists() else "one"
    mark.touch()
    OpenAI(base_url=base_url, api_key=api_key, max_retries=0).chat.completions.create(
        model="any", messages=[{"role": "user", "content": text}]
    )


def speaks_three_protocols(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Run one conversation with a tool call; each of three turns uses another protocol."""
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    schema = TOOLS[0]["function"]["parameters"]
    user = {"role": "user", "content": "why 0?"}
    (call,) = (
        own.chat.completions.create(model="any", messages=[user], tools=TOOLS)
        .choices[0]
        .message.tool_calls
    )
    result = f"saw {call.function.arguments}"
    arguments = {"call_id": call.id, "name": "look", "arguments": call.function.arguments}
    second = own.responses.create(
        model="any",
        tools=[{"type": "function", "name": "look", "parameters": schema}],
        input=[
            user,
            {"type": "function_call", **arguments},
            {"type": "function_call_output", "call_id": call.id, "output": result},
        ],
    )
    third = own.responses.create(
        model="any",
        tools=[{"type": "function", "name": "look", "parameters": schema}],
        previous_response_id=second.id,
        input="so 0?",
    )
    used = {"id": call.id, "name": "look", "input": json.loads(call.function.arguments)}
    body = {
        "model": "any",
        "max_tokens": 9,
        "tools": [{"name": "look", "input_schema": schema}],
        "messages": [
            user,
            {"role": "assistant", "content": [{"type": "tool_use", **used}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}],
            },
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "so 0?"},
            {"role": "assistant", "content": third.output_text},
            {"role": "user", "content": "end"},
        ],
    }
    request = urllib.request.Request(
        f"{base_url}/messages", json.dumps(body).encode(), {"x-api-key": api_key}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        message = json.load(response)
    wrong = urllib.request.Request(
        f"{base_url}/messages", json.dumps(body).encode(), {"x-api-key": "other"}
    )
    try:
        urllib.request.urlopen(wrong, timeout=60)
        refusal = None
    except urllib.error.HTTPError as error:
        refusal = [error.code, json.load(error)["error"]["type"]]
    Path(task["log"]).write_text(json.dumps({"message": message, "refusal": refusal}))
