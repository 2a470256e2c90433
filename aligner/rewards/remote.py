"""Scores over HTTP, in the shape that OpenRLHF's `remote_rm_url` has."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aligner.rewards.scorers import ScorerUnavailable, ScoringError, ScoringRequest
from aligner.schema.options import is_finite_number

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SHOWN_BYTES = 200
_LARGEST_ANSWER = 16 * 2**20  # bytes
_LATER = (
    http.HTTPStatus.REQUEST_TIMEOUT,
    http.HTTPStatus.TOO_EARLY,
    http.HTTPStatus.TOO_MANY_REQUESTS,
)
"""Statuses below 500 that ask for another attempt."""


class Pace:
    """So many requests a minute at most, from any thread: the time between two is never shorter
    than it must be."""

    def __init__(self, per_minute: float) -> None:
        self._apart_s, self._next, self._lock = 60 / per_minute, 0.0, threading.Lock()

    def wait(self) -> float:
        """Wait for the next turn, and take it; how many seconds that was."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._apart_s
        time.sleep(turn - now)
        return turn - now


@dataclass(frozen=True)
class HttpEndpoint:
    """An address that takes JSON."""

    url: str
    timeout_s: float
    """Until the answer is there, retries included."""
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; no error tells it."""
    pace: Pace | None = None

    def post(self, body: bytes) -> bytes:
        """The answer to some JSON.

        No connection, a lost one and the statuses 408, 425, 429 and 5xx are tried again until the
        deadline, after a pause that is no shorter than what the answer asks for (Retry-After, in
        seconds), and then raise ScorerUnavailable. Waiting for a turn does not count. Any other
        status and an answer beyond 16 MiB raise ScoringError at once. Both tell the address.
        """
        deadline = time.monotonic() + self.timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.pace is not None:
                deadline += self.pace.wait()
            try:
                status, answer, asked_s = self._post(body, deadline)
            except (OSError, http.client.HTTPException) as error:
                problem, asked_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if status == http.HTTPStatus.OK:
                    return answer
                problem = f"status {status}, {self.shown(answer)}"
                if status < http.HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LATER:
                    raise ScoringError(f"{self.url}: got {problem}; expected status 200")
            wait_s = max(pause_s, asked_s)
            if time.monotonic() + wait_s >= deadline:
                raise ScorerUnavailable(
                    f"{self.url}: no successful response within {self.timeout_s:g} s, including"
                    f" retries; last attempt: {problem}"
                )
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def shown(self, answer: bytes) -> str:
        """The beginning of an answer, for a message."""
        told = answer if self.key is None else answer.replace(self.key.encode(), b"***")
        more = f" and {len(told) - _SHOWN_BYTES} more bytes" if len(told) > _SHOWN_BYTES else ""
        return f"{told[:_SHOWN_BYTES].decode(errors='replace')!r}{more}"

    def _post(self, body: bytes, deadline: float) -> tuple[int, bytes, float]:
        """Status, answer, and for how many seconds it asks to be left alone."""
        address = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(
            address.hostname or "", address.port, timeout=max(deadline - time.monotonic(), 0.01)
        )
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        headers = {"Content-Type": "application/json"} | (
            {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        )
        with contextlib.closing(connection):
            connection.connect()
            with _cut_off(connection.sock, deadline):
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                answer = response.read(_LARGEST_ANSWER + 1)
        if len(answer) > _LARGEST_ANSWER:
            raise ScoringError(
                f"{self.url}: the response exceeds the limit of {_LARGEST_ANSWER} bytes"
            )
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out before the response was complete")
        if response.length:
            raise http.client.IncompleteRead(answer, response.length)
        asked = response.getheader("Retry-After", "")
        return response.status, answer, float(asked) if asked.isdecimal() else 0.0


@contextlib.contextmanager
def _cut_off(connected: socket.socket, deadline: float) -> Iterator[None]:
    """End what waits for the socket at the deadline: its own timeout begins anew with every byte
    that trickles in."""

    def end() -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(deadline - time.monotonic(), 0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class RemoteScorer:
    """A scorer that asks an HTTP server.

    A batch is one POST of JSON with `query` (prompt and response together), `prompts` and `labels`,
    lists with an entry a request; the answer's `rewards` has a number for each. A label is what the
    request's metadata has as `label` or `answer`, and empty text where it has neither.
    """

    url: str
    timeout_s: float
    """Until the answer is there, retries included."""

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """One score a request. Raises as `HttpEndpoint.post`, and ScoringError for an answer of
        another shape."""
        body = {
            "query": [request.prompt + request.response for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [
                request.metadata.get("label", request.metadata.get("answer", ""))
                for request in requests
            ],
        }
        endpoint = HttpEndpoint(self.url, self.timeout_s)
        answer, count = endpoint.post(json.dumps(body).encode()), len(requests)
        try:
            rewards: Any = json.loads(answer)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ScoringError(
                f"{self.url}: got {endpoint.shown(answer)}; expected a JSON object with `rewards`"
            ) from error
        if (
            not isinstance(rewards, list)
            or len(rewards) != count
            or not all(map(is_finite_number, rewards))
        ):
            raise ScoringError(
                f"{self.url}: got {endpoint.shown(answer)}; `rewards` must be a list of"
                f" {count} finite numbers, one for each query"
            )
        return [float(reward) for reward in rewards]
