"""The device memory of each role in each of its phases.

`build_memory_table` shows it for `aligner validate`, and `find_memory_problems` compares it with
`cluster.device_memory_gib`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from aligner.models.layouts import (
    cache_bytes_per_sequence,
    choose_block_tokens,
    iterate_engine_stages,
)
from aligner.models.model_source import (
    NOTHING_EXPECTED,
    ExpectedInputs,
    critic_shape,
    first_layers,
    reward_shapes,
    teacher_shapes,
)
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head
from aligner.placement.memory.activations import (
    BatchLoad,
    StageActivations,
    compute_forward_work_bytes,
)
from aligner.placement.memory.model_states import (
    ModelStates,
    compute_frozen_weight_bytes,
    compute_trained_states,
    count_engine_weights,
    count_largest_tensor,
    count_shared_weights,
)
from aligner.placement.roles import (
    count_server_ranks,
    get_device,
    get_role,
    has_generator,
    uses_gpus,
)
from aligner.schema import Config, MegatronModelConfig
from aligner.schema.derived import (
    count_trained_samples,
    get_max_sequence_length,
    get_rows_per_group,
    has_reference,
)

# Maximum number of prompt tokens in one prefill of the embedded engine
# (`engines/embedded/scheduler.py`).
_PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class Phase:
    """Memory in bytes that a role needs on a device during one of its phases.

    The phases of a role, such as training and generation, do not overlap.
    """

    name: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0
    """KV cache."""
    engine: int = 0
    """Weights of the engine, and buffers of the weight sync."""

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.cache
            + self.engine
        )


@dataclass(frozen=True)
class RoleMemory:
    """Memory of a role on the device that needs the most."""

    role: str
    phases: tuple[Phase, ...]
    stages: int = 1
    """Number of pipeline stages."""
    stage: int = 0
    """Pipeline stage of the device."""
    host: int = 0
    """Maximum bytes in host memory of one rank and its engine's worker process.

    Host memory contains copies of weights, offloaded optimizer state, and checkpoints that are
    being written.
    """

    @property
    def peak(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)


def compute_role_memory(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> tuple[RoleMemory, ...]:
    """Return the memory of each role that has a model.

    Args:
        config: A valid configuration.
        shape: Dimensions of the policy.
        expected: Dimensions of models that do not exist yet.
    """
    # Pipeline stages differ: the first one has more micro-batches in flight, the last one the head.
    trainer_stages = range(config.actor.parallel.pipeline)
    roles = [
        _select_peak_stage(
            [_compute_trainer_memory(config, shape, stage) for stage in trainer_stages]
        )
    ]
    if has_generator(config):
        engine_stages = range(config.engine.parallel.pipeline)
        roles.append(
            _select_peak_stage(
                [_compute_generator_memory(config, shape, stage) for stage in engine_stages]
            )
        )
    rewards = list(reward_shapes(config, expected).values())
    if config.algorithm.has_critic:
        critic = critic_shape(config, shape, expected)
        stages = range(config.critic.parallel.pipeline)
        roles.append(
            _select_peak_stage(
                [_compute_critic_memory(config, critic, rewards, stage) for stage in stages]
            )
        )
    if rewards and not config.critic_serves_reward:
        roles += _compute_frozen_role_memory(
            config, "reward", "scoring", config.reward, rewards, "scalar"
        )
    if teachers := list(teacher_shapes(config, shape, expected).values()):
        roles += _compute_frozen_role_memory(
            config, "teacher", "logprobs", config.teacher, teachers, "vocabulary"
        )
    return tuple(roles)


def _compute_frozen_role_memory(
    config: Config,
    role: str,
    phase: str,
    settings: MegatronModelConfig,
    shapes: Sequence[ModelShape],
    head: Head,
) -> Iterator[RoleMemory]:
    """Yield the memory of each replica of a role with frozen models; all replicas are equal."""
    stages = range(settings.parallel.pipeline)
    peak_stage = _select_peak_stage(
        [
            RoleMemory(role, (_build_frozen_phase(config, phase, settings, shapes, head, index),))
            for index in stages
        ]
    )
    yield from (
        replace(peak_stage, role=server)
        for server in count_server_ranks(config)
        if get_role(server) == role
    )


def _select_peak_stage(stages: Sequence[RoleMemory]) -> RoleMemory:
    """Return the memory of the pipeline stage that needs the most."""
    stage = max(range(len(stages)), key=lambda index: stages[index].peak.total)
    return replace(stages[stage], stages=len(stages), stage=stage)


def _compute_trainer_memory(config: Config, shape: ModelShape, stage: int) -> RoleMemory:
    """Return the memory of a trainer rank of a pipeline stage."""
    actor = config.actor
    trainer = config.algorithm.trainer
    head: Head = "vocabulary"
    if trainer == "reward_model":
        shape = first_layers(config, shape)
        head = "scalar"
    device = get_device(config, actor.precision)
    activations = StageActivations(
        shape, head, actor, stage, _compute_batch_load(config, actor, is_minibatch=True), device
    )
    states = compute_trained_states(
        shape, head, actor, stage, device, has_optimizer_steps=config.algorithm.trains_model
    )
    phases = []
    host = states.on_host + states.snapshot
    weights = states.weights
    with_reference = replace(states, weights=2 * weights)
    has_reference_copy = has_reference(config) and not actor.lora.rank
    if has_reference_copy and actor.reference_on_device:
        states = with_reference
    if config.algorithm.trains_model:
        phases.append(
            _build_state_phase("training", states, activations.training_activations().total)
        )
    if has_reference_copy:
        # The reference model's weights are copied from host memory to the device, in addition to
        # the policy's weights.
        scoring_work = replace(activations, load=_compute_batch_load(config, actor)).scoring_bytes()
        phases.append(_build_state_phase("reference", with_reference, scoring_work))
        host += 0 if actor.reference_on_device else weights
    if config.algorithm.generates_samples and not has_generator(config):
        phases = [
            *_add_engine_phases(
                config, shape, stage, _build_state_phase("generation", states, 0), phases
            )
        ]
        if config.engine.kind == "tensorrt_llm" and config.engine.sleep:
            # The sleeping engine copies its weights to host memory, also during a weight sync.
            # Since release 1.3 it does not, but the release is known only on the nodes.
            host += phases[-1].engine
        host += _compute_packed_weight_bytes(config, shape)
    if has_generator(config):
        host += _compute_snapshot_bytes(config, weights)
        # Weights are sent during all phases of the trainer, through a bucket.
        phases = [
            replace(phase, engine=min(config.engine.bucket_mib << 20, weights)) for phase in phases
        ]
    # A run without updates and without a colocated engine has no other phase.
    all_phases = tuple(phases) or (_build_state_phase("weight sync", states, 0),)
    return RoleMemory("trainer", all_phases, host=host)


def _add_engine_phases(
    config: Config, shape: ModelShape, stage: int, trainer_phase: Phase, phases: Sequence[Phase]
) -> Iterator[Phase]:
    """Yield the trainer's phases with a colocated engine.

    With `engine.sleep`, the engine needs memory only in its own phases, generation and weight sync.

    Args:
        config: The run's configuration.
        shape: Dimensions of the policy.
        stage: Pipeline stage of the trainer.
        trainer_phase: The trainer's memory during generation.
        phases: The trainer's other phases.
    """
    engine = compute_engine_memory(config, shape, stage=stage, other_bytes=trainer_phase.total)
    is_sleeping = config.engine.sleep and uses_gpus(config)
    for phase in phases:
        yield phase if is_sleeping else replace(phase, engine=engine.weights, cache=engine.cache)
    # An engine that wakes for new weights has not allocated its KV cache yet.
    cache = 0 if is_sleeping else engine.cache
    yield replace(
        trainer_phase, name="weight sync", engine=engine.weights + engine.transfer, cache=cache
    )
    yield replace(trainer_phase, engine=engine.weights, cache=engine.cache, activations=engine.work)


def _build_state_phase(name: str, states: ModelStates, activations: int) -> Phase:
    """Return a phase of a trained model."""
    return Phase(name, states.weights, states.gradients, states.optimizer, activations)


def _compute_snapshot_bytes(config: Config, weights: int) -> int:
    """Return the bytes of weight copies that wait for their transfer to the generator.

    These are the newest version and all versions back to the one that the generator uses.
    """
    actor_itemsize = get_device(config, config.actor.precision).itemsize
    engine_itemsize = get_device(config, config.engine.precision).itemsize
    versions = 1 + max(1, config.rollout.steps_ahead)
    # `weights` are in the trainer's precision, the copies in the engine's precision.
    return weights * engine_itemsize // actor_itemsize * versions


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine on one device, in bytes."""

    weights: int
    """Weights, with the spare copy of `engine.update=atomic`."""
    transfer: int
    """Buffers of a weight sync: the bucket, and tensors for an engine in another process."""
    cache: int
    """KV cache."""
    work: int
    """Temporary tensors of a prefill or of sampling."""


def compute_engine_memory(
    config: Config,
    shape: ModelShape,
    *,
    engine_stage: int | None = None,
    stage: int = 0,
    other_bytes: int = 0,
) -> EngineMemory:
    """Return the memory of an engine's rank.

    Args:
        config: The run's configuration.
        shape: Dimensions of the policy.
        engine_stage: Pipeline stage of the engine; None is the stage with the most weights.
        stage: Pipeline stage of the trainer on the same device, for a colocated engine.
        other_bytes: Bytes that other components use on the device.
    """
    engine = config.engine
    device = get_device(config, engine.precision)
    layout = engine.parallel
    tensor = layout.tensor
    itemsize = device.itemsize
    bucket = engine.bucket_mib << 20

    weights_by_stage = [
        count_engine_weights(shape, tensor, layout.expert, layout.pipeline, index)
        for index in range(layout.pipeline)
    ]
    if engine_stage is None:
        engine_stage = weights_by_stage.index(max(weights_by_stage))
    rank_weights = weights_by_stage[engine_stage]
    weights = itemsize * rank_weights
    if engine.update == "shared":
        weights -= itemsize * count_shared_weights(shape, config.actor.parallel, stage, tensor)
    # An engine that sleeps has freed its weights before a sync, so it needs no spare copy.
    if engine.update == "atomic" and not engine.sleep:
        weights *= 2

    tokens = min(_PREFILL_TOKENS, count_concurrent_rows(config) * config.data.max_prompt_tokens)
    transfer = min(bucket, weights)
    if engine.kind == "tensorrt_llm":
        tokens = engine.tensorrt_llm.max_num_tokens
    # Engines in another process read complete tensors. vLLM reads slices, which are packed in a
    # second buffer.
    if engine.kind != "embedded":
        is_sliced = engine.kind == "vllm"
        shards, copies = (tensor, 2) if is_sliced else (1, 1)
        received_weights = rank_weights if is_sliced else count_engine_weights(shape, 1)
        # A bucket holds at least one complete tensor, even if the tensor is larger than the limit.
        transfer += copies * max(
            min(bucket, itemsize * received_weights),
            itemsize * count_largest_tensor(shape) // shards,
        )
    # Sampling converts the logits of all rows to fp32, gathered over the tensor ranks.
    logits = count_concurrent_rows(config) * shape.vocab_size * (4 + itemsize / tensor)
    work = int(max(compute_forward_work_bytes(shape, tensor, tokens, itemsize), logits))
    used_bytes = weights + transfer + work + other_bytes
    cached_shape = [*iterate_engine_stages(shape, layout.pipeline)][engine_stage]
    cache = _compute_cache_bytes(config, cached_shape, itemsize, used_bytes)
    return EngineMemory(weights, transfer, cache, work)


def _compute_cache_bytes(config: Config, shape: ModelShape, itemsize: int, used_bytes: int) -> int:
    """Return the bytes of the KV cache.

    External engines reserve a share of the memory in advance; the embedded engine allocates blocks
    for the concurrent sequences at their maximum length.

    Args:
        config: The run's configuration.
        shape: Dimensions of the layers of the engine's pipeline stage.
        itemsize: Bytes of a number.
        used_bytes: Bytes of the device that are used for other purposes.
    """
    engine = config.engine
    memory = config.cluster.device_memory_gib
    # The KV cache never contains the last token, whose successor is not generated.
    tokens = get_max_sequence_length(config) - 1
    block_tokens = 1
    if engine.kind == "embedded":
        block_tokens = choose_block_tokens(tokens, is_gpu=uses_gpus(config))
    row_bytes = cache_bytes_per_sequence(
        shape, engine.parallel.tensor, itemsize, tokens, block_tokens
    )
    limit = None if engine.kv_cache_mib is None else engine.kv_cache_mib << 20
    if engine.kind != "embedded" and limit is not None:
        return limit
    # vLLM's share includes its weights and buffers, TensorRT-LLM's share is one of the free memory.
    if engine.kind == "vllm" and memory is not None and uses_gpus(config):
        return max(row_bytes, int(memory * 2**30 * engine.vllm.memory_fraction) - used_bytes)
    if engine.kind == "vllm":
        return engine.batch_size * row_bytes
    if engine.kind == "tensorrt_llm" and memory is not None:
        return max(
            row_bytes, int((memory * 2**30 - used_bytes) * engine.tensorrt_llm.free_memory_fraction)
        )
    needed_bytes = count_concurrent_rows(config) * row_bytes
    return needed_bytes if limit is None else min(needed_bytes, limit)


def count_concurrent_rows(config: Config) -> int:
    """Return the number of sequences that a rank of the engine decodes concurrently, at most.

    The engine generates one rollout micro-batch after the other.
    """
    rollout = config.rollout
    prompts = rollout.prompts_per_micro_batch + rollout.spare_prompts
    samples = prompts * rollout.samples_per_prompt
    if config.evaluation.every:  # the number of evaluation prompts is not known here
        return config.engine.batch_size
    return min(config.engine.batch_size, math.ceil(samples / config.engine.parallel.data))


def _compute_generator_memory(config: Config, shape: ModelShape, stage: int) -> RoleMemory:
    """Return the memory of a generator rank of a pipeline stage."""
    engine = compute_engine_memory(config, shape, engine_stage=stage)
    phases = (
        Phase("generation", activations=engine.work, cache=engine.cache, engine=engine.weights),
        Phase("weight sync", cache=engine.cache, engine=engine.weights + engine.transfer),
    )
    base_bytes = 0
    # To send only changes, the rank keeps the previous weights.
    if config.engine.kind == "vllm" and config.engine.publish == "changes":
        itemsize = get_device(config, config.engine.precision).itemsize
        base_bytes = itemsize * count_engine_weights(shape, 1)
    return RoleMemory(
        "generator", phases, host=base_bytes + _compute_packed_weight_bytes(config, shape)
    )


def _compute_packed_weight_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of the packed copy of the engine's matrices for matmuls on CPUs."""
    engine = config.engine
    device = get_device(config, engine.precision)
    is_packed = engine.kind == "embedded" and engine.packed_weights and not engine.exact
    if not is_packed or device.is_gpu:
        return 0
    layout = engine.parallel
    return device.itemsize * count_engine_weights(shape, layout.tensor, layout.expert)


def _compute_critic_memory(
    config: Config, shape: ModelShape, rewards: Sequence[ModelShape], stage: int
) -> RoleMemory:
    """Return the memory of a critic rank of a pipeline stage."""
    critic = config.critic
    device = get_device(config, critic.precision)
    states = compute_trained_states(shape, "scalar", critic, stage, device)
    training_activations = StageActivations(
        shape,
        "scalar",
        critic,
        stage,
        _compute_batch_load(config, critic, is_minibatch=True),
        device,
    ).training_activations()
    phases = [_build_state_phase("training", states, training_activations.total)]
    host = states.on_host + states.snapshot
    if critic.with_reward and rewards:
        settings = replace(config.reward, parallel=critic.parallel)
        scoring_phase = _build_frozen_phase(config, "scoring", settings, rewards, "scalar", stage)
        # Critic and reward models are on the device in turn. Only the critic's optimizer state
        # stays on the device all the time.
        phases.append(replace(scoring_phase, optimizer=states.optimizer))
        host += scoring_phase.weights + states.weights  # both are in host memory during the swap
    return RoleMemory("critic", tuple(phases), host=host)


def _build_frozen_phase(
    config: Config,
    name: str,
    settings: MegatronModelConfig,
    shapes: Sequence[ModelShape],
    head: Head,
    stage: int,
) -> Phase:
    """Return a phase in which all given frozen models are on the device and are called in turn."""
    device = get_device(config, settings.precision)
    load = _compute_batch_load(config, settings)
    # All models are resident, but only one of them computes at a time.
    weights = sum(
        compute_frozen_weight_bytes(shape, head, settings.parallel, stage, device)
        for shape in shapes
    )
    activations = max(
        StageActivations(shape, head, settings, stage, load, device).scoring_bytes()
        for shape in shapes
    )
    return Phase(name, weights, activations=activations)


def _compute_batch_load(
    config: Config, settings: MegatronModelConfig, *, is_minibatch: bool = False
) -> BatchLoad:
    """Return the token counts of a model's batches, with every sequence at its maximum length.

    Args:
        config: The run's configuration.
        settings: The model's section of the configuration.
        is_minibatch: Whether the batch is a minibatch of a training step instead of all of the
            step's rows.
    """
    rollout = config.rollout
    if not config.algorithm.generates_samples:
        rows = config.data.batch_size * get_rows_per_group(config)
    elif is_minibatch:
        rows = (
            rollout.prompts_per_step * count_trained_samples(config) // config.algorithm.minibatches
        )
    else:
        rows = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = get_max_sequence_length(config)
    return BatchLoad(
        settings.micro_batch_tokens, math.ceil(rows / settings.parallel.data) * longest, longest
    )


COLUMNS = ("weights", "gradients", "optimizer", "activations", "cache", "engine", "total")
# Shorter headings, so that the table fits into 80 characters.
_HEADINGS = {
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "act.",
    "cache": "KV",
}
GIB = 2**30
_MIB = 2**20


def build_memory_table(config: Config, roles: tuple[RoleMemory, ...]) -> Table:
    """Return a table with a line for each phase of each role."""
    limit = config.cluster.device_memory_gib
    is_large = limit is not None or max(role.peak.total for role in roles) >= GIB
    unit = GIB if is_large else _MIB
    limit_text = "" if limit is None else f" (limit {limit:g})"
    title = f"memory per device in {'GiB' if unit == GIB else 'MiB'}{limit_text}"
    # No lines between the columns, so that all of them fit.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for column in ("role", "stage", "phase"):
        table.add_column(column, no_wrap=True)
    for column in (*COLUMNS, "host"):
        table.add_column(_HEADINGS.get(column, column), justify="right", min_width=5, no_wrap=True)

    def format_size(size: int) -> str:
        return f"{size / unit:.1f}" if size else "-"

    for role in roles:
        role_cells = (
            role.role,
            f"{role.stage}/{role.stages}" if role.stages > 1 else "",
            format_size(role.host),
        )
        for phase in role.phases:
            # The role's own cells are in the first of its rows.
            name, stage, host = role_cells if phase is role.phases[0] else ("", "", "")
            style = "bold" if phase is role.peak else None
            table.add_row(
                name,
                stage,
                phase.name,
                *(format_size(getattr(phase, column)) for column in COLUMNS),
                host,
                style=style,
            )
    return table


def find_memory_problems(
    config: Config, shape: ModelShape, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield an error for each role that needs more than `cluster.device_memory_gib`.

    Nothing is checked if this key is null.
    """
    limit = config.cluster.device_memory_gib
    if limit is None:
        return
    yield from _find_vllm_share_problems(config, shape, limit)
    for role in compute_role_memory(config, shape, expected):
        if role.peak.total <= limit * GIB or "." in role.role:  # all replicas of a role are equal
            continue
        stage_text = f" (pipeline stage {role.stage})" if role.stages > 1 else ""
        parts = ((column, getattr(role.peak, column)) for column in COLUMNS[:-1])
        parts_text = ", ".join(f"{column} {size / GIB:.1f}" for column, size in parts if size)
        yield (
            f"cluster.device_memory_gib={limit:g}: too small for the {role.role}, which needs"
            f" {role.peak.total / GIB:.1f} GiB per device during {role.peak.name}{stage_text}:"
            f" {parts_text}; to reduce memory use, try {_suggest_keys(config, role.role)}"
        )


def _find_vllm_share_problems(config: Config, shape: ModelShape, limit: float) -> Iterator[str]:
    """Yield an error if vLLM may not use enough memory for its weights and one sequence.

    vLLM would refuse to start. With `engine.kv_cache_mib`, it does not compute the size of its
    cache from its share.
    """
    engine = config.engine
    if (
        engine.kind != "vllm"
        or engine.kv_cache_mib is not None
        or not config.algorithm.generates_samples
        or not uses_gpus(config)
    ):
        return
    memory = compute_engine_memory(config, shape)
    fraction = engine.vllm.memory_fraction
    needed_gib = (memory.weights + memory.work + memory.cache) / GIB
    if needed_gib > limit * fraction:
        min_fraction = math.ceil(100 * needed_gib / limit) / 100
        advice = f"set it to at least {min_fraction:g}, or use more ranks"
        if min_fraction > 1:
            advice = "use more ranks"
        yield (
            f"engine.vllm.memory_fraction={fraction:g}: too small, because vLLM may then use"
            f" {limit * fraction:.1f} of {limit:g} GiB per device, but needs {needed_gib:.1f} GiB"
            f" for its weights and the longest sequence; {advice}"
        )


def _suggest_keys(config: Config, role: str) -> str:
    """Return the keys with which a role needs less device memory."""
    section = {"trainer": "actor", "generator": "engine"}.get(role, role)
    # Among the engines, only vLLM has pipeline parallelism.
    has_pipeline = section != "engine" or config.engine.kind == "vllm"
    pipeline_key = f" or {section}.parallel.pipeline" if has_pipeline else ""
    keys = [f"more ranks in {section}.parallel.tensor{pipeline_key}"]
    if section in ("actor", "critic"):
        uses_muon = (config.actor if section == "actor" else config.critic).optimizer.kind == "muon"
        keys += [] if uses_muon else [f"{section}.optimizer.distributed=true"]
        keys += [f"a smaller {section}.micro_batch_tokens", f"{section}.recompute=full"]
    # A colocated engine uses the trainer's devices.
    if section == "engine" or (
        section == "actor" and config.algorithm.generates_samples and not has_generator(config)
    ):
        keys += ["engine.sleep=true"] if section == "actor" else []
        keys += ["engine.update=in_place", "a smaller engine.batch_size or engine.kv_cache_mib"]
    return ", ".join(keys)
