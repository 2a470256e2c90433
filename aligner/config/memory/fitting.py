"""What does not fit into a device's memory, and the cheapest change that would."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from aligner.config.algorithms import rows_together
from aligner.config.keys import value_at
from aligner.config.layouts import engine_problems, layout_problems, tensor_sizes
from aligner.config.memory.roles import RoleMemory, memory_needs
from aligner.config.memory.table import GIB, describe_phase
from aligner.config.model_shape import ModelShape
from aligner.config.model_source import NOTHING, Coming, critic_shape
from aligner.config.schema import Config, Parallel

_SECTIONS = {"trainer": "actor", "critic": "critic", "reward": "reward", "generator": "engine"}
_NODE = 8
"""Tensor parallelism across nodes is not proposed, nor are more than so many stages or shares of what is there."""

Changes = Mapping[str, Any]
"""New values by dotted key."""


def memory_problems(config: Config, shape: ModelShape, coming: Coming = NOTHING) -> Iterator[str]:
    """One line for each role that needs more than `cluster.device_memory_gib`; nothing where that is not given."""
    limit = config.cluster.device_memory_gib
    if limit is None:
        return
    for role in memory_needs(config, shape, coming):
        if role.peak.total <= limit * GIB or "." in role.role:  # replicas of the reward are alike
            continue
        where = f" (pipeline stage {role.stage})" if role.stages > 1 else ""
        yield (
            f"cluster.device_memory_gib={limit:g}: {role.role} needs {role.peak.total / GIB:.1f} GiB a device"
            f" in {role.peak.name}{where}: {describe_phase(role.peak)}; {_advice(config, shape, coming, role)}"
        )


def _advice(config: Config, shape: ModelShape, coming: Coming, role: RoleMemory) -> str:
    limit = config.cluster.device_memory_gib or 0.0
    for changes in _candidates(config, shape, role):
        changed = changed_config(config, changes)
        (found,) = (other for other in memory_needs(changed, shape, coming) if other.role == role.role)
        if found.peak.total <= limit * GIB:
            return f"it fits with {_written(changes)}, {found.peak.total / GIB:.1f} GiB"
    return "no layout within a node would fit; give devices with more memory, or a smaller model"


def changed_config(config: Config, changes: Changes) -> Config:
    """The configuration with other values; a colocated engine goes on filling the trainer's ranks."""
    for key, value in changes.items():
        config = _replaced(config, key.split("."), value)
    engine, ranks = config.engine, config.actor.parallel.ranks
    if engine.placement == "colocated" and engine.parallel.ranks != ranks:
        parallel = dataclasses.replace(engine.parallel, data=max(1, ranks // engine.parallel.tensor))
        config = dataclasses.replace(config, engine=dataclasses.replace(engine, parallel=parallel))
    return config


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return dataclasses.replace(section, **{name: _replaced(getattr(section, name), rest, value) if rest else value})


def _written(changes: Changes) -> str:
    values = ((key, str(value).lower() if isinstance(value, bool) else value) for key, value in changes.items())
    return " ".join(f"{key}={value}" for key, value in values)


def _candidates(config: Config, shape: ModelShape, role: RoleMemory) -> Iterator[Changes]:
    """Changes for a role, the cheapest first: what costs nothing, what costs time, then other layouts."""
    if role.role == "generator":
        yield from _of_engine(config, shape)
        return
    section = _SECTIONS[role.role]
    costs_little = [*_of_training(config, section)] if section != "reward" else []
    if role.role == "trainer" and config.algorithm.generates and config.engine.placement == "colocated":
        costs_little += _of_colocated_engine(config)
    yield from costs_little
    together: dict[str, Any] = {}
    for change in costs_little:
        together |= change
        yield dict(together)
    for layout in _layouts(config, shape, section):
        yield layout
        yield {**together, **layout}


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


def _of_colocated_engine(config: Config) -> Iterator[Changes]:
    engine = config.engine
    if not engine.sleep:
        yield {"engine.sleep": True}
    if engine.update == "atomic":
        yield {"engine.update": "in_place"}


def _of_engine(config: Config, shape: ModelShape) -> Iterator[Changes]:
    engine = config.engine
    if engine.update == "atomic":
        yield {"engine.update": "in_place"}
    batch = engine.batch_size
    smaller = [size for size in (batch // 2, batch // 4, batch // 8) if size]
    yield from ({"engine.batch_size": size} for size in smaller)
    for size in tensor_sizes(shape, _NODE):
        parallel = dataclasses.replace(engine.parallel, tensor=size, data=max(1, engine.parallel.ranks // size))
        if size <= engine.parallel.tensor or list(engine_problems(parallel, shape)):
            continue
        layout = {"engine.parallel.tensor": size, "engine.parallel.data": parallel.data}
        yield layout
        yield from ({**layout, "engine.batch_size": fewer} for fewer in smaller)


def _layouts(config: Config, shape: ModelShape, section: str) -> Iterator[Changes]:
    """More tensor ranks and stages, in order of the devices that they take; replicas give way to them where there are any."""
    shape = critic_shape(config, shape) if section == "critic" else shape
    now: Parallel = value_at(config, section).parallel
    stages = [size for size in range(now.pipeline, _NODE * now.pipeline + 1) if shape.num_layers % size == 0]
    sizes = [size for size in tensor_sizes(shape, _NODE) if size >= now.tensor]
    layouts = [_layout(now, tensor, pipeline, section) for tensor, pipeline in itertools.product(sizes, stages)]
    fitting = [layout for layout in layouts if layout != now and not list(layout_problems("", layout, shape))]
    for layout in sorted(fitting, key=lambda layout: (layout.ranks, layout.pipeline, layout.tensor)):
        new = dataclasses.asdict(layout)
        yield {f"{section}.parallel.{name}": value for name, value in new.items() if value != getattr(now, name)}


def _layout(now: Parallel, tensor: int, pipeline: int, section: str) -> Parallel:
    data = max(1, now.tensor * now.pipeline * now.data // (tensor * pipeline))
    sequence = now.sequence or (tensor > 1 and section != "reward")
    layout = dataclasses.replace(now, tensor=tensor, pipeline=pipeline, data=data, sequence=sequence)
    if pipeline == now.pipeline:
        return layout
    return dataclasses.replace(layout, last_stage_layers=None, virtual_pipeline=1)
