"""How much memory each role needs on one device, phase by phase, and the table of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from aligner.models.layouts import cache_bytes_per_token
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
from aligner.placement.memory.activations import Load, Stage, forward_work
from aligner.placement.memory.model_states import (
    States,
    engine_weights,
    frozen_weights,
    largest_tensor,
    shared_weights,
    trained_states,
)
from aligner.placement.roles import device_of, has_generator, role_of, server_ranks, uses_gpus
from aligner.schema import Config, MegatronModelConfig
from aligner.schema.derived import (
    has_reference,
    longest_sequence,
    rows_together,
    samples_learned_from,
)

_PROMPT_TOKENS = 8192
"""Of prompts that the embedded engine runs in one pass: `engines/embedded/scheduler.py`."""


@dataclass(frozen=True)
class Phase:
    """What a role holds on a device while it does one of the things that it does in turn, in
    bytes."""

    name: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0
    engine: int = 0

    @property
    def total(self) -> int:
        """All of it."""
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
    """A role's fullest device."""

    role: str
    phases: tuple[Phase, ...]
    stages: int = 1
    stage: int = 0
    """Its pipeline stage."""
    host: int = 0
    """Bytes in host memory of one rank, and of its engine's worker, at most: copies of weights,
    offloaded optimizer state, a checkpoint that is being written."""

    @property
    def peak(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.total)


def memory_needs(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> tuple[RoleMemory, ...]:
    """Every role that has a model; the configuration must be one that `check` accepts."""
    roles = [
        _fullest(
            [_trainer(config, shape, stage) for stage in range(config.actor.parallel.pipeline)]
        )
    ]
    if has_generator(config):
        roles.append(_generator(config, shape))
    rewards = list(reward_shapes(config, expected).values())
    if config.algorithm.has_critic:
        critic, stages = (
            critic_shape(config, shape, expected),
            range(config.critic.parallel.pipeline),
        )
        roles.append(_fullest([_critic(config, critic, rewards, stage) for stage in stages]))
    if rewards and not config.critic_scores:
        roles += _frozen(config, "reward", "scoring", config.reward, rewards, "scalar")
    if teachers := list(teacher_shapes(config, shape, expected).values()):
        roles += _frozen(config, "teacher", "logprobs", config.teacher, teachers, "vocabulary")
    return tuple(roles)


def _frozen(
    config: Config,
    role: str,
    phase: str,
    settings: MegatronModelConfig,
    shapes: Sequence[ModelShape],
    head: Head,
) -> Iterator[RoleMemory]:
    """A role whose models are only asked, once for each of its replicas, which are alike."""
    stages = range(settings.parallel.pipeline)
    fullest = _fullest(
        [RoleMemory(role, (_asked(config, phase, settings, shapes, head, at),)) for at in stages]
    )
    yield from (
        replace(fullest, role=server) for server in server_ranks(config) if role_of(server) == role
    )


def _fullest(stages: Sequence[RoleMemory]) -> RoleMemory:
    stage = max(range(len(stages)), key=lambda at: stages[at].peak.total)
    return replace(stages[stage], stages=len(stages), stage=stage)


def _trainer(config: Config, shape: ModelShape, stage: int) -> RoleMemory:
    actor, trainer = config.actor, config.algorithm.trainer
    head: Head = "vocabulary"
    if trainer == "reward_model":
        shape, head = first_layers(config, shape), "scalar"
    device = device_of(config, actor.precision)
    part = Stage(shape, head, actor, stage, _load(config, actor, minibatch=True), device)
    states = trained_states(shape, head, actor, stage, device, steps=config.algorithm.learns)
    phases, host = [], states.on_host + states.snapshot
    with_reference, weights = replace(states, weights=2 * states.weights), states.weights
    has_copy = has_reference(config) and not actor.lora.rank
    if has_copy and actor.reference_on_device:
        states = with_reference
    if config.algorithm.learns:
        phases.append(_held("training", states, part.training().total))
    if has_copy:
        # Initial weights that are in host memory come to the device, where the policy's stay.
        asking = replace(part, load=_load(config, actor)).scoring()
        phases.append(_held("reference", with_reference, asking))
        host += 0 if actor.reference_on_device else weights
    if config.algorithm.generates and not has_generator(config):
        phases = [*_with_engine(config, shape, stage, _held("generation", states, 0), phases)]
        if config.engine.kind == "tensorrt_llm" and config.engine.sleep:
            # which it copies there also when the weights are published anew
            host += phases[-1].engine
        host += _packed(config, shape)
    if has_generator(config):
        host += _snapshots(config, weights)
        # Weights are sent beside whatever the trainer does, staged in a bucket.
        phases = [
            replace(phase, engine=min(config.engine.bucket_mib << 20, weights)) for phase in phases
        ]
    return RoleMemory("trainer", tuple(phases) or (_held("weight sync", states, 0),), host=host)


def _with_engine(
    config: Config, shape: ModelShape, stage: int, alone: Phase, phases: Sequence[Phase]
) -> Iterator[Phase]:
    """The trainer's phases with an engine on its devices, which sleeps in all but its own if it
    ever does."""
    engine = engine_memory(config, shape, stage=stage, beside=alone.total)
    asleep = config.engine.sleep and uses_gpus(config)
    for phase in phases:
        yield phase if asleep else replace(phase, engine=engine.weights, cache=engine.cache)
    # one that wakes to take new weights has no room for keys and values yet
    cache = 0 if asleep else engine.cache
    yield replace(alone, name="weight sync", engine=engine.weights + engine.transfer, cache=cache)
    yield replace(alone, engine=engine.weights, cache=engine.cache, activations=engine.work)


def _held(name: str, states: States, activations: int) -> Phase:
    return Phase(name, states.weights, states.gradients, states.optimizer, activations)


def _snapshots(config: Config, weights: int) -> int:
    """Copies of weights on their way to the generator: of the newest version and of all back to the
    one that serves."""
    actor, engine = (
        device_of(config, precision).itemsize
        for precision in (config.actor.precision, config.engine.precision)
    )
    return weights * engine // actor * (1 + max(1, config.rollout.steps_ahead))


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one of its devices."""

    weights: int
    """With the spare copy of update=atomic."""
    transfer: int
    """While new weights arrive: buckets, and what another program takes from there."""
    cache: int
    work: int
    """Of a pass over prompts, or of drawing tokens."""


def engine_memory(
    config: Config, shape: ModelShape, *, stage: int = 0, beside: int = 0
) -> EngineMemory:
    """Of a rank of the engine, on a device where `beside` bytes are held by others.

    Of a colocated engine `stage` is the trainer's pipeline stage on that device.
    """
    engine = config.engine
    device = device_of(config, engine.precision)
    tensor, itemsize, bucket = engine.parallel.tensor, device.itemsize, engine.bucket_mib << 20
    weights = itemsize * engine_weights(shape, tensor)
    if engine.update == "shared":
        weights -= itemsize * shared_weights(shape, config.actor.parallel, stage, tensor)
    # An engine that sleeps drops its weights, and what comes next has nothing to be atomic with.
    if engine.update == "atomic" and not engine.sleep:
        weights *= 2
    tokens, transfer = (
        min(_PROMPT_TOKENS, rows_at_once(config) * config.data.max_prompt_tokens),
        min(bucket, weights),
    )
    if engine.kind == "tensorrt_llm":
        tokens = engine.tensorrt_llm.max_num_tokens
    # whole tensors, which the program takes from there; of vLLM slices, packed once more
    if engine.kind != "embedded":
        cut, copies = (tensor, 2) if engine.kind == "vllm" else (1, 1)
        transfer += copies * max(
            min(bucket, itemsize * engine_weights(shape, cut)),
            itemsize * largest_tensor(shape) // cut,
        )
    logits = rows_at_once(config) * shape.vocab_size * (4 + itemsize / tensor)
    work = int(max(forward_work(shape, tensor, tokens, itemsize), logits))
    held = weights + transfer + work + beside
    return EngineMemory(weights, transfer, _cache(config, shape, itemsize, held), work)


def _cache(config: Config, shape: ModelShape, itemsize: int, held: int) -> int:
    """Keys and values: as many as are used, or as another program takes in advance, beside so many
    bytes held."""
    engine, memory = config.engine, config.cluster.device_memory_gib
    row = (longest_sequence(config) - 1) * cache_bytes_per_token(
        shape, engine.parallel.tensor, itemsize
    )
    limit = None if engine.kv_cache_mib is None else engine.kv_cache_mib << 20
    if engine.kind != "embedded" and limit is not None:
        return limit
    if engine.kind == "vllm" and memory is not None and uses_gpus(config):
        return max(row, int(memory * 2**30 * engine.vllm.memory_fraction) - held)
    if engine.kind == "vllm":
        return engine.batch_size * row
    if engine.kind == "tensorrt_llm" and memory is not None:
        return max(row, int((memory * 2**30 - held) * engine.tensorrt_llm.free_memory_fraction))
    used = rows_at_once(config) * row
    return used if limit is None else min(used, limit)


def rows_at_once(config: Config) -> int:
    """Sequences that a rank decodes at a time: of one rollout micro-batch, as one is drawn after
    another, ahead or in turn."""
    rollout = config.rollout
    samples = (rollout.prompts_per_micro_batch + rollout.spare_prompts) * rollout.samples_per_prompt
    if config.evaluation.every:  # how many prompts it has is not known here
        return config.engine.batch_size
    return min(config.engine.batch_size, math.ceil(samples / config.engine.parallel.data))


def _generator(config: Config, shape: ModelShape) -> RoleMemory:
    engine = engine_memory(config, shape)
    phases = (
        Phase("generation", activations=engine.work, cache=engine.cache, engine=engine.weights),
        Phase("weight sync", cache=engine.cache, engine=engine.weights + engine.transfer),
    )
    kept = 0
    # what they are changes of
    if config.engine.kind == "vllm" and config.engine.publish == "changes":
        kept = device_of(config, config.engine.precision).itemsize * engine_weights(shape, 1)
    return RoleMemory("generator", phases, host=kept + _packed(config, shape))


def _packed(config: Config, shape: ModelShape) -> int:
    """The copy of the engine's matrices that products on CPUs read, at most."""
    engine, device = config.engine, device_of(config, config.engine.precision)
    packs = engine.kind == "embedded" and engine.packed_weights and not engine.exact
    return (
        device.itemsize * engine_weights(shape, engine.parallel.tensor)
        if packs and not device.gpus
        else 0
    )


def _critic(
    config: Config, shape: ModelShape, rewards: Sequence[ModelShape], stage: int
) -> RoleMemory:
    critic = config.critic
    device = device_of(config, critic.precision)
    states = trained_states(shape, "scalar", critic, stage, device)
    training = Stage(
        shape, "scalar", critic, stage, _load(config, critic, minibatch=True), device
    ).training()
    phases, host = [_held("training", states, training.total)], states.on_host + states.snapshot
    if critic.with_reward and rewards:
        settings = replace(config.reward, parallel=critic.parallel)
        scoring = _asked(config, "scoring", settings, rewards, "scalar", stage)
        # Critic and reward models take turns: of the critic the optimizer's state stays.
        phases.append(replace(scoring, optimizer=states.optimizer))
        host += scoring.weights + states.weights  # one goes out before the other comes in
    return RoleMemory("critic", tuple(phases), host=host)


def _asked(
    config: Config,
    name: str,
    settings: MegatronModelConfig,
    shapes: Sequence[ModelShape],
    head: Head,
    stage: int,
) -> Phase:
    """Frozen models, all there at once and asked in turn."""
    device, load = device_of(config, settings.precision), _load(config, settings)
    weights = sum(frozen_weights(shape, head, settings.parallel, stage, device) for shape in shapes)
    activations = max(
        Stage(shape, head, settings, stage, load, device).scoring() for shape in shapes
    )
    return Phase(name, weights, activations=activations)


def _load(config: Config, settings: MegatronModelConfig, *, minibatch: bool = False) -> Load:
    """Of all rows of a step, or of a minibatch of them, shared by the data ranks; each may be as
    long as the longest."""
    rollout = config.rollout
    if not config.algorithm.generates:
        rows = config.data.batch_size * rows_together(config)
    elif minibatch:
        rows = (
            rollout.prompts_per_step * samples_learned_from(config) // config.algorithm.minibatches
        )
    else:
        rows = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = longest_sequence(config)
    return Load(
        settings.micro_batch_tokens, math.ceil(rows / settings.parallel.data) * longest, longest
    )


COLUMNS = ("weights", "gradients", "optimizer", "activations", "cache", "engine", "total")
_HEADINGS = {
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "act.",
    "cache": "KV",
}
"""Of columns with longer names, so that the table fits into 80 characters."""
GIB, _MIB = 2**30, 2**20


def memory_table(config: Config, needs: tuple[RoleMemory, ...]) -> Table:
    """A line for each phase of each role, on the fullest of its devices."""
    limit = config.cluster.device_memory_gib
    unit = GIB if limit is not None or max(role.peak.total for role in needs) >= GIB else _MIB
    of = "" if limit is None else f" (limit {limit:g})"
    title = f"memory per device in {'GiB' if unit == GIB else 'MiB'}{of}"
    # Narrow, for it has many columns: without lines between them.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for column in ("role", "stage", "phase"):
        table.add_column(column, no_wrap=True)
    for column in (*COLUMNS, "host"):
        table.add_column(_HEADINGS.get(column, column), justify="right", min_width=5, no_wrap=True)

    def cell(size: int) -> str:
        return f"{size / unit:.1f}" if size else "-"

    for role in needs:
        first = (
            role.role,
            f"{role.stage}/{role.stages}" if role.stages > 1 else "",
            cell(role.host),
        )
        for phase in role.phases:
            name, stage, host = first if phase is role.phases[0] else ("", "", "")
            style = "bold" if phase is role.peak else None
            table.add_row(
                name,
                stage,
                phase.name,
                *(cell(getattr(phase, column)) for column in COLUMNS),
                host,
                style=style,
            )
    return table


def memory_problems(config: Config, shape: ModelShape, expected: ExpectedInputs) -> Iterator[str]:
    """One line for each role that needs more than `cluster.device_memory_gib`; nothing where that
    is not given."""
    limit = config.cluster.device_memory_gib
    if limit is None:
        return
    for role in memory_needs(config, shape, expected):
        if role.peak.total <= limit * GIB or "." in role.role:  # replicas are alike
            continue
        where = f" (pipeline stage {role.stage})" if role.stages > 1 else ""
        parts = ((column, getattr(role.peak, column)) for column in COLUMNS[:-1])
        held = ", ".join(f"{column} {size / GIB:.1f}" for column, size in parts if size)
        yield (
            f"cluster.device_memory_gib={limit:g}: too small for the {role.role}, which needs"
            f" {role.peak.total / GIB:.1f} GiB per device during {role.peak.name}{where}: {held};"
            f" to reduce memory use, try {_what_helps(config, role.role)}"
        )


def _what_helps(config: Config, role: str) -> str:
    """The keys by which a role takes less of a device."""
    section = {"trainer": "actor", "generator": "engine"}.get(role, role)
    keys = [
        f"more ranks in {section}.parallel.tensor"
        + ("" if section == "engine" else f" or {section}.parallel.pipeline")
    ]
    if section in ("actor", "critic"):
        muon = (config.actor if section == "actor" else config.critic).optimizer.kind == "muon"
        keys += [] if muon else [f"{section}.optimizer.distributed=true"]
        keys += [f"a smaller {section}.micro_batch_tokens", f"{section}.recompute=full"]
    if section == "engine" or (
        section == "actor" and config.algorithm.generates and not has_generator(config)
    ):
        keys += ["engine.sleep=true"] if section == "actor" else []
        keys += ["engine.update=in_place", "a smaller engine.batch_size or engine.kv_cache_mib"]
    return ", ".join(keys)
