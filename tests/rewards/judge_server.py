"""A judge endpoint whose responses a test defines."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An HTTP response; status 0 closes the connection without a response."""

    status: int
    body: object
    headers: dict[str, str] = field(default_factory=dict)


def says(content: object, tokens_in: int = 10, tokens_out: int = 5, **more: object) -> Reply:
    """Return a chat completion with this content."""
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out}
    return Reply(200, {"choices": [{"message": message, **more}], "usage": usage})


def likely(**probabilities: float) -> dict[str, object]:
    """Return log-probs of the first token, with these tokens as its top log-probs."""
    top = [
        {"token": token, "logprob": math.log(probability)}
        for token, probability in probabilities.items()
    ]
    return {
        "logprobs": {
            "content": [
                {"token": top[0]["token"], "logprob": top[0]["logprob"], "top_logprobs": top}
            ]
        }
    }


class JudgeServer(ThreadingHTTPServer):
    """An HTTP server that records its requests.

    `reply` makes the response from the question and the number of earlier requests.
    """

    daemon_threads = True

    def __init__(self, reply: Callable[[str, int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.asked: list[Body] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.answered: list[str] = []
        """Questions that got a response with status 200."""
        self.most_at_a_time = 0
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]

    @contextlib.contextmanager
    def record_request(self, body: Body, path: str, key: str | None) -> Iterator[int]:
        """Record a request in flight, and yield the number of earlier requests."""
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
            self.paths.append(path)
            self.keys.append(key)
            self._in_flight += 1
            self.most_at_a_time = max(self.most_at_a_time, self._in_flight)
        try:
            yield number
        finally:
            with self._lock:
                self._in_flight -= 1


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.record_request(body, self.path, self.headers["Authorization"]) as number:
            question = body["messages"][0]["content"]
            reply = self.server.reply(question, number)
            if reply.status == 0:
                return
            if reply.status == 200:
                self.server.answered.append(question)
            answer = (
                reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            )
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(answer))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def judging(reply: Callable[[str, int], Reply]) -> Iterator[JudgeServer]:
    """Run a judge server within the context."""
    with JudgeServer(reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
