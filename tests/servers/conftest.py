from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.roles import RunningRole, stop_all


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningRole]]:
    """A critic with two ranks and a function reward server, which require the run's key; and a
    combined server that is open to foreign clients."""
    directory = tmp_path_factory.mktemp("servers")
    running = {
        "critic": RunningRole("critic", directory, ranks=2, ACCEPT_UNNUMBERED="1"),
        "reward": RunningRole("reward", directory),
        "open": RunningRole("combined", directory / "open", GUARD="none", ACCEPT_UNNUMBERED="1"),
    }
    try:
        for role in running.values():
            role.wait_ready()
        yield running
    finally:
        stop_all(running.values())


@pytest.fixture
def critic(servers: dict[str, RunningRole]) -> RunningRole:
    return servers["critic"]


@pytest.fixture
def reward(servers: dict[str, RunningRole]) -> RunningRole:
    return servers["reward"]


@pytest.fixture
def open_critic(servers: dict[str, RunningRole]) -> RunningRole:
    """A combined critic and reward server that requires no key and no sequence numbers."""
    return servers["open"]
