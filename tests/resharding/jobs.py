"""Functions that a rank runs in the tests of weight sync."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
import weakref
from collections.abc import Callable, Container
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from aligner.errors import AlignerError
from aligner.megatron.world import join
from aligner.models.weight_slices import Slice, TensorSpec
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import TransferPlan, plan_resharding, plan_transfers
from aligner.resharding.transport import Link
from aligner.resharding.weight_update import PublishStats
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests import other_user
from tests.resharding.layouts import cut, tiny_shape, whole_weights
from tests.resharding.sink import Sink

TIMEOUT = timedelta(seconds=20)


def make_plan(
    trainer: ParallelConfig, engine: EngineParallelConfig, separate: bool = False, itemsize: int = 4
) -> TransferPlan:
    """Return the plan of a model with tied embeddings, which two pipeline stages hold.

    The model has experts if the trainer uses expert parallelism.
    """
    has_experts = max(trainer.expert, engine.expert) > 1
    shape = tiny_shape("mixtral" if has_experts else "llama")
    first = trainer.ranks if separate else 0
    return plan_resharding(shape, trainer, engine, first_engine_rank=first, itemsize=itemsize)


class Rank:
    """A process's publisher and engine, and the published weights; the version is their seed."""

    def __init__(
        self,
        plan: TransferPlan,
        link: Link,
        *,
        bucket_bytes: int = 1 << 14,
        verify: str = "sync",
        group_bytes: int | None = None,
        dtype: torch.dtype = torch.float32,
        sink: Sink | None = None,
        copied_names: Container[str] = (),
        publish_mode: str = "whole",
    ) -> None:
        self.plan, self.link = plan, link
        self.sink = sink or Sink(
            plan, link.rank, group_bytes, dtype, keeps=publish_mode == "changes"
        )
        self.before_read: Callable[[str], None] = lambda name: None
        self.whole: dict[str, Tensor] = {}
        self.served: dict[str, Tensor] = {}
        """Weights of the last successful weight sync."""
        self.publisher = Publisher(
            plan,
            link,
            read=self.read if link.rank in plan.source else None,
            begin_update=self.sink.begin_update if link.rank in plan.target else None,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            held_weights=self.sink if link.rank in plan.target else None,
            verify=verify,
            group_bytes=group_bytes,
            copied_names=copied_names,
            publish_mode=publish_mode,
            read_previous=lambda name: cut(self.served[name], plan.source[link.rank][name]).to(
                dtype
            ),
        )

    def read(self, name: str) -> Tensor:
        self.before_read(name)
        return cut(self.whole[name], self.plan.source[self.link.rank][name])

    def publish(self, version: int) -> PublishStats:
        self.whole = whole_weights(self.plan.table, version)
        stats = self.publisher.publish(version)
        self.served = self.whole
        return stats

    def check(self, version: int) -> None:
        """Assert that the engine serves this version, bit for bit."""
        slices = self.plan.target.get(self.link.rank, {})
        assert self.sink.version == (version if slices else None)
        whole = whole_weights(self.plan.table, version)
        for name, piece in slices.items():
            assert torch.equal(
                self.sink.front[name], cut(whole[name], piece).to(self.sink.dtype)
            ), name

    def failed_publish(self, version: int) -> dict[str, Any]:
        """Return the error of a failing publish, its seconds, and the number of engine aborts."""
        begin, aborted = time.monotonic(), self.sink.aborted
        try:
            self.publish(version)
        except AlignerError as error:
            seconds = time.monotonic() - begin
            return {"error": str(error), "seconds": seconds, "aborted": self.sink.aborted - aborted}
        raise AssertionError("it was published")


def colocated(
    trainer: ParallelConfig,
    engine: EngineParallelConfig,
    timeout: timedelta = TIMEOUT,
    **settings: Any,
) -> Rank:
    itemsize = settings.get("dtype", torch.float32).itemsize
    plan = make_plan(trainer, engine, itemsize=itemsize)
    return Rank(plan, Link.from_default_group(plan.labels, timeout=timeout), **settings)


def separate(
    trainer: ParallelConfig, engine: EngineParallelConfig, port: int, **settings: Any
) -> Rank:
    """Return a rank of one of two worlds, each with its own default group.

    `port` is the port of the store that the worlds share.
    """
    rank = dist.get_rank()
    dist.barrier()  # the default group's store ends with rank 0: all must be connected
    dist.destroy_process_group()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    role, at, size = (
        ("trainer", rank, trainer.ranks)
        if rank < trainer.ranks
        else ("engine", rank - trainer.ranks, engine.ranks)
    )
    dist.init_process_group("gloo", store=dist.PrefixStore(role, store), rank=at, world_size=size)
    plan = make_plan(trainer, engine, separate=True)
    return Rank(plan, Link(store, rank, plan.labels, timeout=TIMEOUT), **settings)


def publish_twice(*args: Any, **settings: Any) -> dict[str, int]:
    """Publish two versions, and compare the engine's weights with slices of the whole tensors."""
    rank = (separate if len(args) == 3 else colocated)(*args, **settings)
    for version in (1, 2):
        stats = rank.publish(version)
        rank.check(version)
    world = dist.get_world_size()
    # no rank exits and closes its store before the other ranks are done
    rank.link.all_reduce(torch.zeros(1))
    assert rank.sink.aborted == 0
    held = sum(tensor.nbytes for tensor in rank.sink.front.values())
    assert (
        rank.plan.itemsize
        * sum(one.numel for one in rank.plan.transfers if one.target == rank.link.rank)
        == held
    )
    return {"staging": stats.staging_bytes, "world": world}


class CopyingRank(Rank):
    """A rank that copies each tensor it reads, as for parts of a fused parameter.

    Counts the bytes of the copies that exist at the same time.
    """

    alive = most_alive = 0

    def read(self, name: str) -> Tensor:
        copy = super().read(name).numpy().copy()
        self._count(copy.nbytes)
        weakref.finalize(copy, self._count, -copy.nbytes)  # the tensor's memory refers to the array
        return torch.from_numpy(copy)

    def _count(self, nbytes: int) -> None:
        self.alive += nbytes
        self.most_alive = max(self.most_alive, self.alive)


def send_halves_of_copies() -> tuple[int, int]:
    """Send half of each of twelve copied tensors of 1 MiB from one rank to another.

    Returns the largest number of bytes of copies at the same time, and the staging bytes.
    """
    table = tuple(TensorSpec(f"w{index}", (512, 512), 0) for index in range(12))
    held = {spec.name: Slice(spec.name, None, 0, 0) for spec in table}
    wanted = {spec.name: Slice(spec.name, 0, 0, 256) for spec in table}
    plan = plan_transfers(table, {0: held}, {1: wanted})
    rank = CopyingRank(
        plan,
        Link.from_default_group(plan.labels, timeout=TIMEOUT),
        bucket_bytes=8 << 20,
        copied_names=held,
    )
    stats = rank.publish(1)
    rank.check(1)
    dist.barrier()
    return rank.most_alive, stats.staging_bytes


class FaultyMemory(dict[str, Tensor]):
    """Views of which one always has a wrong last element."""

    bad = ""

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if name == self.bad:
            tensor.view(-1)[-1] = 12345.0
        return tensor


def fail_commit() -> None:
    raise OSError("the old weights can not be freed")


def break_one_rank(kind: str, rank: Rank) -> None:
    """Let this rank's next publish fail."""
    sink = rank.sink
    if kind == "read":

        def fail(name: str) -> None:
            if name == "model.norm.weight":
                raise OSError("the disk is gone")

        rank.before_read = fail
    elif kind == "open":
        sink.open = sink.begin_update(7)
    elif kind == "late":
        rank.before_read = lambda name: time.sleep(3 if name == "model.norm.weight" else 0)
    elif kind == "fit":
        del sink.shapes["model.embed_tokens.weight"]
        sink.shapes["model.norm.weight"] = (17,)
        sink.shapes["model.layers.3.self_attn.o_proj.weight"] = (3, 3)


def fail_once(kind: str, at: int, timeout_s: float) -> dict[str, Any]:
    """Publish version 1; fail version 2 on one rank over a new link; try version 3 over the failed
    link; publish version 4 over another link."""
    rank = colocated(ParallelConfig(tensor=2, pipeline=2), EngineParallelConfig(tensor=2, data=2))
    rank.publish(1)
    rank.check(1)
    dist.barrier()
    link = Link.from_default_group(
        rank.plan.labels, timeout=timedelta(seconds=timeout_s), generation=1
    )
    rank = Rank(rank.plan, link, sink=rank.sink)
    before = {name: tensor.clone() for name, tensor in rank.sink.front.items()}
    if rank.link.rank == at:
        break_one_rank(kind, rank)
    result = rank.failed_publish(2)
    assert rank.sink.version == 1
    assert all(torch.equal(rank.sink.front[name], tensor) for name, tensor in before.items())
    again = rank.failed_publish(3)
    assert again["seconds"] < 1
    dist.barrier()
    link = Link.from_default_group(rank.plan.labels, timeout=TIMEOUT, generation=2)
    fresh = Rank(rank.plan, link)
    fresh.publish(4)
    fresh.check(4)
    dist.barrier()
    return result | {"again": again["error"]}


def connect_slowly() -> tuple[float, float]:
    """Return the times at which this rank was connected and its link was usable.

    Rank 0 takes longer to connect.
    """
    connect = Link._connect
    connected_at = 0.0

    def slow_connect(link: Link) -> Any:
        nonlocal connected_at
        group = connect(link)
        time.sleep(0.5 if link.rank == 0 else 0)
        connected_at = time.monotonic()
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "_connect", slow_connect)
        Link.from_default_group(["zero", "one"], timeout=TIMEOUT)
    usable_at = time.monotonic()
    dist.barrier()
    return connected_at, usable_at


def fail_to_commit(at: int) -> dict[str, Any]:
    """Let the commit of version 2 fail on one rank; publish version 3 to the same engines over
    another link."""
    rank = colocated(ParallelConfig(tensor=2), EngineParallelConfig(data=2))
    rank.publish(1)
    if rank.link.rank == at:
        rank.sink.before_commit = fail_commit
    result = rank.failed_publish(2)
    rank.check(1 if rank.link.rank == at else 2)
    rank.sink.before_commit = lambda: None
    dist.barrier()
    rank = Rank(
        rank.plan,
        Link.from_default_group(rank.plan.labels, timeout=TIMEOUT, generation=1),
        sink=rank.sink,
    )
    rank.publish(3)
    rank.check(3)
    dist.barrier()
    return result


def publish_to_faulty_memory(at: int, name: str, group_bytes: int | None) -> dict[str, Any]:
    """Publish to an engine rank in whose memory one tensor always has a wrong element; return the
    error, the number of aborts, and the engine's version afterwards."""
    rank = colocated(
        ParallelConfig(tensor=2, pipeline=2),
        EngineParallelConfig(tensor=2, data=2),
        group_bytes=group_bytes,
    )
    rank.publish(1)
    if rank.link.rank == at:
        rank.sink.memory = FaultyMemory
        FaultyMemory.bad = name
    result = rank.failed_publish(2)
    dist.barrier()
    return result | {"version": rank.sink.version}


def publish_after_flipped_bit(at: int, name: str, mode: str) -> dict[str, Any]:
    """Flip one bit of one tensor that an engine rank holds between two weight syncs; return the
    error of the second one, and how many updates were aborted."""
    rank = colocated(
        ParallelConfig(tensor=2, pipeline=2),
        EngineParallelConfig(tensor=2, data=2),
        publish_mode=mode,
    )
    rank.publish(1)
    if rank.link.rank == at:
        rank.sink.front[name].view(torch.int32).flatten()[-1] ^= 1
    result = rank.failed_publish(2)
    dist.barrier()
    return result


def publish_to_stale_engine(at: int) -> dict[str, Any]:
    """Publish two versions; the second commit of one engine rank keeps the old weights. Return the
    error, and the version and the reason that the engine has afterwards."""
    rank = colocated(ParallelConfig(tensor=2), EngineParallelConfig(data=2))
    rank.publish(1)
    old = dict(rank.sink.front)

    def keep_old() -> None:
        rank.sink.open._loaded = old

    if rank.link.rank == at:
        rank.sink.before_commit = keep_old
    result = rank.failed_publish(2)
    dist.barrier()
    return result | {"version": rank.sink.version, "discarded": rank.sink.discarded}


def count_verifications(verify: str, publishes: int) -> list[bool]:
    rank = colocated(ParallelConfig(data=2), EngineParallelConfig(data=2), verify=verify)
    verified = [rank.publish(version).verify_seconds is not None for version in range(publishes)]
    dist.barrier()
    return verified


def refuse_construction() -> list[str]:
    """Return the errors of publishers that do not match their plan or link."""
    plan = make_plan(ParallelConfig(data=2), EngineParallelConfig(data=2))
    link = Link.from_default_group(plan.labels, timeout=TIMEOUT)
    larger = make_plan(ParallelConfig(data=2, tensor=2), EngineParallelConfig(data=2))
    cases: list[dict[str, Any]] = [
        {"plan": plan, "read": None, "begin_update": None, "bucket_bytes": 1 << 14},
        {"plan": larger, "dtype": torch.bfloat16, "bucket_bytes": 1 << 14},
        {"plan": plan, "bucket_bytes": 100},
    ]
    errors = []
    for case in cases:
        keywords = {
            "read": lambda name: torch.zeros(1),
            "begin_update": Sink(plan, link.rank).begin_update,
            "held_weights": None,
            "verify": "never",
        }
        try:
            Publisher(**{"link": link, **keywords, **case})
        except AlignerError as error:
            errors.append(str(error))
    dist.barrier()
    return errors


def connect_alone(timeout_s: float) -> str:
    """Return the error of the first of three ranks when the others do not connect."""
    if dist.get_rank() == 0:
        try:
            Link.from_default_group(
                ["trainer rank 0", "trainer rank 1", "engine rank 0"],
                timeout=timedelta(seconds=timeout_s),
            )
        except AlignerError as error:
            return str(error)
    return ""


def _listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {
        (entry.laddr.ip, entry.laddr.port) for entry in found if entry.status == psutil.CONN_LISTEN
    }


def _leave_pool_world(port: int) -> None:
    """Leave the worker pool's world; the next world's store is to listen on `port`."""
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    os.environ["MASTER_PORT"] = str(port)


def world_listeners(port: int) -> list[tuple[str, int]]:
    """Join a world as a role's rank does; return the addresses and ports on which this rank
    listens for it."""
    _leave_pool_world(port)
    before = _listening()
    join(int(os.environ["WORLD_SIZE"]), 20)
    dist.all_reduce(torch.ones(1))
    return sorted(_listening() - before)


def reachable_addresses(port: int, addresses: list[str]) -> dict[str, list[str]]:
    """Return the addresses at which each user can connect to the store of a complete world.

    The world must keep working after the attempts.
    """
    _leave_pool_world(port)
    join(2, 20)
    reached: dict[str, list[str]] = {"another user": [], "this user": []}
    for address in addresses if dist.get_rank() == 0 else []:
        if other_user.connects(address, port):
            reached["another user"].append(address)
        with contextlib.suppress(OSError), socket.create_connection((address, port), 1):
            reached["this user"].append(address)
    group = dist.new_group(backend="gloo")  # new groups use the closed store
    dist.all_reduce(torch.ones(1), group=group)
    return reached


def join_with_foreign_client(port: int) -> str:
    """Return the error of joining a world to whose store a foreign client connects before all
    ranks; "joined" without error."""
    _leave_pool_world(port)
    try:
        if os.environ["RANK"] == "1":
            with _connected(port):
                join(2, 3)
        else:
            join(2, 3)
    except (AlignerError, dist.DistError) as error:
        return str(error)
    return "joined"


def _connected(port: int) -> socket.socket:
    """Return a connection to the port as soon as a process listens on it."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.05)
    raise AssertionError("nothing listens")
