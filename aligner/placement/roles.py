"""The roles of a run: ranks, devices, threads, sizes of models."""

import os
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, critic_shape, first_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, weight_table
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model

PRETENDED_GPUS = "ALIGNER_GPUS"


def gpu_count() -> int:
    """GPUs of this machine that may be used: asking the driver's files costs nothing, asking torch
    costs its import.

    ALIGNER_GPUS says of how many configurations are checked on a machine that has others, or none.
    """
    if gpus := os.environ.get(PRETENDED_GPUS):
        if not gpus.isdecimal():
            raise ConfigError(f"{PRETENDED_GPUS}={gpus}: must be a number of GPUs")
        return int(gpus)
    # Some sandboxes have no files of the driver's, but all have the devices.
    driver, devices = Path("/proc/driver/nvidia/gpus").glob("*"), Path("/dev").glob("nvidia[0-9]*")
    found, visible = len([*driver]) or len([*devices]), visible_gpus()
    return found if visible is None else min(found, len(visible))


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None where it is not set, which leaves all visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name for name in visible.split(",") if name]


def has_gpu() -> bool:
    """Whether this machine has a GPU to use."""
    return gpu_count() > 0


def uses_gpus(config: Config) -> bool:
    """Whether the roles' devices are GPUs: of this machine where the run stays here.

    A Slurm job's are, whatever the machine that submits it has, unless none are asked for and
    nothing needs one.
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
    return Device(gpus, 2 if precision in ("bf16", "fp8") or (precision == "auto" and gpus) else 4)


def has_generator(config: Config) -> bool:
    """Whether the engine is a role of its own."""
    return config.algorithm.generates and config.engine.placement == "server"


def server_ranks(config: Config) -> dict[str, int]:
    """Number of processes of each server group: `generator`, `critic`, `reward`, `teacher`, further
    replicas `reward.1`, …."""
    if not config.algorithm.generates:
        return {}
    rewards, teachers = (
        (0 if config.critic_scores else config.reward.replicas),
        config.teacher.replicas * config.has_teacher,
    )
    generator = {"generator": config.engine.parallel.ranks} if has_generator(config) else {}
    critic = {"critic": config.critic.parallel.ranks} if config.algorithm.has_critic else {}
    return {
        **generator,
        **critic,
        **dict.fromkeys(_replicas("reward", rewards), config.reward.parallel.ranks),
        **dict.fromkeys(_replicas("teacher", teachers), config.teacher.parallel.ranks),
    }


def _replicas(role: str, count: int) -> list[str]:
    """The server groups of a role: its own name is that of the first."""
    return [f"{role}.{replica}" if replica else role for replica in range(count)]


def role_ranks(config: Config) -> dict[str, int]:
    """Number of processes of each role, in the order in which they are started."""
    return {**server_ranks(config), "trainer": config.actor.parallel.ranks}


def role_of(group: str) -> str:
    """The role of a server group: `reward` for the replica `reward.1`. What prepares a run does so
    in the trainer's place."""
    return "trainer" if group == "prepare" else group.partition(".")[0]


def computes_on_devices(config: Config, group: str) -> bool:
    """Whether the ranks of a role, or a server group, have models; a scoring function needs no
    device."""
    return role_of(group) != "reward" or has_reward_model(config.reward)


def threads_per_rank(config: Config) -> int:
    """OpenMP threads of each process of a run on this machine: as decided, else this process's
    cores over all ranks."""
    ranks = sum(role_ranks(config).values())
    return configured_threads(config) or max(1, len(os.sched_getaffinity(0)) // ranks)


def configured_threads(config: Config) -> int | None:
    """OpenMP threads of a rank where the configuration decides them.

    One on GPUs, as torchrun has it, unless the processor is to take part in the optimizer's steps:
    what else it computes there is small, and dealt out over a pool of threads took longer than what
    the GPU did meanwhile.
    """
    if config.engine.exact:
        return 1
    offloads = any(model.optimizer.offload_fraction > 0 for model in (config.actor, config.critic))
    return config.cluster.threads_per_rank or (1 if uses_gpus(config) and not offloads else None)


def parameter_count(shape: ModelShape, head: Head = "vocabulary") -> int:
    """Number of weights of a model of this shape."""
    return sum(spec.numel for spec in weight_table(shape, head))


def parameters_text(count: int) -> str:
    """A number of parameters as text: `70.6 B parameters`, `134.5 M parameters`."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} B parameters"
    if count >= 1e5:
        return f"{count / 1e6:.1f} M parameters"
    return f"{count / 1e3:.1f} K parameters"


def describe_model(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> str:
    """A line each: the shape and size of the policy, or the reward model that is trained, and, if
    there is one, the critic."""
    trained, model = "policy", shape
    head: Head = "vocabulary"
    if config.algorithm.trainer == "reward_model":
        trained, model, head = "reward model", first_layers(config, shape), "scalar"
    described = (
        f"{trained}: {model.num_layers} layers, hidden size {model.hidden_size},"
        f" {model.num_heads} heads, {model.num_kv_heads} key-value heads, vocabulary size"
        f" {model.vocab_size}, {parameters_text(parameter_count(model, head))}"
    )
    if not config.algorithm.has_critic:
        return described
    critic = critic_shape(config, shape, expected)
    return (
        f"{described}\ncritic: {critic.num_layers} layers,"
        f" {parameters_text(parameter_count(critic, 'scalar'))}"
    )
