"""Assignment of this machine's GPUs to the ranks of each role, and lists of devices as text."""

import re
from collections.abc import Iterator

from aligner.errors import ConfigError
from aligner.placement.roles import computes_on_devices, count_gpus, count_role_ranks, get_role
from aligner.schema import Config


def parse_numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-2,5`, the form that keys and Slurm use.

    Example:
        >>> list(parse_numbers("0-2,5"))
        [0, 1, 2, 5]
    """
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def parse_devices(key: str, text: str, count: int, limit: str) -> tuple[int, ...]:
    """Return the devices in the value of a key.

    Args:
        key: Name of the key, for errors.
        text: Value of the key, such as `0-3,6`.
        count: Number of existing devices.
        limit: Source of `count`, for errors.

    Raises:
        ConfigError: The value is not a list, contains a device twice, or contains a device that
            does not exist.
    """
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(f"{key}={text}: must be a list of numbers and ranges, such as 0-3 or 6,7")
    # Check the bounds before the expansion, because a range may be too long to expand.
    has_valid_bounds = all(int(end) < count for end in re.findall(r"\d+", text))
    devices = list(parse_numbers(text)) if has_valid_bounds else []
    if not devices or len(set(devices)) < len(devices):
        raise ConfigError(
            f"{key}={text}: must list different devices from 0 to {count - 1} ({limit})"
        )
    return tuple(devices)


def describe_devices(devices: tuple[int, ...]) -> str:
    """Return ascending devices as a list that `parse_numbers` reads.

    Example:
        >>> describe_devices((0, 1, 2, 3, 6))
        '0-3,6'
    """
    # runs of consecutive devices
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def assign_local_devices(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each role or server group, one per rank, as indices of the usable GPUs.

    Groups without devices in `cluster.devices` get the next free GPUs, the trainer first. The
    result is empty if the run does not use GPUs of this machine.

    Raises:
        ConfigError: The machine has too few GPUs, or `cluster.devices` is invalid.
    """
    count = count_gpus()
    if config.cluster.kind != "local" or not count:
        return {}
    ranks = {
        group: size
        for group, size in count_role_ranks(config).items()
        if computes_on_devices(config, group)
    }

    # The trainer first: it gets the first free GPUs, although it starts last.
    ordered_ranks = {"trainer": ranks["trainer"], **ranks}
    assigned = {}
    for group in ordered_ranks:
        devices = _get_configured_devices(config, group, ordered_ranks, count)
        if devices is not None:
            assigned[group] = devices
    _check_generator_devices(config, assigned)

    # A device may be listed for several roles; groups without a list get unlisted devices only.
    used = {device for devices in assigned.values() for device in devices}
    free = [device for device in range(count) if device not in used]
    unassigned = {group: size for group, size in ordered_ranks.items() if group not in assigned}
    if sum(unassigned.values()) > len(free):
        raise ConfigError(_describe_shortage(unassigned, len(free), count))
    for group, size in unassigned.items():
        assigned[group] = tuple(free[:size])
        free = free[size:]
    return {group: assigned[group] for group in ordered_ranks}


def _get_configured_devices(
    config: Config, group: str, ranks: dict[str, int], count: int
) -> tuple[int, ...] | None:
    """Return the devices of a group in `cluster.devices`; None if the key is not set.

    Replicas use consecutive parts of the list. They share the devices if the list is shorter.
    """
    role = get_role(group)
    size = ranks[group]
    text: str | None = getattr(config.cluster.devices, role)
    if text is None:
        return None
    key = f"cluster.devices.{role}"
    devices = parse_devices(key, text, count, f"GPUs of this machine: {count}")
    if len(devices) % size:
        raise ConfigError(
            f"{key}={text}: must list {size} devices (one per rank), or a multiple of {size}"
            " devices for several replicas"
        )
    replicas = [other for other in ranks if get_role(other) == role]
    # The modulo lets further replicas start again at the first device.
    first = replicas.index(group) * size % len(devices)
    return devices[first : first + size]


def _check_generator_devices(config: Config, configured: dict[str, tuple[int, ...]]) -> None:
    """Raise ConfigError if trainer and generator share a device, which NCCL does not support."""
    shared = {*configured.get("trainer", ())} & {*configured.get("generator", ())}
    if shared:
        raise ConfigError(
            f"cluster.devices.generator={config.cluster.devices.generator}: device {min(shared)}"
            " also belongs to the trainer, but NCCL, which transfers the weights to the generator,"
            " cannot use a device twice; set other devices, or engine.placement=colocated"
        )


def _describe_shortage(unassigned: dict[str, int], free: int, count: int) -> str:
    """Return the error for a machine with too few free GPUs."""
    requested = ", ".join(f"{group} {size}" for group, size in unassigned.items())
    return (
        f"cluster.devices: each rank requires its own GPU (ranks: {requested}), but only {free} of"
        f" the {count} GPUs of this machine are free; set smaller layouts, or let roles share"
        " devices, for example with cluster.devices.trainer=0 cluster.devices.critic=0"
    )
