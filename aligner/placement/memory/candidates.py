"""What could be changed for a role to need less memory, the cheapest first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aligner.models.layouts import engine_problems, layout_problems, tensor_sizes
from aligner.models.shape import ModelShape
from aligner.placement.memory.engine_memory import rows_at_once
from aligner.schema import Config, EngineParallelConfig, ParallelConfig
from aligner.schema.derived import rows_together
from aligner.schema.keys import value_at

_MORE_STAGES = 8
"""So many times the stages that there are, at most, are proposed."""
Changes = Mapping[str, Any]
"""New values by dotted key."""


def small_changes(config: Config, section: str) -> Iterator[Changes]:
    """One key each, at the layout that there is: what costs nothing, then what costs time."""
    if section in ("actor", "critic"):
        yield from _of_training(config, section)
    is_colocated = config.algorithm.generates and config.engine.placement == "colocated"
    if section == "engine" or (section == "actor" and is_colocated):
        yield from _of_engine(config)


def _of_training(config: Config, section: str) -> Iterator[Changes]:
    settings = value_at(config, section)
    layout = settings.parallel
    if not settings.optimizer.distributed and layout.data * layout.context > 1:
        yield {f"{section}.optimizer.distributed": True}
    if layout.tensor > 1 and not layout.sequence:
        yield {f"{section}.parallel.sequence": True}
    smallest = _smallest_micro_batch(config, section)
    if settings.micro_batch_tokens > smallest:
        yield {f"{section}.micro_batch_tokens": smallest}
    if settings.recompute == "none":
        yield {f"{section}.recompute": "selective"}
    if settings.recompute != "full":
        yield {f"{section}.recompute": "full"}


def _smallest_micro_batch(config: Config, section: str) -> int:
    responses = config.rollout if config.algorithm.generates else config.data
    rows = rows_together(config) if section == "actor" else 1
    return rows * (config.data.max_prompt_tokens + responses.max_response_tokens)


def _of_engine(config: Config) -> Iterator[Changes]:
    engine = config.engine
    if engine.placement == "colocated" and not engine.sleep:
        yield {"engine.sleep": True}
    if engine.update == "atomic":
        yield {"engine.update": "in_place"}
    yield from ({"engine.batch_size": rows} for rows in _parts(rows_at_once(config)))
    if engine.kv_cache_mib is not None:  # which TensorRT-LLM takes in advance, however few sequences there are
        yield from ({"engine.kv_cache_mib": mib} for mib in _parts(engine.kv_cache_mib))


def _parts(whole: int) -> list[int]:
    return [whole // parts for parts in (2, 4, 8) if whole >= parts]


def layout_changes(config: Config, shapes: Sequence[ModelShape], section: str) -> Iterator[Changes]:
    """Other layouts that can cut all of the section's models, in order of the devices that they take.

    Replicas give way to tensor ranks and stages where there are any. Tensor ranks are those of one node.
    """
    now = value_at(config, section).parallel
    most = config.cluster.devices_per_node
    sizes = [now.tensor, *(size for size in tensor_sizes(shapes[0], most) if size > now.tensor)]
    layouts = _engine_layouts(now, sizes, shapes[0]) if section == "engine" else _megatron_layouts(now, sizes, shapes, section)
    old = dataclasses.asdict(now)
    for layout in layouts:
        new = dataclasses.asdict(layout)
        if new != old:
            yield {f"{section}.parallel.{name}": value for name, value in new.items() if value != old[name]}


def _engine_layouts(now: EngineParallelConfig, sizes: Sequence[int], shape: ModelShape) -> Iterator[EngineParallelConfig]:
    for size in sizes:
        layout = dataclasses.replace(now, tensor=size, data=max(1, now.ranks // size))
        if not list(engine_problems(layout, shape)):
            yield layout


def _megatron_layouts(
    now: ParallelConfig, sizes: Sequence[int], shapes: Sequence[ModelShape], section: str
) -> list[ParallelConfig]:
    layers = shapes[0].num_layers
    stages = [count for count in range(now.pipeline, _MORE_STAGES * now.pipeline + 1) if _last_stage(layers, count) > 0]
    layouts = [_layout(now, tensor, pipeline, layers, section) for tensor, pipeline in itertools.product(sizes, stages)]
    possible = [layout for layout in layouts if not any(list(layout_problems("", layout, shape)) for shape in shapes)]
    return sorted(possible, key=lambda layout: (layout.ranks, layout.pipeline, layout.tensor))


def _layout(now: ParallelConfig, tensor: int, pipeline: int, layers: int, section: str) -> ParallelConfig:
    data = max(1, now.tensor * now.pipeline * now.data // (tensor * pipeline))
    sequence = now.sequence or (tensor > 1 and section != "reward")
    layout = dataclasses.replace(now, tensor=tensor, pipeline=pipeline, data=data, sequence=sequence)
    if pipeline == now.pipeline:
        return layout
    last = _last_stage(layers, pipeline) if layers % pipeline else None
    return dataclasses.replace(layout, last_stage_layers=last, virtual_pipeline=1)


def _last_stage(layers: int, stages: int) -> int:
    """Layers that the last stage has where the others have as few as they can; none, or fewer, where they leave none."""
    return layers - math.ceil(layers / stages) * (stages - 1)
