"""Where ranks that look for each other listen."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from aligner.errors import AlignerError
from aligner.resharding.rank_store import open_store, world_store
from tests import other_user
from tests.resharding import jobs
from tests.worker_pool import WorkerPool, free_port

TIMEOUT = timedelta(seconds=20)


def listeners() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {
        (entry.laddr.ip, entry.laddr.port) for entry in found if entry.status == psutil.CONN_LISTEN
    }


def elsewhere() -> list[str]:
    """The machine's addresses but for loopback."""
    found = [
        one.address
        for all_ in psutil.net_if_addrs().values()
        for one in all_
        if one.family == socket.AF_INET
    ]
    return [address for address in found if not address.startswith("127.")]


def test_the_ranks_of_a_local_world_listen_on_loopback_alone(pool: WorkerPool) -> None:
    found = [
        address
        for rank in pool.run(jobs.where_a_world_listens, 2, free_port(), fresh=True)
        for address in rank
    ]
    # the store, and gloo on each rank
    assert {address for address, _ in found} == {"127.0.0.1"} and len(found) >= 3, found


def test_a_rank_that_is_alone_has_no_store_to_listen(pool: WorkerPool) -> None:
    port = free_port()
    (found,) = pool.run(jobs.where_a_world_listens, 1, port, fresh=True)
    assert port not in {taken for _, taken in found} and {address for address, _ in found} <= {
        "127.0.0.1"
    }


@pytest.mark.promise("complete-rank-group-is-closed")
@other_user.needs_root
def test_complete_group_accepts_no_process(pool: WorkerPool) -> None:
    reached = pool.run(
        jobs.who_reaches_a_world, 2, free_port(), ["127.0.0.1", *elsewhere()], fresh=True
    )[0]
    assert reached == {"another user": [], "this user": []}


def test_a_world_with_someone_else_inside_does_not_begin(pool: WorkerPool) -> None:
    port = free_port()
    told = pool.run(jobs.join_with_a_stranger, 2, port, fresh=True)
    assert re.search(
        rf"store at 127.0.0.1:{port} has 3 connections for 2 ranks: another client has connected",
        told[0],
    )
    assert told[1] != "joined"


@other_user.needs_root
def test_another_user_reaches_an_open_store_over_loopback_alone() -> None:
    store = open_store("127.0.0.1", TIMEOUT)
    assert other_user.connects("127.0.0.1", store.port), "docs/running.md says so"
    assert not [address for address in elsewhere() if other_user.connects(address, store.port)]


def test_an_open_store_listens_where_it_is_told_to_and_its_end_ends_that() -> None:
    before = listeners()
    store = open_store("127.0.0.1", TIMEOUT)
    assert listeners() - before == {("127.0.0.1", store.port)}
    assert TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT).add("key", 2) == 2
    del store
    assert listeners() <= before


def test_an_address_that_is_taken_or_another_machines_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
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
