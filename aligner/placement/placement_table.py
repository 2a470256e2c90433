"""The table of a run's roles: their ranks, layouts, components and devices."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from rich.table import Table

from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, critic_shape
from aligner.models.pipeline_stages import count_part_layers
from aligner.models.shape import ModelShape
from aligner.placement.local_devices import assign_local_devices, describe_devices
from aligner.placement.roles import (
    compute_threads_per_rank,
    computes_on_devices,
    count_role_ranks,
    get_role,
    has_generator,
    uses_gpus,
)
from aligner.schema import Config, EngineParallelConfig, ParallelConfig
from aligner.schema.derived import has_reference
from aligner.schema.reward_sources import describe_sources
from aligner.schema.teacher_sources import parse_teacher_sources


@dataclass(frozen=True)
class Placement:
    """The ranks of one role or server group. The viewer shows these fields, too."""

    role: str
    ranks: int
    layout: str
    """Parallel layout, such as `TP2 PP1 DP4`; `-` without a model."""
    runs: str
    """Components that the ranks run, such as models and engines."""
    device: str
    threads: int | None
    """OpenMP threads per rank; None if this is not known yet."""


def describe_layout(parallel: ParallelConfig) -> str:
    """Return a layout in the usual abbreviations.

    Sizes of 1 are omitted, except for tensor, pipeline and data parallelism.

    Example:
        >>> describe_layout(ParallelConfig(tensor=2, data=4))
        'TP2 PP1 DP4'
    """
    parts = [
        f"TP{parallel.tensor}" + ("+SP" if parallel.sequence else ""),
        f"PP{parallel.pipeline}",
    ]
    if parallel.virtual_pipeline > 1:
        parts.append(f"VPP{parallel.virtual_pipeline}")
    if parallel.context > 1:
        parts.append(f"CP{parallel.context}")
    parts.append(f"DP{parallel.data}")
    if parallel.expert > 1:
        parts.append(f"EP{parallel.expert}")
    if parallel.expert_tensor is not None:
        parts.append(f"ETP{parallel.expert_tensor}")
    return " ".join(parts)


def _describe_engine_layout(parallel: EngineParallelConfig) -> str:
    """Return the engine's layout in the abbreviations of `describe_layout`."""
    pipeline = f" PP{parallel.pipeline}" if parallel.pipeline > 1 else ""
    expert = f" EP{parallel.expert}" if parallel.expert > 1 else ""
    return f"TP{parallel.tensor}{pipeline}{expert} DP{parallel.data}"


def build_placements(config: Config) -> tuple[Placement, ...]:
    """Return the placement of each role and server group of a run."""
    engine = config.engine
    engine_layout = _describe_engine_layout(engine.parallel)
    is_separate = has_generator(config)
    is_colocated = config.algorithm.generates_samples and not is_separate
    engine_text = f", {engine.kind} engine" if is_colocated else ""

    # by `algorithm.trainer`
    trainer_components = {
        "online": f"policy, reference{engine_text}",
        "preferences": f"policy{engine_text}",
        "sft": "policy",
        "dpo": "policy, reference" if has_reference(config) else "policy",
        "reward_model": "reward model",
        "teacher_scores": "teacher",
    }
    sources = describe_sources(config.reward)

    devices = {
        group: f"cuda {describe_devices(indices)}"
        for group, indices in assign_local_devices(config).items()
    }
    default_device = "cuda" if uses_gpus(config) else "cpu"
    # The cores of a job's nodes are not known before the job starts.
    is_known = config.cluster.kind == "local" or config.cluster.threads_per_rank is not None
    threads = compute_threads_per_rank(config) if is_known else None
    ranks = count_role_ranks(config)

    def build_placement(role: str, layout: str, runs: str) -> Placement:
        device = devices.get(role, default_device) if computes_on_devices(config, role) else "cpu"
        return Placement(role, ranks[role], layout, runs, device, threads)

    trainer_layout = describe_layout(config.actor.parallel)
    if is_colocated:
        trainer_layout += f", engine {engine_layout}"
    components = trainer_components[config.algorithm.trainer]
    roles = [build_placement("trainer", trainer_layout, components)]

    if is_separate:
        roles.append(build_placement("generator", engine_layout, f"{engine.kind} engine"))
    if "critic" in ranks:
        critic_models = "value model"
        if config.critic.path is not None:
            critic_models += f", from {config.critic.path}"
        if config.critic_serves_reward:
            critic_models += f", {sources}"
        roles.append(
            build_placement("critic", describe_layout(config.critic.parallel), critic_models)
        )

    # A reward function has no layout.
    reward_layout = (
        describe_layout(config.reward.parallel) if computes_on_devices(config, "reward") else "-"
    )
    roles += [
        build_placement(group, reward_layout, sources)
        for group in ranks
        if get_role(group) == "reward"
    ]

    teacher_layout = describe_layout(config.teacher.parallel)
    teacher_names = "teacher " + ", ".join(
        source.path for source in parse_teacher_sources(config.teacher)
    )
    roles += [
        build_placement(group, teacher_layout, teacher_names)
        for group in ranks
        if get_role(group) == "teacher"
    ]
    return tuple(roles)


def build_placement_table(config: Config) -> Table:
    """Return the roles of a run as a table."""
    table = Table(
        title=f"{config.run.experiment}: {sum(count_role_ranks(config).values())} processes",
        title_justify="left",
    )
    # The columns are the fields of `Placement`, in their order.
    for column in ("role", "ranks", "layout", "components", "device", "threads"):
        table.add_column(column, justify="right" if column in ("ranks", "threads") else "left")
    for placement in build_placements(config):
        table.add_row(*("-" if value is None else str(value) for value in astuple(placement)))
    return table


def find_stage_notes(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> Iterator[str]:
    """Yield a note for each trained model whose pipeline stages were chosen with unequal sizes."""
    models = {"actor": (config.actor.parallel, shape)}
    if config.algorithm.has_critic:
        models["critic"] = (config.critic.parallel, critic_shape(config, shape, expected))
    for section, (layout, model) in models.items():
        sizes = count_part_layers(model, layout)
        if layout.stage_layers is None and len(set(sizes)) > 1:
            parts = "chunks" if layout.virtual_pipeline > 1 else "stages"
            yield (
                f"note: {section}.parallel: the {parts} of the pipeline have"
                f" {', '.join(map(str, sizes))} layers; set {section}.parallel.stage_layers to"
                " choose other numbers"
            )


def find_layer_notes(config: Config) -> Iterator[str]:
    """Yield a note for each role whose GPU layers do not use those of transformer-engine."""
    models = {
        "trainer": config.actor,
        "critic": config.critic,
        "reward": config.reward,
        "teacher": config.teacher,
    }
    groups = [group for group in count_role_ranks(config) if computes_on_devices(config, group)]
    # Each role once, in the order of its first group.
    for role in dict.fromkeys(get_role(group) for group in groups):
        if role in models and uses_gpus(config):
            reason = "in float32" if models[role].precision == "fp32" else ""
            if role == "trainer" and config.actor.lora.rank:
                reason = "with LoRA"
            if reason:
                yield (
                    f"note: {role}: {reason}, the model does not use the faster layers of"
                    " transformer-engine"
                )
