"""The table of a run's roles: their ranks, layouts, components and devices."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from rich.table import Table

from aligner.placement.local_devices import describe_devices, local_devices
from aligner.placement.roles import (
    computes_on_devices,
    has_generator,
    role_of,
    role_ranks,
    threads_per_rank,
    uses_gpus,
)
from aligner.schema import Config, ParallelConfig
from aligner.schema.derived import has_reference
from aligner.schema.reward_sources import describe_sources
from aligner.schema.teacher_sources import teacher_sources


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


def placements(config: Config) -> tuple[Placement, ...]:
    """Return the placement of each role and server group of a run."""
    engine = config.engine
    engine_layout = f"TP{engine.parallel.tensor} DP{engine.parallel.data}"
    is_separate = has_generator(config)
    colocated = config.algorithm.generates and not is_separate
    with_engine = f", {engine.kind} engine" if colocated else ""
    runs = {
        "online": f"policy, reference{with_engine}",
        "preferences": f"policy{with_engine}",
        "sft": "policy",
        "dpo": "policy, reference" if has_reference(config) else "policy",
        "reward_model": "reward model",
        "teacher_scores": "teacher",
    }
    sources = describe_sources(config.reward)
    devices = {
        group: f"cuda {describe_devices(indices)}"
        for group, indices in local_devices(config).items()
    }
    default_device = "cuda" if uses_gpus(config) else "cpu"
    # The cores of a job's nodes are not known before the job starts.
    is_known = config.cluster.kind == "local" or config.cluster.threads_per_rank is not None
    threads = threads_per_rank(config) if is_known else None
    ranks = role_ranks(config)

    def build_placement(role: str, layout: str, runs: str) -> Placement:
        device = devices.get(role, default_device) if computes_on_devices(config, role) else "cpu"
        return Placement(role, ranks[role], layout, runs, device, threads)

    layout = describe_layout(config.actor.parallel) + (
        f", engine {engine_layout}" if colocated else ""
    )
    roles = [build_placement("trainer", layout, runs[config.algorithm.trainer])]
    if is_separate:
        roles.append(build_placement("generator", engine_layout, f"{engine.kind} engine"))
    if "critic" in ranks:
        values = (
            "value model"
            if config.critic.path is None
            else f"value model, from {config.critic.path}"
        )
        values = f"{values}, {sources}" if config.critic_scores else values
        roles.append(build_placement("critic", describe_layout(config.critic.parallel), values))
    reward_layout = (
        describe_layout(config.reward.parallel) if computes_on_devices(config, "reward") else "-"
    )
    roles += [
        build_placement(group, reward_layout, sources)
        for group in ranks
        if role_of(group) == "reward"
    ]
    teacher_layout = describe_layout(config.teacher.parallel)
    teacher_names = "teacher " + ", ".join(
        source.path for source in teacher_sources(config.teacher)
    )
    return (
        *roles,
        *(
            build_placement(group, teacher_layout, teacher_names)
            for group in ranks
            if role_of(group) == "teacher"
        ),
    )


def placement_table(config: Config) -> Table:
    """Return the roles of a run as a table."""
    table = Table(
        title=f"{config.run.experiment}: {sum(role_ranks(config).values())} processes",
        title_justify="left",
    )
    for column in ("role", "ranks", "layout", "components", "device", "threads"):
        table.add_column(column, justify="right" if column in ("ranks", "threads") else "left")
    for placement in placements(config):
        table.add_row(*("-" if value is None else str(value) for value in astuple(placement)))
    return table


def layer_notes(config: Config) -> Iterator[str]:
    """Yield a note for each role whose GPU layers do not use those of transformer-engine."""
    models = {
        "trainer": config.actor,
        "critic": config.critic,
        "reward": config.reward,
        "teacher": config.teacher,
    }
    for role in {
        role_of(group): None for group in role_ranks(config) if computes_on_devices(config, group)
    }:
        if role in models and uses_gpus(config):
            reason = "in float32" if models[role].precision == "fp32" else ""
            if role == "trainer" and config.actor.lora.rank:
                reason = "with LoRA"
            if reason:
                yield (
                    f"note: {role}: {reason}, the model does not use the faster layers of"
                    " transformer-engine"
                )
