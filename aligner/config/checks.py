"""What the types cannot say: bounds, and keys that must fit each other, the model and the machine.

Everything is checked before anything starts, and everything wrong is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from aligner.config.algorithms import algorithm_problems, policy_updates
from aligner.config.data_sources import data_problems
from aligner.config.devices import device_of
from aligner.config.engines import engine_kind_problems, engine_machine_problems
from aligner.config.evaluation import evaluation_problems
from aligner.config.frozen import frozen_names
from aligner.config.keys import Key, schema_keys, value_at
from aligner.config.layouts import engine_problems, layout_problems, tensor_sizes
from aligner.config.lengths import length_problems
from aligner.config.lora import lora_problems
from aligner.config.memory import memory_problems
from aligner.config.model_shape import ModelShape
from aligner.config.model_source import NOTHING, Coming, critic_shape, random_reward_models, read_shape
from aligner.config.offline import offline_problems
from aligner.config.ports import port_problems
from aligner.config.resume import resume_problems
from aligner.config.reward_sources import reward_problems
from aligner.config.schema import Config, Optimizer, Rollout, TrainedModel
from aligner.config.slurm import slurm_problems
from aligner.config.tls import tls_problems
from aligner.config.trackers import tracker_problems
from aligner.config.weights import TensorSpec, weight_table
from aligner.errors import ConfigError

_ABOVE_ZERO = ("rollout.top_p", "algorithm.kl_target")
_BELOW_ONE = (
    "actor.optimizer.beta1",
    "actor.optimizer.beta2",
    "critic.optimizer.beta1",
    "critic.optimizer.beta2",
    "algorithm.preference.label_smoothing",
)


def check(config: Config, coming: Coming = NOTHING, *, is_starting: bool = True) -> ModelShape:
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
    problems += [*_schedule(config), *data_problems(config, coming), *evaluation_problems(config, coming)]
    problems += [*port_problems(config), *tls_problems(config), *tracker_problems(config)]
    if is_starting:
        problems += resume_problems(config)
    _raise_all(problems)
    if shape is None:  # its problem was raised above
        raise AssertionError
    # Last: what is counted must fit together.
    _raise_all(memory_problems(config, shape, coming, partial(_is_possible, shape=shape, coming=coming)))
    return shape


def _is_possible(config: Config, shape: ModelShape, coming: Coming) -> bool:
    """Whether a configuration that differs from a valid one in layouts, batches or the engine is valid too."""
    return not any((*_bounds(config), *_parts(config, shape, coming)))


def _raise_all(problems: Iterator[str] | list[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("\n".join(found))


def _parts(config: Config, shape: ModelShape | None, coming: Coming) -> Iterator[str]:
    """What concerns the roles' sizes and how they go together: all that a change of layouts or batches could make wrong."""
    if shape is not None:
        yield from _layouts(config, shape)
        if config.algorithm.generates:
            yield from length_problems(config, shape, coming)
        else:
            yield from offline_problems(config, shape, coming)
    if config.algorithm.generates:
        yield from _online(config, shape, coming)
    if config.cluster.kind == "slurm":
        yield from slurm_problems(config)


def _online(config: Config, shape: ModelShape | None, coming: Coming) -> Iterator[str]:
    """What concerns generation and the servers."""
    if shape is not None:
        yield from engine_problems(config.engine.parallel, shape)
        yield from engine_kind_problems(config.engine, shape)
        yield from _engine_ranks(config, shape)
    if config.cluster.kind == "local":
        yield from engine_machine_problems(config.engine)
    yield from algorithm_problems(config)
    yield from _engine_update(config)
    yield from _engine_start(config)
    yield from _spare_prompts(config.rollout)
    yield from reward_problems(config, coming)
    yield from _batches(config)


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


def _layouts(config: Config, shape: ModelShape) -> Iterator[str]:
    layers, trainer = config.critic.num_layers, config.algorithm.trainer
    too_many = layers is not None and layers > shape.num_layers and (config.algorithm.has_critic or trainer == "reward_model")
    if too_many:
        yield f"critic.num_layers={layers}: the model has {shape.num_layers} layers"
    critic = shape if too_many else critic_shape(config, shape)
    trained = critic if trainer == "reward_model" else shape
    yield from layout_problems("actor.parallel", config.actor.parallel, trained)
    yield from _trained_weights(config, trained)
    if config.algorithm.has_critic and not too_many:
        yield from layout_problems("critic.parallel", config.critic.parallel, critic)
        yield from _frozen(config.critic, weight_table(critic, "scalar"), "critic")


def _trained_weights(config: Config, shape: ModelShape) -> Iterator[str]:
    yield from _frozen(config.actor, weight_table(shape), "actor")
    yield from lora_problems("actor", config.actor, shape)


def _frozen(settings: TrainedModel, table: tuple[TensorSpec, ...], role: str) -> Iterator[str]:
    try:
        frozen_names(table, settings.frozen, f"{role}.frozen")
    except ConfigError as error:
        yield str(error)


def _engine_ranks(config: Config, shape: ModelShape) -> Iterator[str]:
    engine, ranks = config.engine.parallel, config.actor.parallel.ranks
    if config.engine.placement == "colocated" and engine.ranks != ranks:
        fitting = " or ".join(f"{size}x{ranks // size}" for size in tensor_sizes(shape, ranks) if ranks % size == 0)
        yield (
            f"engine.parallel: tensor {engine.tensor} x data {engine.data} is {engine.ranks} ranks, but a colocated engine"
            f" spans the trainer's {ranks} ranks; tensor x data that fit: {fitting}"
        )


def _engine_update(config: Config) -> Iterator[str]:
    if config.rollout.max_staleness:
        yield from _staleness(config)
    elif config.engine.in_flight == "interrupt":
        yield (
            "engine.in_flight=interrupt: nothing is under way when weights come with rollout.max_staleness=0; give"
            " engine.in_flight=finish, or rollout.max_staleness of at least 1"
        )
    if config.engine.placement == "server":
        yield from _generator(config)
    if config.engine.update != "shared":
        return
    if config.actor.lora.rank:
        yield (
            f"engine.update=shared: the engine would serve the trainer's own tensors, without the adapters of"
            f" actor.lora.rank={config.actor.lora.rank}; allowed with adapters: atomic, in_place"
        )
    engine, actor = (device_of(config, precision).itemsize for precision in (config.engine.precision, config.actor.precision))
    if engine != actor:
        yield (
            f"engine.update=shared: engine.precision={config.engine.precision} and actor.precision={config.actor.precision}"
            f" are {engine} and {actor} bytes a number here; shared tensors need one precision"
        )


def _spare_prompts(rollout: Rollout) -> Iterator[str]:
    key = f"rollout.spare_prompts={rollout.spare_prompts}"
    if rollout.spare_prompts > rollout.prompts_per_step:
        yield f"{key}: more than a step takes, rollout.prompts_per_step={rollout.prompts_per_step}"
    if rollout.spare_prompts and rollout.max_staleness <= rollout.max_deferrals:
        yield (
            f"{key}: what is left behind rollout.max_deferrals={rollout.max_deferrals} times is more versions old than"
            f" rollout.max_staleness={rollout.max_staleness} allows; give {rollout.max_deferrals + 1} or more"
        )


def _staleness(config: Config) -> Iterator[str]:
    key = f"rollout.max_staleness={config.rollout.max_staleness}"
    if config.engine.placement != "server":
        yield f"{key}: an engine on the trainer's ranks cannot draw while these train; give engine.placement=server"
    if config.algorithm.trainer != "online":
        yield f"{key}: algorithm.trainer={config.algorithm.trainer} trains nothing that samples could be ahead of"
    if config.critic.with_reward:
        yield f"{key}: critic.with_reward=true gives scores with values, which are wanted later; give critic.with_reward=false"


def _generator(config: Config) -> Iterator[str]:
    """What an engine in a world of its own cannot do."""
    engine, key = config.engine, "engine.placement=server"
    if engine.update == "shared":
        yield f"{key}: engine.update=shared takes the trainer's own tensors, which are elsewhere; allowed: atomic, in_place"
    if engine.sleep:
        yield f"{key}: engine.sleep=true gives memory to the trainer, which is elsewhere; give engine.sleep=false"
    if engine.kind == "tensorrt_llm":
        why = "engine.kind=tensorrt_llm gives out complete responses alone; allowed with it"
        if engine.in_flight == "interrupt":
            yield f"engine.in_flight=interrupt: {why}: finish"
        if config.rollout.spare_prompts:
            yield f"rollout.spare_prompts={config.rollout.spare_prompts}: {why}: 0"
        # It serves once it is built; one on the trainer's ranks starts with these, which nobody waits for to be healthy.
        starts, may_take = config.server.start_timeout_s, engine.tensorrt_llm.timeout_s
        if starts < may_take:
            yield (
                f"server.start_timeout_s={starts:g}: the generator is healthy once its engine has started, which may take"
                f" engine.tensorrt_llm.timeout_s={may_take:g} s; give {may_take:g} or more"
            )


def _engine_start(config: Config) -> Iterator[str]:
    """Who waits for a TensorRT-LLM engine to start: its replica's other ranks, in a collective."""
    engine, waits = config.engine, config.cluster.collective_timeout_s
    if engine.kind == "tensorrt_llm" and engine.parallel.tensor > 1 and waits <= engine.tensorrt_llm.timeout_s:
        yield (
            f"cluster.collective_timeout_s={waits:g}: a replica's other ranks wait so long for its engine to start, which may"
            f" take engine.tensorrt_llm.timeout_s={engine.tensorrt_llm.timeout_s:g} s; give more than that"
        )


def _batches(config: Config) -> Iterator[str]:
    rollout, parts, replicas = config.rollout, config.rollout.micro_batches, config.engine.parallel.data
    if rollout.min_response_tokens > rollout.max_response_tokens:
        yield (
            f"rollout.min_response_tokens={rollout.min_response_tokens}: it is above"
            f" rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    samples = rollout.prompts_per_micro_batch * rollout.samples_per_prompt
    if rollout.prompts_per_step % parts:
        yield f"rollout.prompts_per_step={rollout.prompts_per_step}: does not divide by rollout.micro_batches={parts}"
    elif samples % replicas:
        yield f"engine.parallel.data={replicas}: the {samples} samples of a rollout micro-batch do not divide by {replicas}"


def _schedule(config: Config) -> Iterator[str]:
    updates, critic_updates = policy_updates(config), config.run.steps * config.algorithm.epochs * config.algorithm.minibatches
    optimizers: dict[str, Optimizer] = {"actor": config.actor.optimizer}
    if config.algorithm.has_critic:
        optimizers["critic"] = config.critic.optimizer
    for role, optimizer in optimizers.items():
        steps = updates if role == "actor" else critic_updates
        if optimizer.warmup_steps >= max(steps, 1):
            yield f"{role}.optimizer.warmup_steps={optimizer.warmup_steps}: the run has {steps} optimizer steps"
        if optimizer.min_learning_rate > optimizer.learning_rate:
            yield (
                f"{role}.optimizer.min_learning_rate={optimizer.min_learning_rate}: it is above"
                f" {role}.optimizer.learning_rate={optimizer.learning_rate}"
            )
        if optimizer.offload_fraction and not optimizer.distributed:
            yield f"{role}.optimizer.offload_fraction={optimizer.offload_fraction}: needs {role}.optimizer.distributed=true"
    stop, steps = config.run.stop_after, config.run.steps
    if stop is not None and stop > steps:
        yield f"run.stop_after={stop}: the run has {steps} steps (run.steps)"
