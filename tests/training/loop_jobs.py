"""What the worker ranks run for the tests of the training loop."""

from __future__ import annotations

import torch.distributed as dist

from aligner.megatron import world as worlds
from aligner.schema import CheckpointConfig, Config, ParallelConfig, RunConfig
from aligner.training.loop import StopCondition


def saves(minutes: float) -> list[bool]:
    """After which of six steps a rank is to save for the time, with one collective a step."""
    world = worlds.initialize(ParallelConfig(data=2), seed=1, timeout_s=120)
    now = 0.0
    config = Config(run=RunConfig(steps=7), checkpoint=CheckpointConfig(every_minutes=minutes))
    stop, found, asked = StopCondition(config, world, clock=lambda: now), [], 0
    reduce = dist.all_reduce

    def counted(*given: object, **named: object) -> object:
        nonlocal asked
        asked += 1
        return reduce(*given, **named)

    dist.all_reduce = counted
    try:
        for done in range(1, 7):
            now += 40.0 * world.rank
            assert not stop.is_after(done)
            found.append(stop.is_save_due)
            if stop.is_save_due:
                stop.count_anew()
    finally:
        dist.all_reduce = reduce
    assert asked == 6
    worlds.shutdown()
    return found
