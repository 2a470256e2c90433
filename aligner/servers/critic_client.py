"""The client of the critic: ordered requests, exactly-once updates, and recovery of a lost critic.

- `UpdateJournal` is the trainer's write-ahead log of the critic's updates.
- `UpdateLedger` is the critic's own record of the last update that it has applied.
- `CriticRecovery` finds the critic again after it was lost, restores it from a checkpoint, and
  sends the updates that it lacks.
- `CriticClient` sends requests for values and updates to the critic.
"""

import enum
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from aligner.data.checksums import (
    DamagedError,
    read_sealed,
    read_sealed_bytes,
    seal,
    seal_bytes,
)
from aligner.data.fencing import fenced_write
from aligner.errors import AlignerError
from aligner.files import write_file
from aligner.placement.addresses import Access, Endpoint
from aligner.servers.remote_client import (
    Connection,
    RemoteClient,
    RemoteError,
    RemoteFuture,
    TransportError,
    parse_scores,
)
from aligner.servers.wire_protocol import (
    CRITIC_INFER,
    CRITIC_INFER_WITH_REWARD,
    CRITIC_TRAIN,
    EndpointSpec,
    decode_text,
    encode_text,
)

_log = logging.getLogger(__name__)

_MAX_ATTEMPT_DIGITS = 9
_UPDATE_FILE_NAME = re.compile(r"update_([0-9]+)\.record")


class SequenceError(AlignerError):
    """A critic request in the wrong order.

    Its number is older than the last update or skips an update, it has no number, or it belongs to
    another run.
    """


@dataclass(frozen=True)
class RunId:
    """Name of a run, and attempt of its trainer.

    The attempt counts how often trainers took over the run (`aligner.data.fencing`) before this
    trainer.
    """

    name: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.attempt}"

    @staticmethod
    def parse(text: str) -> "RunId":
        """Parse `name@attempt`. A name without an attempt denotes attempt 0."""
        name, separator, attempt = text.rpartition("@")
        has_attempt = separator and attempt.isdecimal() and len(attempt) <= _MAX_ATTEMPT_DIGITS
        return RunId(name, int(attempt)) if has_attempt else RunId(text)


@dataclass(frozen=True)
class CriticState:
    """A state of the critic that can be restored: that of a checkpoint, or the initial one."""

    step: int | None
    """Step of the run's checkpoint; None denotes the critic's state at its start."""
    updates: int
    """Number of updates that are applied in this state."""


INITIAL = CriticState(None, 0)
"""The critic's state at its start."""


class UpdateJournal:
    """The trainer's write-ahead log of the critic updates since the oldest checkpoint in use.

    Each update is a file, which is written before the update is sent.
    """

    def __init__(self, directory: Path) -> None:
        """Create the directory if necessary, and remove the files of interrupted writes."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("*.tmp"):
            file.unlink()

    @fenced_write()
    def append(self, number: int, arrays: Mapping[str, NDArray]) -> None:
        """Write update `number`. The file is on disk when this method returns."""
        write_file(self._get_path(number), seal_bytes(save(dict(arrays))))

    def read(self, number: int) -> dict[str, NDArray]:
        """Return the tensors of update `number`. Raise AlignerError if its file is not readable."""
        try:
            return load(read_sealed_bytes(self._get_path(number)))
        except (OSError, SafetensorError, DamagedError) as error:
            raise AlignerError(
                f"cannot read critic update {number} from {self._get_path(number)}: {error}"
            ) from error

    def has_updates(self, first: int, last: int) -> bool:
        """Return whether the journal has all updates from `first` to `last`, inclusive."""
        return all(self._get_path(number).exists() for number in range(first, last + 1))

    @fenced_write()
    def prune(self, first: int, last: int) -> None:
        """Remove all updates except those from `first` to `last`, inclusive."""
        for file in self._directory.iterdir():
            number = _UPDATE_FILE_NAME.fullmatch(file.name)
            if number is not None and not first <= int(number[1]) <= last:
                # A file that cannot be removed now is removed the next time. Until then it does no
                # harm: an update is written again before it is sent again.
                with suppress(OSError):
                    file.unlink()

    def _get_path(self, number: int) -> Path:
        return self._directory / f"update_{number:08d}.record"


@dataclass
class UpdateLedger:
    """The critic's record of the last numbered update of its run, and of its result.

    All ranks of the critic have equal ledgers.
    """

    run: RunId | None = None
    """The newest trainer that has sent a request. Older trainers and other runs are refused."""
    last: int = -1
    """Number of the last update; -1 if there was none."""
    result: dict[str, float] | None = None
    """Statistics of the last update."""

    def check_run(self, run: RunId) -> None:
        """Raise SequenceError for a trainer of another run, and for one that was replaced.

        Args:
            run: The trainer that sends the request.
        """
        if self.run is not None and run.name != self.run.name:
            raise SequenceError(
                f"run_id: got {str(run)!r}, but this critic belongs to run {self.run.name!r};"
                " restart the critic to use it in another run"
            )
        if self.run is not None and run.attempt < self.run.attempt:
            raise SequenceError(
                f"run_id: got {str(run)!r}, but the newer attempt {str(self.run)!r} has taken"
                " over the run; the trainer of the older attempt must exit"
            )

    def is_repeat(self, number: int) -> bool:
        """Return True for the number of the last update, and False for the next number.

        Raises:
            SequenceError: The number is neither of the two.
        """
        if number not in (self.last, self.last + 1):
            problem = (
                "updates must not be skipped"
                if number > self.last
                else "this update was already applied and its result is no longer stored"
            )
            raise SequenceError(
                f"sequence_number: got {number}; {problem}; allowed: {self.last + 1}, or"
                f" {self.last} (repeated)"
            )
        return number == self.last

    def check_follows(self, number: int) -> None:
        """Raise SequenceError unless `number` is the last update.

        Requests for values and checkpoints contain the number of the update that they must follow.
        """
        if number != self.last:
            raise SequenceError(
                f"sequence_number: the request must follow update {number}, but the last update is"
                f" {self.last}"
            )

    def record(self, number: int, result: dict[str, float]) -> None:
        """Record that an update was applied."""
        self.last = number
        self.result = result

    def save(self, path: Path) -> None:
        """Write the ledger to a JSON file, atomically.

        Only the name of the run is written: the attempt of the trainer is not part of the critic's
        state.
        """
        state = {**asdict(self), "run": None if self.run is None else self.run.name}
        write_file(path, seal(json.dumps(state) + "\n"))

    @staticmethod
    def load(path: Path) -> "UpdateLedger":
        """Read the file that `save` wrote. Raise AlignerError if it is missing or damaged."""
        try:
            state = read_sealed(path)
        except DamagedError as error:
            raise AlignerError(f"cannot read the critic's update ledger: {error}") from error
        return UpdateLedger(
            None if state["run"] is None else RunId(state["run"]), state["last"], state["result"]
        )


class Phase(enum.Enum):
    """The client's knowledge about the start of the critic that answered last."""

    UP_TO_DATE = "it has applied every update; requests are sent to it"
    LOST = "a request failed, or another instance answered; the same instance has every update"
    RESTORING = "it must restore a checkpoint first"
    REPLAYING = "it has restored a checkpoint; the journal's later updates are being sent to it"


class CriticRecovery:
    """State machine that recovers the critic after a failed request or a restart of its server.

        UP_TO_DATE ── a request fails ──▶ LOST                                  `mark_lost`
        LOST ── the same start answers ──▶ UP_TO_DATE                           `ensure_up_to_date`
        any but UP_TO_DATE ── another start answers ──▶ RESTORING               `ensure_up_to_date`
        RESTORING ── a recovery point is restored ──▶ REPLAYING                 `ensure_up_to_date`
        REPLAYING ── the journal's last update is sent ──▶ UP_TO_DATE           `ensure_up_to_date`
        UP_TO_DATE ── an earlier start has answered an update ──▶ REPLAYING     `record`

    A "start" is one start of the server process, which its `instance` identifies. If RESTORING or
    REPLAYING is interrupted, the next attempt resumes it. An update that is sent twice is applied
    once: the critic refuses all numbers except the next one, and answers a repetition of the last
    one from its ledger.
    """

    def __init__(self, run: RunId, journal: UpdateJournal, timeout_s: float) -> None:
        """Create the state machine, with the initial state as its only recovery point.

        Args:
            run: The trainer that sends the requests.
            journal: Updates that the critic may need again.
            timeout_s: Deadline in seconds of each step of a recovery: a restore, or a replayed
                update.
        """
        self._run = run
        self._journal = journal
        self._timeout_s = timeout_s
        self._phase = Phase.RESTORING
        self._instance = ""
        # State of the checkpoint that the critic is writing.
        self._pending_checkpoint: CriticState | None = None
        # Held during a recovery, however long it takes.
        self._recovery_lock = threading.Lock()
        # Guards phase and instance. It is a separate lock, so that a thread whose request fails
        # does not wait for a recovery in another thread.
        self._phase_lock = threading.Lock()
        self.start([INITIAL])

    def start(self, recovery_points: Sequence[CriticState]) -> None:
        """Schedule a recovery to the last of these states, even if the critic is up to date."""
        self._recovery_points = list(recovery_points)  # the newest is last
        # Number of updates that the critic has answered, and must have after a recovery.
        self._applied_updates = recovery_points[-1].updates
        self._set_phase(Phase.RESTORING, "")

    def set_recovery_points(self, recovery_points: Sequence[CriticState], updates: int) -> None:
        """Set the states that later recoveries restore, and remove updates that they do not need.

        Args:
            recovery_points: States that a later recovery may restore, newest last. Earlier updates
                are removed from the journal.
            updates: Number of updates requested so far. Updates from this number on are removed,
                too.
        """
        with self._recovery_lock:
            self._recovery_points = list(recovery_points)
            self._journal.prune(recovery_points[0].updates, updates - 1)

    def ensure_up_to_date(self, connection: Connection) -> str:
        """Return the instance of a critic that has every update, after a recovery if necessary.

        Requests contain this instance, so that another start of the server refuses them.

        Raises:
            RemoteError: The critic was lost during the recovery.
            AlignerError: The critic cannot be restored.
        """
        with self._recovery_lock:
            if self._phase is not Phase.UP_TO_DATE:
                state = connection.control(self._timeout_s, "version")
                if state["instance"] != self._instance:
                    self._set_phase(Phase.RESTORING, state["instance"])
                next_update = state["sequence_number"] + 1
                if self._phase is Phase.RESTORING:
                    next_update = self._restore(connection, state)
                    self._set_phase(Phase.REPLAYING)
                if self._phase is Phase.REPLAYING:
                    self._replay(connection, next_update)
                self._set_phase(Phase.UP_TO_DATE)
            return self._instance

    def mark_lost(self) -> None:
        """Note that a request got no answer, or was refused by another start of the server."""
        with self._phase_lock:
            if self._phase is Phase.UP_TO_DATE:
                self._phase = Phase.LOST

    def record(self, number: int, instance: str) -> None:
        """Note that a start of the server has answered update `number`.

        If another start was recovered in the meantime, it does not have the update, which is
        therefore replayed.
        """
        with self._recovery_lock:
            self._applied_updates = number + 1
            if instance != self._instance and self._phase in (Phase.UP_TO_DATE, Phase.LOST):
                self._set_phase(Phase.REPLAYING)

    def build_update(self, number: int, arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Return the input tensors of `critic_train` for update `number`."""
        return {
            **arrays,
            "sequence_number": np.array([number]),
            "run_id": encode_text(str(self._run)),
        }

    def expect_checkpoint(self, state: CriticState) -> None:
        """Note that the critic must write a checkpoint of this state.

        If the critic is lost before the checkpoint is complete, the recovery writes the checkpoint.
        """
        with self._recovery_lock:
            self._pending_checkpoint = state

    def begin_checkpoint(self, connection: Connection, timeout_s: float, instance: str) -> None:
        """Let the critic begin the pending checkpoint, unless a recovery has already written it."""
        if self._pending_checkpoint is not None:
            self._request_checkpoint(
                connection, timeout_s, "begin_checkpoint", self._pending_checkpoint, instance
            )

    def finish_checkpoint(self, connection: Connection, timeout_s: float, instance: str) -> None:
        """Let the critic complete the pending checkpoint, unless a recovery has already written it.

        Raises:
            RemoteError: The critic has not completed the expected checkpoint.
            TransportError: The critic was lost during the operation.
        """
        pending = self._pending_checkpoint
        if pending is None:
            return
        answer = connection.control(timeout_s, "finish_checkpoint", instance=instance)
        if answer["finished"] != pending.step:
            raise connection.make_error(
                "CheckpointLost",
                f"expected checkpoint {pending.step} to be finished, got {answer['finished']}",
            )
        with self._recovery_lock:
            is_current = self._phase is Phase.UP_TO_DATE and self._instance == instance
            # Another start may be writing the checkpoint again by now.
            if self._pending_checkpoint is not None and not is_current:
                raise TransportError(
                    "critic",
                    connection.address,
                    "Unreachable",
                    f"the server was lost while it finished checkpoint {pending.step}",
                )
            self._pending_checkpoint = None

    def _set_phase(self, phase: Phase, instance: str | None = None) -> None:
        """Enter a phase, and set the instance of the critic if it is given."""
        with self._phase_lock:
            self._phase = phase
            self._instance = self._instance if instance is None else instance

    def _restore(self, connection: Connection, state: Mapping[str, Any]) -> int:
        """Restore the newest possible recovery point, and return the number of the next update.

        Args:
            connection: Connection to the critic.
            state: The critic's answer to the operation `version`.

        Raises:
            AlignerError: None of the recovery points can be restored.
        """
        problems = []
        # An older recovery point needs more updates. The search ends at the first point whose later
        # updates are not all in the journal.
        for recovery_point in reversed(self._recovery_points):
            if not self._journal.has_updates(recovery_point.updates, self._applied_updates - 1):
                problems.append(
                    f"updates {recovery_point.updates} to {self._applied_updates - 1}"
                    " are not in the journal"
                )
                break
            problem = self._try_restore(connection, recovery_point, state)
            if problem is None:
                return recovery_point.updates
            problems.append(problem)
        reasons = "; ".join(problems)
        raise AlignerError(
            f"the critic at {connection.address} cannot be restored to its state after"
            f" {self._applied_updates} updates: {reasons}"
        )

    def _try_restore(
        self, connection: Connection, recovery_point: CriticState, state: Mapping[str, Any]
    ) -> str | None:
        """Let the critic restore a recovery point, and return the problem, or None on success."""
        if recovery_point.step is None:
            # The initial state is not a checkpoint: only a critic without updates has it.
            applied_updates = state["sequence_number"] + 1
            return (
                f"{applied_updates} updates are already applied; restart the critic"
                if applied_updates
                else None
            )
        try:
            expected_state = {name: state[name] for name in ("instance", "sequence_number")}
            restored = connection.control(
                self._timeout_s,
                "restore",
                step=recovery_point.step,
                run_id=str(self._run),
                **expected_state,
            )
        except RemoteError as error:
            # The critic has refused the checkpoint. Another recovery point may be usable.
            if error.kind not in ("AlignerError", "DamagedError", "SequenceError"):
                raise
            return error.message

        applied_updates = restored["sequence_number"] + 1
        if applied_updates != recovery_point.updates:
            return (
                f"the critic in checkpoint {recovery_point.step} has applied {applied_updates}"
                f" updates, but the policy was saved after {recovery_point.updates}"
            )
        return None

    def _replay(self, connection: Connection, first: int) -> None:
        """Send the journal's updates from number `first` on.

        A pending checkpoint is written as soon as the critic has reached its state.
        """
        if first < self._applied_updates:
            _log.info("critic: replaying updates %d to %d", first, self._applied_updates - 1)
        # The last iteration only writes a checkpoint of the state after all updates.
        for number in range(first, self._applied_updates + 1):
            if self._pending_checkpoint is not None and self._pending_checkpoint.updates == number:
                self._request_checkpoint(
                    connection,
                    self._timeout_s,
                    "checkpoint",
                    self._pending_checkpoint,
                    self._instance,
                )
                self._pending_checkpoint = None
            if number < self._applied_updates:
                update = self.build_update(number, self._journal.read(number))
                connection.infer(
                    CRITIC_TRAIN,
                    with_instance(CRITIC_TRAIN, update, self._instance),
                    self._timeout_s,
                )

    def _request_checkpoint(
        self, connection: Connection, timeout_s: float, op: str, state: CriticState, instance: str
    ) -> None:
        """Request a checkpoint operation, which the critic refuses if its state is another one."""
        arguments = {
            "step": state.step,
            "sequence_number": state.updates - 1,
            "run_id": str(self._run),
            "instance": instance,
        }
        connection.control(timeout_s, op, **arguments)


def with_instance(
    endpoint: EndpointSpec, arrays: Mapping[str, NDArray], instance: str
) -> dict[str, NDArray]:
    """Return a request that only the given start of the server executes."""
    rows = (arrays["tokens"].shape[0], 1) if endpoint.batching else (1,)
    return {**arrays, "instance": np.full(rows, instance.encode(), dtype=object)}


T = TypeVar("T")


class CriticClient(RemoteClient):
    """Client of the critic, which executes requests in the order of the calls.

    Values include all updates that were requested before them, and no later updates. Updates are
    numbered, and written to the journal before they are sent. If the critic was restarted,
    `CriticRecovery` restores it first. A recovery only delays the results of requests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        access: Access,
        timeout_s: float,
        run: RunId,
        journal: UpdateJournal,
        max_batch_size: int,
    ) -> None:
        """Create a client that has no state yet; call `start` before any request.

        Args:
            endpoint: Address of the critic.
            access: Access key and TLS certificates.
            timeout_s: Deadline of a request in seconds, including retries and a restart of the
                critic. Each step of a recovery (a restore, or a replayed update) has the same
                deadline of its own.
            run: The trainer that sends the requests.
            journal: Write-ahead log of the updates.
            max_batch_size: Maximum number of rows in a request for values.
        """
        super().__init__("critic", [endpoint], access, timeout_s, max_batch_size)
        self._journal = journal
        self._recovery = CriticRecovery(run, journal, timeout_s)
        self._update_count = 0  # number of requested updates
        self._requests_since_update: list[Future[Any]] = []
        self._last_update: Future[Any] | None = None
        # A single thread, so that updates are sent in their order.
        self._update_pool = ThreadPoolExecutor(1, thread_name_prefix="critic-updates")

    def start(self, recovery_points: Sequence[CriticState] = (INITIAL,)) -> None:
        """Bring the critic to the last of these states.

        If the critic cannot restore the last state, it restores an earlier one, and the journal's
        updates are replayed.

        Args:
            recovery_points: States that can be restored, newest last.

        Raises:
            AlignerError: The critic cannot be brought to the state. It belongs to another run, or
                its checkpoint belongs to another step.
        """
        self._update_count = recovery_points[-1].updates
        self._recovery.start(recovery_points)
        # The attempt itself does nothing: the recovery before it brings the critic to the state.
        self._retry_with_recovery(lambda connection, remaining_s, instance: None)
        # Not earlier: updates that an unsuccessful start has left in the journal may be needed.
        self.set_recovery_points(recovery_points)

    def values(self, tokens: Tensor, lengths: Tensor) -> RemoteFuture[Tensor]:
        """Request the values of tokens.

        Args:
            tokens: int64 [B, S], padded on the right.
            lengths: int64 [B].

        Returns:
            The future of the values, float32 [B, S]; 0 after the end of the longest sequence.
        """
        return self._request_rows(CRITIC_INFER, tokens, lengths)["values"]

    def values_and_scores(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RemoteFuture[Tensor], RemoteFuture[Tensor]]:
        """Request values and scores in one request, from a critic that also serves the reward.

        Args:
            tokens: int64 [B, S], padded on the right.
            lengths: int64 [B].
            prompt_lengths: int64 [B].
            metadata: Fields of each row's prompt record; JSON values.

        Returns:
            The future of the values, see `values`, and the future of the scores, see
            `parse_scores`.
        """
        answers = self._request_rows(
            CRITIC_INFER_WITH_REWARD, tokens, lengths, prompt_lengths, metadata
        )
        return answers["values"], answers["rewards"]

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> RemoteFuture[dict[str, float]]:
        """Request one optimizer step.

        Args:
            tokens: int64 [B, S].
            returns: Targets, [B, S-1].
            old_values: Values before the update, [B, S-1].
            mask: 1 for tokens that the critic trains on, [B, S-1].

        Returns:
            The future of the server's statistics.
        """
        arrays = {
            "tokens": tokens.contiguous().numpy(),
            "returns": returns.float().contiguous().numpy(),
            "prev_values": old_values.float().contiguous().numpy(),
            "mask": mask.float().contiguous().numpy(),
        }
        number = self._update_count
        earlier_requests = self._requests_since_update
        self._update_count = number + 1
        self._requests_since_update = []
        future = self._submit(self._update_pool, self._train, number, arrays, earlier_requests)
        self._last_update = future
        return future

    def begin_checkpoint(self, step: int) -> CriticState:
        """Begin to save the critic as it is after the updates requested so far; return its state.

        Further requests can follow immediately.
        """
        if self._last_update is not None:
            wait([self._last_update])
        state = CriticState(step, self._update_count)
        self._recovery.expect_checkpoint(state)
        self._retry_with_recovery(self._recovery.begin_checkpoint)
        return state

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is complete.

        If the critic is lost during the wait, a recovery writes the checkpoint again.
        """
        self._retry_with_recovery(self._recovery.finish_checkpoint)

    def set_recovery_points(self, recovery_points: Sequence[CriticState]) -> None:
        """Set the states that later recoveries restore, newest last, and remove earlier updates."""
        self._recovery.set_recovery_points(recovery_points, self._update_count)

    def close(self) -> None:
        """Close the connection and the threads. See `RemoteClient.close`."""
        super().close()
        self._update_pool.shutdown()

    def _request_rows(
        self, endpoint: EndpointSpec, tokens: Tensor, lengths: Tensor, *responses: Any
    ) -> dict[str, RemoteFuture[Tensor]]:
        """Return futures of the endpoint's outputs, computed after the updates requested so far."""
        futures: dict[str, RemoteFuture[Tensor]] = {
            spec.name: RemoteFuture(self._outstanding)
            for spec in endpoint.outputs
            if not spec.optional
        }
        # The number of the last update makes the critic check that it has applied all updates.
        requests = self._split_rows(tokens, lengths, self._update_count - 1, *responses)
        last_update = self._last_update

        def request_outputs() -> None:
            """Request the outputs of all rows after the last update, and set the futures."""
            try:
                if last_update is not None:
                    wait([last_update])
                outputs = {"values": torch.zeros(tokens.shape)}
                scores = []
                for rows, arrays in requests:
                    answer, _ = self._infer_with_recovery(endpoint, arrays)
                    outputs["values"][rows, : answer["values"].shape[1]] = torch.from_numpy(
                        answer["values"].copy()
                    )
                    if "rewards" in answer:
                        scores.append(parse_scores(answer))
                if scores:
                    outputs["rewards"] = torch.cat(scores)
            except BaseException as error:
                for future in futures.values():
                    future.set_exception(error)
            else:
                for name, future in futures.items():
                    future.set_result(outputs[name])

        self._request_pool.submit(request_outputs)
        self._requests_since_update.append(futures["values"])
        return futures

    def _train(
        self, number: int, arrays: Mapping[str, NDArray], earlier_requests: Sequence[Future[Any]]
    ) -> dict[str, float]:
        """Send an update after all earlier requests for values, and return its statistics."""
        # Earlier requests for values must be computed without this update.
        wait(earlier_requests)
        # The journal is written first: a recovery replays the update even if the trainer exits now.
        self._journal.append(number, arrays)
        answer, instance = self._infer_with_recovery(
            CRITIC_TRAIN, self._recovery.build_update(number, arrays)
        )
        self._recovery.record(number, instance)
        return json.loads(decode_text(answer["stats"]))

    def _infer_with_recovery(
        self, endpoint: EndpointSpec, arrays: Mapping[str, NDArray]
    ) -> tuple[dict[str, NDArray], str]:
        """Return the answer of an up-to-date critic, and the instance that has answered."""

        def attempt(
            connection: Connection, remaining_s: float, instance: str
        ) -> tuple[dict[str, NDArray], str]:
            return (
                connection.infer(endpoint, with_instance(endpoint, arrays, instance), remaining_s),
                instance,
            )

        return self._retry_with_recovery(attempt)

    def _retry_with_recovery(self, attempt: Callable[[Connection, float, str], T]) -> T:
        """Return the result of `attempt`, with retries and recoveries.

        Args:
            attempt: Function of a connection, of the remaining time in seconds, and of the instance
                that the request must contain.
        """

        def once(connection: Connection, remaining_s: float) -> T:
            """Make one attempt, with a server that has the current weights.

            Raises:
                TransportError: The server is unreachable or was restarted; a retry can succeed.
            """
            try:
                return attempt(
                    connection, remaining_s, self._recovery.ensure_up_to_date(connection)
                )
            except TransportError:
                self._recovery.mark_lost()
                raise
            except RemoteError as error:
                if error.kind != "InstanceError":
                    raise
                # Another start of the server has answered. After a recovery, a retry can succeed.
                self._recovery.mark_lost()
                raise TransportError(error.role, error.address, error.kind, error.message) from None

        return self._retry(once)
