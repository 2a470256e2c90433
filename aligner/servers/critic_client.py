"""The trainer's side of the critic: values and updates in the order of the calls, each update
applied exactly once."""

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
    read_sealed_record,
    sealed,
    sealed_record,
)
from aligner.data.claim import writing
from aligner.errors import AlignerError
from aligner.files import write_file
from aligner.placement.addresses import Access, Endpoint
from aligner.servers.remote_client import (
    Connection,
    RemoteClient,
    RemoteError,
    RemoteFuture,
    TransportError,
    scores_in,
)
from aligner.servers.wire_protocol import (
    CRITIC_INFER,
    CRITIC_INFER_WITH_REWARD,
    CRITIC_TRAIN,
    EndpointSpec,
    array_text,
    text_array,
)

_ATTEMPT_DIGITS = 9
_UPDATE = re.compile(r"update_([0-9]+)\.record")


class SequenceError(AlignerError):
    """A request out of order: older than the last update, beyond the next, another run's, or
    unnumbered."""


@dataclass(frozen=True)
class RunId:
    """A run, and how often it was taken (`aligner.data.claim`) before the trainer that speaks
    did."""

    name: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.attempt}"

    @staticmethod
    def parse(text: str) -> "RunId":
        """Read `name@attempt`; a name alone is its first attempt."""
        name, mark, attempt = text.rpartition("@")
        counted = mark and attempt.isdecimal() and len(attempt) <= _ATTEMPT_DIGITS
        return RunId(name, int(attempt)) if counted else RunId(text)


@dataclass(frozen=True)
class CriticState:
    """A state of the critic that can be had again: that of a checkpoint, or the initial one."""

    step: int | None
    """The run's checkpoint; None is the critic as it starts."""
    updates: int
    """Updates applied by then."""


INITIAL = CriticState(None, 0)


class UpdateJournal:
    """The trainer's write-ahead log: the updates since the last checkpoints, a file each, written
    before they are sent."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory; removes what an interrupted write left behind."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.glob("*.tmp"):
            file.unlink()

    @writing()
    def append(self, number: int, arrays: Mapping[str, NDArray]) -> None:
        """Write update `number`; it is on disk when this returns."""
        write_file(self._file(number), sealed_record(save(dict(arrays))))

    def read(self, number: int) -> dict[str, NDArray]:
        """What `append` wrote. Raises AlignerError where it is missing or damaged."""
        try:
            return load(read_sealed_record(self._file(number)))
        except (OSError, SafetensorError, DamagedError) as error:
            raise AlignerError(
                f"cannot read critic update {number} from {self._file(number)}: {error}"
            ) from error

    def covers(self, first: int, last: int) -> bool:
        """Whether every update from `first` to `last` is there."""
        return all(self._file(number).exists() for number in range(first, last + 1))

    @writing()
    def keep(self, first: int, last: int) -> None:
        """Remove every update outside `first` to `last`."""
        for file in self._directory.iterdir():
            number = _UPDATE.fullmatch(file.name)
            if number is not None and not first <= int(number[1]) <= last:
                # what cannot be removed now is the next time; whatever is asked for is written anew
                with suppress(OSError):
                    file.unlink()

    def _file(self, number: int) -> Path:
        return self._directory / f"update_{number:08d}.record"


@dataclass
class UpdateLedger:
    """The critic's record: the last numbered update of a run and its result."""

    run: RunId | None = None
    """The newest trainer that was heard; an older one, and another run's, is refused."""
    last: int = -1
    result: dict[str, float] | None = None

    def check_run(self, run: RunId) -> None:
        """Raise SequenceError for another run's trainer, and for one that a newer has replaced."""
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
        """Whether the update is the last one again; false when it is the next one. Raises
        SequenceError otherwise."""
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
        """Raise SequenceError unless `number` is the last update, which a request for values or a
        checkpoint is to follow."""
        if number != self.last:
            raise SequenceError(
                f"sequence_number: the request must follow update {number}, but the last update is"
                f" {self.last}"
            )

    def record(self, number: int, result: dict[str, float]) -> None:
        """Note that an update has been applied."""
        self.last, self.result = number, result

    def save(self, path: Path) -> None:
        """Write as JSON, atomically; which trainer it was is no part of the critic's state."""
        state = {**asdict(self), "run": None if self.run is None else self.run.name}
        write_file(path, sealed(json.dumps(state) + "\n"))

    @staticmethod
    def load(path: Path) -> "UpdateLedger":
        """Read what `save` wrote. Raises AlignerError when there is nothing to read."""
        try:
            state = read_sealed(path)
        except DamagedError as error:
            raise AlignerError(f"cannot read the critic's update ledger: {error}") from error
        return UpdateLedger(
            None if state["run"] is None else RunId(state["run"]), state["last"], state["result"]
        )


_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """What is known of the start of the critic that answered last."""

    FOLLOWING = "it has applied every update; requests are sent to it"
    LOST = "a request failed, or another instance answered; the same instance has every update"
    RESTORING = "it must restore a checkpoint first"
    REPLAYING = "it has restored a checkpoint; the journal's later updates are being sent to it"


class CriticRecovery:
    """The way back to a critic that has applied every update, whichever start of the server
    answers.

        FOLLOWING ── a request fails ──▶ LOST                                 `lose`
        LOST ── the same start answers ──▶ FOLLOWING                          `follow`
        any but FOLLOWING ── another start answers ──▶ RESTORING              `follow`
        RESTORING ── it is at a checkpoint, or as it began ──▶ REPLAYING      `follow`
        REPLAYING ── it has the journal's last update ──▶ FOLLOWING           `follow`
        FOLLOWING ── the start before it answered an update ──▶ REPLAYING     `record`

    Where RESTORING or REPLAYING is broken off, the next attempt goes on with it. An update sent
    twice counts once: the critic refuses any number but its next one, and answers its last one from
    memory.
    """

    def __init__(self, run: RunId, journal: UpdateJournal, timeout_s: float) -> None:
        """`timeout_s` is the deadline of each step: a restore, or a replayed update."""
        self._run, self._journal, self._timeout_s = run, journal, timeout_s
        self._phase, self._instance = Phase.RESTORING, ""
        self._saving: CriticState | None = None  # the checkpoint that is being written
        # held while the critic is brought back, however long it takes
        self._recovering = threading.Lock()
        # of phase and instance: whoever loses the critic need not wait for its recovery
        self._moving = threading.Lock()
        self.start([INITIAL])

    def start(self, bases: Sequence[CriticState]) -> None:
        """The critic, whatever is known of it, is to be brought to the last of these states."""
        self._bases = list(bases)  # to be restored, newest last
        self._applied = bases[-1].updates  # updates that are known to be applied
        self._enter(Phase.RESTORING, "")

    def keep(self, bases: Sequence[CriticState], updates: int) -> None:
        """Restore these states from now on; forget the updates before them, and from number
        `updates` on."""
        with self._recovering:
            self._bases = list(bases)
            self._journal.keep(bases[0].updates, updates - 1)

    def follow(self, connection: Connection) -> str:
        """The name of a start that has applied every update, for requests to say; brings the critic
        there where it is not.

        Raises RemoteError where it is lost on the way, and AlignerError where it cannot be brought
        there.
        """
        with self._recovering:
            if self._phase is not Phase.FOLLOWING:
                state = connection.control(self._timeout_s, "version")
                if state["instance"] != self._instance:
                    self._enter(Phase.RESTORING, state["instance"])
                next_update = state["sequence_number"] + 1
                if self._phase is Phase.RESTORING:
                    next_update = self._restore(connection, state)
                    self._enter(Phase.REPLAYING)
                if self._phase is Phase.REPLAYING:
                    self._replay(connection, next_update)
                self._enter(Phase.FOLLOWING)
            return self._instance

    def lose(self) -> None:
        """A request got no answer, or that of another start."""
        with self._moving:
            if self._phase is Phase.FOLLOWING:
                self._phase = Phase.LOST

    def record(self, number: int, instance: str) -> None:
        """Update `number` has been answered by a start of the server; another may have been brought
        back since, without it."""
        with self._recovering:
            self._applied = number + 1
            if instance != self._instance and self._phase in (Phase.FOLLOWING, Phase.LOST):
                self._enter(Phase.REPLAYING)

    def numbered(self, number: int, arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Update `number` as `critic_train` takes it."""
        return {
            **arrays,
            "sequence_number": np.array([number]),
            "run_id": text_array(str(self._run)),
        }

    def expect_checkpoint(self, state: CriticState) -> None:
        """A checkpoint of this state is to be made: by whoever asks next, or on the way back to a
        critic that is lost."""
        with self._recovering:
            self._saving = state

    def begin_checkpoint(self, connection: Connection, timeout_s: float, instance: str) -> None:
        """Have the critic begin to write the checkpoint, unless it was made when the critic was
        brought back."""
        if self._saving is not None:
            self._save(connection, timeout_s, "begin_checkpoint", self._saving, instance)

    def finish_checkpoint(self, connection: Connection, timeout_s: float, instance: str) -> None:
        """Have the critic finish the checkpoint, unless it was made when the critic was brought
        back."""
        saving = self._saving
        if saving is None:
            return
        answer = connection.control(timeout_s, "finish_checkpoint", instance=instance)
        if answer["finished"] != saving.step:
            raise connection.error(
                "CheckpointLost",
                f"expected checkpoint {saving.step} to be finished, got {answer['finished']}",
            )
        with self._recovering:
            is_followed = self._phase is Phase.FOLLOWING and self._instance == instance
            if self._saving is not None and not is_followed:  # and may be half made again by now
                raise TransportError(
                    "critic",
                    connection.address,
                    "Unreachable",
                    f"the server was lost while it finished checkpoint {saving.step}",
                )
            self._saving = None

    def _enter(self, phase: Phase, instance: str | None = None) -> None:
        with self._moving:
            self._phase = phase
            self._instance = self._instance if instance is None else instance

    def _restore(self, connection: Connection, state: Mapping[str, Any]) -> int:
        """Restore the newest base that the critic can; the number of the next update after it."""
        refusals = []
        for base in reversed(self._bases):
            if not self._journal.covers(base.updates, self._applied - 1):
                refusals.append(
                    f"updates {base.updates} to {self._applied - 1} are not in the journal"
                )
                break
            problem = self._problem_with(connection, base, state)
            if problem is None:
                return base.updates
            refusals.append(problem)
        why = "; ".join(refusals)
        raise AlignerError(
            f"the critic at {connection.address} cannot be restored to its state after"
            f" {self._applied} updates: {why}"
        )

    def _problem_with(
        self, connection: Connection, base: CriticState, state: Mapping[str, Any]
    ) -> str | None:
        """Have the critic restore a base; what is wrong with the base where that fails."""
        if base.step is None:
            got = state["sequence_number"] + 1
            return f"{got} updates are already applied; restart the critic" if got else None
        try:
            known = {name: state[name] for name in ("instance", "sequence_number")}
            restored = connection.control(
                self._timeout_s, "restore", step=base.step, run_id=str(self._run), **known
            )
        except RemoteError as error:
            if error.kind not in ("AlignerError", "DamagedError", "SequenceError"):
                raise
            return error.message
        got = restored["sequence_number"] + 1
        if got != base.updates:
            return (
                f"the critic in checkpoint {base.step} has applied {got} updates, but the policy"
                f" was saved after {base.updates}"
            )
        return None

    def _replay(self, connection: Connection, first: int) -> None:
        """Send the journal's updates from `first` on, and make the checkpoint that was being
        written on the way."""
        if first < self._applied:
            _log.info("critic: replaying updates %d to %d", first, self._applied - 1)
        for number in range(first, self._applied + 1):
            if self._saving is not None and self._saving.updates == number:
                self._save(connection, self._timeout_s, "checkpoint", self._saving, self._instance)
                self._saving = None
            if number < self._applied:
                update = self.numbered(number, self._journal.read(number))
                connection.infer(
                    CRITIC_TRAIN,
                    for_instance(CRITIC_TRAIN, update, self._instance),
                    self._timeout_s,
                )

    def _save(
        self, connection: Connection, timeout_s: float, op: str, state: CriticState, instance: str
    ) -> None:
        """Have the critic save itself, which must be in that state."""
        order = {
            "step": state.step,
            "sequence_number": state.updates - 1,
            "run_id": str(self._run),
            "instance": instance,
        }
        connection.control(timeout_s, op, **order)


def for_instance(
    endpoint: EndpointSpec, arrays: Mapping[str, NDArray], instance: str
) -> dict[str, NDArray]:
    """A request that only that start of the server is to answer."""
    rows = (arrays["tokens"].shape[0], 1) if endpoint.batching else (1,)
    return {**arrays, "instance": np.full(rows, instance.encode(), dtype=object)}


T = TypeVar("T")


class CriticClient(RemoteClient):
    """The critic, which computes in the order of the calls: values follow the updates asked for
    before them, and come before those asked for after them.

    Updates are numbered and written to the journal before they are sent. A critic that was started
    anew is brought back first, as `CriticRecovery` does it. Whoever waits for an answer notices
    nothing but the time.
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
        """`run` is the trainer that speaks; `timeout_s` is a request's deadline, retries and the
        critic's restart included.

        Each step of bringing the critic back, a restore or a replayed update, has a deadline of its
        own.
        """
        super().__init__("critic", [endpoint], access, timeout_s, max_batch_size)
        self._journal = journal
        self._recovery = CriticRecovery(run, journal, timeout_s)
        self._updates = 0  # asked for
        self._before_update: list[Future[Any]] = []  # what was asked for since the last update
        self._last_update: Future[Any] | None = None
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="critic-updates")

    def start(self, bases: Sequence[CriticState] = (INITIAL,)) -> None:
        """Bring the critic to the last of these states, from an earlier one and the journal where
        it has to be.

        Raises AlignerError when that cannot be done: the critic belongs to another run, or its
        checkpoint to another step.
        """
        self._updates = bases[-1].updates
        self._recovery.start(bases)
        self._followed(lambda connection, left, instance: None)
        self.keep(bases)  # not before: what a start that failed has left there may repair it

    def values(self, tokens: Tensor, lengths: Tensor) -> RemoteFuture[Tensor]:
        """float32 [B, S] of right-padded tokens int64 [B, S] and lengths int64 [B]; 0 beyond the
        longest sequence."""
        return self._ask(CRITIC_INFER, tokens, lengths)["values"]

    def values_and_scores(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RemoteFuture[Tensor], RemoteFuture[Tensor]]:
        """As `values`, and scores as `scores_in` has them, of a critic that serves the reward too;
        one request for both."""
        answers = self._ask(CRITIC_INFER_WITH_REWARD, tokens, lengths, prompt_lengths, metadata)
        return answers["values"], answers["rewards"]

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> RemoteFuture[dict[str, float]]:
        """One optimizer step on tokens int64 [B, S] and [B, S-1] targets; the server's
        statistics."""
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
        """Begin to save the critic as it is after the updates asked for so far; further requests
        may follow at once."""
        if self._last_update is not None:
            wait([self._last_update])
        saving = CriticState(step, self._updates)
        self._recovery.expect_checkpoint(saving)
        self._followed(self._recovery.begin_checkpoint)
        return saving

    def finish_checkpoint(self) -> None:
        """Return when the checkpoint that was begun is complete, made again if the critic was lost
        meanwhile."""
        self._followed(self._recovery.finish_checkpoint)

    def keep(self, bases: Sequence[CriticState]) -> None:
        """Bring a lost critic back from these states from now on, newest last; forget the updates
        before them."""
        self._recovery.keep(bases, self._updates)

    def close(self) -> None:
        """See `RemoteClient`."""
        super().close()
        self._ordered.shutdown()

    def _ask(
        self, endpoint: EndpointSpec, tokens: Tensor, lengths: Tensor, *responses: Any
    ) -> dict[str, RemoteFuture[Tensor]]:
        """The endpoint's outputs for these rows, after the updates asked for so far."""
        futures: dict[str, RemoteFuture[Tensor]] = {
            spec.name: RemoteFuture(self._outstanding)
            for spec in endpoint.outputs
            if not spec.optional
        }
        requests = self._row_requests(tokens, lengths, self._updates - 1, *responses)
        after = self._last_update

        def answer() -> None:
            try:
                if after is not None:
                    wait([after])
                outputs, scores = {"values": torch.zeros(tokens.shape)}, []
                for rows, arrays in requests:
                    got, _ = self._answered(endpoint, arrays)
                    outputs["values"][rows, : got["values"].shape[1]] = torch.from_numpy(
                        got["values"].copy()
                    )
                    if "rewards" in got:
                        scores.append(scores_in(got))
                if scores:
                    outputs["rewards"] = torch.cat(scores)
            except BaseException as error:
                for future in futures.values():
                    future.set_exception(error)
            else:
                for name, future in futures.items():
                    future.set_result(outputs[name])

        self._parallel.submit(answer)
        self._before_update.append(futures["values"])
        return futures

    def _train(
        self, number: int, arrays: Mapping[str, NDArray], earlier: Sequence[Future[Any]]
    ) -> dict[str, float]:
        wait(earlier)
        self._journal.append(number, arrays)
        answer, instance = self._answered(CRITIC_TRAIN, self._recovery.numbered(number, arrays))
        self._recovery.record(number, instance)
        return json.loads(array_text(answer["stats"]))

    def _answered(
        self, endpoint: EndpointSpec, arrays: Mapping[str, NDArray]
    ) -> tuple[dict[str, NDArray], str]:
        """The answer of a critic in the right state, and which start of the server it was."""

        def attempt(
            connection: Connection, left: float, instance: str
        ) -> tuple[dict[str, NDArray], str]:
            return (
                connection.infer(endpoint, for_instance(endpoint, arrays, instance), left),
                instance,
            )

        return self._followed(attempt)

    def _followed(self, attempt: Callable[[Connection, float, str], T]) -> T:
        """`attempt`'s result, given a connection, the seconds left and the start of the critic that
        it is to name."""

        def once(connection: Connection, left: float) -> T:
            try:
                return attempt(connection, left, self._recovery.follow(connection))
            except TransportError:
                self._recovery.lose()
                raise
            except RemoteError as error:
                if error.kind != "InstanceError":
                    raise
                self._recovery.lose()
                raise TransportError(error.role, error.address, error.kind, error.message) from None

        return self._retried(once)
