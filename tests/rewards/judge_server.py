"""An endpoint with a judge behind it, which says what a test tells it to."""

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
    """An answer to a request; status 0 hangs up without a word."""

    status: int
    body: object
    headers: dict[str, str] = field(default_factory=dict)


def says(content: object, tokens_in: int = 10, tokens_out: int = 5, **more: object) -> Reply:
    """An answer of the protocol's."""
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out}
    return Reply(200, {"choices": [{"message": message, **more}], "usage": usage})


def likely(**probabilities: float) -> dict[str, object]:
    """Log-probs of the first token, of which these are the most probable ones."""
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
    """`reply` makes the answer to a question, with the number of requests before it; what was asked
    is kept."""

    daemon_threads = True

    def __init__(self, reply: Callable[[str, int], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.asked: list[Body] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.answered: list[str] = []
        """The questions that were answered with status 200."""
        self.most_at_a_time = 0
        self._under_way = 0
        self._lock = threading.Lock()

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]

    @contextlib.contextmanager
    def noted(self, body: Body, path: str, key: str | None) -> Iterator[int]:
        """A request while it is answered: how many came before it."""
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
            self.paths.append(path)
            self.keys.append(key)
            self._under_way += 1
            self.most_at_a_time = max(self.most_at_a_time, self._under_way)
        try:
            yield number
        finally:
            with self._lock:
                self._under_way -= 1


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.noted(body, self.path, self.headers["Authorization"]) as number:
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
    """A judge that answers meanwhile."""
    with JudgeServer(reply) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
