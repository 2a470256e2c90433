"""The trainer's side of a server: futures, deadlines, retries, and answers that cannot be
forgotten."""

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

from aligner.data.types import ABSTAINED, TaughtTokens
from aligner.errors import AlignerError, UnansweredError
from aligner.placement.addresses import GRPC_KEY_HEADER, Access, Endpoint
from aligner.schema.reasoning_tasks import TASK
from aligner.servers.wire_protocol import (
    CONTROL,
    REQUEST_NUMBER,
    REWARD_MODEL,
    TEACHER_LOGPROBS,
    EndpointSpec,
    array_text,
    text_array,
    told_error,
    with_request_number,
)

_DATATYPES = {
    np.uint8: "UINT8",
    np.int16: "INT16",
    np.int32: "INT32",
    np.int64: "INT64",
    np.bool_: "BOOL",
    np.float32: "FP32",
    np.bytes_: "BYTES",
}
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A peer that has vanished without a word is noticed within seconds, however long a request may
    # take.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that starts, or is started again, is found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
]
# gRPC's words for a connection that broke under a request, where its status is the one that Triton
# uses for model errors.
_BROKEN = (
    "RST_STREAM",
    "GOAWAY",
    "Stream removed",
    "HTTP2",
    "HTTP/2",
    "framing",
    "deserializing response",
    "parsing",
    # The gateway's gRPC says this of a call if Triton was killed.
    "Internal error from Core",
)
_LOST = {
    # a helper process of Triton has ended, or did not run for a second
    "Stub process": "StubLost",
    "health mutex": "StubLost",
    "Failed to retrieve the response": "StubLost",
    "Failed to process the request": "StubLost",
    # PyTriton's words when a request did not get to our functions: as when their process was
    # killed.
    "Model execute error": "NotHandedOver",
    # Triton is up before the endpoints are.
    "unknown model": "NotReady",
    "is not ready": "NotReady",
}
"""Triton's words for a request that it did not carry out, and what we call that."""
_SERVER_ENDS = ("ServerStopping", "ServerFailed")
"""What a server says that is about to be gone, and perhaps to come again."""


class RemoteError(AlignerError):
    """A server's refusal or failure, or its silence. `kind` is the server's error type, or says who
    failed."""

    def __init__(self, role: str, address: str, kind: str, message: str) -> None:
        super().__init__(f"{role} server at {address}: {kind}: {message}")
        self.role, self.address = role, address
        self.kind, self.message = kind, message


class TransportError(RemoteError, UnansweredError):
    """No answer came, and none will on this attempt; another one may fare better."""

    def final(self, reason: str) -> RemoteError:
        """The error of the last attempt, and why there is none after it."""
        return RemoteError(self.role, self.address, self.kind, f"{self.message}; gave up {reason}")


class RefusedError(RemoteError):
    """The server's own word: it will not do what was asked, or could not. Asked again, it would say
    the same."""


class Connection:
    """Requests to one server over gRPC, from any thread."""

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
        look_s: float | None = None,
    ) -> dict[str, NDArray]:
        """The endpoint's outputs for these inputs, of optional ones those that it gives.

        Raises TransportError, or RemoteError with the server's own words.

        With `look_s` a server that takes longer is asked for its health, which it tells also while
        it is at work, and is left with a TransportError where it does not within as long again.
        """
        number = secrets.randbits(62)
        rows = len(next(iter(arrays.values()))) if endpoint.batching else 1
        numbers = np.full((rows, 1) if endpoint.batching else (1,), number, dtype=np.int64)
        sent = {**arrays, REQUEST_NUMBER: numbers}
        inputs = []
        for spec in with_request_number(endpoint).inputs:
            if spec.name in sent:
                tensor = triton.InferInput(spec.name, sent[spec.name].shape, _DATATYPES[spec.dtype])
                tensor.set_data_from_numpy(sent[spec.name])
                inputs.append(tensor)
        try:
            if look_s is None:
                response = self._client().infer(
                    endpoint.name, inputs, client_timeout=timeout_s, headers=self._headers
                )
            else:
                response = self._watched(endpoint.name, inputs, timeout_s, look_s)
        except InferenceServerException as error:
            raise self._told(endpoint, error, timeout_s) from None
        except ValueError as error:  # gRPC's for a call on a channel that was closed before it
            raise self._hung_up() if self._is_closed else error from None
        returned = response.as_numpy(REQUEST_NUMBER)
        if returned is None or not np.array_equal(returned, numbers):
            # Triton has lost the answer, or has delivered that of another request.
            raise TransportError(
                self.role, self.address, "Misdelivered", f"the answer of {endpoint.name} was lost"
            )
        answer = {spec.name: response.as_numpy(spec.name) for spec in endpoint.outputs}
        return {name: array for name, array in answer.items() if array is not None}

    def _watched(self, name: str, inputs: list[Any], timeout_s: float, look_s: float) -> Any:
        answered: Future[Any] = Future()

        def answer(result: Any, error: InferenceServerException | None) -> None:
            answered.set_result(result) if error is None else answered.set_exception(error)

        call = self._client().async_infer(
            name, inputs, answer, client_timeout=timeout_s, headers=self._headers
        )
        while not wait([answered], look_s).done:
            try:
                self.control(look_s, "health")
            except RemoteError as error:
                call.cancel()
                raise TransportError(
                    self.role,
                    self.address,
                    "Silent",
                    f"the server did not answer a health check: {error.message}",
                ) from None
        return answered.result()

    def control(self, timeout_s: float, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a control operation. Raises as `infer`."""
        request = {"request": text_array(json.dumps({"op": op, **arguments}))}
        return json.loads(array_text(self.infer(CONTROL, request, timeout_s)["response"]))

    def check_ready(self, timeout_s: float) -> None:
        """Return when all endpoints are up. Raises TransportError when they are not, or not heard
        of in time."""
        try:
            ready = self._client().is_model_ready(
                CONTROL.name, headers=self._headers, client_timeout=timeout_s
            )
        except InferenceServerException as error:
            raise self._told(CONTROL, error, timeout_s) from None
        if not ready:
            raise TransportError(self.role, self.address, "NotReady", "the server is not ready")

    def error(self, kind: str, message: str) -> RemoteError:
        """An error that names this server."""
        return RemoteError(self.role, self.address, kind, message)

    def close(self) -> None:
        """Hang up: requests under way end with an error, as further ones do."""
        with self._lock:
            self._is_closed = True
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def _client(self) -> Any:
        """This thread's client: tritonclient's objects are not to be shared."""
        if not hasattr(self._local, "client"):
            with self._lock:
                if self._is_closed:
                    raise self._hung_up()
                self._local.client = triton.InferenceServerClient(
                    self.address, channel_args=_CHANNEL, **self._tls
                )
                self._clients.append(self._local.client)
        return self._local.client

    def _hung_up(self) -> RemoteError:
        return self.error("Closed", "the request was not sent: the connection is closed")

    def _told(
        self, endpoint: EndpointSpec, error: InferenceServerException, timeout_s: float
    ) -> RemoteError:
        status, message = str(error.status() or ""), str(error.message())
        kind, told = told_error(message)
        if kind in _SERVER_ENDS:
            return TransportError(self.role, self.address, kind, told)
        if kind != "Triton":
            return RefusedError(self.role, self.address, kind, told)
        if "DEADLINE_EXCEEDED" in status:
            return self.error("Timeout", f"no answer to {endpoint.name} within {timeout_s:g} s")
        if "UNAUTHENTICATED" in status or "PERMISSION_DENIED" in status:
            # no other request would fare better: it is not about this one
            return self.error("AccessError", message)
        for words, kind in _LOST.items():
            if words in message:
                return TransportError(self.role, self.address, kind, message)
        lost = any(name in status for name in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "DATA_LOSS"))
        broken = "INTERNAL" in status and any(words in message for words in _BROKEN)
        if lost or broken or not message:  # Triton never refuses without a word
            return TransportError(
                self.role, self.address, "Unreachable", message or f"{status} without a message"
            )
        return self.error("Triton", message)


T = TypeVar("T")

_log = logging.getLogger(__name__)

_PARALLEL_REQUESTS = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_SILENT_PART = 0.1
"""Of a request's deadline: so soon another replica is asked in place of one that shows no life."""


class RemoteFuture(Future[T]):
    """An answer to come. Whoever asked must call `result`: `assert_settled` finds the futures that
    were dropped."""

    def __init__(self, outstanding: set[Future[Any]]) -> None:
        """It is `outstanding` until somebody has seen its answer."""
        super().__init__()
        self._outstanding = outstanding
        outstanding.add(self)

    def result(self, timeout: float | None = None) -> T:
        """The answer. Raises RemoteError; the request's own deadline bounds the wait."""
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self._outstanding.discard(self)

    def fulfil(self, function: Callable[..., T], *arguments: Any) -> None:
        """Become the function's result or error."""
        try:
            self.set_result(function(*arguments))
        except BaseException as error:
            self.set_exception(error)


class RemoteClient:
    """Requests to the servers of one role, sent from background threads.

    What the transport loses is sent again, to the same server or to another replica, with growing
    pauses until the request's deadline; what a server refuses is not.
    """

    def __init__(
        self,
        role: str,
        endpoints: Sequence[Endpoint],
        access: Access,
        timeout_s: float,
        max_batch_size: int,
    ) -> None:
        """`timeout_s` is a request's deadline, retries included."""
        self._role = role
        self._replicas = [Connection(role, endpoint, access) for endpoint in endpoints]
        self._busy = dict.fromkeys(self._replicas, 0)
        self._failed_at = dict.fromkeys(self._replicas, 0.0)
        self._lock = threading.Lock()  # of who is busy
        self._timeout_s = timeout_s
        self._max_batch_size = max_batch_size
        self._outstanding: set[Future[Any]] = set()
        self._closing = threading.Event()
        self._parallel = ThreadPoolExecutor(
            _PARALLEL_REQUESTS * len(endpoints), thread_name_prefix=f"{role}-requests"
        )

    def control(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Run a control operation on the first replica and wait for its answer. It is not sent
        twice."""
        return self._replicas[0].control(self._timeout_s, op, **arguments)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every replica answers. Raises RemoteError when one does not within
        `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for connection in self._replicas:
            while True:
                try:
                    connection.check_ready(max(0.1, deadline - time.monotonic()))
                    break
                except RemoteError as error:
                    if not isinstance(error, TransportError) or time.monotonic() > deadline:
                        raise connection.error(
                            "NotReady", f"not ready within {timeout_s:g} s; last error: {error}"
                        ) from None
                time.sleep(0.1)

    def assert_settled(self) -> None:
        """Raise AlignerError if an answer was asked for and never looked at."""
        if self._outstanding:
            raise AlignerError(
                f"{len(self._outstanding)} answers of the {self._role} server were never consumed"
            )

    def close(self) -> None:
        """Hang up, which gives up what is under way. Warns of answers that were never looked at."""
        self._closing.set()
        for connection in self._replicas:
            connection.close()
        self._parallel.shutdown()
        if self._outstanding:
            warnings.warn(
                f"{len(self._outstanding)} answers of the {self._role} server were never consumed",
                ResourceWarning,
                2,
            )

    def _future(
        self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any
    ) -> RemoteFuture[T]:
        future: RemoteFuture[T] = RemoteFuture(self._outstanding)
        pool.submit(future.fulfil, function, *arguments)
        return future

    def _infer(self, endpoint: EndpointSpec, arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
        # Half of that for the answer, half for a word of its health.
        look_s = self._timeout_s * _SILENT_PART / 2 if len(self._replicas) > 1 else None
        return self._retried(
            lambda connection, left: connection.infer(endpoint, arrays, left, look_s)
        )

    def _retried(self, attempt: Callable[[Connection, float], T]) -> T:
        """`attempt`'s result, given a connection and the seconds left; repeated after a
        TransportError."""
        deadline = time.monotonic() + self._timeout_s
        pause = _FIRST_PAUSE_S
        while True:
            if self._closing.is_set():
                raise self._replicas[0].error(
                    "Closed", "the request was not sent: the client is closing"
                )
            try:
                with self._least_busy() as connection:
                    return attempt(connection, max(0.001, deadline - time.monotonic()))
            except TransportError as error:
                if error.kind == "StubLost":
                    _log.warning(
                        "%s; the server restarts Triton, and the request is sent again", error
                    )
                if time.monotonic() + pause > deadline:
                    raise error.final(f"after {self._timeout_s:g} s") from None
                if self._closing.wait(pause):
                    raise error.final("because the client is closing") from None
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _least_busy(self) -> Iterator[Connection]:
        """The replica with the fewest requests under way; one that has just failed only when the
        others have, too."""
        with self._lock:
            recently = time.monotonic() - _LONGEST_PAUSE_S
            failed = {
                connection: max(recently, self._failed_at[connection])
                for connection in self._replicas
            }
            chosen = min(
                self._replicas, key=lambda connection: (failed[connection], self._busy[connection])
            )
            self._busy[chosen] += 1
        try:
            yield chosen
        except TransportError as error:
            self._failed_at[chosen] = time.monotonic() + (
                self._timeout_s * _SILENT_PART if error.kind == "Silent" else 0
            )
            raise
        finally:
            with self._lock:
                self._busy[chosen] -= 1

    def _row_requests(
        self,
        tokens: Tensor,
        lengths: Tensor,
        sequence_number: int,
        prompt_lengths: Tensor | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[tuple[slice, dict[str, NDArray]]]:
        """Requests of at most `max_batch_size` rows each, and which ones; their padding is cut to
        what they need."""
        for first in range(0, len(lengths), self._max_batch_size):
            rows = slice(first, first + self._max_batch_size)
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


def wide(rows: Tensor, width: int) -> Tensor:
    """Rows [B, S, ...] as [B, width, ...], cut or zero-padded on the right."""
    return F.pad(rows, (*[0, 0] * (rows.ndim - 2), 0, width - rows.shape[1]))


def scores_in(answer: Mapping[str, NDArray]) -> Tensor:
    """Return the scores float32 [B] of an answer, ABSTAINED for NaN, which is an abstention on the
    wire.

    With several sources, or step rewards, they are [B, 1+P+S-1]: the score, the scores of the P
    sources, and the rewards of tokens that end steps.
    """
    names = ("rewards", "reward_parts", "step_rewards")
    columns = [torch.from_numpy(answer[name].copy()) for name in names if name in answer]
    columns[0][columns[0].isnan()] = ABSTAINED
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0][:, 0]


def joined_scores(parts: Sequence[Tensor]) -> Tensor:
    """Those of one request after another, as `scores_in` has them; of [B] that are not a number
    every part is none."""
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
    """Not one of a request's rows could be scored."""

    def __init__(self, refused: RefusedError, rows: int) -> None:
        super().__init__(refused.role, refused.address, refused.kind, refused.message)
        self.rows = rows


class RewardClient(RemoteClient):
    """The reward servers."""

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
        rows_apart: int | None = None,
    ) -> RemoteFuture[Tensor]:
        """Scores, as `scores_in` has them, of right-padded tokens int64 [B, S], lengths and prompt
        lengths int64 [B].

        `metadata` is what the data says about each row's prompt; JSON. With `rows_apart`, a
        refused request is repeated once, in requests of so many rows; the scores of rows that are
        refused again are NaN. If all are refused, the error is UnscoredError. A scoring function
        that is deadlocked is not asked again, and the error is raised.
        """

        def score(rows: slice) -> Tensor:
            known = None if metadata is None else metadata[rows]
            # Numbered requests are computed alone, so that scores do not depend on who else asks.
            requests = self._row_requests(
                tokens[rows], lengths[rows], 0, prompt_lengths[rows], known
            )
            answers = [self._infer(REWARD_MODEL, arrays) for _, arrays in requests]
            return joined_scores([scores_in(answer) for answer in answers])

        def score_all() -> Tensor:
            try:
                return score(slice(None))
            except RefusedError as refused:
                if rows_apart is None or refused.kind == "ScorerDeadlocked":
                    raise
                if refused.kind == "ScorerTimeout" and len(lengths) <= rows_apart:
                    # A retry would be the same call of the function, and time out again.
                    _log.warning("samples without a score are skipped: %s", refused)
                    raise UnscoredError(refused, len(lengths)) from None
                parts = []
                for first in range(0, len(lengths), rows_apart):
                    rows = slice(first, first + rows_apart)
                    try:
                        parts.append(score(rows))
                    except RefusedError as error:
                        if error.kind == "ScorerDeadlocked":
                            raise
                        _log.warning("samples without a score are skipped: %s", error)
                        parts.append(torch.full(lengths[rows].shape, math.nan))
                    except RemoteError as error:
                        if refused.kind != "ScorerTimeout":
                            raise
                        # The request waited behind other calls of a function that hangs.
                        raise RemoteError(
                            error.role,
                            error.address,
                            error.kind,
                            f"{error.message}, after a call of the scoring function timed out:"
                            f" {refused.message}",
                        ) from None
                scores = joined_scores(parts)
                if scores.isnan().all():
                    raise UnscoredError(refused, len(scores)) from None
                return scores

        return self._future(self._parallel, score_all)


class TeacherClient(RemoteClient):
    """The teacher's servers."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Access,
        timeout_s: float,
        max_batch_size: int,
        temperature: float,
        top_k: int = 0,
    ) -> None:
        """Log-probs are at `temperature`, the policy's own when it samples; with `top_k` so many
        tokens are asked for too."""
        super().__init__("teacher", endpoints, access, timeout_s, max_batch_size)
        self._temperature, self._top_k = temperature, top_k

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]],
    ) -> RemoteFuture[Tensor]:
        """float32 [B, S-1] of right-padded tokens int64 [B, S], lengths and prompt lengths int64
        [B]; entry t is of token t+1.

        With `top_k` [B, S-1, 2+2k], as `TaughtTokens` packs it, of k tokens, fewer where the policy
        knows no more. Zeros in the prompts and past a sequence's end. `metadata` is what the data
        says about each row's prompt, of which its task is told.
        """
        tasks = [{TASK: fields[TASK]} if TASK in fields else {} for fields in metadata]

        def logprobs() -> Tensor:
            parts = []
            # Numbered requests are computed alone, so that log-probs do not depend on who else
            # asks.
            for _, arrays in self._row_requests(tokens, lengths, 0, prompt_lengths, tasks):
                arrays["temperature"] = np.full(
                    (len(arrays["tokens"]), 1), self._temperature, dtype=np.float32
                )
                if self._top_k:
                    arrays["top_k"] = np.full((len(arrays["tokens"]), 1), self._top_k)
                parts.append(_told(self._infer(TEACHER_LOGPROBS, arrays)))
            return torch.cat([wide(part, tokens.shape[1] - 1) for part in parts])

        return self._future(self._parallel, logprobs)


def _told(answer: Mapping[str, NDArray]) -> Tensor:
    found = {name: torch.from_numpy(array.copy()) for name, array in answer.items()}
    if "top_ids" not in found:
        return found["logprobs"]
    outcomes = torch.cat([found["top_logprobs"], found["rest_logprobs"][..., None]], -1)
    return TaughtTokens(found["logprobs"], found["top_ids"], outcomes).packed()
