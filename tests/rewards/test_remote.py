"""The remote scorer: requests, retries, deadlines and invalid responses."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from aligner.errors import UnavailableError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.remote import RemoteScorer
from aligner.rewards.scorers import ScorerUnavailable, ScoringError, call_scorer
from aligner.rewards.sources import CombinedReward, build_text_source
from aligner.schema.reward_sources import FunctionSource, RemoteSource
from aligner.servers.reward_server import RewardRank
from aligner.servers.validation import Limits
from tests.servers.role_main import character_tokenizer

REQUESTS = [
    ScoringRequest("2+2=", "4", {"label": "four", "answer": "4"}),
    ScoringRequest("3+3=", "6", {"answer": ["6", "six"]}),
    ScoringRequest("ünd ", "", {"topic": "none"}),
]


class ScoringServer(ThreadingHTTPServer):
    """Sends the given responses in order, repeats the last one, and records its requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[tuple[int, bytes, str]] = []
        self.requests: list[tuple[str, str, dict[str, object]]] = []
        self.missing_bytes = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/get_reward?model=a"

    def answer(self, status: int, body: object, retry_after: str = "") -> None:
        self.answers.append(
            (status, body if isinstance(body, bytes) else json.dumps(body).encode(), retry_after)
        )


class _Handler(BaseHTTPRequestHandler):
    server: ScoringServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Content-Type"], body))
        answers = self.server.answers
        status, answer, retry_after = answers.pop(0) if len(answers) > 1 else answers[0]
        if status == 0:
            return  # closes the connection without a response
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer) + self.server.missing_bytes))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ScoringServer]:
    with ScoringServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_batch_is_one_request_in_openrlhf_format(server):
    server.answer(
        200, {"rewards": [1, -0.5, 2.0], "scores": [0, 0, 0], "extra_logs": {"length": [1, 2, 3]}}
    )
    assert call_scorer("judge", RemoteScorer(server.url, 10), REQUESTS) == [1.0, -0.5, 2.0]
    body = {
        "query": ["2+2=4", "3+3=6", "ünd "],
        "prompts": ["2+2=", "3+3=", "ünd "],
        "labels": ["four", ["6", "six"], ""],
    }
    assert server.requests == [("/get_reward?model=a", "application/json", body)]


def test_lost_connection_and_status_503_are_retried(server):
    server.answer(0, b"")
    server.answer(503, b"starting")
    server.answer(200, {"rewards": [1, 2, 3]})
    assert RemoteScorer(server.url, 10)(REQUESTS) == [1.0, 2.0, 3.0]
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [408, 425, 429])
def test_retry_waits_for_retry_after_header(server, status):
    server.answer(status, b"slow down", retry_after="1")
    server.answer(200, {"rewards": [1, 2, 3]})
    start = time.monotonic()
    assert RemoteScorer(server.url, 10)(REQUESTS) == [1.0, 2.0, 3.0]
    assert time.monotonic() - start >= 1 and len(server.requests) == 2


def test_retry_after_beyond_deadline_fails_immediately(server):
    server.answer(429, b"slow down", retry_after="3600")
    start = time.monotonic()
    with pytest.raises(
        ScorerUnavailable,
        match=(
            r"no successful response within 10 s, including retries; last attempt: status 429, 'slow"
            r" down'"
        ),
    ):
        RemoteScorer(server.url, 10)(REQUESTS)
    assert time.monotonic() - start < 5 and len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"no such page", "got status 404, 'no such page'; expected status 200"),
        (302, b"", "status 302, ''"),
        (200, b" " * (2**24 + 1), "the response exceeds the limit of 16777216 bytes"),
        (422, b"x" * 1000, f"status 422, '{'x' * 200}' and 800 more bytes"),
        (200, b"<html>", "got '<html>'; expected a JSON object with `rewards`"),
        (200, b"\xff{", "expected a JSON object with `rewards`"),
        (200, b"[" * 100_000, "expected a JSON object with `rewards`"),
        (200, [1, 2, 3], "expected a JSON object with `rewards`"),
        (200, {"scores": [1, 2, 3]}, "expected a JSON object with `rewards`"),
        (200, {"rewards": [1, 2]}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": 1.0}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": [1, "2", 3]}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": [1, None, 3]}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": [1, True, 3]}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": [[1], [2], [3]]}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": [1, float("nan"), 3]}, "`rewards` must be a list of 3 finite numbers"),
        (200, {"rewards": [1, 10**400, 3]}, "`rewards` must be a list of 3 finite numbers"),
    ],
)
def test_invalid_response_is_not_retried(server, status, body, message):
    server.answer(status, body)
    with pytest.raises(ScoringError) as caught:
        call_scorer("judge", RemoteScorer(server.url, 10), REQUESTS)
    assert f"the scorer judge: {server.url}: " in str(caught.value)
    assert message in str(caught.value)
    assert len(server.requests) == 1


def test_incomplete_response_is_retried(server):
    server.answer(200, {"rewards": [1, 2, 3]})
    server.missing_bytes = 1
    with pytest.raises(ScorerUnavailable, match="last attempt: IncompleteRead"):
        RemoteScorer(server.url, 0.3)(REQUESTS)
    assert len(server.requests) > 1


def test_failing_server_is_retried_until_deadline(server):
    server.answer(500, b"out of memory")
    start = time.monotonic()
    with pytest.raises(
        ScoringError,
        match=(
            r"no successful response within 0.5 s, including retries; last attempt: status 500, 'out of"
            r" memory'"
        ),
    ):
        RemoteScorer(server.url, 0.5)(REQUESTS)
    assert len(server.requests) > 1
    assert time.monotonic() - start < 2


def test_refused_connection_is_reported_at_deadline():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(
        ScorerUnavailable,
        match=rf"127.0.0.1:{port}/: no successful response within 0.3 s, .*ConnectionRefusedError",
    ):
        call_scorer("judge", RemoteScorer(f"http://127.0.0.1:{port}/", 0.3), REQUESTS)
    assert issubclass(ScorerUnavailable, UnavailableError)


@pytest.mark.parametrize("length", ["", "Content-Length: 1000\r\n"])
def test_slow_response_does_not_exceed_the_deadline(length):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode())
                while not done.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        done = threading.Event()
        thread = threading.Thread(target=trickle)
        thread.start()
        start = time.monotonic()
        try:
            with pytest.raises(ScoringError, match=r"no successful response within 0.5 s"):
                RemoteScorer(f"http://127.0.0.1:{listener.getsockname()[1]}/", 0.5)(REQUESTS)
            assert time.monotonic() - start < 2
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, ("ab<eos>", "cd<eos>")),
        ({"skip_special_tokens": False}, ("ab<eos>", "cd<eos>")),
        ({"skip_special_tokens": True}, ("ab", "cd")),
    ],
)
def test_special_tokens_are_sent_unless_skipped(server, settings, asked):
    tokenizer = character_tokenizer()
    server.answer(200, {"rewards": [1]})
    source = RemoteSource(name="judge", key="reward", url=server.url, timeout_s=5, **settings)
    # A function gets the text without special tokens.
    functions = FunctionSource(name="exact", key="reward", function="exact_match")
    scoring = RewardRank(
        CombinedReward([(each, build_text_source(each)) for each in (source, functions)]),
        tokenizer,
        Limits(99, 99, 99),
    )
    prompt, response = (tokenizer.encode(text).ids for text in ("ab<eos>", "cd<eos>"))
    tokens = torch.tensor([[*prompt, *response, 0]])
    score = scoring.score(
        tokens, torch.tensor([6]), torch.tensor([3]), metadata=['{"answer": "cd"}']
    )
    assert {name: part.tolist() for name, part in score.items()} == {
        "rewards": [2.0],
        "0": [1.0],
        "1": [1.0],
    }
    ((_, _, body),) = server.requests
    assert body == {"query": ["".join(asked)], "prompts": [asked[0]], "labels": ["cd"]}
