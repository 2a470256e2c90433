"""Faults that worker ranks plant in one layer of the trainer, from outside of `aligner.proof`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from aligner.megatron import runner
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.norms import RMSNorm
from aligner.megatron.output_heads import VocabularyHead

Modify = Callable[[Any], None]


def run_with_fault(fault: str, layer: int, module: str, name: str, *arguments: Any) -> Any:
    """Call a function of a rank with a fault in a layer."""
    with FAULTS[fault](layer):
        return getattr(importlib.import_module(module), name)(*arguments)


@contextmanager
def _changed_write(
    layer: int, endings: Sequence[str], change: Callable[[NamedWeights, str, Tensor], Tensor]
) -> Iterator[None]:
    """Change the weights of a layer with some endings when they are loaded."""
    write = NamedWeights.write

    def write_changed(weights: NamedWeights, name: str, tensor: Tensor) -> None:
        if weights.specs[name].layer == layer and name.endswith(tuple(endings)):
            tensor = change(weights, name, tensor)
        write(weights, name, tensor)

    with patch.object(NamedWeights, "write", write_changed):
        yield


@contextmanager
def _changed_layer(layer: int, modify: Modify) -> Iterator[None]:
    """Modify the module of a layer after the model was built."""
    build = runner.build_model

    def build_changed(*arguments: Any, **keywords: Any) -> Any:
        chunks = build(*arguments, **keywords)
        for chunk in chunks:
            for module in chunk.decoder.layers:
                if module.layer_number == layer + 1:
                    modify(module)
        return chunks

    with patch.object(runner, "build_model", build_changed):
        yield


@contextmanager
def _swapped_gate_and_up(layer: int) -> Iterator[None]:
    """Read gate as up and up as gate, and write them so."""
    build = runner.weight_table
    other = {"gate": "up", "up": "gate"}

    def build_swapped(*arguments: Any) -> Any:
        return tuple(
            dataclasses.replace(spec, part=other.get(spec.part, spec.part))
            if spec.layer == layer
            else spec
            for spec in build(*arguments)
        )

    with patch.object(runner, "weight_table", build_swapped):
        yield


def _wrong_rope_base(layer: int) -> Any:
    def modify(module: Any) -> None:
        attention = module.self_attention.core_attention
        attention._rope = dataclasses.replace(attention._rope, theta=attention._rope.theta * 1.5)

    return _changed_layer(layer, modify)


def _norm_without_one(layer: int) -> Any:
    def modify(module: Any) -> None:
        module.pre_mlp_layernorm.__class__ = RMSNorm

    return _changed_layer(layer, modify)


def _scaled_router(layer: int) -> Any:
    def modify(module: Any) -> None:
        module.mlp.router.register_forward_hook(
            lambda router, inputs, output: (output[0] * 1.25, output[1])
        )

    return _changed_layer(layer, modify)


@contextmanager
def _untied_embedding(layer: int) -> Iterator[None]:
    """Train the embedding without the gradient of the head."""
    projection = VocabularyHead.projection
    detached = property(lambda head: projection.fget(head).detach())  # type: ignore[attr-defined]
    with patch.object(VocabularyHead, "projection", detached):
        yield


def _roll_heads(weights: NamedWeights, name: str, tensor: Tensor) -> Tensor:
    return tensor.roll(weights._shape.head_dim, 0)


FAULTS: dict[str, Callable[[int], Any]] = {
    "swapped gate and up": _swapped_gate_and_up,
    "wrong rope base": _wrong_rope_base,
    "missing bias": lambda layer: _changed_write(
        layer, ("q_proj.bias",), lambda weights, name, tensor: tensor * 0
    ),
    "transposed expert": lambda layer: _changed_write(
        layer,
        ("experts.1.down_proj.weight",),
        lambda weights, name, tensor: tensor.T.reshape(tensor.shape),
    ),
    "norm without 1+": _norm_without_one,
    "KV head order": lambda layer: _changed_write(
        layer, ("k_proj.weight", "v_proj.weight"), _roll_heads
    ),
    "tied embedding": _untied_embedding,
    "router scaling": _scaled_router,
    "wrong sink": lambda layer: _changed_write(
        layer, (".sinks",), lambda weights, name, tensor: tensor + 1
    ),
    "shared expert gate": lambda layer: _changed_write(
        layer, ("shared_expert_gate.weight",), lambda weights, name, tensor: tensor * 0
    ),
}
