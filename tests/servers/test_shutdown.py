from __future__ import annotations

import signal
import socket
import time

import pytest
import torch

from aligner.config.schema import Ports
from aligner.errors import AlignerError
from aligner.servers.client import CriticClient, RemoteError, RewardClient
from aligner.servers.host import TritonHost
from tests.servers.roles import RunningRole, stop_all
from tests.servers.test_critic_server import LENGTHS, TARGETS, TOKENS
from tests.servers.tiny_model import TinyValueModel

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """Roles to be ended by one test each, started together."""
    directory = tmp_path_factory.mktemp("shutdown")
    roles = {
        "terminated": RunningRole("critic", directory, ranks=2),
        "killed": RunningRole("critic", directory, ranks=2),
        "asked": RunningRole("reward_model", directory),
    }
    try:
        for role in roles.values():
            role.wait_ready()
        yield roles
    finally:
        stop_all(roles.values())


def ended(role: RunningRole, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while role.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not role.survivors()


def test_sigterm_ends_all_ranks_and_triton_and_unnumbered_updates_are_refused_by_default(roles):
    role = roles["terminated"]
    try:
        client = CriticClient(role.endpoint, 20, "run")
        assert client.train(*TARGETS).result()["loss"] > 0
        with pytest.raises(RemoteError, match="sequence_number: missing"):
            targets = dict(zip(("tokens", "returns", "prev_values"), (x.numpy() for x in TARGETS[:3]), strict=True))
            client._train({**targets, "mask": TARGETS[3].float().numpy()})
        client.close()
        role.note_processes()
        role.ranks[1].send_signal(signal.SIGTERM)  # only rank 0 ends the world
        time.sleep(0.5)
        assert role.ranks[1].poll() is None
    finally:
        code = role.stop(signal.SIGTERM)
    assert code == 0 and role.ranks[1].returncode == 0
    assert ended(role, 2), role.survivors()


def test_sigterm_while_triton_starts_ends_all_ranks_too(tmp_path):
    role = RunningRole("critic", tmp_path, ranks=2)
    try:
        deadline = time.monotonic() + 60
        while not any(process.name() == "tritonserver" for process in role.seen) and time.monotonic() < deadline:
            time.sleep(0.1)
            role.note_processes()
    finally:
        code = role.stop()
    assert code == 0 and role.ranks[1].returncode == 0, role.log.read_text()[-3000:]
    assert "ready at" not in role.log.read_text()
    assert ended(role, 2), role.survivors()


def test_a_killed_rank_ends_the_role_with_an_error_and_no_process_left(roles):
    role = roles["killed"]
    try:
        role.ranks[1].kill()
        client = CriticClient(role.endpoint, 20, "run")
        with pytest.raises(RemoteError):
            client.values(TOKENS, LENGTHS).result()
        client.close()
        assert role.ranks[0].wait(20) != 0
    finally:
        role.stop()
    assert ended(role, 2), role.survivors()


def test_a_reward_model_scores_the_last_token_and_stops_when_asked(roles):
    role = roles["asked"]
    try:
        client = RewardClient(role.endpoint, 20)
        expected = TinyValueModel().values(TOKENS, LENGTHS).gather(1, LENGTHS[:, None] - 1)[:, 0]
        torch.testing.assert_close(client.score(TOKENS, LENGTHS, torch.ones(3, dtype=torch.int64)).result(), expected)
        assert client.control("shutdown") == {"status": "stopping", "role": "reward"}
        client.close()
        assert role.ranks[0].wait(15) == 0
    finally:
        role.stop()
    assert ended(role, 2), role.survivors()


def test_a_port_in_use_is_named_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AlignerError, match=rf"ports.grpc={port}: cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            TritonHost("127.0.0.1", Ports(grpc=port), 16)
