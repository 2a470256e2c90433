"""The policy's weights to the engine on the trainer's own ranks."""

from __future__ import annotations

from datetime import timedelta

from aligner.engines.protocol import GenerationEngine
from aligner.megatron.policy import Policy
from aligner.megatron.world import World
from aligner.models.shape import ModelShape
from aligner.resharding.link import Link
from aligner.resharding.plan import plan_resharding
from aligner.resharding.publisher import Publisher
from aligner.resharding.update import WeightUpdate
from aligner.schema import Config


def build_colocated_publisher(
    config: Config, shape: ModelShape, world: World, policy: Policy, engine: GenerationEngine
) -> Publisher:
    """What takes them there."""
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
