"""Remote scorers over HTTP, in the format of OpenRLHF's `remote_rm_url`.

`HttpEndpoint` sends JSON by POST with retries until a deadline; judges use it too. `RateLimiter`
limits the requests per minute.
"""

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

from aligner.file_limits import parse_json
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import ScorerUnavailable, ScoringError
from aligner.values import is_finite_number

# Pause before the first retry, and upper bound of the pauses, in seconds. Each pause is twice the
# previous one.
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
# Bytes of a response in an error message.
_SHOWN_BYTES = 200
_MAX_RESPONSE_BYTES = 16 * 2**20
# Statuses below 500 that are retried.
_RETRIED_STATUSES = (
    http.HTTPStatus.REQUEST_TIMEOUT,
    http.HTTPStatus.TOO_EARLY,
    http.HTTPStatus.TOO_MANY_REQUESTS,
)


class RateLimiter:
    """Limits the requests of all threads to a number per minute.

    Consecutive requests are at least 60 s / (requests per minute) apart.
    """

    def __init__(self, per_minute: float) -> None:
        self._interval_s = 60 / per_minute
        self._next_start = 0.0
        """Earliest time of the next request, as `time.monotonic`."""
        self._lock = threading.Lock()

    def wait(self) -> float:
        """Wait until the caller may send a request; return the seconds of waiting."""
        # The lock is held only while the start is reserved, so that threads sleep in parallel.
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + self._interval_s
        time.sleep(start - now)
        return start - now


@dataclass(frozen=True)
class HttpEndpoint:
    """An HTTP server that accepts JSON."""

    url: str
    """Address of the requests."""
    timeout_s: float
    """Timeout of a request including its retries, in seconds."""
    key: str | None = field(default=None, repr=False)
    """API key, sent as a bearer token; error messages never contain it."""
    rate_limiter: RateLimiter | None = None
    """Limit of the requests per minute; None means no limit."""

    def post(self, body: bytes) -> bytes:
        """Send JSON and return the body of the response with status 200.

        Failed and lost connections and the statuses 408, 425, 429 and 5xx are retried until the
        timeout. The pause before a retry is at least the response's `Retry-After`, in seconds.
        Waiting for the rate limiter does not count towards the timeout.

        Raises:
            ScorerUnavailable: No attempt succeeded before the timeout.
            ScoringError: The response has another status, which is not retried, or exceeds 16 MiB.
        """
        deadline = time.monotonic() + self.timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.rate_limiter is not None:
                deadline += self.rate_limiter.wait()
            try:
                status, response_body, retry_after_s = self._post(body, deadline)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
                retry_after_s = 0.0
            else:
                if status == http.HTTPStatus.OK:
                    return response_body
                problem = f"status {status}, {self.describe_body(response_body)}"
                if (
                    status < http.HTTPStatus.INTERNAL_SERVER_ERROR
                    and status not in _RETRIED_STATUSES
                ):
                    raise ScoringError(f"{self.url}: got {problem}; expected status 200")

            wait_s = max(pause_s, retry_after_s)
            if time.monotonic() + wait_s >= deadline:
                raise ScorerUnavailable(
                    f"{self.url}: no successful response within {self.timeout_s:g} s, including"
                    f" retries; last attempt: {problem}"
                )
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def describe_body(self, body: bytes) -> str:
        """Return the beginning of a response body for a message, without the API key."""
        shown = body if self.key is None else body.replace(self.key.encode(), b"***")
        more = f" and {len(shown) - _SHOWN_BYTES} more bytes" if len(shown) > _SHOWN_BYTES else ""
        return f"{shown[:_SHOWN_BYTES].decode(errors='replace')!r}{more}"

    def _post(self, body: bytes, deadline: float) -> tuple[int, bytes, float]:
        """Send one request; return its status, response body and `Retry-After` in seconds."""
        address = urlsplit(self.url)
        connection_type = (
            http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        )
        connection = connection_type(
            address.hostname or "", address.port, timeout=max(deadline - time.monotonic(), 0.01)
        )
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        headers = {"Content-Type": "application/json"} | (
            {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        )

        with contextlib.closing(connection):
            connection.connect()
            with _shut_down_at(connection.sock, deadline):
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                # One byte more than allowed shows that the body is too long.
                response_body = response.read(_MAX_RESPONSE_BYTES + 1)

        if len(response_body) > _MAX_RESPONSE_BYTES:
            raise ScoringError(
                f"{self.url}: the response exceeds the limit of {_MAX_RESPONSE_BYTES} bytes"
            )
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out before the response was complete")
        # `length` is the number of bytes that the server announced but did not send.
        if response.length:
            raise http.client.IncompleteRead(response_body, response.length)
        retry_after = response.getheader("Retry-After", "")
        return (
            response.status,
            response_body,
            float(retry_after) if retry_after.isdecimal() else 0.0,
        )


@contextlib.contextmanager
def _shut_down_at(connection: socket.socket, deadline: float) -> Iterator[None]:
    """Shut down the socket at the deadline, if the block has not ended by then.

    The socket's own timeout restarts with every byte, so a server that sends one byte after the
    other would never reach it.
    """

    def shut_down() -> None:
        with contextlib.suppress(OSError):  # the connection has already ended
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(deadline - time.monotonic(), 0), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class RemoteScorer:
    """A scorer that sends batches to an HTTP server.

    A batch is one POST request of a JSON object with the lists `query` (prompt and response
    concatenated), `prompts` and `labels`. A label is the field `label` or `answer` of the request's
    metadata, or empty text if neither exists. The response is a JSON object whose `rewards` is a
    list with one number for each query.
    """

    url: str
    """Address of the server."""
    timeout_s: float
    """Timeout of a batch including its retries, in seconds."""

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """Return one score for each request.

        Raises:
            ScorerUnavailable: The server cannot be reached. See `HttpEndpoint.post`.
            ScoringError: The server refuses the request, or `rewards` is invalid.
        """
        body = {
            "query": [request.prompt + request.response for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [
                request.metadata.get("label", request.metadata.get("answer", ""))
                for request in requests
            ],
        }
        endpoint = HttpEndpoint(self.url, self.timeout_s)
        response_body = endpoint.post(json.dumps(body).encode())
        count = len(requests)
        try:
            rewards: Any = parse_json(response_body)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ScoringError(
                f"{self.url}: got {endpoint.describe_body(response_body)}; expected a JSON object"
                " with `rewards`"
            ) from error
        if (
            not isinstance(rewards, list)
            or len(rewards) != count
            or not all(map(is_finite_number, rewards))
        ):
            raise ScoringError(
                f"{self.url}: got {endpoint.describe_body(response_body)}; `rewards` must be a list"
                f" of {count} finite numbers, one for each query"
            )
        return [float(reward) for reward in rewards]
