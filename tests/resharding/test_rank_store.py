"""Addresses on which the rendezvous store and the ranks listen, and who can connect to them."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from aligner.errors import AlignerError
from aligner.resharding.verify import open_store, world_store
from tests import other_user
from tests.resharding import jobs
from tests.worker_pool import WorkerPool, free_port

TIMEOUT = timedelta(seconds=20)


def listeners() -> set[tuple[str, int]]:
    """Return the addresses and ports on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {
        (entry.laddr.ip, entry.laddr.port) for entry in found if entry.status == psutil.CONN_LISTEN
    }


def elsewhere() -> list[str]:
    """Return the machine's IPv4 addresses except loopback."""
    found = [
        one.address
        for all_ in psutil.net_if_addrs().values()
        for one in all_
        if one.family == socket.AF_INET
    ]
    return [address for address in found if not address.startswith("127.")]


def test_local_world_listens_only_on_loopback(pool: WorkerPool) -> None:
    found = [
        address
        for rank in pool.run(jobs.world_listeners, 2, free_port(), fresh=True)
        for address in rank
    ]
    # the store, and gloo on each of the two ranks
    assert {address for address, _ in found} == {"127.0.0.1"} and len(found) >= 3, found


def test_single_rank_world_opens_no_store(pool: WorkerPool) -> None:
    port = free_port()
    (found,) = pool.run(jobs.world_listeners, 1, port, fresh=True)
    assert port not in {taken for _, taken in found} and {address for address, _ in found} <= {
        "127.0.0.1"
    }


@pytest.mark.promise("complete-rank-group-is-closed")
@other_user.needs_root
def test_complete_group_accepts_no_process(pool: WorkerPool) -> None:
    reached = pool.run(
        jobs.reachable_addresses, 2, free_port(), ["127.0.0.1", *elsewhere()], fresh=True
    )[0]
    assert reached == {"another user": [], "this user": []}


def test_world_with_foreign_connection_does_not_start(pool: WorkerPool) -> None:
    port = free_port()
    outcomes = pool.run(jobs.join_with_foreign_client, 2, port, fresh=True)
    assert re.search(
        rf"store at 127.0.0.1:{port} has 3 connections for 2 ranks: another client has connected",
        outcomes[0],
    )
    assert outcomes[1] != "joined"


@other_user.needs_root
def test_open_store_accepts_other_users_only_on_loopback() -> None:
    store = open_store("127.0.0.1", TIMEOUT)
    assert other_user.connects("127.0.0.1", store.port), "docs/running.md says so"
    assert not [address for address in elsewhere() if other_user.connects(address, store.port)]


def test_open_store_listens_until_it_is_deleted() -> None:
    before = listeners()
    store = open_store("127.0.0.1", TIMEOUT)
    assert listeners() - before == {("127.0.0.1", store.port)}
    assert TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT).add("key", 2) == 2
    del store
    assert listeners() <= before


def test_unusable_store_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            AlignerError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            world_store(0, 2, TIMEOUT)
    with pytest.raises(
        AlignerError,
        match=r"cannot listen on 192\.0\.2\.77:0: Cannot assign .*; MASTER_ADDR must be",
    ):
        open_store("192.0.2.77", TIMEOUT)
