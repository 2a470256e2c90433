"""The policy's weights to wherever the engine is."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aligner.config.model_shape import ModelShape
from aligner.config.schema import Config
from aligner.data.collectives import broadcast_json
from aligner.engines.protocol import GenerationEngine
from aligner.engines.receiver import plan_between_worlds
from aligner.megatron.policy import Policy
from aligner.megatron.world import World
from aligner.resharding.link import Link
from aligner.resharding.plan import plan_resharding
from aligner.resharding.publisher import Publisher
from aligner.resharding.update import WeightUpdate
from aligner.rollout.services import together
from aligner.servers.generator_client import GeneratorClient


class Publishes(Protocol):
    """What takes the policy's weights into the engine."""

    def publish(self, version: int) -> object:
        """Publish the weights as `version`; every rank of the trainer calls it. Raises AlignerError on every rank."""
        ...


def build_colocated_publisher(
    config: Config, shape: ModelShape, world: World, policy: Policy, engine: GenerationEngine
) -> Publisher:
    """To the engine on the trainer's own ranks."""
    weights = policy.runner.weights

    def begin_update(version: int) -> WeightUpdate:
        engine.wake()
        return engine.begin_update(version)

    itemsize = engine.weight_dtype.itemsize
    plan = plan_resharding(weights.table, shape.num_layers, world.layout, engine.weight_layout, itemsize=itemsize)
    return Publisher(
        plan,
        Link.of_world(plan.labels, timeout=timedelta(seconds=config.engine.update_timeout_s), device=world.device),
        read=weights.read,
        begin_update=begin_update,
        dtype=engine.weight_dtype,
        bucket_bytes=config.engine.bucket_mib << 20,
        verify_every=config.engine.verify_every,
        group_bytes=engine.group_bytes,
        copied=weights.copied,
    )


class RemotePublisher:
    """To the generator role, shard to shard; joined with its ranks at the first publish, over a store that rank 0 hosts."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        world: World,
        policy: Policy,
        dtype: torch.dtype,
        client: GeneratorClient | None,
    ) -> None:
        """`client` is rank 0's; `dtype` is what the generator's weights are."""
        self._settings, self._world, self._client, self._dtype = config.engine, world, client, dtype
        self._weights = policy.runner.weights
        self._plan = plan_between_worlds(config, shape, dtype.itemsize)
        self._store: TCPStore | None = None
        self._publisher: Publisher | None = None

    def publish(self, version: int) -> None:
        """As `Publishes`; returns once the generator serves them."""
        if self._publisher is None:
            self._publisher = self._connect()
        received = self._client.receive(version) if self._client is not None else None
        self._publisher.publish(version)
        together(lambda: None if received is None else received.result())

    def _connect(self) -> Publisher:
        settings = self._settings
        timeout = timedelta(seconds=settings.update_timeout_s)
        host, is_host = os.environ["MASTER_ADDR"], self._client is not None
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout) if is_host else None
        port = broadcast_json(None if store is None else store.port)
        self._store = store or TCPStore(host, port, is_master=False, timeout=timeout)
        joined = self._client.connect(host, port, generation=0) if self._client is not None else None
        link = Link(
            self._store,
            self._world.rank,
            self._plan.labels,
            timeout=timeout,
            device=self._world.device,
            store_host=self._plan.labels[0],
        )
        together(lambda: None if joined is None else joined.result())
        return Publisher(
            self._plan,
            link,
            read=self._weights.read,
            begin_update=None,
            dtype=self._dtype,
            bucket_bytes=settings.bucket_mib << 20,
            verify_every=settings.verify_every,
            copied=self._weights.copied,
        )
