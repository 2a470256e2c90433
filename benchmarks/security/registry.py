"""Registry of the security probes.

A group of probes is a module of this package, such as `benchmarks/security/sandbox.py`. A probe is
a function without arguments that attempts one violation and returns its outcome:

    @probe(
        "secrets",
        attempt="find an API key of the environment in config.yaml",
        expected="the file contains the interpolation, not its value",
        component="config.yaml",
    )
    def key_in_configuration() -> Outcome:
        found = ...
        return finding(f"config.yaml contains {found}") if found else HELD

The name of the function is the name of the probe. A probe should not rely on aligner's own checks:
it makes the attempt and looks at the effect.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import benchmarks.security

State = Literal["held", "not enforceable", "finding"]
"""Result of a probe.

- `held`: the attempt failed, as expected
- `not enforceable`: the attempt succeeded or could not be made, because this host lacks a
  prerequisite; aligner refuses or reports this by itself
- `finding`: the attempt succeeded, or the probe itself failed
"""

_INFRASTRUCTURE = ("__main__", "registry")
"""Modules of this package that contain no probes."""


@dataclass(frozen=True)
class Outcome:
    """Result of one attempt."""

    state: State
    detail: str = ""
    """Effect of the attempt, or the reason why this host cannot enforce the limit."""


HELD = Outcome("held")


def finding(detail: str) -> Outcome:
    return Outcome("finding", detail)


def not_enforceable(reason: str) -> Outcome:
    return Outcome("not enforceable", reason)


@dataclass(frozen=True)
class Probe:
    """One attempt to violate a guarantee."""

    group: str
    name: str
    attempt: str
    """Action of the attacker."""
    expected: str
    """Behavior of aligner if the guarantee holds."""
    component: str
    """Configuration key, command or file that the attempt is directed at."""
    function: Callable[[], Outcome]

    def run(self) -> dict[str, Any]:
        """Make the attempt, and return the probe and its outcome as JSON values."""
        begin = time.monotonic()
        try:
            outcome = self.function()
        except Exception as error:
            outcome = finding(f"the probe failed: {type(error).__name__}: {error}")
        description = {
            "group": self.group,
            "name": self.name,
            "attempt": self.attempt,
            "expected": self.expected,
            "component": self.component,
        }
        return description | asdict(outcome) | {"seconds": round(time.monotonic() - begin, 2)}


PROBES: list[Probe] = []
"""All probes of the imported groups, in the order of their definitions."""


def add_probe(probe: Probe) -> None:
    """Add a probe to the registry. Raises ValueError if the group has a probe of this name."""
    if any((each.group, each.name) == (probe.group, probe.name) for each in PROBES):
        raise ValueError(f"{probe.group}: two probes are named {probe.name}")
    PROBES.append(probe)


def probe(
    group: str, *, attempt: str, expected: str, component: str
) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Register the decorated function as a probe; see `Probe` for the arguments."""

    def register(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
        name = function.__name__
        add_probe(Probe(group, name, attempt, expected, component, function))
        return function

    return register


def list_groups() -> list[str]:
    """Return the names of all groups, which are the modules of this package."""
    modules = pkgutil.iter_modules(benchmarks.security.__path__)
    return sorted(module.name for module in modules if module.name not in _INFRASTRUCTURE)


def load_probes(groups: list[str]) -> list[Probe]:
    """Import groups, and return their probes in the order of the groups."""
    for group in groups:
        importlib.import_module(f"{benchmarks.security.__name__}.{group}")
    return [each for group in groups for each in PROBES if each.group == group]
