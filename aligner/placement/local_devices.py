"""Which GPUs of this machine the ranks of each role have."""

import re
from collections.abc import Iterator

from aligner.errors import ConfigError
from aligner.placement.roles import computes_on_devices, gpu_count, role_of, role_ranks
from aligner.schema import Config


def numbers(text: str) -> Iterator[int]:
    """Those of a list such as 0-2,5."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def device_list(key: str, text: str, count: int, limit: str) -> tuple[int, ...]:
    """The devices that a key's value names, of `count` ones; `limit` is what an error says that the
    count comes from.

    Raises ConfigError, with the key, for what is no list, for devices that are not there and for
    one that is named twice.
    """
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(f"{key}={text}: must be a list of numbers and ranges, such as 0-3 or 6,7")
    # first of all: a range may be too long to write out
    is_known = all(int(end) < count for end in re.findall(r"\d+", text))
    found = list(numbers(text)) if is_known else []
    if not found or len(set(found)) < len(found):
        raise ConfigError(
            f"{key}={text}: must list different devices from 0 to {count - 1} ({limit})"
        )
    return tuple(found)


def describe_devices(devices: tuple[int, ...]) -> str:
    """Ascending devices as a list that `numbers` reads: 0-3,6."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def local_devices(config: Config) -> dict[str, tuple[int, ...]]:
    """The GPUs of a role or server group, one a rank, by their places among those that may be used.

    Of `cluster.devices` where that names them; the others get the next ones that nobody has, the
    trainer first. Empty where the run's roles are not on GPUs of this machine. Raises ConfigError
    where there are too few.
    """
    count = gpu_count()
    if config.cluster.kind != "local" or not count:
        return {}
    ranks = {
        group: size
        for group, size in role_ranks(config).items()
        if computes_on_devices(config, group)
    }
    in_order = {"trainer": ranks["trainer"], **ranks}
    found = {
        group: devices
        for group in in_order
        if (devices := _named(config, group, in_order, count)) is not None
    }
    _check_generator(config, found)
    taken = {device for devices in found.values() for device in devices}
    free = [device for device in range(count) if device not in taken]
    wanting = {group: size for group, size in in_order.items() if group not in found}
    if sum(wanting.values()) > len(free):
        raise ConfigError(_too_few(wanting, len(free), count))
    for group, size in wanting.items():
        found[group], free = tuple(free[:size]), free[size:]
    return {group: found[group] for group in in_order}


def _named(config: Config, group: str, ranks: dict[str, int], count: int) -> tuple[int, ...] | None:
    """What `cluster.devices` says of a group; replicas have their parts of it in turn, or share
    what is one's alone."""
    role, size = role_of(group), ranks[group]
    text: str | None = getattr(config.cluster.devices, role)
    if text is None:
        return None
    key = f"cluster.devices.{role}"
    devices = device_list(key, text, count, f"GPUs of this machine: {count}")
    if len(devices) % size:
        raise ConfigError(
            f"{key}={text}: must list {size} devices (one per rank), or a multiple of {size}"
            " devices for several replicas"
        )
    first = [other for other in ranks if role_of(other) == role].index(group) * size % len(devices)
    return devices[first : first + size]


def _check_generator(config: Config, named: dict[str, tuple[int, ...]]) -> None:
    shared = {*named.get("trainer", ())} & {*named.get("generator", ())}
    if shared:
        raise ConfigError(
            f"cluster.devices.generator={config.cluster.devices.generator}: device {min(shared)}"
            " also belongs to the trainer, but NCCL, which transfers the weights to the generator,"
            " cannot use a device twice; set other devices, or engine.placement=colocated"
        )


def _too_few(wanting: dict[str, int], free: int, count: int) -> str:
    asked = ", ".join(f"{group} {size}" for group, size in wanting.items())
    return (
        f"cluster.devices: each rank requires its own GPU (ranks: {asked}), but only {free} of"
        f" the {count} GPUs of this machine are free; set smaller layouts, or let roles share"
        " devices, for example with cluster.devices.trainer=0 cluster.devices.critic=0"
    )
