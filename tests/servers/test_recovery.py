"""A critic that crashes and restarts behind a lossy network applies every update exactly once."""

from __future__ import annotations

import signal

import pytest
import torch

from aligner.errors import AlignerError
from aligner.placement.addresses import Endpoint
from aligner.servers.critic_client import CriticClient, CriticState, RunId, UpdateJournal
from aligner.servers.remote_client import Connection
from tests.servers.proxy import BadProxy
from tests.servers.roles import RunningRole
from tests.servers.tiny_model import TinyValueModel
from tests.worker_pool import free_port

pytestmark = pytest.mark.slow

LENGTHS = torch.full((4,), 8)


class Expected:
    """The same updates, applied to a local model."""

    def __init__(self) -> None:
        self.model = TinyValueModel()

    def update(self, number: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 64, (4, 8), generator=generator)
        return (
            tokens,
            torch.randn(4, 7, generator=generator),
            torch.zeros(4, 7),
            torch.ones(4, 7).bool(),
        )

    def train(self, number: int) -> dict[str, float]:
        return self.model.train(*self.update(number))


def check_updates(client: CriticClient, expected: Expected, numbers: range) -> None:
    """Send updates and several value requests concurrently; compare all answers bit by bit."""
    asked = []
    for number in numbers:
        before = [client.values(expected.update(number)[0], LENGTHS) for _ in range(3)]
        stats = client.train(*expected.update(number))
        asked.append((number, before, stats))
    for number, before, stats in asked:
        values = expected.model.values(expected.update(number)[0], LENGTHS)
        assert all(torch.equal(each.result(), values) for each in before)
        assert stats.result() == expected.train(number)


@pytest.fixture
def lost_critic(tmp_path):
    """A function that kills a running critic, and starts a new critic at the same address."""
    endpoint = Endpoint("127.0.0.1", free_port(), free_port(), free_port())
    roles: list[RunningRole] = []

    def start_again() -> RunningRole:
        for role in roles:
            role.kill()
        roles.append(RunningRole("critic", tmp_path, endpoint=endpoint))
        return roles[-1]

    yield start_again
    for role in roles:
        role.kill()


@pytest.mark.promise("critic-applies-each-update-once")
def test_crashed_critic_applies_each_update_once(lost_critic, tmp_path):
    role = lost_critic().wait_ready()
    through = Endpoint("127.0.0.1", free_port(), free_port(), 0)
    expected, journal = Expected(), UpdateJournal(tmp_path / "journal")
    with BadProxy(
        through.grpc, role.endpoint.grpc, seed=4, delay=0.3, double=0.06, lose=0.06, repeat=0.5
    ) as proxy:
        client = CriticClient(through, role.access, 90, RunId("run"), journal, 256)
        client.wait_ready(30)
        client.start()
        check_updates(client, expected, range(20))
        assert min(proxy.suffered.values()) >= 1, proxy.suffered

        # The critic is lost while it writes a checkpoint. Recovery writes the checkpoint again.
        saving = client.begin_checkpoint(step=3)
        check_updates(client, expected, range(20, 23))
        lost_critic()
        check_updates(client, expected, range(23, 30))
        client.finish_checkpoint()
        client.set_recovery_points([saving])
        assert not journal.has_updates(19, 19) and journal.has_updates(20, 29)
        direct = Connection("critic", role.endpoint, role.access)
        state = direct.control(10, "version")
        direct.close()
        assert (state["sequence_number"], state["version"]) == (29, 30)
        client.assert_settled()
        client.close()

        # Another trainer of the same run resumes from the same checkpoint. Before, it tries a
        # checkpoint of a policy with another number of updates, and a missing checkpoint.
        journal = UpdateJournal(tmp_path / "journal")
        client = CriticClient(through, role.access, 30, RunId("run", 1), journal, 256)
        with pytest.raises(
            AlignerError,
            match="the critic in checkpoint 3 has applied 20 updates, but the policy was saved after 21",
        ):
            client.start([CriticState(3, 21)])
        with pytest.raises(
            AlignerError,
            match=r"critic checkpoint .*step_9/critic does not exist; updates 20 to 39 are not in the journal",
        ):
            client.start([saving, CriticState(9, 40)])
        client.start([saving])
        assert not journal.has_updates(20, 20)
        client.close()
    assert role.ranks[0].returncode == -signal.SIGKILL


def test_journal_keeps_requested_updates_and_reports_damage(tmp_path):
    arrays = {"tokens": torch.arange(6).reshape(2, 3).numpy()}
    journal = UpdateJournal(tmp_path)
    for number in range(5):
        journal.append(number, arrays)
    journal.prune(1, 3)
    assert [journal.has_updates(number, number) for number in range(5)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert (journal.read(2)["tokens"] == arrays["tokens"]).all()
    (tmp_path / "update_00000002.record").write_bytes(b"\x00")
    (tmp_path / "update_00000009.tmp").write_bytes(b"half")
    with pytest.raises(AlignerError, match=r"cannot read critic update 2 from .*update_00000002"):
        journal.read(2)
    UpdateJournal(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
