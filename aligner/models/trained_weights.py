"""Which weights of a model are trained: all but those that patterns freeze, or low-rank adapters
(Hu et al. 2021) alone; and which of them Muon may update."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from aligner.errors import ConfigError
from aligner.models.weight_slices import Stored, TensorSpec
from aligner.schema import LoraConfig

TARGETS = {"attention": "self_attention", "mlp": "mlp"}
"""A target of the configuration to the part of megatron-core's layer that holds its linear layers.
"""


@dataclass(frozen=True)
class Adapter:
    """The factors of what is added to a weight W [out, in]: (alpha / rank) x up [out, rank] x down
    [rank, in]."""

    weight: TensorSpec
    down: TensorSpec
    """PEFT's lora_A. Weights that lie in one tensor of the file (GPT-2's query, key, value) share
    it, as they do in PEFT."""
    up: TensorSpec
    """PEFT's lora_B."""


def adapter_map(table: Iterable[TensorSpec], lora: LoraConfig) -> dict[str, Adapter]:
    """The adapters of a model by the name of their weight, in the table's order; none when the rank
    is 0."""
    if not lora.rank:
        return {}
    modules = tuple(f".{TARGETS[target]}.linear_" for target in lora.targets)
    return {
        spec.name: _adapter(spec, lora.rank)
        for spec in table
        if spec.parameter.endswith(".weight")
        and any(module in spec.parameter for module in modules)
    }


def adapter_table(adapters: Mapping[str, Adapter]) -> tuple[TensorSpec, ...]:
    """Every tensor of the adapters once."""
    return tuple(
        dict.fromkeys(spec for adapter in adapters.values() for spec in (adapter.down, adapter.up))
    )


def _adapter(weight: TensorSpec, rank: int) -> Adapter:
    outputs, inputs = weight.shape[::-1] if weight.transposed else weight.shape
    cuts_outputs = weight.axis == (1 if weight.transposed else 0)
    linear = weight.parameter.removesuffix(".weight")
    name, stored = weight.name.removesuffix(".weight"), weight.stored.name.removesuffix(".weight")
    fused = None
    if weight.fused is not None and weight.fused.axis is not None:
        whole = weight.fused.shape[weight.fused.axis]
        fused = Stored(f"{stored}.lora_B.weight", (whole, rank), 0, weight.fused.start)
    down = TensorSpec(
        name=f"{stored}.lora_A.weight",
        shape=(rank, inputs),
        axis=None if cuts_outputs else 1,
        layer=weight.layer,
        parameter=f"{linear}.adapter.down.{stored.rsplit('.', 1)[-1]}",
    )
    up = TensorSpec(
        name=f"{name}.lora_B.weight",
        shape=(outputs, rank),
        axis=0 if cuts_outputs else None,
        layer=weight.layer,
        parameter=f"{linear}.adapter.up.{name.rsplit('.', 1)[-1]}",
        fused=fused,
    )
    return Adapter(weight, down, up)


def is_layer_matrix(spec: TensorSpec) -> bool:
    """Whether Muon updates a weight: a matrix of a decoder layer. Embeddings, heads, norms and
    biases are Adam's."""
    return spec.layer is not None and len(spec.shape) == 2


def frozen_names(
    table: Iterable[TensorSpec], patterns: Sequence[str], key: str = "frozen"
) -> frozenset[str]:
    """The names of the weights that the patterns freeze; `key` names the setting in errors.

    A pattern is a shell's (`*`, `?`, `[0-7]`, as in fnmatch) over Hugging Face names, and matches a
    weight by its own name or by that of the file's tensor that it is a part of. Raises ConfigError
    for a pattern that matches nothing, for a parameter of which only a part would be frozen, and
    when nothing is left to train.
    """
    specs = tuple(table)
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {
            spec.name
            for spec in specs
            if fnmatchcase(spec.name, pattern) or fnmatchcase(spec.stored.name, pattern)
        }
        if not matched:
            raise ConfigError(
                f"{key}: the pattern {pattern!r} matches no weight; examples of weight names:"
                f" {_examples(specs)}"
            )
        frozen |= matched
    if frozen and len(frozen) == len(specs):
        raise ConfigError(
            f"{key}: {', '.join(patterns)} freeze all {len(specs)} weights of the model; at least"
            " one weight must be trained"
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
                f"{key}: {', '.join(chosen)} would be frozen, but {', '.join(left)} would be"
                " trained. All of these weights are parts of one parameter; freeze all of them or"
                " none of them"
            )
        # megatron-core's product with a frozen weight gives the bias that it adds no gradient.
        bias = fused.get(parameter.removesuffix("weight") + "bias", [])
        if (
            chosen
            and parameter.endswith("linear_qkv.weight")
            and any(spec.name not in frozen for spec in bias)
        ):
            raise ConfigError(
                f"{key}: {', '.join(chosen)} would be frozen, but"
                f" {', '.join(spec.name for spec in bias)} would be trained; freeze the biases of"
                " query, key and value together with the weights"
            )
