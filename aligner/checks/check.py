"""What the types cannot say: bounds, and keys that must fit each other, the model and the machine.

Everything is checked before anything starts, and everything wrong is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from aligner.checks.actor import layout_problems_of_roles
from aligner.checks.algorithm import algorithm_problems
from aligner.checks.cluster import slurm_problems
from aligner.checks.data import data_problems, offline_problems
from aligner.checks.engine import (
    engine_kind_problems,
    engine_machine_problems,
    engine_rank_problems,
    engine_start_problems,
    engine_update_problems,
)
from aligner.checks.evaluation import evaluation_problems
from aligner.checks.logging import tracker_problems
from aligner.checks.reward import reward_problems
from aligner.checks.rollout import batch_problems, length_problems, spare_prompt_problems
from aligner.checks.run import schedule_problems
from aligner.checks.server import port_problems, tls_problems
from aligner.config.resume import resume_problems
from aligner.errors import ConfigError
from aligner.models.layouts import engine_problems
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, random_reward_models, read_shape
from aligner.models.shape import ModelShape
from aligner.placement.memory import memory_problems
from aligner.schema import Config
from aligner.schema.keys import Key, schema_keys, value_at

_ABOVE_ZERO = ("rollout.top_p", "algorithm.kl_target")
_BELOW_ONE = (
    "actor.optimizer.beta1",
    "actor.optimizer.beta2",
    "critic.optimizer.beta1",
    "critic.optimizer.beta2",
    "algorithm.preference.label_smoothing",
)


def check(config: Config, coming: ExpectedInputs = NOTHING_EXPECTED, *, is_starting: bool = True) -> ModelShape:
    """Check the whole configuration against itself, the model and this machine; returns the policy's shape.

    What is `coming` need not be there yet. A run that is not starting now may have a directory that would be in its way.
    Raises ConfigError with one line for each thing that is wrong.
    """
    # Bounds come first: the checks after them divide by these numbers.
    _raise_all(_bounds(config))
    coming = {**coming, **random_reward_models(config)}
    shape, problems = None, []
    try:
        shape = read_shape(config, coming)
    except ConfigError as error:
        problems.append(str(error))
    problems += _parts(config, shape, coming)
    problems += [*schedule_problems(config), *data_problems(config, coming), *evaluation_problems(config, coming)]
    problems += [*port_problems(config), *tls_problems(config), *tracker_problems(config)]
    if is_starting:
        problems += resume_problems(config)
    _raise_all(problems)
    if shape is None:  # its problem was raised above
        raise AssertionError
    # Last: what is counted must fit together.
    _raise_all(memory_problems(config, shape, coming, partial(_is_possible, shape=shape, coming=coming)))
    return shape


def _is_possible(config: Config, shape: ModelShape, coming: ExpectedInputs) -> bool:
    """Whether a configuration that differs from a valid one in layouts, batches or the engine is valid too."""
    return not any((*_bounds(config), *_parts(config, shape, coming)))


def _raise_all(problems: Iterator[str] | list[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("\n".join(found))


def _parts(config: Config, shape: ModelShape | None, coming: ExpectedInputs) -> Iterator[str]:
    """What concerns the roles' sizes and how they go together: all that a change of layouts or batches could make wrong."""
    if shape is not None:
        yield from layout_problems_of_roles(config, shape)
        if config.algorithm.generates:
            yield from length_problems(config, shape, coming)
        else:
            yield from offline_problems(config, shape, coming)
    if config.algorithm.generates:
        yield from _online(config, shape, coming)
    if config.cluster.kind == "slurm":
        yield from slurm_problems(config)


def _online(config: Config, shape: ModelShape | None, coming: ExpectedInputs) -> Iterator[str]:
    """What concerns generation and the servers."""
    if shape is not None:
        yield from engine_problems(config.engine.parallel, shape)
        yield from engine_kind_problems(config.engine, shape)
        yield from engine_rank_problems(config, shape)
    if config.cluster.kind == "local":
        yield from engine_machine_problems(config.engine)
    yield from algorithm_problems(config)
    yield from engine_update_problems(config)
    yield from engine_start_problems(config)
    yield from spare_prompt_problems(config.rollout)
    yield from reward_problems(config, coming)
    yield from batch_problems(config)


def _bounds(config: Config) -> Iterator[str]:
    for name, key in schema_keys().items():
        value = value_at(config, name)
        if value is None:
            continue
        if problem := _out_of_bounds(key, value):
            yield f"{name}={value}: {problem}"


def _out_of_bounds(key: Key, value: Any) -> str | None:
    if key.choices and value not in key.choices:
        return f"allowed: {', '.join(key.choices)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if key.minimum is not None and value < key.minimum:
        return f"must be at least {key.minimum:g}"
    if key.name in _ABOVE_ZERO and value <= 0:
        return "must be above 0"
    if key.maximum is not None and value > key.maximum:
        return f"must be at most {key.maximum:.10g}"
    if key.name in _BELOW_ONE and value >= 1:
        return "must be below 1"
    return None
