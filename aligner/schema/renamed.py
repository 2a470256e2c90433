"""Old names of keys and metrics. The release after the one that renamed them removes an entry here.

Old keys are accepted on the command line, in YAML files and in the `config.yaml` of older runs; old
metrics are accepted in the `metrics.jsonl` of older runs.
"""

from collections.abc import Callable, Mapping
from typing import Any

_ROLES = ("trainer", "generator", "critic", "reward", "teacher")
_LENGTHS = tuple(2**power for power in range(24))
"""Upper bounds of the ranges of response lengths, in tokens."""

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
"""Old key to new key."""

RENAMED_METRICS: Mapping[str, str] = {
    "data/drawn_fraction": "data/sampled_fraction",
    "mismatch/routes": "mismatch/expert_routing",
    "rollout/guessed": "rollout/draft_tokens",
    **{f"response/drawn_to_{length}": f"response/generated_to_{length}" for length in _LENGTHS},
    **{f"response/learned_to_{length}": f"response/trained_to_{length}" for length in _LENGTHS},
}
"""Old metric to new metric."""


def current_key(key: str) -> str:
    """Return the present name of a dotted key."""
    return RENAMED_KEYS.get(key, key)


def with_current_keys(
    values: Mapping[str, Any], section: str = "", report: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Return the nested values of sections under the present names of their keys.

    A renamed key stays in its section. A value under the present name takes precedence.

    Args:
        values: Keys of the section with their values.
        section: Dotted name of the section; empty for the root.
        report: Called with every old key.
    """
    present: dict[str, Any] = {}
    old: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}.{name}" if section else str(name)
        if isinstance(value, dict):
            value = with_current_keys(value, key, report)
        if key in RENAMED_KEYS:
            if report is not None:
                report(key)
            old[RENAMED_KEYS[key].rpartition(".")[2]] = value
        else:
            present[name] = value
    return old | present


def with_current_metrics(record: Mapping[str, float]) -> dict[str, float]:
    """Return a record of metrics under their present names."""
    if RENAMED_METRICS.keys().isdisjoint(record):
        return dict(record)
    return {RENAMED_METRICS.get(name, name): value for name, value in record.items()}
