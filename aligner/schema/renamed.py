"""Old names of renamed keys and metrics.

Old keys are accepted on the command line, in YAML files and in the `config.yaml` of older runs. Old
metrics are accepted in the `metrics.jsonl` of older runs. An entry is removed in the release after
the one that renamed its key or metric.
"""

from collections.abc import Callable, Mapping
from typing import Any

_ROLES = ("trainer", "generator", "critic", "reward", "teacher")
# Upper bounds of the ranges of response lengths in tokens.
_LENGTHS = tuple(2**power for power in range(24))

RENAMED_KEYS: Mapping[str, str] = {
    "algorithm.replay_routes": "algorithm.routing_replay",
    "data.curriculum.least_chance": "data.curriculum.min_probability",
    "data.curriculum.memory": "data.curriculum.decay",
    "data.drawn_tokens": "data.generated_tokens",
    "environment.most_characters": "environment.max_characters",
    "evaluation.beside": "evaluation.asynchronous",
    **{
        f"cluster.slurm.roles.{role}.beside": f"cluster.slurm.roles.{role}.shares_nodes_with"
        for role in _ROLES
    },
}
"""New names of keys by their old names."""

REMOVED_KEYS: Mapping[str, str] = {
    "engine.verify_every": (
        "use engine.verify=sync (every weight sync, the default), first or never"
    ),
}
"""Replacements of removed keys, for error messages. The `config.yaml` of an older run may contain
these keys, which are ignored there."""

RENAMED_METRICS: Mapping[str, str] = {
    "data/drawn_fraction": "data/sampled_fraction",
    "mismatch/routes": "mismatch/expert_routing",
    "rollout/guessed": "rollout/draft_tokens",
    **{f"response/drawn_to_{length}": f"response/generated_to_{length}" for length in _LENGTHS},
    **{f"response/learned_to_{length}": f"response/trained_to_{length}" for length in _LENGTHS},
}
"""New names of metrics by their old names."""


def get_current_key(key: str) -> str:
    """Return the current name of a dotted key."""
    return RENAMED_KEYS.get(key, key)


def with_current_keys(
    values: Mapping[str, Any], section: str = "", report: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the nested values of sections under the current names of their keys.

    A renamed key remains in its section. If a section has both names of a key, the value under the
    current name takes precedence.

    Args:
        values: Values of the section by key.
        section: Dotted name of the section; empty for the root.
        report: Function that is called with each old key.
    """
    current_values: dict[str, Any] = {}
    old_values: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}.{name}" if section else str(name)
        if isinstance(value, dict):
            value = with_current_keys(value, key, report)
        if key in RENAMED_KEYS:
            if report is not None:
                report(key)
            # The new key is in the same section, so that only the last part of its name changes.
            old_values[RENAMED_KEYS[key].rpartition(".")[2]] = value
        else:
            current_values[name] = value
    return old_values | current_values


def without_removed_keys(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the nested values of sections without the removed keys.

    Args:
        values: Values of the section by key.
        section: Dotted name of the section; empty for the root.
    """
    remaining_values: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}.{name}" if section else str(name)
        if key not in REMOVED_KEYS:
            is_section = isinstance(value, dict)
            remaining_values[name] = without_removed_keys(value, key) if is_section else value
    return remaining_values


def with_current_metrics(record: Mapping[str, float]) -> dict[str, float]:
    """Return a record of metrics under their current names."""
    if RENAMED_METRICS.keys().isdisjoint(record):
        return dict(record)
    return {RENAMED_METRICS.get(name, name): value for name, value in record.items()}
