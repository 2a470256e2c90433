"""The roles of a run: ranks, layout, device, threads."""

import os
from dataclasses import astuple, dataclass
from pathlib import Path

from rich.table import Table

from aligner.models.model_source import critic_shape
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, weight_table
from aligner.schema import Config, ParallelConfig
from aligner.schema.reward_sources import describe_sources, has_reward_model, reward_sources


def has_gpu() -> bool:
    """Whether this machine has a GPU to use: asking the driver's files costs nothing, asking torch costs its import."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def uses_gpus(config: Config) -> bool:
    """Whether the roles' devices are GPUs: of this machine where the run stays here.

    A Slurm job's are, whatever the machine that submits it has, unless none are asked for and nothing needs one.
    """
    if config.cluster.kind == "local":
        return has_gpu()
    return config.cluster.slurm.gpus != "none" or config.engine.kind == "tensorrt_llm"


@dataclass(frozen=True)
class Device:
    """What a model computes on, and how many bytes a number of its layers takes there."""

    gpus: bool
    itemsize: int


def device_of(config: Config, precision: str) -> Device:
    """Of a role, or engine, at a precision: auto is bf16 on GPUs and fp32 on CPUs."""
    gpus = uses_gpus(config)
    return Device(gpus, 2 if precision == "bf16" or (precision == "auto" and gpus) else 4)


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
    parts = [f"TP{parallel.tensor}" + ("+SP" if parallel.sequence else ""), f"PP{parallel.pipeline}"]
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


def has_generator(config: Config) -> bool:
    """Whether the engine is a role of its own."""
    return config.algorithm.generates and config.engine.placement == "server"


def server_ranks(config: Config) -> dict[str, int]:
    """Number of processes of each server group: `generator`, `critic`, `reward`, and its further replicas `reward.1`, …."""
    if not config.algorithm.generates:
        return {}
    generator = {"generator": config.engine.parallel.ranks} if has_generator(config) else {}
    critic = {"critic": config.critic.parallel.ranks} if config.algorithm.has_critic else {}
    rewards = 0 if config.critic_scores else config.reward.replicas
    names = ["reward", *(f"reward.{replica}" for replica in range(1, rewards))][:rewards]
    return {**generator, **critic, **dict.fromkeys(names, config.reward.parallel.ranks)}


def role_ranks(config: Config) -> dict[str, int]:
    """Number of processes of each role, in the order in which they are started."""
    return {**server_ranks(config), "trainer": config.actor.parallel.ranks}


def threads_per_rank(config: Config) -> int:
    """OpenMP threads of each process of a run on this machine: as configured, else this process's cores over all ranks."""
    ranks = sum(role_ranks(config).values())
    return configured_threads(config) or max(1, len(os.sched_getaffinity(0)) // ranks)


def configured_threads(config: Config) -> int | None:
    """OpenMP threads of a rank where the configuration decides them."""
    return 1 if config.engine.exact else config.cluster.threads_per_rank


def placements(config: Config) -> tuple[Placement, ...]:
    """Every role of the run."""
    engine = config.engine
    engine_layout, generates = f"TP{engine.parallel.tensor} DP{engine.parallel.data}", has_generator(config)
    colocated = config.algorithm.generates and not generates
    with_engine = f", {engine.kind} engine" if colocated else ""
    runs = {
        "online": f"policy, reference{with_engine}",
        "preferences": f"policy{with_engine}",
        "sft": "policy",
        "dpo": "policy, reference",
        "reward_model": "reward model",
    }
    sources, has_model = describe_sources(reward_sources(config.reward)), has_reward_model(config.reward)
    device = "cuda" if uses_gpus(config) else "cpu"
    # A job's nodes are not known yet: their cores over the ranks there.
    is_known = config.cluster.kind == "local" or config.cluster.threads_per_rank is not None
    threads = threads_per_rank(config) if is_known else None
    ranks = role_ranks(config)

    def place(role: str, layout: str, runs: str, device: str = device) -> Placement:
        return Placement(role, ranks[role], layout, runs, device, threads)

    layout = describe_layout(config.actor.parallel) + (f", engine {engine_layout}" if colocated else "")
    found = [place("trainer", layout, runs[config.algorithm.trainer])]
    if generates:
        found.append(place("generator", engine_layout, f"{engine.kind} engine"))
    if "critic" in ranks:
        values = f"value model, {sources}" if config.critic_scores else "value model"
        found.append(place("critic", describe_layout(config.critic.parallel), values))
    scorer = (describe_layout(config.reward.parallel), sources) if has_model else ("-", sources, "cpu")
    return (*found, *(place(group, *scorer) for group in ranks if group.startswith("reward")))


def placement_table(config: Config) -> Table:
    """The roles as a table."""
    table = Table(title=f"{config.run.experiment}: {sum(role_ranks(config).values())} processes", title_justify="left")
    for column in ("role", "ranks", "layout", "runs", "device", "threads"):
        table.add_column(column, justify="right" if column in ("ranks", "threads") else "left")
    for place in placements(config):
        table.add_row(*("-" if value is None else str(value) for value in astuple(place)))
    return table


def parameter_count(shape: ModelShape, head: Head = "vocabulary") -> int:
    """Number of weights of a model of this shape."""
    return sum(spec.numel for spec in weight_table(shape, head))


def describe_model(config: Config, shape: ModelShape) -> str:
    """A line each: the shape and size of the policy, or the reward model that is trained, and, if there is one, the critic."""
    critic, trained = critic_shape(config, shape), "policy"
    head: Head = "vocabulary"
    if config.algorithm.trainer == "reward_model":
        shape, head, trained = critic, "scalar", "reward model"
    described = (
        f"{trained}: {shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_heads} heads,"
        f" {shape.num_kv_heads} key-value heads, vocabulary {shape.vocab_size},"
        f" {parameter_count(shape, head) / 1e6:.1f} M parameters"
    )
    if not config.algorithm.has_critic:
        return described
    return f"{described}\ncritic: {critic.num_layers} layers, {parameter_count(critic, 'scalar') / 1e6:.1f} M parameters"
