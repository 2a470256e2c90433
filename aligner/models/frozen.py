"""Which weights of a model are frozen: a pure function of its table and the configured patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from aligner.errors import ConfigError
from aligner.models.weight_slices import TensorSpec


def frozen_names(table: Iterable[TensorSpec], patterns: Sequence[str], key: str = "frozen") -> frozenset[str]:
    """The names of the weights that the patterns freeze; `key` names the setting in errors.

    A pattern is a shell's (`*`, `?`, `[0-7]`, as in fnmatch) over Hugging Face names, and matches a weight by its own name or
    by that of the file's tensor that it is a part of. Raises ConfigError for a pattern that matches nothing, for a parameter
    of which only a part would be frozen, and when nothing is left to train.
    """
    specs = tuple(table)
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {spec.name for spec in specs if fnmatchcase(spec.name, pattern) or fnmatchcase(spec.stored.name, pattern)}
        if not matched:
            raise ConfigError(f"{key}: the pattern {pattern!r} matches no weight; there are {_examples(specs)}")
        frozen |= matched
    if frozen and len(frozen) == len(specs):
        raise ConfigError(
            f"{key}: {', '.join(patterns)} freeze all of the model's {len(specs)} weights; nothing is left to train"
        )
    _check_whole_parameters(specs, frozen, key)
    return frozenset(frozen)


def _examples(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in (specs[0], specs[len(specs) // 2], specs[-1]))


def _check_whole_parameters(specs: Sequence[TensorSpec], frozen: Collection[str], key: str) -> None:
    fused: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        fused.setdefault(spec.parameter, []).append(spec)
    for parameter, parts in fused.items():
        chosen = [spec.name for spec in parts if spec.name in frozen]
        left = [spec.name for spec in parts if spec.name not in frozen]
        if chosen and left:
            raise ConfigError(
                f"{key}: {', '.join(chosen)} would be frozen and {', '.join(left)} not, but they are one parameter;"
                " freeze all of them, or none"
            )
        # megatron-core's product with a frozen weight gives the bias that it adds no gradient.
        bias = fused.get(parameter.removesuffix("weight") + "bias", [])
        if chosen and parameter.endswith("linear_qkv.weight") and any(spec.name not in frozen for spec in bias):
            raise ConfigError(
                f"{key}: {', '.join(chosen)} would be frozen and {', '.join(spec.name for spec in bias)} not;"
                " freeze the biases of query, key and value with the weights"
            )
