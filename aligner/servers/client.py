"""The trainer's side of the critic and reward servers; it needs only tritonclient."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import tritonclient.grpc as triton
from numpy.typing import NDArray
from torch import Tensor
from tritonclient.utils import InferenceServerException

from aligner.config.endpoints import Endpoint
from aligner.errors import AlignerError
from aligner.servers.protocol import (
    CONTROL,
    CRITIC_INFER,
    CRITIC_TRAIN,
    REWARD_MODEL,
    EndpointSpec,
    array_text,
    text_array,
    told_error,
)

T = TypeVar("T")

_DATATYPES = {np.int64: "INT64", np.float32: "FP32", np.bytes_: "BYTES"}
_PARALLEL_REQUESTS = 4


class RemoteError(AlignerError):
    """A server's refusal or failure, or its silence. `kind` is the server's error type, or Triton's status."""

    def __init__(self, role: str, address: str, kind: str, message: str) -> None:
        super().__init__(f"{role} server at {address}: {kind}: {message}")
        self.role = role
        self.kind = kind


class RemoteFuture(Future[T]):
    """An answer to come. Whoever asked must call `result`: `assert_settled` finds the futures that were dropped."""

    def __init__(self, settle: Callable[[Future[T]], None]) -> None:
        super().__init__()
        self._settle = settle

    def result(self, timeout: float | None = None) -> T:
        """The answer. Raises RemoteError; the request's own deadline bounds the wait."""
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self._settle(self)

    def fulfil(self, function: Callable[..., T], *arguments: Any) -> None:
        """Become the function's result or error."""
        try:
            self.set_result(function(*arguments))
        except BaseException as error:
            self.set_exception(error)


class RemoteClient:
    """Requests to one server, sent from background threads."""

    def __init__(self, role: str, endpoint: Endpoint, timeout_s: float, max_batch_size: int) -> None:
        self._role = role
        self._address = f"{endpoint.host}:{endpoint.grpc}"
        self._timeout_s = timeout_s
        self._max_batch_size = max_batch_size
        self._local = threading.local()
        self._clients: list[Any] = []
        self._outstanding: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._parallel = ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix=f"{role}-requests")

    def control(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Run a control operation and wait for its answer."""
        request = text_array(json.dumps({"op": op, **arguments}))
        return json.loads(array_text(self._infer(CONTROL, {"request": request})["response"]))

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server answers. Raises RemoteError when it does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._client().is_model_ready(CONTROL.name, client_timeout=max(0.1, deadline - time.monotonic())):
                    return
                last = "not ready"
            except InferenceServerException as error:
                last = str(error.message())
            if time.monotonic() > deadline:
                raise RemoteError(self._role, self._address, "NotReady", f"not ready within {timeout_s:g} s; last: {last}")
            time.sleep(0.1)

    def assert_settled(self) -> None:
        """Raise AlignerError if an answer was asked for and never looked at."""
        with self._lock:
            count = len(self._outstanding)
        if count:
            raise AlignerError(f"{count} answers of the {self._role} server were never consumed")

    def close(self) -> None:
        """Wait for the requests on their way, then hang up. Warns of answers that were never looked at."""
        self._parallel.shutdown()
        for client in self._clients:
            client.close()
        if self._outstanding:
            warnings.warn(
                f"{len(self._outstanding)} answers of the {self._role} server were never consumed", ResourceWarning, 2
            )

    def _future(self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> RemoteFuture[T]:
        future: RemoteFuture[T] = RemoteFuture(self._forget)
        with self._lock:
            self._outstanding.add(future)
        pool.submit(future.fulfil, function, *arguments)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._outstanding.discard(future)

    def _client(self) -> Any:
        """This thread's connection: tritonclient's objects are not to be shared."""
        if not hasattr(self._local, "client"):
            self._local.client = triton.InferenceServerClient(self._address)
            with self._lock:
                self._clients.append(self._local.client)
        return self._local.client

    def _infer(self, endpoint: EndpointSpec, arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
        inputs = []
        for spec in endpoint.inputs:
            if spec.name in arrays:
                tensor = triton.InferInput(spec.name, arrays[spec.name].shape, _DATATYPES[spec.dtype])
                tensor.set_data_from_numpy(arrays[spec.name])
                inputs.append(tensor)
        try:
            response = self._client().infer(endpoint.name, inputs, client_timeout=self._timeout_s)
        except InferenceServerException as error:
            status = str(error.status() or "")
            if "DEADLINE_EXCEEDED" in status:
                raise self._error("Timeout", f"no answer to {endpoint.name} within {self._timeout_s:g} s") from None
            if "UNAVAILABLE" in status:
                raise self._error("Unreachable", str(error.message())) from None
            raise self._error(*told_error(str(error.message()))) from None
        return {spec.name: response.as_numpy(spec.name) for spec in endpoint.outputs}

    def _error(self, kind: str, message: str) -> RemoteError:
        return RemoteError(self._role, self._address, kind, message)

    def _pieces(self, lengths: Tensor) -> list[slice]:
        return [slice(first, first + self._max_batch_size) for first in range(0, lengths.shape[0], self._max_batch_size)]


class CriticClient(RemoteClient):
    """The critic: values, and updates that are applied exactly once, in the order of the calls."""

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float,
        run_id: str,
        first_sequence_number: int = 0,
        max_batch_size: int = 256,
    ) -> None:
        """`first_sequence_number` is that of the first `train`: one more than the server's last (`control("version")`)."""
        super().__init__("critic", endpoint, timeout_s, max_batch_size)
        self._run_id = run_id
        self._next_number = first_sequence_number
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="critic-updates")

    def values(self, tokens: Tensor, lengths: Tensor) -> RemoteFuture[Tensor]:
        """float32 [B, S] of right-padded tokens int64 [B, S] and lengths int64 [B]; 0 beyond the longest sequence."""
        return self._future(self._parallel, self._values, tokens, lengths)

    def _values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        values = torch.zeros(tokens.shape)
        for rows in self._pieces(lengths):
            arrays = _sequences(tokens[rows], lengths[rows])
            part = self._infer(CRITIC_INFER, arrays)["values"]
            values[rows, : part.shape[1]] = torch.from_numpy(part.copy())
        return values

    def train(self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> RemoteFuture[dict[str, float]]:
        """One optimizer step on tokens int64 [B, S] and [B, S-1] targets; the server's statistics."""
        arrays = {
            "tokens": tokens.numpy(),
            "returns": returns.float().numpy(),
            "prev_values": old_values.float().numpy(),
            "mask": mask.float().numpy(),
            "sequence_number": np.array([self._next_number]),
            "run_id": text_array(self._run_id),
        }
        self._next_number += 1
        return self._future(self._ordered, self._train, arrays)

    def _train(self, arrays: Mapping[str, NDArray]) -> dict[str, float]:
        return json.loads(array_text(self._infer(CRITIC_TRAIN, arrays)["stats"]))

    def close(self) -> None:
        """Wait for the requests on their way, then hang up. Warns of answers that were never looked at."""
        self._ordered.shutdown()
        super().close()


class RewardClient(RemoteClient):
    """The reward server."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, max_batch_size: int = 256) -> None:
        super().__init__("reward", endpoint, timeout_s, max_batch_size)

    def score(self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> RemoteFuture[Tensor]:
        """Scores float32 [B] of right-padded tokens int64 [B, S], lengths and prompt lengths int64 [B]."""
        return self._future(self._parallel, self._score, tokens, lengths, prompt_lengths)

    def _score(self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        scores = []
        for rows in self._pieces(lengths):
            arrays = {**_sequences(tokens[rows], lengths[rows]), "prompt_lengths": prompt_lengths[rows, None].numpy()}
            scores.append(torch.from_numpy(self._infer(REWARD_MODEL, arrays)["rewards"][:, 0].copy()))
        return torch.cat(scores)


def _sequences(tokens: Tensor, lengths: Tensor) -> dict[str, NDArray]:
    """Cut the padding to what these rows need."""
    width = int(lengths.max()) if lengths.numel() else tokens.shape[1]
    return {"tokens": tokens[:, :width].contiguous().numpy(), "sequence_lengths": lengths[:, None].contiguous().numpy()}
