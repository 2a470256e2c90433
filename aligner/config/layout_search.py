"""Search for the fastest layout with which all roles of a run fit into the machine's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aligner.config.situation import Choice, Situation, format_count
from aligner.errors import ConfigError
from aligner.models.layouts import engine_problems, layout_problems, tensor_sizes
from aligner.models.model_source import critic_shape, reward_shapes, teacher_shapes
from aligner.placement.local_devices import describe_devices
from aligner.placement.memory.role_memory import GIB, compute_role_memory
from aligner.placement.roles import computes_on_devices, count_role_ranks
from aligner.schema import Config
from aligner.schema.derived import get_max_sequence_length, get_rows_per_group
from aligner.schema.keys import is_read, with_values
from aligner.schema.reward_sources import has_reward_model

# Number of parameters up to which one rank per CPU core is faster than several threads per rank
# (docs/speed.md).
_SMALL_MODEL = 3e7
_MAX_THREADS = 8
_MAX_RANKS_ON_CPU = 8
# Fraction of the memory that the roles may use. The rest is for the fragmentation of allocators and
# for other programs.
_USABLE_GPU_MEMORY = 0.92
_USABLE_HOST_MEMORY = 0.9


@dataclass(frozen=True)
class MemorySettings:
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
_GPU_SETTINGS = (
    MemorySettings("none", 16384, 256),
    MemorySettings("selective", 8192, 256),
    MemorySettings("selective", 4096, 128),
    MemorySettings("full", 8192, 64),
    MemorySettings("full", 1, 16),
)
_CPU_SETTINGS = (
    MemorySettings("none", 2048, 256),
    MemorySettings("none", 1024, 64),
    MemorySettings("full", 512, 16),
    MemorySettings("full", 1, 4, packed=False),
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
    # The candidates are in the order of their speed, so that the first that fits is the fastest.
    for values in _iterate_candidates(config, situation):
        candidate = with_values(config, values)
        if _is_supported(candidate, situation):
            if _fits_in_memory(candidate, situation):
                return tuple(_iterate_choices(candidate, values, situation))
            smallest = candidate
    if smallest is None:  # the checks report the user's own values that cause this
        return ()

    needs = compute_role_memory(smallest, situation.shape, situation.expected)
    roles = ", ".join(
        f"{role.role} {role.peak.total / GIB:.1f} (host memory {role.host / GIB:.1f})"
        for role in needs
    )
    nodes_advice = (
        ", more nodes (cluster=slurm)"
        if situation.machine.gpus and situation.machine.max_nodes == 1
        else ""
    )
    raise ConfigError(
        f"a model with {situation.parameters_text} does not fit into"
        f" {_describe_memory(situation)}. Memory of"
        f" the smallest layout in GiB per rank: {roles}. Use a smaller model, shorter lengths or"
        f" LoRA (actor.lora.rank=16){nodes_advice}, or set all values in an experiment"
        " (docs/memory.md)"
    )


def _iterate_candidates(config: Config, situation: Situation) -> Iterator[Values]:
    """Yield the values of candidate layouts, from the fastest to the smallest.

    The values do not include the keys that the user set.
    """
    # Tokens of the sequences that the loss needs in the same micro-batch.
    min_tokens = get_rows_per_group(config) * get_max_sequence_length(config)
    machine = situation.machine
    if not machine.gpus:
        for ranks in _iterate_cpu_ranks(config, situation):
            for memory_settings in _CPU_SETTINGS:
                yield _select_open_keys(
                    config,
                    situation,
                    _get_cpu_layout(config, situation, ranks)
                    | _get_memory_values(config, memory_settings, min_tokens),
                )
        return

    # Fewer nodes come first, then less model parallelism. Memory settings vary fastest, because
    # recomputation and smaller batches cost less speed than either.
    nodes = 1
    while nodes <= machine.max_nodes:
        devices = nodes * machine.gpus
        for tensor, pipeline in _iterate_model_parallelism(situation, devices):
            layout = _get_gpu_layout(config, tensor, pipeline, devices // (tensor * pipeline))
            for memory_settings in _GPU_SETTINGS:
                yield _select_open_keys(
                    config,
                    situation,
                    layout | _get_memory_values(config, memory_settings, min_tokens),
                )
        nodes *= 2


def _select_open_keys(config: Config, situation: Situation, values: Values) -> Values:
    """Return the values of the keys that the run reads and that the user did not set."""
    candidate = with_values(
        config, {key: value for key, value in values.items() if key not in situation.user_keys}
    )
    return {
        key: value
        for key, value in values.items()
        if key not in situation.user_keys and is_read(candidate, key)
    }


def _iterate_cpu_ranks(config: Config, situation: Situation) -> Iterator[int]:
    """Yield data-parallel sizes of the trainer, each of which divides the samples of a step."""
    cores = situation.machine.cores
    ranks = cores if situation.parameters <= _SMALL_MODEL else cores // _MAX_THREADS
    rows = (
        config.rollout.prompts_per_step
        * config.rollout.samples_per_prompt
        // config.rollout.micro_batches
    )
    rows = rows if config.algorithm.generates_samples else config.data.batch_size
    ranks = max(1, min(ranks, _MAX_RANKS_ON_CPU))
    yield from (size for size in range(ranks, 0, -1) if rows % size == 0)


def _get_cpu_layout(config: Config, situation: Situation, ranks: int) -> Values:
    """Return the layout with a number of trainer ranks on CPUs, and the threads of each rank."""
    # The ranks that compute at the same time share the cores.
    computing_ranks = ranks + config.algorithm.has_critic + config.has_teacher
    return {
        "actor.parallel.data": ranks,
        "engine.parallel.data": max(1, ranks // config.engine.parallel.pipeline),
        "cluster.threads_per_rank": max(
            1, min(situation.machine.cores // computing_ranks, 2 * _MAX_THREADS)
        ),
    }


def _iterate_model_parallelism(situation: Situation, devices: int) -> Iterator[tuple[int, int]]:
    """Yield tensor- and pipeline-parallel sizes, those with the least model parallelism first.

    Tensor parallelism stays inside a node. Among equal products, larger tensor-parallel sizes come
    first.
    """
    tensor_parallel_sizes = [
        size
        for size in tensor_sizes(situation.shape, situation.machine.gpus)
        if devices % size == 0
    ]
    pipeline_sizes = [size for size in (1, 2, 4, 8, 16) if size <= situation.shape.num_layers]
    size_pairs = [
        (tensor, pipeline)
        for tensor in tensor_parallel_sizes
        for pipeline in pipeline_sizes
        if devices % (tensor * pipeline) == 0
    ]
    # Model parallelism costs communication, and pipeline stages also idle in bubbles.
    yield from sorted(size_pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))


def _get_gpu_layout(config: Config, tensor: int, pipeline: int, data: int) -> Values:
    """Return the layouts of all roles, and the settings that depend on them, on GPUs."""
    sizes: Values = {"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline, "data": data}
    values = {
        f"{role}.parallel.{key}": value
        for role in ("actor", "critic")
        for key, value in sizes.items()
    }
    optimizers = {"actor": config.actor.optimizer, "critic": config.critic.optimizer}
    distributed = {
        f"{role}.optimizer.distributed": data > 1 and optimizer.kind == "adam"
        for role, optimizer in optimizers.items()
    }
    # The engine's replicas span the trainer's stages.
    replicas = max(1, pipeline * data // config.engine.parallel.pipeline)
    engine = {"engine.parallel.tensor": tensor, "engine.parallel.data": replicas}
    if has_reward_model(config.reward):
        engine["reward.parallel.tensor"] = tensor
    if config.has_teacher:
        engine["teacher.parallel.tensor"] = tensor
    # A colocated engine frees its weights and KV cache while the trainer needs the memory.
    sleep = {} if config.engine.placement == "server" else {"engine.sleep": True}
    return (
        values
        | distributed
        | engine
        | sleep
        | _get_shared_devices(config, tensor, tensor * pipeline * data)
    )


def _get_shared_devices(config: Config, tensor: int, ranks: int) -> Values:
    """Return devices that several roles with models on this machine's GPUs share.

    The result is empty if only one role has models on GPUs, or if the roles run on a cluster.
    """
    gpu_roles = [role for role in count_role_ranks(config) if computes_on_devices(config, role)]
    if config.cluster.kind != "local" or len(gpu_roles) == 1:
        return {}
    sizes = {"trainer": ranks, "critic": ranks, "reward": tensor, "teacher": tensor}
    return {
        f"cluster.devices.{role}": describe_devices(tuple(range(size)))
        for role, size in sizes.items()
    }


def _get_memory_values(config: Config, memory_settings: MemorySettings, min_tokens: int) -> Values:
    """Return the batch sizes and the recomputation of all roles.

    Args:
        config: Configuration of the run.
        memory_settings: Settings that trade speed for memory.
        min_tokens: Minimum number of tokens in a micro-batch.
    """
    rollout = config.rollout
    rows = rollout.prompts_per_micro_batch * rollout.samples_per_prompt
    values: Values = {"engine.batch_size": min(memory_settings.rows, rows)}
    if not memory_settings.packed:
        values["engine.packed_weights"] = False
    for role in ("actor", "critic"):
        values[f"{role}.recompute"] = memory_settings.recompute
    for role in ("actor", "critic", "reward", "teacher"):
        values[f"{role}.micro_batch_tokens"] = max(min_tokens, memory_settings.micro_batch_tokens)
    return values


def _is_supported(config: Config, situation: Situation) -> bool:
    """Return whether all models support their layouts."""
    shape = situation.shape
    problems = [*layout_problems("actor.parallel", config.actor.parallel, shape)]
    if config.algorithm.generates_samples:
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


def _fits_in_memory(config: Config, situation: Situation) -> bool:
    """Return whether the roles fit into memory.

    On this machine, the roles share the memory. In a job on a cluster, each role has its own nodes.
    """
    machine = situation.machine
    ranks = count_role_ranks(config)
    needs = compute_role_memory(config, situation.shape, situation.expected)
    host = sum(role.host * ranks[role.role] for role in needs)
    if not machine.gpus:
        # Without GPUs, the device memory of a role is host memory, too.
        total = host + sum(role.peak.total * ranks[role.role] for role in needs)
        return total <= _USABLE_HOST_MEMORY * machine.memory_gib * GIB

    peaks = [role.peak.total for role in needs]
    if config.cluster.kind != "local":
        return max(peaks) <= _USABLE_GPU_MEMORY * machine.gpu_memory_gib * GIB
    return (
        sum(peaks) <= _USABLE_GPU_MEMORY * machine.gpu_memory_gib * GIB
        and host <= _USABLE_HOST_MEMORY * machine.memory_gib * GIB
    )


def _iterate_choices(candidate: Config, values: Values, situation: Situation) -> Iterator[Choice]:
    """Yield the values of a layout with their reasons: one for layouts, one for memory settings."""
    machine = situation.machine
    needs = compute_role_memory(candidate, situation.shape, situation.expected)
    peak_gib = max(role.peak.total for role in needs) / GIB
    if not machine.gpus:
        cpu_reason = (
            "one rank per core is fastest for a small model"
            if situation.parameters <= _SMALL_MODEL
            else "threads of a rank share one copy of the weights"
        )
        layout_reason = f"{format_count(machine.cores, 'core')}: {cpu_reason}"
    else:
        gpus = format_count(candidate.actor.parallel.ranks, "GPU")
        layout_reason = (
            f"{gpus} for {situation.parameters_text}, with the lowest model parallelism that fits"
            " into memory"
        )
    memory_reason = (
        f"a rank needs up to {peak_gib:.1f} GiB; available: {_describe_memory(situation)}"
    )
    for key, value in values.items():
        is_layout = "parallel" in key or key.startswith("cluster.") or key == "engine.sleep"
        yield Choice(key, value, layout_reason if is_layout else memory_reason)


def _describe_memory(situation: Situation) -> str:
    """Return the memory of the machine in which models must fit, in words."""
    machine = situation.machine
    if not machine.gpus:
        return f"{machine.memory_gib:.0f} GiB of host memory"
    return f"{machine.gpu_memory_gib:.0f} GiB of GPU memory"
