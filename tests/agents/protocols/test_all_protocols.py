"""Behavior that all wire formats share: guided features, bad input, disconnects, models, CORS."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import NotFoundError, OpenAI

from aligner.agents.protocols.requests import JsonFormat, NamedTool
from tests.agents.protocols.scripted_model import ScriptedModel, text_answer

USER = {"role": "user", "content": "why?"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "completions": {"prompt": "why?"},
    "responses": {"input": "why?"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [USER]},
}
TOOLS: dict[str, dict[str, Any]] = {
    "chat/completions": {"type": "function", "function": FUNCTION},
    "responses": {"type": "function", **FUNCTION},
    "messages": {"name": "look", "input_schema": SCHEMA},
}
every_path = pytest.mark.parametrize("path", BODIES)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"tool_choice": "required"}),
        ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        ("chat/completions", {"parallel_tool_calls": False}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        ("chat/completions", {"guided_json": json.dumps(SCHEMA)}),
        ("responses", {"tool_choice": "required"}),
        ("responses", {"tool_choice": {"type": "function", "name": "look"}}),
        ("responses", {"parallel_tool_calls": False}),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        ),
        ("messages", {"tool_choice": {"type": "any"}}),
        ("messages", {"tool_choice": {"type": "tool", "name": "look"}}),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
def test_guided_features_are_parsed_equally(model, path, fields) -> None:
    body = {**BODIES[path], "tools": [TOOLS[path]], **fields}
    model.answers = [text_answer("yes")]
    assert model.post(path, body)[0] == 200
    (request,) = model.requests
    (name,) = fields
    if name == "parallel_tool_calls" or "disable_parallel_tool_use" in str(fields):
        assert not request.parallel_tool_calls
    elif name == "tool_choice":
        assert request.tool_choice == (
            "required" if "look" not in str(fields) else NamedTool("look")
        )
    else:
        schema = None if "json_object" in str(fields) else SCHEMA
        assert request.response_format == JsonFormat(schema)


@every_path
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b'{"messages": 5}', b"\xff\xfe", b"[" * 5000]
)
def test_malformed_body_is_refused(model: ScriptedModel, path, content) -> None:
    status, response = model.post(path, content)
    assert status == 400 and response["error"]["message"] and response["error"]["type"]
    assert ("type" in response) == (path == "messages")


@every_path
def test_fields_of_wrong_types_are_refused(model: ScriptedModel, path) -> None:
    for name, value in BODIES[path].items():
        for wrong in (5 if not isinstance(value, int) else "many", {"a": 1}, [None]):
            status, _ = model.post(path, {**BODIES[path], name: wrong})
            assert status == 400, (name, wrong)


@every_path
def test_oversized_body_is_refused(model: ScriptedModel, path) -> None:
    status, response = model.post(path, {**BODIES[path], "user": "x" * 300_000})
    assert status == 413 and response["error"]["message"]


@every_path
def test_unknown_field_is_logged_once(model: ScriptedModel, path, caplog) -> None:
    model.answers = [text_answer("yes")] * 2
    for _ in range(2):
        assert model.post(path, {**BODIES[path], "odd_field": 1})[0] == 200
    assert caplog.text.count("requests set odd_field, which is unknown and ignored") == 1


@every_path
def test_client_may_disconnect_within_a_stream(model: ScriptedModel, path) -> None:
    place = urlsplit(model.url)
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    model.answers = [text_answer("yes" * 10_000)] * 2
    with socket.create_connection((str(place.hostname), int(place.port or 0))) as client:
        client.sendall(head.encode() + body)
        assert client.recv(20).startswith(b"HTTP/1.1 200")
    # an unfinished body
    with socket.create_connection((str(place.hostname), int(place.port or 0))) as client:
        client.sendall(head.encode() + body[:5])
    assert model.post(path, BODIES[path])[0] == 200


@every_path
def test_request_above_the_limit_is_retried_by_its_client(model: ScriptedModel, path) -> None:
    model.server.max_requests = 0
    headers = {"Content-Type": "application/json"}
    content = json.dumps(BODIES[path]).encode()
    request = urllib.request.Request(f"{model.url}/{path}", content, headers)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=30)
    assert raised.value.code == 429 and raised.value.headers["Retry-After"] == "1"
    assert json.load(raised.value)["error"]["type"] == "rate_limit_error"
    assert model.refused == 1 and not model.requests


def test_client_of_openai_waits_for_a_place(model: ScriptedModel) -> None:
    model.answers = [text_answer("yes")]
    model.server.max_requests = 0

    def make_room() -> None:
        while not model.refused:
            time.sleep(0.01)
        model.server.max_requests = 1

    thread = threading.Thread(target=make_room)
    thread.start()
    client = OpenAI(base_url=model.url, api_key="key", max_retries=2)
    completion = client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    thread.join()
    assert completion.choices[0].message.content == "yes" and model.refused == 1


def test_models_are_listed_and_retrieved(model: ScriptedModel) -> None:
    client = OpenAI(base_url=model.url, api_key="key", max_retries=0)
    assert [each.id for each in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "aligner"
    with pytest.raises(NotFoundError) as raised:
        client.models.retrieve("org/other")
    assert raised.value.code == "model_not_found"


def test_browser_gets_permission_for_its_request(model: ScriptedModel) -> None:
    headers = {
        "Origin": "http://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-api-key",
    }
    request = urllib.request.Request(
        f"{model.url}/chat/completions", headers=headers, method="OPTIONS"
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == "*"
        assert "x-api-key" in response.headers["access-control-allow-headers"]


def test_unexpected_error_of_backend_has_status_500(model: ScriptedModel) -> None:
    for path, body in BODIES.items():  # the model has no answers
        status, response = model.post(path, body)
        kind = "api_error" if path == "messages" else "server_error"
        assert (status, response["error"]["type"]) == (500, kind)
