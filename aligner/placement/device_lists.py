"""Devices as keys and Slurm write them: 0-3,6."""

import re
from collections.abc import Iterator

from aligner.errors import ConfigError


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
