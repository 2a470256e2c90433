"""What happens when the critic is lost: it is found again, restored and given the updates that it
lacks."""

import enum
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aligner.errors import AlignerError
from aligner.servers.connection import Connection, RemoteError, TransportError
from aligner.servers.critic_updates import INITIAL, CriticState, RunId, UpdateJournal
from aligner.servers.wire_protocol import CRITIC_TRAIN, EndpointSpec, text_array

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
