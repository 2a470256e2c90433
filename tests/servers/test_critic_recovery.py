"""Transitions between the phases of critic recovery, with a critic that counts its updates."""

from __future__ import annotations

import numpy as np
import pytest

from aligner.servers.critic_client import CriticRecovery, CriticState, Phase, RunId, UpdateJournal
from aligner.servers.remote_client import TransportError

TOKENS = {"tokens": np.zeros((1, 2), dtype=np.int64)}


class Critic:
    """A connection to a critic that counts its starts, updates and requests."""

    address = "here"

    def __init__(self):
        self.start, self.updates, self.asked = 0, 0, []
        self.checkpoints, self.fails_at = {}, None

    def start_again(self):
        self.start, self.updates = self.start + 1, 0

    def _asked(self, *request):
        self.asked.append(request)
        if self.fails_at == request:
            self.fails_at = None
            raise TransportError("critic", self.address, "Unreachable", "gone")

    def control(self, timeout_s, op, step=None, instance=None, **arguments):
        self._asked(op, *(() if step is None else (step,)))
        if op in ("checkpoint", "begin_checkpoint"):
            self.checkpoints[step] = self.updates
        if op == "restore":
            self.updates = self.checkpoints[step]
        return {
            "instance": f"start {self.start}",
            "sequence_number": self.updates - 1,
            "finished": max(self.checkpoints, default=None),
        }

    def infer(self, endpoint, arrays, timeout_s):
        number = int(arrays["sequence_number"][0])
        self._asked("train", number)
        assert arrays["instance"][0] == f"start {self.start}".encode() and number == self.updates
        self.updates += 1
        return {}


@pytest.fixture
def critic():
    return Critic()


@pytest.fixture
def recovery(tmp_path, critic):
    """Follows a critic with five applied updates and a checkpoint after the second update."""
    journal = UpdateJournal(tmp_path)
    recovery = CriticRecovery(RunId("run"), journal, 1.0)
    recovery.start([CriticState(None, 0)])
    start = recovery.ensure_up_to_date(critic)
    for number in range(5):
        if number == 2:
            critic.checkpoints[7] = 2
            recovery.set_recovery_points([CriticState(7, 2)], number)
        journal.append(number, TOKENS)
        critic.updates += 1
        recovery.record(number, start)
    critic.asked.clear()
    return recovery


def test_reconnected_critic_is_followed_without_replay(recovery, critic):
    recovery.mark_lost()
    assert recovery._phase is Phase.LOST
    assert recovery.ensure_up_to_date(critic) == "start 0" and recovery._phase is Phase.UP_TO_DATE
    assert recovery.ensure_up_to_date(critic) == "start 0" and critic.asked == [("version",)]


def test_restarted_critic_is_restored_and_replayed(recovery, critic):
    critic.start_again()
    recovery.mark_lost()
    assert recovery.ensure_up_to_date(critic) == "start 1" and critic.updates == 5
    assert critic.asked == [("version",), ("restore", 7), ("train", 2), ("train", 3), ("train", 4)]


@pytest.mark.parametrize(
    ("broken", "phase", "rest"),
    [
        (
            ("restore", 7),
            Phase.RESTORING,
            [("restore", 7), ("train", 2), ("train", 3), ("train", 4)],
        ),
        (("train", 3), Phase.REPLAYING, [("train", 3), ("train", 4)]),
    ],
    ids=["restore", "replay"],
)
def test_interrupted_recovery_resumes_unless_critic_restarts(recovery, critic, broken, phase, rest):
    critic.start_again()
    recovery.mark_lost()
    for start in ("start 1", "start 2"):
        critic.fails_at = broken
        with pytest.raises(TransportError):
            recovery.ensure_up_to_date(critic)
        recovery.mark_lost()
        assert recovery._phase is phase
        critic.asked.clear()
        if start == "start 1":
            critic.start_again()  # in the second iteration, the same start answers again
    assert (
        recovery.ensure_up_to_date(critic) == "start 2"
        and critic.asked == [("version",), *rest]
        and critic.updates == 5
    )


def test_update_answered_before_restart_is_replayed(recovery, critic):
    recovery._journal.append(5, TOKENS)
    # The critic restarts after its answer. Another request notices the restart before the answer
    # is recorded.
    critic.start_again()
    recovery.mark_lost()
    recovery.ensure_up_to_date(critic)
    recovery.record(5, "start 0")
    assert recovery._phase is Phase.REPLAYING
    critic.asked.clear()
    assert recovery.ensure_up_to_date(critic) == "start 1" and critic.asked == [
        ("version",),
        ("train", 5),
    ]
    recovery.record(5, "start 1")
    assert recovery._phase is Phase.UP_TO_DATE


def test_unfinished_checkpoint_is_written_again_after_replay(recovery, critic):
    recovery.expect_checkpoint(CriticState(9, 5))
    recovery.begin_checkpoint(critic, 1.0, "start 0")
    critic.start_again()
    del critic.checkpoints[9]
    with pytest.raises(Exception, match="CheckpointLost"):
        critic.make_error = lambda kind, message: TransportError(
            "critic", critic.address, kind, message
        )
        recovery.finish_checkpoint(critic, 1.0, "start 0")
    recovery.mark_lost()
    recovery.ensure_up_to_date(critic)
    assert critic.asked[-1] == ("checkpoint", 9) and critic.checkpoints[9] == 5
    asked = len(critic.asked)
    recovery.finish_checkpoint(critic, 1.0, "start 1")
    assert len(critic.asked) == asked  # the checkpoint is complete already
