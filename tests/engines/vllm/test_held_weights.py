"""The recorder of vLLM's loaders finds received values that a model's parameters do not contain.

`test_vllm_verification.py` tests it in a worker of vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aligner.engines.vllm import program_client

pytestmark = pytest.mark.promise("weight-sync-is-verified")


@pytest.fixture(scope="module")
def held_weights() -> Iterator[Any]:
    """The module as vLLM's workers import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(program_client._PROGRAM))
        import held_weights

        yield held_weights
        for name in ("held_weights", "weight_memory"):
            sys.modules.pop(name, None)


class QuantMethod:
    """Processing of a layer's weights after loading, which may convert them."""

    def __init__(self, converts: bool) -> None:
        self.converts = converts

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.converts:
            layer.weight = nn.Parameter(layer.weight.data.flip(0).contiguous())


class Fused(nn.Module):
    """A layer that stacks two received tensors of [4, 8]."""

    def __init__(self, converts: bool | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
        if converts is not None:
            self.quant_method = QuantMethod(converts)


def receive(recorder: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    tensors = []
    for name in ("gate", "up"):
        tensor = torch.randn(4, 8).to(dtype)
        recorder.receive(name, tensor, tensor.numel())
        tensors.append(tensor)
    return tensors[0], tensors[1]


def load(layer: nn.Module, gate: Tensor, up: Tensor) -> None:
    """Load two tensors as vLLM does, and process the weights."""
    weight: Any = layer.weight
    weight.data[:4].copy_(gate)
    weight.data.narrow(0, 4, 4).copy_(up)
    if hasattr(layer, "quant_method"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("converts", [None, False, True])
def test_loaded_slices_are_held(held_weights, converts):
    model = nn.Sequential(Fused(converts))
    recorder = held_weights.LoadRecorder(model)
    with recorder:
        gate, up = receive(recorder)
        with recorder.load_layer(model[0]):
            load(model[0], gate, up)
    assert recorder.find_wrong() == []
    assert recorder.converted == (["0"] if converts else [])


def test_slice_overwritten_after_its_copy_is_wrong(held_weights):
    model = nn.Sequential(Fused(converts=False))
    recorder = held_weights.LoadRecorder(model)
    with recorder:
        gate, up = receive(recorder)
        with recorder.load_layer(model[0]):
            load(model[0], gate, up)
            model[0].weight.data[5, 0] += 1
    assert recorder.find_wrong() == ["up (in 0.weight)"]


def test_error_before_conversion_is_wrong(held_weights):
    model = nn.Sequential(Fused(converts=True))
    recorder = held_weights.LoadRecorder(model)
    with recorder:
        gate, up = receive(recorder)
        with recorder.load_layer(model[0]):
            weight = model[0].weight
            weight.data[:4].copy_(gate)
            weight.data[4:].copy_(up)
            weight.data[0, 0] += 1
            model[0].quant_method.process_weights_after_loading(model[0])
    assert recorder.find_wrong() == ["gate (in 0.weight)"]


def test_tensor_without_copy_is_missing(held_weights):
    model = nn.Sequential(Fused())
    recorder = held_weights.LoadRecorder(model)
    with recorder:
        gate, _ = receive(recorder)
        with recorder.load_layer(model[0]):
            model[0].weight.data[:4].copy_(gate)
    assert recorder.find_wrong() == ["up (32 elements were not loaded)"]


def test_derived_values_at_a_reused_address_count(held_weights):
    """Loaders copy from temporary tensors, whose memory is used again and again."""
    model = nn.Sequential(*(Fused() for _ in range(20)))
    recorder = held_weights.LoadRecorder(model)
    with recorder:
        for index, layer in enumerate(model):
            names = (f"gate{index}", f"up{index}")
            tensors = [torch.randn(8, 4) for _ in names]
            for name, tensor in zip(names, tensors, strict=True):
                recorder.receive(name, tensor, tensor.numel())
            with recorder.load_layer(layer):
                load(layer, *(tensor.t().contiguous() for tensor in tensors))
    assert recorder.find_wrong() == []


def test_wider_parameter_holds_received_values(held_weights):
    model = nn.Sequential(Fused(dtype=torch.float32))
    recorder = held_weights.LoadRecorder(model)
    with recorder:
        gate, up = receive(recorder, torch.bfloat16)
        with recorder.load_layer(model[0]):
            load(model[0], gate, up)
    assert recorder.find_wrong() == []


def test_changed_parameter_changes_its_checksum(held_weights):
    model = nn.Sequential(Fused(dtype=torch.bfloat16), nn.Linear(3, 1))
    before = held_weights.compute_parameter_checksums(model)
    model[1].weight.data.view(torch.int32)[0, 2] ^= 1
    after = held_weights.compute_parameter_checksums(model)
    assert [name for name in before if before[name] != after[name]] == ["1.weight"]
