"""Functions that worker ranks run to measure the memory of a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from aligner.data.checkpoint_files import MOMENTS, MOMENTUM
from aligner.megatron import model_checkpoint as checkpoint
from aligner.megatron import world as worlds
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head
from aligner.schema import ActorConfig, CriticConfig, LoraConfig, OptimizerConfig, ParallelConfig


def model(
    entries: dict[str, Any], layout: dict[str, Any], head: Head, settings: dict[str, Any]
) -> ModelRunner:
    """Return a model with small random weights at a layout, prepared for training."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    runner = ModelRunner(read_config(entries, "test"), world, head, section(head, layout, settings))
    for _, parameter in runner.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    runner.start_training()
    return runner


def section(
    head: Head, layout: dict[str, Any], settings: dict[str, Any]
) -> ActorConfig | CriticConfig:
    """Return the role's section of the configuration."""
    chosen = dict(settings)
    chosen["optimizer"] = OptimizerConfig(**chosen.get("optimizer", {}))
    if "lora" in chosen:
        chosen["lora"] = LoraConfig(**chosen["lora"])
    return (ActorConfig if head == "vocabulary" else CriticConfig)(
        parallel=ParallelConfig(**layout), **chosen
    )


class SavedTensors:
    """Count the bytes of tensors that autograd saves, and their peak.

    A storage counts once; the model's parameters do not count.
    """

    def __init__(self, model: ModelRunner) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for _, parameter in model.parameters()}
        self._held: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def pack(self, tensor: Tensor) -> _Held:
        return _Held(self, tensor)

    def add(self, tensor: Tensor, sign: int) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._own:
            return
        self._held[address] += sign
        if self._held[address] == (1 if sign > 0 else 0):
            self.bytes += sign * storage.nbytes()
            self.peak = max(self.peak, self.bytes)


class _Held:
    """A saved tensor, until autograd releases it."""

    def __init__(self, counts: SavedTensors, tensor: Tensor) -> None:
        self.counts, self.tensor = counts, tensor
        counts.add(tensor, 1)

    def __del__(self) -> None:
        self.counts.add(self.tensor, -1)


def measure(
    entries: dict[str, Any],
    layout: dict[str, Any],
    head: Head,
    settings: dict[str, Any],
    rows: int,
    length: int,
) -> dict[str, int]:
    """Return this rank's bytes of weights, gradients, optimizer state, snapshot, and the peak of
    saved tensors in the second of two equal updates."""
    runner = model(entries, layout, head, settings)
    shape: ModelShape = runner.shape
    tokens = torch.randint(
        2, shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)
    )
    lengths = torch.full((rows,), length)

    def loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if head == "scalar":
            value = batch.unpack_tokens(output[0, :, 0].float()).sum()
        else:
            scores, entropy = runner.chunks[-1].output_layer.logprobs(
                output[0],
                batch.target_index,
                batch.targets,
                temperature=1.0,
                chunk_tokens=CHUNK,
                with_entropy=True,
            )
            value = (batch.unpack_targets(scores) + batch.unpack_targets(entropy)).sum()
        return value, {"value": value.detach()}

    with runner.reserve_optimizer_memory():
        to_come = runner.optimizer_state().unallocated_bytes
    for _ in range(2):  # the first update creates the optimizer state
        saved = SavedTensors(runner)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            stats = runner.update(runner.pack(tokens, lengths), loss)
    assert stats["skipped"] == 0.0 and saved.bytes == 0
    assert to_come == _bytes(_moments(runner)) and runner.optimizer_state().unallocated_bytes == 0
    measured = {
        "weights": _bytes(parameter for _, parameter in runner.parameters()),
        "gradients": _bytes(
            parameter.main_grad for _, parameter in runner.parameters() if parameter.requires_grad
        ),
        "optimizer": _bytes(_optimizer_state(runner)),
        "saved": saved.peak,
        "snapshot": _bytes(_snapshot(runner)),
        "stage": runner.world.coordinates.pipeline,
    }
    worlds.shutdown()
    return measured


CHUNK = 16
"""Tokens per chunk of logits."""


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_state(runner: ModelRunner) -> Iterator[Tensor]:
    """Yield moments, and main weights that do not share the parameters' storage."""
    own = {parameter.untyped_storage().data_ptr() for _, parameter in runner.parameters()}
    for part in getattr(runner.optimizer, "chained_optimizers", [runner.optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        for group in part.optimizer.param_groups:
            yield from (
                main for main in group["params"] if main.untyped_storage().data_ptr() not in own
            )
    yield from _moments(runner)


def _moments(runner: ModelRunner) -> Iterator[Tensor]:
    for part in getattr(runner.optimizer, "chained_optimizers", [runner.optimizer]):
        for state in (
            () if getattr(part, "is_stub_optimizer", False) else part.optimizer.state.values()
        ):
            yield from (state[name] for name in (*MOMENTS, *MOMENTUM) if name in state)


def _snapshot(runner: ModelRunner) -> Iterator[Tensor]:
    """Yield the tensors that this rank copies for a checkpoint."""
    state = runner.optimizer_state()
    units, _ = checkpoint._assign_writers(runner, state)
    yield from checkpoint._copy_to_host(state, units, runner.world.rank).values()


def expected_section(
    head: Head, layout: dict[str, Any], settings: dict[str, Any]
) -> ActorConfig | CriticConfig:
    """Return the role's section with the chunk size that `measure` uses."""
    chosen = section(head, layout, settings)
    return (
        dataclasses.replace(chosen, logprob_chunk_tokens=CHUNK)
        if isinstance(chosen, ActorConfig)
        else chosen
    )
