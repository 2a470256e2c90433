"""What a trained model keeps between steps: weights, gradients and optimizer state, by pipeline
stage.

Megatron keeps a gradient in fp32 for every trained weight. bf16 weights have a fp32 main copy
beside Adam's two moments, so that a trained weight takes 2 + 4 + 12 bytes: the 18 of
megatron-core's own account of its distributed optimizer, which cuts the last 12 over the data and
context ranks: 6 + 12/d (ZeRO-1, Rajbhandari et al. 2020). fp32 weights are their own main copy.
Muon keeps one number of a matrix's weight where Adam keeps two moments.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Head,
    TensorSpec,
    adapter_map,
    adapter_table,
    engine_slices,
    frozen_names,
    is_layer_matrix,
    stage_layers,
    weight_table,
)
from aligner.placement.roles import Device
from aligner.schema import EngineParallelConfig, LoraConfig, ParallelConfig, TrainedModelConfig

_GRADIENT, _MAIN_COPY, _MOMENT = 4, 4, 4
"""Bytes a trained weight."""


@dataclass(frozen=True)
class Numbers:
    """How many numbers of a model lie in a part of it, by how tensor parallelism treats them."""

    cut: int = 0
    """Cut over the tensor ranks."""
    whole: int = 0
    """On every tensor rank."""
    experts: int = 0
    """Cut over the experts' own tensor ranks, and by expert."""

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.cut + other.cut, self.whole + other.whole, self.experts + other.experts)

    def dense(self, layout: ParallelConfig) -> int:
        """Of those outside experts, how many a rank holds."""
        return self.cut // layout.tensor + self.whole

    def of_experts(self, layout: ParallelConfig) -> int:
        """Of those of experts."""
        return self.experts // (layout.expert * layout.expert_tensor_size)


@dataclass(frozen=True)
class Census:
    """A model's weights, and those of them that are trained, by decoder layer and outside the
    layers."""

    layers: tuple[Numbers, ...]
    first: Numbers
    last: Numbers
    """Of the last stage; what the first holds too, a tied embedding, is in both."""
    tied: Numbers
    """That is held once where first and last stage are one."""

    def stage(self, layout: ParallelConfig, stage: int) -> Numbers:
        """What the ranks of a pipeline stage hold together."""
        total = Numbers()
        for chunk in stage_layers(len(self.layers), layout, stage):
            total = sum((self.layers[layer] for layer in chunk), total)
        total = total + self.first if stage == 0 else total
        if stage < layout.pipeline - 1:
            return total
        total = total + self.last
        return (
            Numbers(total.cut - self.tied.cut, total.whole, total.experts) if stage == 0 else total
        )


def _census(table: Iterable[TensorSpec], num_layers: int) -> Census:
    layers, first, last, tied = [Numbers()] * num_layers, Numbers(), Numbers(), Numbers()
    for spec in table:
        if spec.expert is not None:
            numbers = Numbers(experts=spec.numel)
        else:
            numbers = Numbers(whole=spec.numel) if spec.axis is None else Numbers(cut=spec.numel)
        if spec.layer is not None:
            layers[spec.layer] += numbers
            continue
        first = first + numbers if "first" in spec.stages else first
        last = last + numbers if "last" in spec.stages else last
        tied = tied + numbers if len(spec.stages) > 1 else tied
    return Census(tuple(layers), first, last, tied)


@lru_cache(maxsize=64)
def weight_census(
    shape: ModelShape, head: Head, frozen: Collection[str] = (), *, matrices: bool = False
) -> Census:
    """All of a model's weights but those that the patterns freeze, or the layers' `matrices`
    alone."""
    table = weight_table(shape, head)
    left_out = frozen_names(table, tuple(frozen)) if frozen else frozenset()
    chosen = (spec for spec in table if spec.name not in left_out)
    return _census(
        (spec for spec in chosen if is_layer_matrix(spec) or not matrices), shape.num_layers
    )


@lru_cache(maxsize=64)
def _adapter_census(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> Census:
    """All of them are matrices of layers."""
    lora = LoraConfig(rank=rank, targets=list(targets))
    return _census(adapter_table(adapter_map(weight_table(shape), lora)), shape.num_layers)


@dataclass(frozen=True)
class States:
    """Bytes on a device of a pipeline stage, from step to step."""

    weights: int
    gradients: int
    optimizer: int
    on_host: int
    """Optimizer state in host memory (optimizer.offload_fraction)."""
    snapshot: int
    """Of a checkpoint, in host memory until it is written."""


def frozen_weights(
    shape: ModelShape, head: Head, layout: ParallelConfig, stage: int, device: Device
) -> int:
    """Bytes of the weights of a model that is not trained."""
    return device.itemsize * _on_rank(weight_census(shape, head).stage(layout, stage), layout)


def trained_states(
    shape: ModelShape,
    head: Head,
    settings: TrainedModelConfig,
    stage: int,
    device: Device,
    *,
    steps: bool = True,
) -> States:
    """Of a model that is trained.

    `steps` is false where the optimizer is made but never takes a step, and so has no moments, and
    nothing is saved.
    """
    layout = settings.parallel
    base, frozen = weight_census(shape, head), tuple(settings.frozen)
    held, changed = (
        base.stage(layout, stage),
        weight_census(shape, head, frozen).stage(layout, stage),
    )
    matrices = weight_census(shape, head, frozen, matrices=True).stage(layout, stage)
    lora = getattr(settings, "lora", None)
    if lora is not None and lora.rank:
        changed = matrices = _adapter_census(shape, lora.rank, tuple(lora.targets)).stage(
            layout, stage
        )
        held = held + changed
    main, moments = (
        (_MAIN_COPY if device.itemsize < _GRADIENT else 0),
        (2 * _MOMENT if steps else 0),
    )
    # Main weights and moments are saved in fp32, what is not trained as it is.
    saved = _share(changed, layout)
    kept = (saved if settings.optimizer.distributed else _on_rank(changed, layout)) * (
        main + moments
    )
    snapshot = (_MAIN_COPY + 2 * _MOMENT) * saved + device.itemsize * (_share(held, layout) - saved)
    if settings.optimizer.kind == "muon":
        kept -= _on_rank(matrices, layout) * moments // 2
        snapshot -= _share(matrices, layout) * _MOMENT
    offloaded = int(kept * settings.optimizer.offload_fraction) if device.gpus else 0
    return States(
        weights=device.itemsize * _on_rank(held, layout),
        gradients=_GRADIENT * _on_rank(changed, layout),
        optimizer=kept - offloaded,
        on_host=offloaded,
        snapshot=snapshot if steps else 0,
    )


def _on_rank(numbers: Numbers, layout: ParallelConfig) -> int:
    return numbers.dense(layout) + numbers.of_experts(layout)


def _share(numbers: Numbers, layout: ParallelConfig) -> int:
    """Of what a rank and its replicas hold alike, a rank's part."""
    dense, experts = numbers.dense(layout), numbers.of_experts(layout)
    ranks = layout.tensor * layout.data * layout.context
    replicas = ranks // (layout.expert * layout.expert_tensor_size)
    return math.ceil(dense / (layout.data * layout.context)) + math.ceil(experts / replicas)


@lru_cache(maxsize=64)
def engine_weights(shape: ModelShape, tensor: int) -> int:
    """Weights of a rank of an engine that is cut over so many tensor ranks."""
    table = weight_table(shape)
    slices = engine_slices(table, EngineParallelConfig(tensor=tensor), 0)
    return sum(spec.numel // (1 if slices[spec.name].axis is None else tensor) for spec in table)


@lru_cache(maxsize=64)
def largest_tensor(shape: ModelShape) -> int:
    """Numbers in the model's largest weight."""
    return max(spec.numel for spec in weight_table(shape))


def shared_weights(
    shape: ModelShape, layout: ParallelConfig, stage: int, engine_tensor: int
) -> int:
    """Of an engine's weights, how many a trainer's rank holds cut the same way
    (engine.update=shared).

    megatron-core interleaves query, key and value, and the engine stacks experts: those are never
    the same.
    """
    held = _shareable(shape).stage(layout, stage)
    return held.dense(layout) if layout.tensor == engine_tensor else held.whole


@lru_cache(maxsize=64)
def _shareable(shape: ModelShape) -> Census:
    parts = ("whole", "gate", "up")
    table = weight_table(shape)
    return _census(
        (spec for spec in table if spec.part in parts and spec.expert is None), shape.num_layers
    )
