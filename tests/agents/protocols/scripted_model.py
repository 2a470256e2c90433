"""A model server whose back end gives prepared answers, for tests of the wire formats."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from aligner.agents.model_server import ModelServer
from aligner.agents.protocols.requests import Answer, AnswerToken, ChatRequest, ModelRequest
from aligner.agents.protocols.response_store import ResponseStore
from aligner.data.tool_calls import ToolCall

PROMPT_TOKENS = 7


def text_answer(text: str, reason: str = "stop", stop_string: str | None = None) -> Answer:
    tokens = tuple(
        AnswerToken(letter, -0.5, (AnswerToken(letter, -0.5), AnswerToken("?", -1.5)))
        for letter in text
    )
    return Answer(text, reason, PROMPT_TOKENS, tokens, stop_string=stop_string)  # type: ignore[arg-type]


def call_answer(*calls: ToolCall, content: str = "") -> Answer:
    tokens = (AnswerToken("<call>", -1.0),)
    return Answer("<call>", "tool_calls", PROMPT_TOKENS, tokens, content=content, tool_calls=calls)


class ScriptedModel:
    """A back end that returns prepared answers in order, and records the requests."""

    name = "episode"
    model_name = "scripted"

    server: ModelServer

    def __init__(self) -> None:
        self.stored_responses = ResponseStore()
        self.requests: list[ChatRequest] = []
        self.answers: list[Answer] = []
        self.unreceived: list[ModelRequest] = []
        self.refused = 0
        self.url = ""

    async def answer(self, request: ModelRequest) -> list[Answer]:
        self.requests.append(request)  # type: ignore[arg-type]
        return [self.answers.pop(0)] * request.n

    def mark_refused(self) -> None:
        self.refused += 1

    def mark_unreceived(self, request: ModelRequest) -> None:
        self.unreceived.append(request)

    def count_tokens(self, request: ChatRequest) -> int:
        return len(request.messages)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Send a body, JSON or bytes, and return the status and the JSON of the response."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", content, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stream(self, path: str, body: Any) -> list[tuple[str | None, dict[str, Any]]]:
        """Send a body with `stream`, and return the names and data of the events."""
        content = json.dumps({**body, "stream": True}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/{path}", content), timeout=30
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            blocks = response.read().decode().split("\n\n")[:-1]
        events = []
        for block in blocks:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            data = {} if fields["data"] == "[DONE]" else json.loads(fields["data"])
            events.append((fields.get("event"), data))
        return events


@contextlib.contextmanager
def serve_scripted() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    server = ModelServer(
        "127.0.0.1", 0, 10_000, "--host", lambda request: model, allows_browsers=True
    )
    server.start()
    model.server = server
    model.url = f"{server.url}/v1"
    try:
        yield model
    finally:
        server.close()
