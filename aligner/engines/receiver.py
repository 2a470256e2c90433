"""An engine in a world of its own: how the trainer's weights reach it."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aligner.engines.formats import WeightFormat
from aligner.engines.protocol import GenerationEngine, InFlight
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table
from aligner.resharding.link import Link
from aligner.resharding.plan import TransferPlan, plan_resharding
from aligner.resharding.publisher import Publisher
from aligner.resharding.update import WeightUpdate
from aligner.schema import Config


def plan_between_worlds(config: Config, shape: ModelShape, to: WeightFormat) -> TransferPlan:
    """The plan from the trainer's ranks to the generator's, which are counted behind them."""
    trainer = config.actor.parallel
    return plan_resharding(
        weight_table(shape),
        shape.num_layers,
        trainer,
        to.layout,
        first_engine_rank=trainer.ranks,
        itemsize=to.dtype.itemsize,
    )


class WeightReceiver:
    """One rank's end of the way from the trainer's weights to an engine that is a role of its own."""

    def __init__(self, config: Config, shape: ModelShape, engine: GenerationEngine, rank: int, device: torch.device) -> None:
        self._settings, self._engine, self._device = config.engine, engine, device
        self._format = WeightFormat(engine.weight_layout, engine.weight_dtype, engine.group_bytes)
        self._plan = plan_between_worlds(config, shape, self._format)
        self._rank = config.actor.parallel.ranks + rank
        self._publisher: Publisher | None = None

    def connect(self, host: str, port: int, generation: int) -> None:
        """Join the trainer's ranks in a link, over the store that they host. Collective.

        Raises AlignerError where the store or a rank does not answer within `engine.update_timeout_s`.
        """
        timeout = timedelta(seconds=self._settings.update_timeout_s)
        try:
            store = TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise AlignerError(f"the trainer's store at {host}:{port} does not answer: {error}") from error
        link = Link(store, self._rank, self._plan.labels, timeout=timeout, device=self._device, generation=generation)
        self._publisher = Publisher(
            self._plan,
            link,
            read=None,
            begin_update=self._begin_update,
            dtype=self._format.dtype,
            bucket_bytes=self._settings.bucket_mib << 20,
            verify_every=self._settings.verify_every,
            group_bytes=self._format.group_bytes,
        )

    def receive(self, version: int) -> None:
        """Take the weights that the trainer publishes as `version`. Collective, with the trainer's ranks."""
        if self._publisher is None:
            raise AlignerError("the generator is not connected to the trainer: connect comes first")
        self._publisher.publish(version)

    def _begin_update(self, version: int) -> WeightUpdate:
        return self._engine.begin_update(version, cast(InFlight, self._settings.in_flight))
