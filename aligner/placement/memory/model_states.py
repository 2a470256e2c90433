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

from aligner.models.pipeline_stages import has_outer_weights_on_all_stages, stage_layers
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import (
    Head,
    TensorSpec,
    build_adapter_map,
    build_adapter_table,
    compute_engine_slices,
    cut_shape,
    frozen_names,
    is_layer_matrix,
    weight_table,
)
from aligner.placement.roles import Device
from aligner.schema import EngineParallelConfig, LoraConfig, ParallelConfig, TrainedModelConfig

# Bytes per trained weight.
_GRADIENT_BYTES = 4
_MAIN_COPY_BYTES = 4
_MOMENT_BYTES = 4


@dataclass(frozen=True)
class WeightCounts:
    """Number of weights in a part of a model, by their treatment in tensor parallelism."""

    sharded: int = 0
    """Weights that are sharded over the tensor ranks, with their copies on several ranks."""
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

    def count_dense_on_rank(self, layout: ParallelConfig) -> int:
        """Return the number of a rank's weights outside of experts."""
        return self.sharded // layout.tensor + self.replicated

    def count_expert_on_rank(self, layout: ParallelConfig) -> int:
        """Return the number of a rank's expert weights."""
        return self.expert // (layout.expert * layout.expert_tensor_size)


@dataclass(frozen=True)
class ModelCounts:
    """Number of weights of a model by decoder layer, and outside of the layers."""

    shape: ModelShape
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
        # A stage has several chunks of layers with the interleaved schedule.
        for chunk in stage_layers(self.shape, layout, stage):
            total = sum((self.layers[layer] for layer in chunk), total)
        if stage == 0:
            total = total + self.first
        if stage < layout.pipeline - 1:
            return total

        total = total + self.last
        # With one stage, input and output embedding are the same tensor; both sums contain it.
        if stage == 0:
            return WeightCounts(total.sharded - self.tied.sharded, total.replicated, total.expert)
        return total


def _count_table(table: Iterable[TensorSpec], shape: ModelShape, tensor: int) -> ModelCounts:
    """Return the counts of the weights in a table.

    Args:
        table: The weights.
        shape: Dimensions of the model.
        tensor: Number of tensor ranks; some weights have copies if it exceeds the number of KV
            heads.
    """
    layers = [WeightCounts()] * shape.num_layers
    first = WeightCounts()
    last = WeightCounts()
    tied = WeightCounts()
    for spec in table:
        if spec.expert is not None:
            counts = WeightCounts(expert=spec.numel)
        elif spec.axis is None:
            counts = WeightCounts(replicated=spec.numel)
        else:
            counts = WeightCounts(sharded=spec.numel * spec.count_copies(tensor))
        if spec.layer is not None:
            layers[spec.layer] += counts
            continue
        if "first" in spec.stages:
            first = first + counts
        if "last" in spec.stages:
            last = last + counts
        if len(spec.stages) > 1:
            tied = tied + counts
    return ModelCounts(shape, tuple(layers), first, last, tied)


@lru_cache(maxsize=64)
def count_weights(
    shape: ModelShape,
    head: Head,
    frozen: Collection[str] = (),
    *,
    only_matrices: bool = False,
    tensor: int = 1,
) -> ModelCounts:
    """Return the counts of a model's weights.

    Args:
        shape: Dimensions of the model.
        head: Head of the model.
        frozen: Name patterns of weights to exclude.
        only_matrices: Whether to count only the matrices of decoder layers, which Muon trains.
        tensor: Number of tensor ranks.
    """
    table = weight_table(shape, head)
    excluded = frozen_names(table, tuple(frozen)) if frozen else frozenset()
    included = (spec for spec in table if spec.name not in excluded)
    return _count_table(
        (spec for spec in included if is_layer_matrix(spec) or not only_matrices),
        shape,
        tensor,
    )


@lru_cache(maxsize=64)
def _count_adapters(
    shape: ModelShape, rank: int, targets: tuple[str, ...], tensor: int
) -> ModelCounts:
    """Return the counts of a model's LoRA weights, all of which are matrices of layers."""
    lora = LoraConfig(rank=rank, targets=list(targets))
    return _count_table(
        build_adapter_table(build_adapter_map(weight_table(shape), lora)), shape, tensor
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


def compute_frozen_weight_bytes(
    shape: ModelShape, head: Head, layout: ParallelConfig, stage: int, device: Device
) -> int:
    """Return the bytes of a frozen model's weights on a rank of a pipeline stage."""
    counts = count_weights(shape, head, tensor=layout.tensor)
    return device.itemsize * _count_on_rank(counts.count_stage(layout, stage), layout)


def compute_trained_states(
    shape: ModelShape,
    head: Head,
    settings: TrainedModelConfig,
    stage: int,
    device: Device,
    *,
    has_optimizer_steps: bool = True,
) -> ModelStates:
    """Return the memory of a trained model on a rank of a pipeline stage.

    Args:
        shape: Dimensions of the model.
        head: Head of the model.
        settings: The model's section of the configuration.
        stage: Index of the pipeline stage.
        device: Device of the model.
        has_optimizer_steps: Whether the optimizer takes steps. Without steps, there are no moments
            and no checkpoints.
    """
    layout = settings.parallel
    tensor = layout.tensor
    frozen = tuple(settings.frozen)
    weights = count_weights(shape, head, tensor=tensor).count_stage(layout, stage)
    trained = count_weights(shape, head, frozen, tensor=tensor).count_stage(layout, stage)
    matrices = count_weights(shape, head, frozen, only_matrices=True, tensor=tensor).count_stage(
        layout, stage
    )
    # Only the policy's section has the key `lora`. All base weights are frozen with it.
    lora = getattr(settings, "lora", None)
    if lora is not None and lora.rank:
        adapters = _count_adapters(shape, lora.rank, tuple(lora.targets), tensor)
        trained = matrices = adapters.count_stage(layout, stage)
        weights = weights + trained

    # fp32 weights are their own main copy.
    main_copy = _MAIN_COPY_BYTES if device.itemsize < _GRADIENT_BYTES else 0
    moments = 2 * _MOMENT_BYTES if has_optimizer_steps else 0
    # Each rank saves only its shard, also without the distributed optimizer.
    saved = _count_optimizer_share(trained, layout)
    optimized = saved if settings.optimizer.distributed else _count_on_rank(trained, layout)
    optimizer = optimized * (main_copy + moments)
    # Checkpoints contain main weights and moments in fp32, and frozen weights in their own dtype.
    saved_frozen = _count_optimizer_share(weights, layout) - saved
    snapshot = (_MAIN_COPY_BYTES + 2 * _MOMENT_BYTES) * saved + device.itemsize * saved_frozen
    # Muon has one moment for each weight of a matrix.
    if settings.optimizer.kind == "muon":
        optimizer -= _count_on_rank(matrices, layout) * moments // 2
        snapshot -= _count_optimizer_share(matrices, layout) * _MOMENT_BYTES
    offloaded = int(optimizer * settings.optimizer.offload_fraction) if device.is_gpu else 0
    return ModelStates(
        weights=device.itemsize * _count_on_rank(weights, layout),
        gradients=_GRADIENT_BYTES * _count_on_rank(trained, layout),
        optimizer=optimizer - offloaded,
        on_host=offloaded,
        snapshot=snapshot if has_optimizer_steps else 0,
    )


def _count_on_rank(counts: WeightCounts, layout: ParallelConfig) -> int:
    """Return the number of weights on a rank."""
    return counts.count_dense_on_rank(layout) + counts.count_expert_on_rank(layout)


def _count_optimizer_share(counts: WeightCounts, layout: ParallelConfig) -> int:
    """Return the number of a rank's weights that the rank's part of a sharded optimizer covers.

    The optimizer is sharded over all ranks that have the same weights.
    """
    dense = counts.count_dense_on_rank(layout)
    expert = counts.count_expert_on_rank(layout)
    ranks = layout.tensor * layout.data * layout.context
    # Experts have their own parallel sizes on the same ranks, so fewer or more ranks have copies.
    expert_replicas = ranks // (layout.expert * layout.expert_tensor_size)
    dense_share = math.ceil(dense / (layout.data * layout.context))
    return dense_share + math.ceil(expert / expert_replicas)


@lru_cache(maxsize=64)
def count_engine_weights(
    shape: ModelShape, tensor: int, expert: int = 1, pipeline: int = 1, stage: int = 0
) -> int:
    """Return the number of weights on a rank of an engine.

    Args:
        shape: Dimensions of the model.
        tensor: Tensor-parallel size of the engine.
        expert: Expert-parallel size of the engine.
        pipeline: Pipeline-parallel size of the engine; above 1, the engine is vLLM.
        stage: Pipeline stage of the rank.
    """
    layout = EngineParallelConfig(tensor=tensor, expert=expert, pipeline=pipeline)
    table = {spec.name: spec for spec in weight_table(shape)}
    slices = compute_engine_slices(
        tuple(table.values()),
        layout,
        stage * tensor,
        has_outer_weights_on_all_stages=has_outer_weights_on_all_stages(shape.family),
    )
    return sum(
        math.prod(cut_shape(table[name].shape, piece.axis, piece.start, piece.stop))
        for name, piece in slices.items()
    )


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
    shareable = _count_shareable(shape, layout.tensor).count_stage(layout, stage)
    # With different tensor-parallel sizes, only replicated tensors have the same content.
    if layout.tensor == engine_tensor:
        return shareable.count_dense_on_rank(layout)
    return shareable.replicated


@lru_cache(maxsize=64)
def _count_shareable(shape: ModelShape, tensor: int) -> ModelCounts:
    """Return the counts of the weights that trainer and engine store in the same form."""
    parts = ("whole", "gate", "up")
    table = weight_table(shape)
    return _count_table(
        (spec for spec in table if spec.part in parts and spec.expert is None),
        shape,
        tensor,
    )
