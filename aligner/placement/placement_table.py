"""The table of a run's roles: who runs what, where."""

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
    """One role's processes."""

    role: str
    ranks: int
    layout: str
    runs: str
    device: str
    threads: int | None


def describe_layout(parallel: ParallelConfig) -> str:
    """A layout in the field's abbreviations; what is not cut is left out, but for TP, PP and DP."""
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
    """Every role of the run."""
    engine = config.engine
    engine_layout, generates = (
        f"TP{engine.parallel.tensor} DP{engine.parallel.data}",
        has_generator(config),
    )
    colocated = config.algorithm.generates and not generates
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
        group: f"cuda {describe_devices(taken)}" for group, taken in local_devices(config).items()
    }
    everywhere = "cuda" if uses_gpus(config) else "cpu"
    # A job's nodes are not known yet: their cores over the ranks there.
    is_known = config.cluster.kind == "local" or config.cluster.threads_per_rank is not None
    threads = threads_per_rank(config) if is_known else None
    ranks = role_ranks(config)

    def place(role: str, layout: str, runs: str) -> Placement:
        device = devices.get(role, everywhere) if computes_on_devices(config, role) else "cpu"
        return Placement(role, ranks[role], layout, runs, device, threads)

    layout = describe_layout(config.actor.parallel) + (
        f", engine {engine_layout}" if colocated else ""
    )
    found = [place("trainer", layout, runs[config.algorithm.trainer])]
    if generates:
        found.append(place("generator", engine_layout, f"{engine.kind} engine"))
    if "critic" in ranks:
        values = (
            "value model"
            if config.critic.path is None
            else f"value model, from {config.critic.path}"
        )
        values = f"{values}, {sources}" if config.critic_scores else values
        found.append(place("critic", describe_layout(config.critic.parallel), values))
    scorer = (
        describe_layout(config.reward.parallel) if computes_on_devices(config, "reward") else "-"
    )
    found += [place(group, scorer, sources) for group in ranks if role_of(group) == "reward"]
    teacher = describe_layout(config.teacher.parallel)
    taught = "teacher " + ", ".join(source.path for source in teacher_sources(config.teacher))
    return (
        *found,
        *(place(group, teacher, taught) for group in ranks if role_of(group) == "teacher"),
    )


def placement_table(config: Config) -> Table:
    """The roles as a table."""
    table = Table(
        title=f"{config.run.experiment}: {sum(role_ranks(config).values())} processes",
        title_justify="left",
    )
    for column in ("role", "ranks", "layout", "components", "device", "threads"):
        table.add_column(column, justify="right" if column in ("ranks", "threads") else "left")
    for place in placements(config):
        table.add_row(*("-" if value is None else str(value) for value in astuple(place)))
    return table


def layer_notes(config: Config) -> Iterator[str]:
    """Which roles' layers on GPUs are megatron-core's own around torch's attention, also where
    transformer-engine is."""
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
            why = "in float32" if models[role].precision == "fp32" else ""
            if role == "trainer" and config.actor.lora.rank:
                why = "with LoRA"
            if why:
                yield (
                    f"note: {role}: {why}, the model does not use the faster layers of"
                    " transformer-engine"
                )
