"""The policy's weights to the generator role, beside training."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aligner.data.collectives import broadcast_json
from aligner.engines.formats import weight_format
from aligner.engines.protocol import SpanListener
from aligner.engines.receiver import plan_between_worlds
from aligner.errors import AlignerError
from aligner.megatron.policy import Policy
from aligner.megatron.world import World
from aligner.models.shape import ModelShape
from aligner.resharding.link import Link
from aligner.resharding.publisher import Publisher
from aligner.resharding.snapshots import Snapshots
from aligner.rollout.services import together
from aligner.schema import Config
from aligner.servers.generator_client import GeneratorClient

_log = logging.getLogger(__name__)
_FOREVER = timedelta(days=1000)
"""Who follows waits for as long as the run goes: rank 0's end, or its own, ends it."""
_END_S = 2.0
"""How long the end of a rank waits for its thread, which may be in the middle of a move that has failed elsewhere."""


class RemotePublisher:
    """To the generator role, shard to shard, from copies that each rank of the trainer keeps: training goes on meanwhile.

    Rank 0 decides what moves when, from whichever thread wants a version to serve, and announces it in a store that it
    hosts; a thread of each other rank follows. A copy is kept until a newer version serves, so that a generator that was
    lost and started again gets the version that it should have.
    """

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        world: World,
        policy: Policy,
        client: GeneratorClient | None,
        listener: SpanListener | None = None,
    ) -> None:
        """Collective. `client` is rank 0's; `listener` is told of every move."""
        self._settings, self._world, self._client = config.engine, world, client
        self._start_timeout_s, self._listener = config.server.start_timeout_s, listener
        self._timeout = timedelta(seconds=config.engine.update_timeout_s)
        self._format = weight_format(config.engine, world.device)
        self._plan = plan_between_worlds(config, shape, self._format)
        self._snapshots = Snapshots(
            policy.runner.weights.read, self._plan.source.get(world.rank, {}), self._format.dtype, device=world.device
        )
        host = os.environ["MASTER_ADDR"]
        store = None if client is None else TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._address: tuple[str, int] = host, broadcast_json(None if store is None else store.port)
        self._store = store or TCPStore(*self._address, is_master=False, timeout=self._timeout)
        self._publisher: Publisher | None = None
        """Of the link to the generator's ranks; None where it is not there, or broken."""
        self._moves = self._links = 0
        self._serving, self._wanted, self._instance = -1, -1, ""
        self._lock = threading.RLock()
        self._follower: threading.Thread | None = None
        if client is None:
            self._follower = threading.Thread(target=self._follow, name="weights", daemon=True)
            self._follower.start()
            atexit.register(self.close)  # also where the run has failed: no thread may wait when the interpreter ends

    @property
    def served(self) -> int:
        """As `Offers`; a generator that is being brought back is waited for."""
        with self._lock:
            return self._serving

    def offer(self, version: int) -> None:
        """As `Offers`: a copy in memory."""
        self._snapshots.take(version)

    def publish(self, version: int) -> None:
        """As `Publishes`."""
        self.offer(version)
        together(lambda: self.serve(version) if self._client is not None else None)

    def serve(self, version: int) -> None:
        """As `Offers`."""
        with self._lock:
            self._wanted = max(self._wanted, version)
            self._bring_up_to_date()

    def restore(self) -> int:
        """As `Offers`."""
        with self._lock:
            self._serving = -1
            self._bring_up_to_date()
            return self._serving

    def close(self) -> None:
        """As `Offers`."""
        deadline = time.monotonic() + _END_S
        while self._follower is not None and self._follower.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(dist.DistError):  # rank 0 has ended, and with it the thread
                self._client_of_store().set(self._key(self._world.rank), json.dumps({}))
            self._follower.join(0.2)

    def _bring_up_to_date(self) -> None:
        client = self._client
        assert client is not None, "rank 0 decides what moves"
        while self._serving < self._wanted:
            known = self._instance
            try:
                self._move_to(client, self._wanted)
            except AlignerError as error:
                self._publisher = None
                if not client.is_another(known or self._instance, self._start_timeout_s):
                    raise
                _log.warning("the generator was lost while weights moved, and gets them again: %s", error)

    def _move_to(self, client: GeneratorClient, version: int) -> None:
        """Have the generator take a version, over a new link where the one there was is of another start of it."""
        instance = client.instance()
        if self._publisher is None or instance != self._instance:
            self._publisher, self._instance = None, instance
            self._links += 1
            self._announce(link=self._links)
            joined = client.connect(*self._address, generation=self._links)
            _both(joined, lambda: self._act(link=self._links))
        start = time.perf_counter()
        self._announce(version=version)
        received = client.receive(version)
        received.add_done_callback(self._give_up)
        _both(received, lambda: self._act(version=version))
        self._serving = version
        if self._listener is not None:
            self._listener("publish", start, time.perf_counter())

    def _give_up(self, received: Any) -> None:
        """No rank of the trainer waits for a generator that has refused, or is gone."""
        publisher = self._publisher
        if received.exception() is not None and publisher is not None:
            with contextlib.suppress(dist.DistError):
                publisher.give_up(self._client_of_store())

    def _client_of_store(self) -> TCPStore:
        """Another one: a client that waits for a key does nothing else."""
        return TCPStore(*self._address, is_master=False, timeout=self._timeout)

    def _key(self, rank: int) -> str:
        """Of the next move, for a rank that follows."""
        return f"move/{rank}/{self._moves}"

    def _announce(self, **move: int) -> None:
        for rank in range(1, self._world.size):
            self._store.set(self._key(rank), json.dumps(move))
        self._moves += 1

    def _follow(self) -> None:
        while True:
            key = self._key(self._world.rank)
            try:
                self._store.wait([key], _FOREVER)
                move = json.loads(self._store.get(key))
            except dist.DistError:  # rank 0 has ended, and with it the run
                return
            if not move:
                return
            self._moves += 1
            try:
                self._act(**move)
            except AlignerError as error:  # rank 0 knows: the link has told it
                self._publisher = None
                _log.warning("weights did not move: %s", error)

    def _act(self, link: int | None = None, version: int | None = None) -> None:
        """This rank's part of what was announced. Collective, with the generator's ranks."""
        if link is not None:
            self._publisher = self._join(link)
        elif version is not None:
            if self._publisher is None:
                raise AlignerError("there is no link to the generator")
            self._snapshots.select(version, self._timeout.total_seconds())
            self._publisher.publish(version)
            self._snapshots.forget_below(version)

    def _join(self, generation: int) -> Publisher:
        link = Link(
            self._store,
            self._world.rank,
            self._plan.labels,
            timeout=self._timeout,
            device=self._world.device,
            generation=generation,
            store_host=self._plan.labels[0],
        )
        on_cpu = self._world.device.type == "cpu"
        return Publisher(
            self._plan,
            link,
            read=self._snapshots.read,
            begin_update=None,
            dtype=self._format.dtype,
            bucket_bytes=self._settings.bucket_mib << 20,
            verify_every=self._settings.verify_every,
            group_bytes=self._format.group_bytes,
            copied=() if on_cpu else self._plan.specs,
        )


def _both(asked: Any, act: Callable[[], None]) -> None:
    """Act while a server does what it was asked; raises what went wrong at either end."""
    problem: AlignerError | None = None
    try:
        act()
    except AlignerError as error:
        problem = error
    try:
        asked.result()
    except AlignerError as error:
        raise AlignerError(str(error) if problem is None else f"{error}\n{problem}") from error
    if problem is not None:
        raise problem
