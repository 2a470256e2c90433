"""The first layout, from the fastest on, at which all roles of a run fit into the memory of the
machine."""

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

_SMALL = 3e7
"""Parameters up to which a CPU's cores are faster as ranks of their own than as threads of one:
docs/speed.md."""
_MOST_THREADS, _MOST_RANKS_ON_CPU = 8, 8
_ROOM_ON_GPU, _ROOM_ON_CPU = 0.92, 0.9
"""Share of the memory that is planned with: allocators leave gaps, and a machine has more to do
than this."""


@dataclass(frozen=True)
class Effort:
    """How a rank saves memory at the cost of time."""

    recompute: str
    micro_batch_tokens: int
    """At least the longest sequences that must be together."""
    rows: int
    """Sequences that the engine decodes at a time, at most."""
    packed: bool = True
    """Whether an engine on cores keeps a second copy of its weights."""


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


def find_layout(config: Config, situation: Situation) -> tuple[Choice, ...]:
    """Layouts, micro-batches and what is recomputed. Raises ConfigError, with what the leanest
    needs, where nothing fits."""
    leanest: Config | None = None
    for values in _candidates(config, situation):
        tried = with_values(config, values)
        if _is_possible(tried, situation):
            if _fits(tried, situation):
                return tuple(_choices(tried, values, situation))
            leanest = tried
    if leanest is None:  # of what the user gave, which the checks tell
        return ()
    needs = memory_needs(leanest, situation.shape, situation.expected)
    roles = ", ".join(
        f"{role.role} {role.peak.total / GIB:.1f} (host memory {role.host / GIB:.1f})"
        for role in needs
    )
    more = (
        ", more nodes (cluster=slurm)"
        if situation.machine.gpus and situation.machine.most_nodes == 1
        else ""
    )
    raise ConfigError(
        f"a model with {situation.billions} does not fit into {_memory_of(situation)}. Memory of"
        f" the smallest layout in GiB per rank: {roles}. Use a smaller model, shorter lengths or"
        f" LoRA (actor.lora.rank=16){more}, or set all values in an experiment (docs/memory.md)"
    )


def _candidates(config: Config, situation: Situation) -> Iterator[Values]:
    """Values of keys that nobody gave, from the fastest layout to the leanest."""
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
    """Those that the run reads and nobody gave."""
    full = with_values(
        config, {key: value for key, value in values.items() if key not in situation.given}
    )
    return {
        key: value
        for key, value in values.items()
        if key not in situation.given and is_read(full, key)
    }


def _ranks_on_cpu(config: Config, situation: Situation) -> Iterator[int]:
    """Data-parallel ranks of the trainer: a step's samples divide by them."""
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
    working = ranks + config.algorithm.has_critic + config.has_teacher
    return {
        "actor.parallel.data": ranks,
        "engine.parallel.data": ranks,
        "cluster.threads_per_rank": max(
            1, min(situation.machine.cores // working, 2 * _MOST_THREADS)
        ),
    }


def _cuts(situation: Situation, devices: int) -> Iterator[tuple[int, int]]:
    """Tensor- and pipeline-parallel sizes, first those that cut the model least: within a node,
    then over nodes."""
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
    cut: Values = {"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline, "data": data}
    values = {
        f"{role}.parallel.{key}": value
        for role in ("actor", "critic")
        for key, value in cut.items()
    }
    optimizers = {"actor": config.actor.optimizer, "critic": config.critic.optimizer}
    distributed = {
        f"{role}.optimizer.distributed": data > 1 and of.kind == "adam"
        for role, of in optimizers.items()
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
    """Where several roles have models on this machine's GPUs they share them; nobody else's are
    free."""
    on_devices = [group for group in role_ranks(config) if computes_on_devices(config, group)]
    if config.cluster.kind != "local" or len(on_devices) == 1:
        return {}
    sizes = {"trainer": ranks, "critic": ranks, "reward": tensor, "teacher": tensor}
    return {
        f"cluster.devices.{role}": describe_devices(tuple(range(size)))
        for role, size in sizes.items()
    }


def _memory(config: Config, effort: Effort, needed: int) -> Values:
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
    """Whether the models can be cut so."""
    shape = situation.shape
    problems = [*layout_problems("actor.parallel", config.actor.parallel, shape)]
    if config.algorithm.generates:
        problems += engine_problems(config.engine.parallel, shape)
        for other in reward_shapes(config, situation.expected).values():
            problems += layout_problems("reward.parallel", config.reward.parallel, other)
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
    """Whether memory suffices: on this machine roles share it, in a Slurm job each has nodes of its
    own."""
    machine, ranks = situation.machine, role_ranks(config)
    needs = memory_needs(config, situation.shape, situation.expected)
    host = sum(role.host * ranks[role.role] for role in needs)
    if not machine.gpus:
        held = host + sum(role.peak.total * ranks[role.role] for role in needs)
        return held <= _ROOM_ON_CPU * machine.memory_gib * GIB
    peaks = [role.peak.total for role in needs]
    if config.cluster.kind == "slurm":
        return max(peaks) <= _ROOM_ON_GPU * machine.gpu_memory_gib * GIB
    return (
        sum(peaks) <= _ROOM_ON_GPU * machine.gpu_memory_gib * GIB
        and host <= _ROOM_ON_CPU * machine.memory_gib * GIB
    )


def _choices(tried: Config, values: Values, situation: Situation) -> Iterator[Choice]:
    """The values, those of a role's layout and those of its memory each with one reason."""
    machine = situation.machine
    fullest = (
        max(role.peak.total for role in memory_needs(tried, situation.shape, situation.expected))
        / GIB
    )
    if not machine.gpus:
        split = (
            "one rank per core is fastest for a small model"
            if situation.parameters <= _SMALL
            else "threads of a rank share one copy of the weights"
        )
        placed = f"{counted(machine.cores, 'core')}: {split}"
    else:
        gpus = counted(tried.actor.parallel.ranks, "GPU")
        placed = (
            f"{gpus} for {situation.billions}, with the lowest model parallelism that fits into"
            " memory"
        )
    held = f"a rank needs up to {fullest:.1f} GiB; available: {_memory_of(situation)}"
    for key, value in values.items():
        is_layout = "parallel" in key or key.startswith("cluster.") or key == "engine.sleep"
        yield Choice(key, value, placed if is_layout else held)


def _memory_of(situation: Situation) -> str:
    machine = situation.machine
    if not machine.gpus:
        return f"{machine.memory_gib:.0f} GiB of host memory"
    return f"{machine.gpu_memory_gib:.0f} GiB of GPU memory"
