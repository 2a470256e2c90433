"""Memory that a trained model needs between steps: weights, gradients and optimizer state.

Megatron stores a gradient in fp32 for each trained weight. bf16 weights have an fp32 main copy in
addition to Adam's two moments. A trained weight therefore takes 2 + 4 + 12 bytes, which are the 18
bytes in megatron-core's documentation of its distributed optimizer. The distributed optimizer
shards the last 12 bytes over the d data and context ranks, which gives 6 + 12/d bytes (ZeRO-1,
Rajbhandari et al. 2020). fp32 weights are their own main copy. Muon stores one number for each
weight of a matrix, in place of Adam's two moments.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Head,
    TensorSpec,
    build_adapter_map,
    build_adapter_table,
    compute_engine_slices,
    frozen_names,
    is_layer_matrix,
    stage_layers,
    weight_table,
)
from aligner.placement.roles import Device
from aligner.schema import EngineParallelConfig, LoraConfig, ParallelConfig, TrainedModelConfig

# Bytes per trained weight.
_GRADIENT = 4
_MAIN_COPY = 4
_MOMENT = 4


@dataclass(frozen=True)
class WeightCounts:
    """Number of weights in a part of a model, by their treatment in tensor parallelism."""

    sharded: int = 0
    """Weights that are sharded over the tensor ranks."""
    replicated: int = 0
    """Weights that every tensor rank has."""
    expert: int = 0
    """Weights of experts, sharded over expert ranks and the experts' own tensor ranks."""

    def __add__(self, other: "WeightCounts") -> "WeightCounts":
        return WeightCounts(
            self.sharded + other.sharded,
            self.replicated + other.replicated,
            self.expert + other.expert,
        )

    def dense_on_rank(self, layout: ParallelConfig) -> int:
        """Return the number of a rank's weights outside of experts."""
        return self.sharded // layout.tensor + self.replicated

    def expert_on_rank(self, layout: ParallelConfig) -> int:
        """Return the number of a rank's expert weights."""
        return self.expert // (layout.expert * layout.expert_tensor_size)


@dataclass(frozen=True)
class ModelCounts:
    """Number of weights of a model by decoder layer, and outside of the layers."""

    layers: tuple[WeightCounts, ...]
    """Weights of each decoder layer."""
    first: WeightCounts
    """Weights outside of the layers on the first pipeline stage."""
    last: WeightCounts
    """Weights outside of the layers on the last pipeline stage.

    A tied embedding is in `first` and in `last`.
    """
    tied: WeightCounts
    """Tied weights, which exist once if the first stage is also the last one."""

    def count_stage(self, layout: ParallelConfig, stage: int) -> WeightCounts:
        """Return the weights of all ranks of a pipeline stage.

        Args:
            layout: Layout of the model.
            stage: Index of the pipeline stage.
        """
        total = WeightCounts()
        for chunk in stage_layers(len(self.layers), layout, stage):
            total = sum((self.layers[layer] for layer in chunk), total)
        total = total + self.first if stage == 0 else total
        if stage < layout.pipeline - 1:
            return total
        total = total + self.last
        return (
            WeightCounts(total.sharded - self.tied.sharded, total.replicated, total.expert)
            if stage == 0
            else total
        )


def _count_table(table: Iterable[TensorSpec], num_layers: int) -> ModelCounts:
    """Return the counts of the weights in a table."""
    layers = [WeightCounts()] * num_layers
    first = WeightCounts()
    last = WeightCounts()
    tied = WeightCounts()
    for spec in table:
        if spec.expert is not None:
            numbers = WeightCounts(expert=spec.numel)
        else:
            numbers = (
                WeightCounts(replicated=spec.numel)
                if spec.axis is None
                else WeightCounts(sharded=spec.numel)
            )
        if spec.layer is not None:
            layers[spec.layer] += numbers
            continue
        first = first + numbers if "first" in spec.stages else first
        last = last + numbers if "last" in spec.stages else last
        tied = tied + numbers if len(spec.stages) > 1 else tied
    return ModelCounts(tuple(layers), first, last, tied)


@lru_cache(maxsize=64)
def count_weights(
    shape: ModelShape, head: Head, frozen: Collection[str] = (), *, matrices: bool = False
) -> ModelCounts:
    """Return the counts of a model's weights.

    Args:
        shape: Dimensions of the model.
        head: Head of the model.
        frozen: Name patterns of weights to exclude.
        matrices: Whether to count only the matrices of decoder layers, which Muon trains.
    """
    table = weight_table(shape, head)
    excluded = frozen_names(table, tuple(frozen)) if frozen else frozenset()
    included = (spec for spec in table if spec.name not in excluded)
    return _count_table(
        (spec for spec in included if is_layer_matrix(spec) or not matrices), shape.num_layers
    )


@lru_cache(maxsize=64)
def _count_adapters(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> ModelCounts:
    """Return the counts of a model's LoRA weights, all of which are matrices of layers."""
    lora = LoraConfig(rank=rank, targets=list(targets))
    return _count_table(
        build_adapter_table(build_adapter_map(weight_table(shape), lora)), shape.num_layers
    )


@dataclass(frozen=True)
class ModelStates:
    """Bytes per device of a pipeline stage that a trained model needs between steps."""

    weights: int
    gradients: int
    optimizer: int
    on_host: int
    """Optimizer state in host memory (`optimizer.offload_fraction`)."""
    snapshot: int
    """Copy of a checkpoint in host memory, until it is written."""


def frozen_weight_bytes(
    shape: ModelShape, head: Head, layout: ParallelConfig, stage: int, device: Device
) -> int:
    """Return the bytes of a frozen model's weights on a rank of a pipeline stage."""
    return device.itemsize * _on_rank(count_weights(shape, head).count_stage(layout, stage), layout)


def trained_states(
    shape: ModelShape,
    head: Head,
    settings: TrainedModelConfig,
    stage: int,
    device: Device,
    *,
    steps: bool = True,
) -> ModelStates:
    """Return the memory of a trained model on a rank of a pipeline stage.

    Args:
        shape: Dimensions of the model.
        head: Head of the model.
        settings: The model's section of the configuration.
        stage: Index of the pipeline stage.
        device: Device of the model.
        steps: Whether the optimizer takes steps. Without steps, there are no moments and no
            checkpoints.
    """
    layout = settings.parallel
    base = count_weights(shape, head)
    frozen = tuple(settings.frozen)
    weights = base.count_stage(layout, stage)
    trained = count_weights(shape, head, frozen).count_stage(layout, stage)
    matrices = count_weights(shape, head, frozen, matrices=True).count_stage(layout, stage)
    lora = getattr(settings, "lora", None)
    if lora is not None and lora.rank:
        trained = matrices = _count_adapters(shape, lora.rank, tuple(lora.targets)).count_stage(
            layout, stage
        )
        weights = weights + trained
    main_copy = _MAIN_COPY if device.itemsize < _GRADIENT else 0
    moments = 2 * _MOMENT if steps else 0
    # Checkpoints contain main weights and moments in fp32, and frozen weights in their own dtype.
    saved = _optimizer_share(trained, layout)
    optimizer = (saved if settings.optimizer.distributed else _on_rank(trained, layout)) * (
        main_copy + moments
    )
    snapshot = (_MAIN_COPY + 2 * _MOMENT) * saved + device.itemsize * (
        _optimizer_share(weights, layout) - saved
    )
    # Muon has one moment for each weight of a matrix.
    if settings.optimizer.kind == "muon":
        optimizer -= _on_rank(matrices, layout) * moments // 2
        snapshot -= _optimizer_share(matrices, layout) * _MOMENT
    offloaded = int(optimizer * settings.optimizer.offload_fraction) if device.gpus else 0
    return ModelStates(
        weights=device.itemsize * _on_rank(weights, layout),
        gradients=_GRADIENT * _on_rank(trained, layout),
        optimizer=optimizer - offloaded,
        on_host=offloaded,
        snapshot=snapshot if steps else 0,
    )


def _on_rank(counts: WeightCounts, layout: ParallelConfig) -> int:
    """Return the number of weights on a rank."""
    return counts.dense_on_rank(layout) + counts.expert_on_rank(layout)


def _optimizer_share(counts: WeightCounts, layout: ParallelConfig) -> int:
    """Return the number of a rank's weights that the rank's part of a sharded optimizer covers.

    The optimizer is sharded over all ranks that have the same weights.
    """
    dense = counts.dense_on_rank(layout)
    expert = counts.expert_on_rank(layout)
    ranks = layout.tensor * layout.data * layout.context
    replicas = ranks // (layout.expert * layout.expert_tensor_size)
    return math.ceil(dense / (layout.data * layout.context)) + math.ceil(expert / replicas)


@lru_cache(maxsize=64)
def count_engine_weights(shape: ModelShape, tensor: int) -> int:
    """Return the number of weights on a rank of an engine with `tensor` tensor ranks."""
    table = weight_table(shape)
    slices = compute_engine_slices(table, EngineParallelConfig(tensor=tensor), 0)
    return sum(spec.numel // (1 if slices[spec.name].axis is None else tensor) for spec in table)


@lru_cache(maxsize=64)
def count_largest_tensor(shape: ModelShape) -> int:
    """Return the number of elements of the model's largest weight."""
    return max(spec.numel for spec in weight_table(shape))


def count_shared_weights(
    shape: ModelShape, layout: ParallelConfig, stage: int, engine_tensor: int
) -> int:
    """Return how many of an engine's weights a trainer's rank stores in the same form.

    With `engine.update=shared`, the engine uses these weights without a copy. megatron-core
    interleaves query, key and value, and the engine stacks experts, so those are never shared.

    Args:
        shape: Dimensions of the model.
        layout: Layout of the trainer.
        stage: Pipeline stage of the trainer's rank.
        engine_tensor: Tensor-parallel size of the engine.
    """
    shareable = _count_shareable(shape).count_stage(layout, stage)
    return (
        shareable.dense_on_rank(layout) if layout.tensor == engine_tensor else shareable.replicated
    )


@lru_cache(maxsize=64)
def _count_shareable(shape: ModelShape) -> ModelCounts:
    """Return the counts of the weights that trainer and engine store in the same form."""
    parts = ("whole", "gate", "up")
    table = weight_table(shape)
    return _count_table(
        (spec for spec in table if spec.part in parts and spec.expert is None), shape.num_layers
    )
