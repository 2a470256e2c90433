"""The trainer's side of the critic: updates that are applied exactly once, also when the critic is lost and comes back."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligner.errors import AlignerError
from aligner.placement.addresses import Access, Endpoint
from aligner.servers.client import RemoteClient, RemoteFuture, control, response_arrays, sequence_arrays
from aligner.servers.connection import Connection, RemoteError, TransportError
from aligner.servers.journal import UpdateJournal
from aligner.servers.ledger import RunId
from aligner.servers.protocol import CRITIC_INFER, CRITIC_INFER_WITH_REWARD, CRITIC_TRAIN, EndpointSpec, array_text, text_array

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CriticState:
    """A state of the critic that can be had again: that of a checkpoint, or the initial one."""

    step: int | None
    """The run's checkpoint; None is the critic as it starts."""
    updates: int
    """Updates applied by then."""


INITIAL = CriticState(None, 0)


class CriticClient(RemoteClient):
    """The critic, which computes in the order of the calls: values follow the updates asked for before them, and come
    before those asked for after them.

    Updates are numbered and written to the journal before they are sent. A critic that was started anew is brought back
    first: it restores the newest checkpoint that it can, and the updates after that are replayed. Whoever waits for an
    answer notices nothing but the time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        access: Access,
        timeout_s: float,
        run: str,
        journal: UpdateJournal,
        max_batch_size: int = 256,
    ) -> None:
        """`run` is the run's name; `timeout_s` is a request's deadline, retries and the critic's restart included.

        Each step of bringing the critic back, a restore or a replayed update, has a deadline of its own.
        """
        super().__init__("critic", [endpoint], access, timeout_s, max_batch_size)
        self._run, self._journal = RunId(run, journal.attempt), journal
        self._updates = self._applied = 0  # asked for; known to be applied
        self._bases = [INITIAL]
        self._saving: CriticState | None = None
        self._instance: str | None = None  # the server's start that is known to be in the right state, and to answer
        self._known_instance: str | None = None  # the last one that was
        self._restored_instance: str | None = None  # the last one that restored a base, its replay perhaps cut short
        self._restoring = threading.RLock()
        self._before_update: list[Future[Any]] = []  # what was asked for since the last update
        self._last_update: Future[Any] | None = None
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="critic-updates")

    def start(self, bases: Sequence[CriticState] = (INITIAL,)) -> None:
        """Bring the critic to the last of these states, from an earlier one and the journal where it has to be.

        Raises AlignerError when that cannot be done: the critic belongs to another run, or its checkpoint to another step.
        """
        self._bases = list(bases)
        self._updates = self._applied = bases[-1].updates
        self._instance = self._known_instance = self._restored_instance = None
        self._in_session(lambda connection, left: None)
        self.keep(bases)  # not before: what a start that failed has left there may repair it

    def values(self, tokens: Tensor, lengths: Tensor) -> RemoteFuture[Tensor]:
        """float32 [B, S] of right-padded tokens int64 [B, S] and lengths int64 [B]; 0 beyond the longest sequence."""
        future = self._future(self._parallel, self._values, tokens, lengths, self._last_update, self._updates)
        self._before_update.append(future)
        return future

    def values_and_scores(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RemoteFuture[Tensor], RemoteFuture[Tensor]]:
        """Values as `values`, and scores float32 [B], of a critic that serves the reward too; one request for both."""
        values, scores = self._promise(), self._promise()

        def ask(after: Future[Any] | None, updates: int) -> None:
            try:
                responses = (prompt_lengths, metadata)
                parts = self._values_and_scores(tokens, lengths, responses, after, updates)
            except BaseException as error:
                values.set_exception(error)
                scores.set_exception(error)
            else:
                values.set_result(parts[0])
                scores.set_result(parts[1])

        self._parallel.submit(ask, self._last_update, self._updates)
        self._before_update.append(values)
        return values, scores

    def train(self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor) -> RemoteFuture[dict[str, float]]:
        """One optimizer step on tokens int64 [B, S] and [B, S-1] targets; the server's statistics."""
        arrays = {
            "tokens": tokens.contiguous().numpy(),
            "returns": returns.float().contiguous().numpy(),
            "prev_values": old_values.float().contiguous().numpy(),
            "mask": mask.float().contiguous().numpy(),
        }
        number, earlier = self._updates, self._before_update
        self._updates, self._before_update = number + 1, []
        future = self._future(self._ordered, self._train, number, arrays, earlier)
        self._last_update = future
        return future

    def begin_checkpoint(self, step: int) -> CriticState:
        """Begin to save the critic as it is after the updates asked for so far; further requests may follow at once."""
        if self._last_update is not None:
            wait([self._last_update])
        saving = CriticState(step, self._updates)
        with self._restoring:
            self._saving = saving

        def begin(connection: Connection, left: float) -> None:
            if self._saving is not None:  # not yet made when the critic was brought back
                self._save(connection, left, "begin_checkpoint", saving, self._instance or "")

        self._in_session(begin)
        return saving

    def finish_checkpoint(self) -> None:
        """Return when the checkpoint that was begun is complete, made again if the critic was lost meanwhile."""

        def finish(connection: Connection, left: float) -> None:
            saving, instance = self._saving, self._instance
            if saving is None:
                return
            answer = control(connection, left, "finish_checkpoint", instance=instance or "")
            if answer["finished"] != saving.step:
                raise connection.error("CheckpointLost", f"checkpoint {saving.step} is not the one it was writing")
            with self._restoring:
                if self._saving is not None and self._instance != instance:  # and may be half made again by now
                    raise TransportError("critic", connection.address, "Unreachable", "lost while it finished a checkpoint")
                self._saving = None

        self._in_session(finish)

    def keep(self, bases: Sequence[CriticState]) -> None:
        """Bring a lost critic back from these states from now on, newest last; forget the updates before them."""
        with self._restoring:
            self._bases = list(bases)
            self._journal.keep(bases[0].updates, self._updates - 1)

    def close(self) -> None:
        """See `RemoteClient`."""
        super().close()
        self._ordered.shutdown()

    def _values(self, tokens: Tensor, lengths: Tensor, after: Future[Any] | None, updates: int) -> Tensor:
        return self._answers(CRITIC_INFER, tokens, lengths, None, after, updates)[0]

    def _values_and_scores(
        self, tokens: Tensor, lengths: Tensor, responses: tuple[Tensor, Any], after: Future[Any] | None, updates: int
    ) -> tuple[Tensor, Tensor]:
        values, scores = self._answers(CRITIC_INFER_WITH_REWARD, tokens, lengths, responses, after, updates)
        return values, torch.cat(scores)

    def _answers(
        self,
        endpoint: EndpointSpec,
        tokens: Tensor,
        lengths: Tensor,
        responses: tuple[Tensor, Any] | None,
        after: Future[Any] | None,
        updates: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Values [B, S], and the parts of the scores [B] where `responses` are given."""
        if after is not None:
            wait([after])
        values, scores = torch.zeros(tokens.shape), []
        for rows in self._pieces(lengths):
            arrays = sequence_arrays(tokens[rows], lengths[rows])
            if responses is not None:
                arrays |= response_arrays(*responses, rows)
            arrays["sequence_number"] = np.full((len(lengths[rows]), 1), updates - 1)
            answer = self._ask(endpoint, arrays)
            values[rows, : answer["values"].shape[1]] = torch.from_numpy(answer["values"].copy())
            if responses is not None:
                scores.append(torch.from_numpy(answer["rewards"][:, 0].copy()))
        return values, scores

    def _train(self, number: int, arrays: Mapping[str, NDArray], earlier: Sequence[Future[Any]]) -> dict[str, float]:
        wait(earlier)
        self._journal.append(number, arrays)
        answered: list[str] = []
        stats = self._send_update(number, lambda update: self._ask(CRITIC_TRAIN, update, answered.append), arrays)
        with self._restoring:
            self._applied = number + 1
            if answered[-1] != self._known_instance:  # lost again, and brought back without this update
                self._instance = self._known_instance = None
        return stats

    def _send_update(
        self,
        number: int,
        send: Callable[[Mapping[str, NDArray]], Mapping[str, NDArray]],
        arrays: Mapping[str, NDArray],
    ) -> dict[str, float]:
        order = {"sequence_number": np.array([number]), "run_id": text_array(str(self._run))}
        return json.loads(array_text(send({**arrays, **order})["stats"]))

    def _ask(
        self,
        endpoint: EndpointSpec,
        arrays: Mapping[str, NDArray],
        answered: Callable[[str], None] = lambda instance: None,
    ) -> dict[str, NDArray]:
        """The answer of a critic in the right state: a request names the start of the server that it is for.

        `answered` is told which start it was.
        """
        rows = (arrays["tokens"].shape[0], 1) if endpoint.batching else (1,)

        def attempt(connection: Connection, left: float) -> dict[str, NDArray]:
            instance = self._instance or ""  # lost a moment ago: refused, and asked again
            named = np.full(rows, instance.encode(), dtype=object)
            answer = connection.infer(endpoint, {**arrays, "instance": named}, left)
            answered(instance)
            return answer

        return self._in_session(attempt)

    def _in_session(self, attempt: Callable[[Connection, float], T]) -> T:
        """`attempt`'s result from a critic that is in the state it should be in, brought there where it is not."""

        def once(connection: Connection, left: float) -> T:
            try:
                self._session(connection)
                return attempt(connection, left)
            except TransportError:
                self._instance = None
                raise
            except RemoteError as error:
                if error.kind != "InstanceError":
                    raise
                self._instance = None
                raise TransportError(error.role, error.address, error.kind, error.message) from None

        return self._retried(once)

    def _session(self, connection: Connection) -> None:
        """Return when the critic at the other end is known to be in the state that it should be in."""
        with self._restoring:
            if self._instance is not None:
                return
            state = control(connection, self._timeout_s, "version")
            if state["instance"] != self._known_instance:
                self._bring_back(connection, state)
            self._known_instance = self._instance = state["instance"]

    def _bring_back(self, connection: Connection, state: Mapping[str, Any]) -> None:
        """Restore the newest base that the critic can, and replay the journal from there."""
        applied, instance = self._applied, state["instance"]
        if instance == self._restored_instance:  # the connection broke while it was being brought back
            self._replay(connection, state["sequence_number"] + 1, applied, instance)
            return
        refusals = []
        for base in reversed(self._bases):
            if not self._journal.covers(base.updates, applied - 1):
                refusals.append(f"updates {base.updates} to {applied - 1} are not in the journal")
                break
            if problem := self._restored(connection, base, state):
                refusals.append(problem)
                continue
            self._restored_instance = instance
            self._replay(connection, base.updates, applied, instance)
            return
        raise AlignerError(f"the critic at {connection.address} cannot be brought to update {applied}: {'; '.join(refusals)}")

    def _restored(self, connection: Connection, base: CriticState, state: Mapping[str, Any]) -> str | None:
        """Have the critic restore a base; what is wrong with the base where that fails."""
        if base.step is None:
            got = state["sequence_number"] + 1
            return f"it has applied {got} updates already; start it anew" if got else None
        try:
            known = {name: state[name] for name in ("instance", "sequence_number")}
            restored = control(connection, self._timeout_s, "restore", step=base.step, run_id=str(self._run), **known)
        except RemoteError as error:
            if error.kind not in ("AlignerError", "SequenceError"):
                raise
            return error.message
        got = restored["sequence_number"] + 1
        if got != base.updates:
            return f"the critic of checkpoint {base.step} has {got} updates, where the policy was saved after {base.updates}"
        return None

    def _replay(self, connection: Connection, first: int, applied: int, instance: str) -> None:
        """Send the journal's updates from `first` on, and make the checkpoint that was being written on the way."""
        named = text_array(instance)
        if first < applied:
            _log.info("critic: replaying updates %d to %d", first, applied - 1)
        for number in range(first, applied + 1):
            if self._saving is not None and self._saving.updates == number:
                self._save(connection, self._timeout_s, "checkpoint", self._saving, instance)
                self._saving = None
            if number < applied:
                update = {**self._journal.read(number), "instance": named}
                self._send_update(number, lambda arrays: connection.infer(CRITIC_TRAIN, arrays, self._timeout_s), update)

    def _save(self, connection: Connection, timeout_s: float, op: str, state: CriticState, instance: str) -> None:
        """Have the critic save itself, which must be in that state."""
        order = {"sequence_number": state.updates - 1, "run_id": str(self._run), "instance": instance}
        control(connection, timeout_s, op, step=state.step, **order)
