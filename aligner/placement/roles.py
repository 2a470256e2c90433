"""The roles of a run: their ranks, devices and threads, and descriptions of their models."""

import os
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, critic_shape, first_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, weight_table
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model

# Environment variable with a number of GPUs, to validate configurations on a machine that has other
# GPUs or none.
GPU_COUNT_VARIABLE = "ALIGNER_GPUS"


def count_gpus() -> int:
    """Return the number of GPUs of this machine that this process may use.

    The function reads files of the driver, because an import of torch would take seconds.
    ALIGNER_GPUS replaces the result.

    Raises:
        ConfigError: ALIGNER_GPUS is not a number.
    """
    pretended_gpus = os.environ.get(GPU_COUNT_VARIABLE)
    if pretended_gpus:
        if not pretended_gpus.isdecimal():
            raise ConfigError(f"{GPU_COUNT_VARIABLE}={pretended_gpus}: must be a number of GPUs")
        return int(pretended_gpus)

    # Some sandboxes hide the driver's files, but all show the devices.
    driver_files = Path("/proc/driver/nvidia/gpus").glob("*")
    device_files = Path("/dev").glob("nvidia[0-9]*")
    count = len([*driver_files]) or len([*device_files])
    visible = get_visible_gpus()
    return count if visible is None else min(count, len(visible))


def get_visible_gpus() -> list[str] | None:
    """Return the names in CUDA_VISIBLE_DEVICES; None if the variable is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name for name in visible.split(",") if name]


def has_gpu() -> bool:
    """Return whether this machine has a GPU that this process may use."""
    return count_gpus() > 0


def uses_gpus(config: Config) -> bool:
    """Return whether the roles of a run compute on GPUs.

    For a job on a cluster, this does not depend on the machine that submits it: the job uses GPUs
    unless it requests none and its engine does not require them.
    """
    if config.cluster.kind == "local":
        return has_gpu()
    return requests_gpus(config) or config.engine.kind == "tensorrt_llm"


def requests_gpus(config: Config) -> bool:
    """Return whether the job of a run requests GPUs from its cluster; False for a local run."""
    cluster = config.cluster
    requests = {
        "slurm": cluster.slurm.gpus != "none",
        "kubernetes": cluster.kubernetes.gpu_resource is not None,
        "skypilot": cluster.skypilot.accelerator is not None,
    }
    return requests.get(cluster.kind, False)


@dataclass(frozen=True)
class Device:
    """Kind of device that a model computes on, and the size of a number of its layers."""

    is_gpu: bool
    """Whether the device is a GPU."""
    itemsize: int
    """Bytes of a number: 2 for bf16, also with fp8 matmuls, and 4 for fp32."""


def get_device(config: Config, precision: str) -> Device:
    """Return the device of a role or engine; precision `auto` is bf16 on GPUs and fp32 on CPUs."""
    is_gpu = uses_gpus(config)
    is_bf16 = precision in ("bf16", "fp8") or (precision == "auto" and is_gpu)
    return Device(is_gpu, 2 if is_bf16 else 4)


def has_generator(config: Config) -> bool:
    """Return whether the engine is a separate role, on its own devices."""
    return config.algorithm.generates_samples and config.engine.placement == "server"


def count_server_ranks(config: Config) -> dict[str, int]:
    """Return the number of ranks of each server group.

    The groups are `generator`, `critic`, `reward` and `teacher`. Further replicas are `reward.1`, …
    """
    if not config.algorithm.generates_samples:
        return {}
    # The critic's ranks may serve the rewards, too; then there is no reward group.
    rewards = 0 if config.critic_serves_reward else config.reward.replicas
    teachers = config.teacher.replicas * config.has_teacher
    generator = {"generator": config.engine.parallel.ranks} if has_generator(config) else {}
    critic = {"critic": config.critic.parallel.ranks} if config.algorithm.has_critic else {}
    return {
        **generator,
        **critic,
        **dict.fromkeys(_replica_groups("reward", rewards), config.reward.parallel.ranks),
        **dict.fromkeys(_replica_groups("teacher", teachers), config.teacher.parallel.ranks),
    }


def _replica_groups(role: str, count: int) -> list[str]:
    """Return the server groups of a role; the first one has the name of the role."""
    return [f"{role}.{replica}" if replica else role for replica in range(count)]


def count_role_ranks(config: Config) -> dict[str, int]:
    """Return the number of ranks of each role or server group, in the order in which they start."""
    return {**count_server_ranks(config), "trainer": config.actor.parallel.ranks}


def get_role(group: str) -> str:
    """Return the role of a server group, for example `reward` for the replica `reward.1`.

    The role of `prepare` is `trainer`, because it runs on the trainer's devices.
    """
    return "trainer" if group == "prepare" else group.partition(".")[0]


def computes_on_devices(config: Config, group: str) -> bool:
    """Return whether the ranks of a role or server group have models.

    Only a reward function has none, and needs no device.
    """
    return get_role(group) != "reward" or has_reward_model(config.reward)


def compute_threads_per_rank(config: Config) -> int:
    """Return the number of OpenMP threads of each rank of a run on this machine.

    Unless the configuration sets a number, the ranks share the cores of this process.
    """
    ranks = sum(count_role_ranks(config).values())
    return get_configured_threads(config) or max(1, len(os.sched_getaffinity(0)) // ranks)


def get_configured_threads(config: Config) -> int | None:
    """Return the configured number of OpenMP threads per rank, or None.

    On GPUs the default is 1, as with torchrun: the remaining CPU work is so small that a thread
    pool takes longer than it saves. An offloaded optimizer step is the exception. `engine.exact`
    requires 1.
    """
    if config.engine.exact:
        return 1
    offloads = any(model.optimizer.offload_fraction > 0 for model in (config.actor, config.critic))
    return config.cluster.threads_per_rank or (1 if uses_gpus(config) and not offloads else None)


def count_parameters(shape: ModelShape, head: Head = "vocabulary") -> int:
    """Return the number of weights of a model."""
    return sum(spec.numel for spec in weight_table(shape, head))


def format_parameter_count(count: int) -> str:
    """Return a number of parameters as text.

    Example:
        >>> format_parameter_count(70_600_000_000)
        '70.6 B parameters'
    """
    if count >= 1e9:
        return f"{count / 1e9:.1f} B parameters"
    if count >= 1e5:
        return f"{count / 1e6:.1f} M parameters"
    return f"{count / 1e3:.1f} K parameters"


def describe_model(
    config: Config, shape: ModelShape, expected: ExpectedInputs = NOTHING_EXPECTED
) -> str:
    """Return one line with the shape and size of the trained model, and one for the critic, if any.

    Args:
        config: The run's configuration.
        shape: Dimensions of the policy.
        expected: Dimensions of models that do not exist yet.
    """
    kind = "policy"
    model = shape
    head: Head = "vocabulary"
    if config.algorithm.trainer == "reward_model":
        kind = "reward model"
        model = first_layers(config, shape)
        head = "scalar"
    text = (
        f"{kind}: {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_heads}"
        f" heads, {model.num_kv_heads} key-value heads, vocabulary size {model.vocab_size},"
        f" {format_parameter_count(count_parameters(model, head))}"
    )
    if not config.algorithm.has_critic:
        return text
    critic = critic_shape(config, shape, expected)
    return (
        f"{text}\ncritic: {critic.num_layers} layers,"
        f" {format_parameter_count(count_parameters(critic, 'scalar'))}"
    )
