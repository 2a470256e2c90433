"""Low-rank adapters (Hu et al. 2021): which weights have them, and their own names, shapes and cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aligner.models.weight_slices import Stored, TensorSpec
from aligner.schema import LoraConfig

TARGETS = {"attention": "self_attention", "mlp": "mlp"}
"""A target of the configuration to the part of megatron-core's layer that holds its linear layers."""


@dataclass(frozen=True)
class Adapter:
    """The factors of what is added to a weight W [out, in]: (alpha / rank) x up [out, rank] x down [rank, in]."""

    weight: TensorSpec
    down: TensorSpec
    """PEFT's lora_A. Weights that lie in one tensor of the file (GPT-2's query, key, value) share it, as they do in PEFT."""
    up: TensorSpec
    """PEFT's lora_B."""


def adapter_map(table: Iterable[TensorSpec], lora: LoraConfig) -> dict[str, Adapter]:
    """The adapters of a model by the name of their weight, in the table's order; none when the rank is 0."""
    if not lora.rank:
        return {}
    modules = tuple(f".{TARGETS[target]}.linear_" for target in lora.targets)
    return {
        spec.name: _adapter(spec, lora.rank)
        for spec in table
        if spec.parameter.endswith(".weight") and any(module in spec.parameter for module in modules)
    }


def adapter_table(adapters: Mapping[str, Adapter]) -> tuple[TensorSpec, ...]:
    """Every tensor of the adapters once."""
    return tuple(dict.fromkeys(spec for adapter in adapters.values() for spec in (adapter.down, adapter.up)))


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
