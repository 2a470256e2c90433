"""One server as a client sees it: requests out, answers or typed errors back. It needs only
tritonclient."""

import json
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from aligner.errors import AlignerError, UnansweredError
from aligner.placement.addresses import GRPC_KEY_HEADER, Access, Endpoint
from aligner.servers.wire_protocol import (
    CONTROL,
    REQUEST_NUMBER,
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
