"""The trainer's side of a server: connections, requests, and clients of reward and teacher.

`Connection` sends requests to one server through tritonclient, and converts errors to typed
exceptions. `RemoteClient` is the base class of the clients: it sends requests from background
threads with deadlines, retries them, and chooses between replicas. `RewardClient` and
`TeacherClient` request scores and teacher log-probs while the engine generates further samples.
"""

import contextlib
import json
import logging
import math
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import tritonclient.grpc as triton
from numpy.typing import NDArray
from torch import Tensor
from tritonclient.utils import InferenceServerException

from aligner.data.types import ABSTAINED, GuidedTokens, TeacherTopK
from aligner.errors import AlignerError, UnansweredError
from aligner.placement.addresses import GRPC_KEY_HEADER, Access, Endpoint
from aligner.schema.data import TASK
from aligner.servers.wire_protocol import (
    CONTROL,
    REQUEST_NUMBER,
    REWARD_MODEL,
    TEACHER_LOGPROBS,
    EndpointSpec,
    decode_text,
    encode_text,
    grammars_to_texts,
    parse_error,
    with_request_number,
)
from aligner.user_code import report_skipped_prompt

_log = logging.getLogger(__name__)

_TRITON_DATATYPES = {
    np.uint8: "UINT8",
    np.int16: "INT16",
    np.int32: "INT32",
    np.int64: "INT64",
    np.bool_: "BOOL",
    np.float32: "FP32",
    np.bytes_: "BYTES",
}
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Detect within seconds that a server's machine has vanished, however long the deadline of the
    # request is.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect soon after a server has started or restarted.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The timeout of an attempt to connect. A busy machine may need longer than the backoff.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 100),
]
# Parts of gRPC's messages about a connection that broke during a request. These errors have the
# status INTERNAL, which Triton also uses for errors of a model.
_BROKEN_CONNECTION_MESSAGES = (
    "RST_STREAM",
    "GOAWAY",
    "Stream removed",
    "HTTP2",
    "HTTP/2",
    "framing",
    "deserializing response",
    "parsing",
    # Message of the gateway's gRPC if Triton was killed during the call.
    "Internal error from Core",
)
# Parts of Triton's messages about a request that it did not execute, and the error kind for each.
_LOST_REQUEST_KINDS = {
    # A helper process of Triton has exited, or did not run for a second.
    "Stub process": "StubLost",
    "health mutex": "StubLost",
    "Failed to retrieve the response": "StubLost",
    "Failed to process the request": "StubLost",
    # PyTriton could not pass the request to the server process, for example because that process
    # was killed.
    "Model execute error": "NotHandedOver",
    # Triton listens before its endpoints are ready.
    "unknown model": "NotReady",
    "is not ready": "NotReady",
}
# Error types of a server that is about to exit, and may be restarted.
_SERVER_EXIT_KINDS = ("ServerStopping", "ServerFailed")


class RemoteError(AlignerError):
    """Error of a request to a server: the server refused it, failed or did not answer.

    Attributes:
        role: Role of the server, such as `critic`.
        address: Address of the server's gRPC port.
        kind: The server's error type, or a name for the failure of the transport.
        message: The message without role, address and kind.
    """

    def __init__(self, role: str, address: str, kind: str, message: str) -> None:
        super().__init__(f"{role} server at {address}: {kind}: {message}")
        self.role = role
        self.address = address
        self.kind = kind
        self.message = message


class TransportError(RemoteError, UnansweredError):
    """The request got no answer. Another attempt may succeed."""

    def to_final_error(self, reason: str) -> RemoteError:
        """Return the error of the last attempt, with the reason why there is no further attempt."""
        return RemoteError(self.role, self.address, self.kind, f"{self.message}; gave up {reason}")


class RefusedError(RemoteError):
    """The server refused the request, or failed to execute it; a retry would not help."""


class Connection:
    """Sends requests to one server over gRPC. All threads can use it."""

    def __init__(self, role: str, endpoint: Endpoint, access: Access = Access()) -> None:  # noqa: B008  # frozen
        self.role = role
        self.address = f"{endpoint.host}:{endpoint.grpc}"
        self._headers = None if access.key is None else {GRPC_KEY_HEADER: access.key}
        self._tls = {
            "ssl": access.authorities is not None,
            "root_certificates": access.authorities,
            "certificate_chain": access.certificate,
            "private_key": access.certificate_key,
        }
        self._local = threading.local()
        self._clients: list[Any] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def infer(
        self,
        endpoint: EndpointSpec,
        arrays: Mapping[str, NDArray],
        timeout_s: float,
        health_check_s: float | None = None,
    ) -> dict[str, NDArray]:
        """Return the outputs of an endpoint for the given inputs.

        Optional outputs are included only if the server returns them.

        Args:
            endpoint: Specification of the endpoint.
            arrays: Input tensors by name.
            timeout_s: Deadline of the request in seconds.
            health_check_s: If given, a health check is sent whenever the server has not answered
                for this number of seconds. A server answers health checks while it executes
                requests. If a health check is not answered within the same time, the request fails
                with a TransportError of kind `Silent`.

        Raises:
            TransportError: The request got no answer, or the answer to another request.
            RemoteError: The server refused the request or failed, with the server's own message.
        """
        # The server returns the random number, so that an answer to another request is detected.
        number = secrets.randbits(62)
        rows = len(next(iter(arrays.values()))) if endpoint.batching else 1
        numbers = np.full((rows, 1) if endpoint.batching else (1,), number, dtype=np.int64)
        request_arrays = {**arrays, REQUEST_NUMBER: numbers}

        inputs = []
        for spec in with_request_number(endpoint).inputs:
            if spec.name in request_arrays:
                tensor = triton.InferInput(
                    spec.name, request_arrays[spec.name].shape, _TRITON_DATATYPES[spec.dtype]
                )
                tensor.set_data_from_numpy(request_arrays[spec.name])
                inputs.append(tensor)

        try:
            if health_check_s is None:
                response = self._client().infer(
                    endpoint.name, inputs, client_timeout=timeout_s, headers=self._headers
                )
            else:
                response = self._infer_with_health_checks(
                    endpoint.name, inputs, timeout_s, health_check_s
                )
        except InferenceServerException as error:
            raise self._to_remote_error(endpoint, error, timeout_s) from None
        except ValueError as error:  # gRPC raises it for a call on a closed channel
            raise self._make_closed_error() if self._is_closed else error from None

        returned = response.as_numpy(REQUEST_NUMBER)
        if returned is None or not np.array_equal(returned, numbers):
            # Triton has lost the answer, or has delivered the answer to another request.
            raise TransportError(
                self.role, self.address, "Misdelivered", f"the answer of {endpoint.name} was lost"
            )
        answer = {spec.name: response.as_numpy(spec.name) for spec in endpoint.outputs}
        return {name: array for name, array in answer.items() if array is not None}

    def _infer_with_health_checks(
        self, name: str, inputs: list[Any], timeout_s: float, health_check_s: float
    ) -> Any:
        """Send a request, and check the server's health until the answer arrives."""
        response: Future[Any] = Future()

        def set_response(result: Any, error: InferenceServerException | None) -> None:
            response.set_result(result) if error is None else response.set_exception(error)

        call = self._client().async_infer(
            name, inputs, set_response, client_timeout=timeout_s, headers=self._headers
        )
        while not wait([response], health_check_s).done:
            try:
                self.control(health_check_s, "health")
            except RemoteError as error:
                call.cancel()
                raise TransportError(
                    self.role,
                    self.address,
                    "Silent",
                    f"the server did not answer a health check: {error.message}",
                ) from None
        return response.result()

    def control(self, timeout_s: float, op: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a control operation. Raise the same errors as `infer`."""
        request = {"request": encode_text(json.dumps({"op": op, **arguments}))}
        return json.loads(decode_text(self.infer(CONTROL, request, timeout_s)["response"]))

    def check_ready(self, timeout_s: float) -> None:
        """Return if all endpoints are ready.

        Raises:
            TransportError: The endpoints are not ready.
            RemoteError: The server did not answer in time, or rejected the request.
        """
        try:
            ready = self._client().is_model_ready(
                CONTROL.name, headers=self._headers, client_timeout=timeout_s
            )
        except InferenceServerException as error:
            raise self._to_remote_error(CONTROL, error, timeout_s) from None
        if not ready:
            raise TransportError(self.role, self.address, "NotReady", "the server is not ready")

    def make_error(self, kind: str, message: str) -> RemoteError:
        """Return an error that contains the role and the address of this server."""
        return RemoteError(self.role, self.address, kind, message)

    def close(self) -> None:
        """Close the connection. Requests in flight and later requests fail with an error."""
        with self._lock:
            self._is_closed = True
            clients = self._clients
            self._clients = []
        for client in clients:
            client.close()

    def _client(self) -> Any:
        """Return this thread's client: threads must not share tritonclient's objects."""
        if not hasattr(self._local, "client"):
            with self._lock:
                if self._is_closed:
                    raise self._make_closed_error()
                self._local.client = triton.InferenceServerClient(
                    self.address, channel_args=_CHANNEL_OPTIONS, **self._tls
                )
                self._clients.append(self._local.client)
        return self._local.client

    def _make_closed_error(self) -> RemoteError:
        return self.make_error("Closed", "the request was not sent: the connection is closed")

    def _to_remote_error(
        self, endpoint: EndpointSpec, error: InferenceServerException, timeout_s: float
    ) -> RemoteError:
        """Convert an error of tritonclient to the RemoteError that says whether to retry."""
        status = str(error.status() or "")
        message = str(error.message())

        # Errors of the server process.
        kind, server_message = parse_error(message)
        if kind in _SERVER_EXIT_KINDS:
            return TransportError(self.role, self.address, kind, server_message)
        if kind != "Triton":
            return RefusedError(self.role, self.address, kind, server_message)

        # Errors of gRPC, the gateway or Triton.
        if "DEADLINE_EXCEEDED" in status:
            return self.make_error(
                "Timeout", f"no answer to {endpoint.name} within {timeout_s:g} s"
            )
        if "UNAUTHENTICATED" in status or "PERMISSION_DENIED" in status:
            # Not a RefusedError: all other requests would fail for the same reason.
            return self.make_error("AccessError", message)
        for part, kind in _LOST_REQUEST_KINDS.items():
            if part in message:
                return TransportError(self.role, self.address, kind, message)
        is_lost = any(
            name in status for name in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "DATA_LOSS")
        )
        is_broken = "INTERNAL" in status and any(
            part in message for part in _BROKEN_CONNECTION_MESSAGES
        )
        if is_lost or is_broken or not message:  # Triton's own errors always have a message
            return TransportError(
                self.role, self.address, "Unreachable", message or f"{status} without a message"
            )
        return self.make_error("Triton", message)


T = TypeVar("T")


_REQUESTS_PER_REPLICA = 4
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
# Fraction of a request's deadline after which a request to a silent replica is sent to another one.
_SILENCE_FRACTION = 0.1


class RemoteFuture(Future[T]):
    """The future result of a request.

    Callers must call `result`: `RemoteClient.assert_settled` detects futures that were dropped.
    """

    def __init__(self, outstanding: set[Future[Any]]) -> None:
        """Create a future and add it to a set, in which it remains until its result was read.

        Args:
            outstanding: Futures of a client whose results were not read yet.
        """
        super().__init__()
        self._outstanding = outstanding
        outstanding.add(self)

    def result(self, timeout: float | None = None) -> T:
        """Return the result. Raise RemoteError if the request failed.

        The wait is bounded by the request's own deadline.
        """
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self._outstanding.discard(self)

    def fulfil(self, function: Callable[..., T], *arguments: Any) -> None:
        """Call the function, and set its result or its exception as this future's."""
        try:
            self.set_result(function(*arguments))
        except BaseException as error:
            self.set_exception(error)


class RemoteClient:
    """Sends requests to the servers of one role, from background threads.

    A request without an answer is sent again, to the same server or to another replica, with
    exponential backoff, until the deadline of the request. A request that a server refuses is not
    sent again.
    """

    def __init__(
        self,
        role: str,
        endpoints: Sequence[Endpoint],
        access: Access,
        timeout_s: float,
        max_batch_size: int,
    ) -> None:
        """Create a client, which connects to the servers at its first requests.

        Args:
            role: Role of the servers, for messages.
            endpoints: Addresses of the role's replicas.
            access: Access key and TLS certificates.
            timeout_s: Deadline of a request in seconds, including retries.
            max_batch_size: Maximum number of rows in a request.
        """
        self._role = role
        self._replicas = [Connection(role, endpoint, access) for endpoint in endpoints]
        self._in_flight = dict.fromkeys(self._replicas, 0)
        self._failed_at = dict.fromkeys(self._replicas, 0.0)
        self._lock = threading.Lock()  # guards `_in_flight`
        self._timeout_s = timeout_s
        self._max_batch_size = max_batch_size
        self._outstanding: set[Future[Any]] = set()
        self._closing = threading.Event()
        self._request_pool = ThreadPoolExecutor(
            _REQUESTS_PER_REPLICA * len(endpoints), thread_name_prefix=f"{role}-requests"
        )

    def control(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Execute a control operation on the first replica, without retries; return its answer."""
        return self._replicas[0].control(self._timeout_s, op, **arguments)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every replica is ready.

        Raises:
            RemoteError: A replica is not ready within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        for connection in self._replicas:
            while True:
                try:
                    connection.check_ready(max(0.1, deadline - time.monotonic()))
                    break
                except RemoteError as error:
                    if not isinstance(error, TransportError) or time.monotonic() > deadline:
                        raise connection.make_error(
                            "NotReady", f"not ready within {timeout_s:g} s; last error: {error}"
                        ) from None
                time.sleep(0.1)

    def assert_settled(self) -> None:
        """Raise AlignerError if the result of a request was never read."""
        if self._outstanding:
            raise AlignerError(
                f"{len(self._outstanding)} answers of the {self._role} server were never consumed"
            )

    def close(self) -> None:
        """Close the connections, which aborts requests in flight.

        A warning is issued if the result of a request was never read.
        """
        self._closing.set()
        for connection in self._replicas:
            connection.close()
        self._request_pool.shutdown()
        if self._outstanding:
            warnings.warn(
                f"{len(self._outstanding)} answers of the {self._role} server were never consumed",
                ResourceWarning,
                2,
            )

    def _submit(
        self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any
    ) -> RemoteFuture[T]:
        """Call the function in a thread of the pool, and return the future of its result."""
        future: RemoteFuture[T] = RemoteFuture(self._outstanding)
        pool.submit(future.fulfil, function, *arguments)
        return future

    def _infer(self, endpoint: EndpointSpec, arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Return the endpoint's outputs from any replica, with retries."""
        # Half of the time passes before the health check, and the other half during the check.
        # A single replica is not checked, because no other replica could answer instead.
        health_check_s = (
            self._timeout_s * _SILENCE_FRACTION / 2 if len(self._replicas) > 1 else None
        )
        return self._retry(
            lambda connection, remaining_s: connection.infer(
                endpoint, arrays, remaining_s, health_check_s
            )
        )

    def _retry(self, attempt: Callable[[Connection, float], T]) -> T:
        """Return the result of `attempt`, repeated after each TransportError until the deadline.

        Args:
            attempt: Function of a connection and of the remaining time in seconds.
        """
        deadline = time.monotonic() + self._timeout_s
        pause = _MIN_BACKOFF_S
        while True:
            if self._closing.is_set():
                raise self._replicas[0].make_error(
                    "Closed", "the request was not sent: the client is closing"
                )
            try:
                with self._select_replica() as connection:
                    return attempt(connection, max(0.001, deadline - time.monotonic()))
            except TransportError as error:
                if error.kind == "StubLost":
                    _log.warning(
                        "%s; the server restarts Triton, and the request is sent again", error
                    )
                if time.monotonic() + pause > deadline:
                    raise error.to_final_error(f"after {self._timeout_s:g} s") from None
                if self._closing.wait(pause):
                    raise error.to_final_error("because the client is closing") from None
                pause = min(2 * pause, _MAX_BACKOFF_S)

    @contextlib.contextmanager
    def _select_replica(self) -> Iterator[Connection]:
        """Yield the replica with the fewest requests in flight.

        A replica that failed within the last second is selected only if all other replicas failed,
        too. After a failed health check, a replica is avoided longer.
        """
        with self._lock:
            # All failures that are older than a second count as equal.
            recent_time = time.monotonic() - _MAX_BACKOFF_S
            failure_times = {
                connection: max(recent_time, self._failed_at[connection])
                for connection in self._replicas
            }
            selected = min(
                self._replicas,
                key=lambda connection: (failure_times[connection], self._in_flight[connection]),
            )
            self._in_flight[selected] += 1

        try:
            yield selected
        except TransportError as error:
            # A silent server gets a later time, and is avoided until then.
            self._failed_at[selected] = time.monotonic() + (
                self._timeout_s * _SILENCE_FRACTION if error.kind == "Silent" else 0
            )
            raise
        finally:
            with self._lock:
                self._in_flight[selected] -= 1

    def _split_rows(
        self,
        tokens: Tensor,
        lengths: Tensor,
        sequence_number: int,
        prompt_lengths: Tensor | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[tuple[slice, dict[str, NDArray]]]:
        """Yield requests of at most `max_batch_size` rows, each with the slice of its rows.

        The padding of each request is cut to the longest sequence of the request.

        Args:
            tokens: int64 [B, S], padded on the right.
            lengths: int64 [B].
            sequence_number: Number of the update that the server must have applied. The server
                never batches a request with a number with other requests.
            prompt_lengths: int64 [B].
            metadata: Fields of each row's prompt record, which are sent as JSON.
        """
        for start in range(0, len(lengths), self._max_batch_size):
            rows = slice(start, start + self._max_batch_size)
            arrays = {
                "tokens": tokens[rows, : int(lengths[rows].max())].contiguous().numpy(),
                "sequence_lengths": lengths[rows, None].contiguous().numpy(),
                "sequence_number": np.full((len(lengths[rows]), 1), sequence_number),
            }
            if prompt_lengths is not None:
                arrays["prompt_lengths"] = prompt_lengths[rows, None].contiguous().numpy()
            if metadata is not None and any(metadata):
                arrays["metadata"] = np.array(
                    [[json.dumps(fields).encode()] for fields in metadata[rows]], dtype=object
                )
            yield rows, arrays


def resize_width(rows: Tensor, width: int) -> Tensor:
    """Return rows [B, S, ...] as [B, width, ...], truncated or zero-padded on the right."""
    # `F.pad` lists dimensions from the last to the first; a negative padding truncates.
    return F.pad(rows, (*[0, 0] * (rows.ndim - 2), 0, width - rows.shape[1]))


def parse_scores(answer: Mapping[str, NDArray]) -> Tensor:
    """Return the scores of an answer, float32 [B].

    An abstention is ABSTAINED; on the wire it is NaN.

    With several sources or step rewards, the shape is [B, 1+P+S-1]: the score, the scores of the P
    sources, and the rewards of the tokens that end steps.
    """
    names = ("rewards", "reward_parts", "step_rewards")
    columns = [torch.from_numpy(answer[name].copy()) for name in names if name in answer]
    columns[0][columns[0].isnan()] = ABSTAINED
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0][:, 0]


def join_scores(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the scores of several requests, in the form that `parse_scores` returns.

    Scores of shape [B] are repeated in all columns if other requests have more columns. They are
    NaN in this case, because all rows of such a request failed.
    """
    width = max(part.shape[1] if part.ndim > 1 else 0 for part in parts)
    if width == 0:
        return torch.cat(list(parts))
    padded = [
        (
            part[:, None].expand(-1, width)
            if part.ndim == 1
            else F.pad(part, (0, width - part.shape[1]), value=math.nan)
        )
        for part in parts
    ]
    return torch.cat(padded)


class UnscoredError(RefusedError):
    """None of the rows of a request could be scored.

    Attributes:
        rows: Number of rows of the request.
    """

    def __init__(self, cause: RefusedError, rows: int) -> None:
        super().__init__(cause.role, cause.address, cause.kind, cause.message)
        self.rows = rows


def _report_skipped(refusal: RefusedError) -> None:
    """Report why a prompt has no score, in the log and for the terminal."""
    _log.warning("samples without a score are skipped: %s", refusal)
    report_skipped_prompt(refusal.message)


class RewardClient(RemoteClient):
    """Client of the reward servers."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Access,
        timeout_s: float,
        max_batch_size: int = 256,
    ) -> None:
        super().__init__("reward", endpoints, access, timeout_s, max_batch_size)

    def score(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        retry_batch_rows: int | None = None,
    ) -> RemoteFuture[Tensor]:
        """Request the scores of samples, in the form that `parse_scores` returns.

        Args:
            tokens: int64 [B, S], padded on the right.
            lengths: int64 [B].
            prompt_lengths: int64 [B].
            metadata: Fields of each row's prompt record; JSON values.
            retry_batch_rows: If given, a refused request is repeated once, split into requests of
                this number of rows. The scores of rows that are refused again are NaN.

        Returns:
            The future of the scores. Its error is UnscoredError if all rows were refused. A scoring
            function that is deadlocked is never called again, and its error is raised.
        """

        def score(rows: slice) -> Tensor:
            """Return the scores of some rows."""
            rows_metadata = None if metadata is None else metadata[rows]
            # The server does not batch a request with a number with other requests, so that scores
            # do not depend on the requests of other clients.
            requests = self._split_rows(
                tokens[rows], lengths[rows], 0, prompt_lengths[rows], rows_metadata
            )
            answers = [self._infer(REWARD_MODEL, arrays) for _, arrays in requests]
            return join_scores([parse_scores(answer) for answer in answers])

        def score_all() -> Tensor:
            """Return the scores of all rows, with a retry in smaller requests after a refusal."""
            try:
                return score(slice(None))
            except RefusedError as refusal:
                if retry_batch_rows is None or refusal.kind == "ScorerDeadlocked":
                    raise
                if refusal.kind == "ScorerTimeout" and len(lengths) <= retry_batch_rows:
                    # A retry would call the function with the same rows, and time out again.
                    _report_skipped(refusal)
                    raise UnscoredError(refusal, len(lengths)) from None
                parts = []
                for start in range(0, len(lengths), retry_batch_rows):
                    rows = slice(start, start + retry_batch_rows)
                    try:
                        parts.append(score(rows))
                    except RefusedError as error:
                        if error.kind == "ScorerDeadlocked":
                            raise
                        _report_skipped(error)
                        parts.append(torch.full(lengths[rows].shape, math.nan))
                    except RemoteError as error:
                        if refusal.kind != "ScorerTimeout":
                            raise
                        # The request waited for calls of a function that hangs.
                        raise RemoteError(
                            error.role,
                            error.address,
                            error.kind,
                            f"{error.message}, after a call of the scoring function timed out:"
                            f" {refusal.message}",
                        ) from None
                scores = join_scores(parts)
                if scores.isnan().all():
                    raise UnscoredError(refusal, len(scores)) from None
                return scores

        return self._submit(self._request_pool, score_all)


class TeacherClient(RemoteClient):
    """Client of the teacher servers."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Access,
        timeout_s: float,
        max_batch_size: int,
        temperature: float,
        top_k: int = 0,
    ) -> None:
        """Store the settings of the requests.

        Args:
            endpoints: Addresses of the teacher's replicas.
            access: Access key and TLS certificates.
            timeout_s: Deadline of a request in seconds, including retries.
            max_batch_size: Maximum number of rows in a request.
            temperature: Temperature of the log-probs; the policy's sampling temperature.
            top_k: Number of most probable tokens per position to request; 0 requests none.
        """
        super().__init__("teacher", endpoints, access, timeout_s, max_batch_size)
        self._temperature = temperature
        self._top_k = top_k

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]],
        guided_tokens: GuidedTokens | None = None,
    ) -> RemoteFuture[Tensor]:
        """Request the teacher's log-probs of the tokens of samples.

        Args:
            tokens: int64 [B, S], padded on the right.
            lengths: int64 [B].
            prompt_lengths: int64 [B].
            metadata: Fields of each row's prompt record. Only the task is sent.
            guided_tokens: Grammars of the tokens, [B, S-1]. The teacher's probabilities are
                normalized over the tokens that they allow, as the policy's are.

        Returns:
            The future of the log-probs, float32 [B, S-1]. Entry t belongs to token t+1. Entries of
            prompt tokens, and entries after the end of a sequence, are 0. With `top_k`, the result
            is [B, S-1, 2+2k], packed by `TeacherTopK`. k is smaller than `top_k` if the policy's
            vocabulary is smaller.
        """
        tasks = [{TASK: fields[TASK]} if TASK in fields else {} for fields in metadata]

        def logprobs() -> Tensor:
            """Return the log-probs of all rows."""
            parts = []
            # The server does not batch a request with a number with other requests, so that
            # log-probs do not depend on the requests of other clients.
            for rows, arrays in self._split_rows(tokens, lengths, 0, prompt_lengths, tasks):
                if guided_tokens is not None:
                    texts = grammars_to_texts(guided_tokens.select(rows))
                    arrays["grammars"] = np.array([[text.encode()] for text in texts], dtype=object)
                arrays["temperature"] = np.full(
                    (len(arrays["tokens"]), 1), self._temperature, dtype=np.float32
                )
                if self._top_k:
                    arrays["top_k"] = np.full((len(arrays["tokens"]), 1), self._top_k)
                parts.append(_parse_teacher_answer(self._infer(TEACHER_LOGPROBS, arrays)))
            return torch.cat([resize_width(part, tokens.shape[1] - 1) for part in parts])

        return self._submit(self._request_pool, logprobs)


def _parse_teacher_answer(answer: Mapping[str, NDArray]) -> Tensor:
    """Return the log-probs of an answer, packed with the most probable tokens if it has them."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in answer.items()}
    if "top_ids" not in tensors:
        return tensors["logprobs"]
    outcomes = torch.cat([tensors["top_logprobs"], tensors["rest_logprobs"][..., None]], -1)
    return TeacherTopK(tensors["logprobs"], tensors["top_ids"], outcomes).pack()
