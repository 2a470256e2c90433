"""Search for the fastest layout with which all roles of a run fit into the machine's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aligner.config.situation import Choice, Situation, counted
from aligner.errors import ConfigError
from aligner.models.layouts import engine_problems, layout_problems, tensor_sizes
from aligner.models.model_source import critic_shape, reward_shapes, teacher_shapes
from aligner.placement.local_devices import describe_devices
from aligner.placement.memory.role_memory import GIB, memory_needs
from aligner.placement.roles import computes_on_devices, role_ranks
from aligner.schema import Config
from aligner.schema.derived import longest_sequence, rows_together
from aligner.schema.keys import is_read, with_values
from aligner.schema.reward_sources import has_reward_model

# Number of parameters up to which one rank per CPU core is faster than several threads per rank
# (docs/speed.md).
_SMALL = 3e7
_MOST_THREADS = 8
_MOST_RANKS_ON_CPU = 8
# Fraction of the memory that the roles may use. The rest is for the fragmentation of allocators and
# for other programs.
_ROOM_ON_GPU = 0.92
_ROOM_ON_CPU = 0.9


@dataclass(frozen=True)
class Effort:
    """Settings that trade speed for memory on a rank."""

    recompute: str
    """Value of `actor.recompute` and `critic.recompute`."""
    micro_batch_tokens: int
    """Tokens per micro-batch, unless the sequences that must be together have more."""
    rows: int
    """Maximum number of sequences that the engine decodes at the same time."""
    packed: bool = True
    """Whether the engine on CPUs keeps a second, packed copy of its weights."""


# From the fastest settings to the settings that need the least memory.
_ON_GPU = (
    Effort("none", 16384, 256),
    Effort("selective", 8192, 256),
    Effort("selective", 4096, 128),
    Effort("full", 8192, 64),
    Effort("full", 1, 16),
)
_ON_CPU = (
    Effort("none", 2048, 256),
    Effort("none", 1024, 64),
    Effort("full", 512, 16),
    Effort("full", 1, 4, packed=False),
)

Values = dict[str, Any]
"""Values by dotted key."""


def find_layout(config: Config, situation: Situation) -> tuple[Choice, ...]:
    """Return the layouts, micro-batch sizes and recomputation of the fastest layout that fits.

    The result is empty if the models do not support any candidate layout with the user's own
    values; the checks of the configuration report the reason.

    Raises:
        ConfigError: No layout fits into memory. The message contains the memory of the smallest.
    """
    smallest: Config | None = None
    for values in _candidates(config, situation):
        candidate = with_values(config, values)
        if _is_possible(candidate, situation):
            if _fits(candidate, situation):
                return tuple(_choices(candidate, values, situation))
            smallest = candidate
    if smallest is None:  # the checks report the user's own values that cause this
        return ()

    needs = memory_needs(smallest, situation.shape, situation.expected)
    roles = ", ".join(
        f"{role.role} {role.peak.total / GIB:.1f} (host memory {role.host / GIB:.1f})"
        for role in needs
    )
    nodes_advice = (
        ", more nodes (cluster=slurm)"
        if situation.machine.gpus and situation.machine.most_nodes == 1
        else ""
    )
    raise ConfigError(
        f"a model with {situation.billions} does not fit into {_memory_of(situation)}. Memory of"
        f" the smallest layout in GiB per rank: {roles}. Use a smaller model, shorter lengths or"
        f" LoRA (actor.lora.rank=16){nodes_advice}, or set all values in an experiment"
        " (docs/memory.md)"
    )


def _candidates(config: Config, situation: Situation) -> Iterator[Values]:
    """Yield the values of candidate layouts, from the fastest to the smallest.

    The values do not include the keys that the user set.
    """
    # Tokens of the sequences that the loss needs in the same micro-batch.
    needed = rows_together(config) * longest_sequence(config)
    machine = situation.machine
    if not machine.gpus:
        for ranks in _ranks_on_cpu(config, situation):
            for effort in _ON_CPU:
                yield _asked(
                    config,
                    situation,
                    _on_cpu(config, situation, ranks) | _memory(config, effort, needed),
                )
        return

    nodes = 1
    while nodes <= machine.most_nodes:
        devices = nodes * machine.gpus
        for tensor, pipeline in _cuts(situation, devices):
            layout = _on_gpus(config, tensor, pipeline, devices // (tensor * pipeline))
            for effort in _ON_GPU:
                yield _asked(config, situation, layout | _memory(config, effort, needed))
        nodes *= 2


def _asked(config: Config, situation: Situation, values: Values) -> Values:
    """Return the values of the keys that the run reads and that the user did not set."""
    full = with_values(
        config, {key: value for key, value in values.items() if key not in situation.given}
    )
    return {
        key: value
        for key, value in values.items()
        if key not in situation.given and is_read(full, key)
    }


def _ranks_on_cpu(config: Config, situation: Situation) -> Iterator[int]:
    """Yield data-parallel sizes of the trainer, each of which divides the samples of a step."""
    cores = situation.machine.cores
    ranks = cores if situation.parameters <= _SMALL else cores // _MOST_THREADS
    rows = (
        config.rollout.prompts_per_step
        * config.rollout.samples_per_prompt
        // config.rollout.micro_batches
    )
    rows = rows if config.algorithm.generates else config.data.batch_size
    ranks = max(1, min(ranks, _MOST_RANKS_ON_CPU))
    yield from (size for size in range(ranks, 0, -1) if rows % size == 0)


def _on_cpu(config: Config, situation: Situation, ranks: int) -> Values:
    """Return the layout with a number of trainer ranks on CPUs, and the threads of each rank."""
    # The ranks that compute at the same time share the cores.
    computing_ranks = ranks + config.algorithm.has_critic + config.has_teacher
    return {
        "actor.parallel.data": ranks,
        "engine.parallel.data": ranks,
        "cluster.threads_per_rank": max(
            1, min(situation.machine.cores // computing_ranks, 2 * _MOST_THREADS)
        ),
    }


def _cuts(situation: Situation, devices: int) -> Iterator[tuple[int, int]]:
    """Yield tensor- and pipeline-parallel sizes, those with the least model parallelism first.

    Tensor parallelism stays inside a node. Among equal products, larger tensor-parallel sizes come
    first.
    """
    tensors = [
        size
        for size in tensor_sizes(situation.shape, situation.machine.gpus)
        if devices % size == 0
    ]
    pipelines = [size for size in (1, 2, 4, 8, 16) if situation.shape.num_layers % size == 0]
    cuts = [
        (tensor, stages)
        for tensor in tensors
        for stages in pipelines
        if devices % (tensor * stages) == 0
    ]
    yield from sorted(cuts, key=lambda cut: (cut[0] * cut[1], cut[1]))


def _on_gpus(config: Config, tensor: int, pipeline: int, data: int) -> Values:
    """Return the layouts of all roles, and the settings that depend on them, on GPUs."""
    cut: Values = {"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline, "data": data}
    values = {
        f"{role}.parallel.{key}": value
        for role in ("actor", "critic")
        for key, value in cut.items()
    }
    optimizers = {"actor": config.actor.optimizer, "critic": config.critic.optimizer}
    distributed = {
        f"{role}.optimizer.distributed": data > 1 and optimizer.kind == "adam"
        for role, optimizer in optimizers.items()
    }
    engine = {"engine.parallel.tensor": tensor, "engine.parallel.data": pipeline * data}
    if has_reward_model(config.reward):
        engine["reward.parallel.tensor"] = tensor
    if config.has_teacher:
        engine["teacher.parallel.tensor"] = tensor
    sleeps = {} if config.engine.placement == "server" else {"engine.sleep": True}
    return (
        values
        | distributed
        | engine
        | sleeps
        | _shared_devices(config, tensor, tensor * pipeline * data)
    )


def _shared_devices(config: Config, tensor: int, ranks: int) -> Values:
    """Return devices that several roles with models on this machine's GPUs share.

    The result is empty if only one role has models on GPUs, or if the roles run in a Slurm job.
    """
    on_devices = [group for group in role_ranks(config) if computes_on_devices(config, group)]
    if config.cluster.kind != "local" or len(on_devices) == 1:
        return {}
    sizes = {"trainer": ranks, "critic": ranks, "reward": tensor, "teacher": tensor}
    return {
        f"cluster.devices.{role}": describe_devices(tuple(range(size)))
        for role, size in sizes.items()
    }


def _memory(config: Config, effort: Effort, needed: int) -> Values:
    """Return the batch sizes and the recomputation of all roles.

    Args:
        config: Configuration of the run.
        effort: Settings that trade speed for memory.
        needed: Minimum number of tokens in a micro-batch.
    """
    rollout = config.rollout
    rows = rollout.prompts_per_micro_batch * rollout.samples_per_prompt
    values: Values = {"engine.batch_size": min(effort.rows, rows)}
    if not effort.packed:
        values["engine.packed_weights"] = False
    for role in ("actor", "critic"):
        values[f"{role}.recompute"] = effort.recompute
    for role in ("actor", "critic", "reward", "teacher"):
        values[f"{role}.micro_batch_tokens"] = max(needed, effort.micro_batch_tokens)
    return values


def _is_possible(config: Config, situation: Situation) -> bool:
    """Return whether all models support their layouts."""
    shape = situation.shape
    problems = [*layout_problems("actor.parallel", config.actor.parallel, shape)]
    if config.algorithm.generates:
        problems += engine_problems(config.engine.parallel, shape)
        for reward_shape in reward_shapes(config, situation.expected).values():
            problems += layout_problems("reward.parallel", config.reward.parallel, reward_shape)
    for teacher in teacher_shapes(config, shape, situation.expected).values():
        problems += layout_problems("teacher.parallel", config.teacher.parallel, teacher)
    if config.algorithm.has_critic:
        problems += layout_problems(
            "critic.parallel",
            config.critic.parallel,
            critic_shape(config, shape, situation.expected),
        )
    return not problems


def _fits(config: Config, situation: Situation) -> bool:
    """Return whether the roles fit into memory.

    On this machine, the roles share the memory. In a Slurm job, each role has its own nodes.
    """
    machine = situation.machine
    ranks = role_ranks(config)
    needs = memory_needs(config, situation.shape, situation.expected)
    host = sum(role.host * ranks[role.role] for role in needs)
    if not machine.gpus:
        # Without GPUs, the device memory of a role is host memory, too.
        total = host + sum(role.peak.total * ranks[role.role] for role in needs)
        return total <= _ROOM_ON_CPU * machine.memory_gib * GIB

    peaks = [role.peak.total for role in needs]
    if config.cluster.kind == "slurm":
        return max(peaks) <= _ROOM_ON_GPU * machine.gpu_memory_gib * GIB
    return (
        sum(peaks) <= _ROOM_ON_GPU * machine.gpu_memory_gib * GIB
        and host <= _ROOM_ON_CPU * machine.memory_gib * GIB
    )


def _choices(tried: Config, values: Values, situation: Situation) -> Iterator[Choice]:
    """Yield the values of a layout with their reasons: one for layouts, one for memory settings."""
    machine = situation.machine
    peak_gib = (
        max(role.peak.total for role in memory_needs(tried, situation.shape, situation.expected))
        / GIB
    )
    if not machine.gpus:
        split = (
            "one rank per core is fastest for a small model"
            if situation.parameters <= _SMALL
            else "threads of a rank share one copy of the weights"
        )
        layout_reason = f"{counted(machine.cores, 'core')}: {split}"
    else:
        gpus = counted(tried.actor.parallel.ranks, "GPU")
        layout_reason = (
            f"{gpus} for {situation.billions}, with the lowest model parallelism that fits into"
            " memory"
        )
    memory_reason = f"a rank needs up to {peak_gib:.1f} GiB; available: {_memory_of(situation)}"
    for key, value in values.items():
        is_layout = "parallel" in key or key.startswith("cluster.") or key == "engine.sleep"
        yield Choice(key, value, layout_reason if is_layout else memory_reason)


def _memory_of(situation: Situation) -> str:
    """Return the memory of the machine in which models must fit, in words."""
    machine = situation.machine
    if not machine.gpus:
        return f"{machine.memory_gib:.0f} GiB of host memory"
    return f"{machine.gpu_memory_gib:.0f} GiB of GPU memory"
