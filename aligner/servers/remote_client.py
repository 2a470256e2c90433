"""The trainer's side of a server: futures, deadlines, retries, and answers that cannot be
forgotten."""

import contextlib
import json
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.types import ABSTAINED
from aligner.errors import AlignerError
from aligner.placement.addresses import Access, Endpoint
from aligner.servers.connection import Connection, RefusedError, RemoteError, TransportError
from aligner.servers.wire_protocol import REWARD_MODEL, EndpointSpec

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
