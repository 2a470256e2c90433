"""`OptimizerState`: the state of each parameter in megatron-core's optimizers, for checkpoints.

The optimizers store the state in different places. This module reads and writes it in the
parameters' shapes, at any layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from aligner.data.checkpoint_files import MOMENTS, MOMENTUM, WEIGHT
from aligner.megatron.muon import Muon


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that a chained optimizer consists of, or the optimizer itself.

    AdamW and Muon each have one part for dense parameters and, if there are experts, another part
    for the experts.
    """
    return getattr(optimizer, "chained_optimizers", [optimizer])


@dataclass(frozen=True)
class _StateShard:
    """This rank's part of a parameter's optimizer state.

    It covers the elements `start` to `stop` - 1 of the flattened parameter.
    """

    optimizer: Any
    """The torch optimizer that updates the shard; None if the shard is empty."""
    main: Tensor | None
    """The tensor that the optimizer updates, fp32 with `stop - start` elements; None if the shard
    is empty."""
    start: int
    stop: int
    group: dist.ProcessGroup | None
    """The ranks over which the parameter is sharded; None if this rank holds all of it."""


def _optimizer_state_kinds(optimizer: Any) -> tuple[str, ...]:
    """Return the kinds of state that the optimizer stores for a parameter, besides the main weight.

    An empty shard has no optimizer; its kinds are Adam's, since only Adam's state is sharded.
    """
    return MOMENTUM if isinstance(optimizer, Muon) else MOMENTS


class OptimizerState:
    """Main weights and optimizer state (Adam's moments or Muon's momentum) of trained parameters.

    megatron-core's plain optimizers hold a parameter's state, and the fp32 main weight of a bf16
    parameter, on every replica. Its distributed optimizer (ZeRO-1) shards both, flattened, over the
    data and context ranks.
    """

    def __init__(self, optimizer: MegatronOptimizer, parameters: Iterator[nn.Parameter]) -> None:
        """Find the shards of all trained parameters.

        Args:
            optimizer: megatron-core's optimizer.
            parameters: The model's parameters on this rank, trained and frozen.
        """
        # A rank that trains nothing has a stub optimizer without parameters.
        parts = [
            part
            for part in optimizer_parts(optimizer)
            if not getattr(part, "is_stub_optimizer", False)
        ]
        self._optimizers = [inner for part in parts for inner in _torch_optimizers(part.optimizer)]
        self._shards: dict[nn.Parameter, _StateShard] = {}
        plain: dict[Tensor, torch.optim.Optimizer] = {}
        for part in parts:
            if isinstance(part, DistributedOptimizer):
                self._shards |= _distributed_shards(part)
            else:
                plain |= {
                    main: part.optimizer
                    for group in part.optimizer.param_groups
                    for main in group["params"]
                }
        for parameter in parameters:
            main = getattr(parameter, "main_param", parameter)
            if parameter not in self._shards and main in plain:
                self._shards[parameter] = _StateShard(plain[main], main, 0, parameter.numel(), None)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is trained."""
        return parameter in self._shards

    @property
    def steps(self) -> int:
        """Number of steps that this rank's optimizers have taken; 0 if the rank trains no
        weights."""
        counts = [0]
        for optimizer in self._optimizers:
            # Muon, transformer-engine's and apex's Adam count the steps of a group; torch's Adam
            # counts the steps of a parameter.
            counts += [int(group.get("step", 0)) for group in optimizer.param_groups]
            counts += [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        return max(counts)

    @property
    def unallocated_bytes(self) -> int:
        """Size in bytes of the state that the first step will allocate on the weights' device."""
        total = 0
        for parameter, shard in self._shards.items():
            if (
                shard.main is not None
                and shard.main.device == parameter.device
                and self._local_tensors(shard).keys() == {WEIGHT}
            ):
                kinds = _optimizer_state_kinds(shard.optimizer)
                total += len(kinds) * shard.main.numel() * torch.float32.itemsize
        return total

    def kinds(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the kinds of state of a trained parameter from the first step on.

        They are MOMENTS or MOMENTUM.
        """
        return _optimizer_state_kinds(self._shards[parameter].optimizer)

    def gather(self, parameter: nn.Parameter, writer: int) -> dict[str, Tensor] | None:
        """Return a parameter's main weight and state on rank `writer`, and None on other ranks.

        Collective over the ranks over which the writer's state is sharded. A rank that holds the
        whole state communicates with no other rank.

        Args:
            parameter: A trained parameter.
            writer: Global rank that receives the tensors.

        Returns:
            float32 tensors in the parameter's shape, by kind. Before the first step, there is only
            the main weight.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        shard = self._shards[parameter]
        if shard.group is None:
            return self._local_tensors(shard) if rank == writer else None
        if writer not in dist.get_process_group_ranks(shard.group):
            return None
        whole = {}
        for kind in (WEIGHT, *_optimizer_state_kinds(shard.optimizer)):
            buffer = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            tensors = self._local_tensors(shard)
            if kind in tensors:
                buffer[shard.start : shard.stop] = tensors[kind].to(buffer.device).view(-1)
            # Reduce the bits as integers: adding zeros then preserves each bit, including the sign
            # of a negative zero.
            dist.reduce(buffer.view(torch.int32), writer, group=shard.group)
            whole[kind] = buffer.view(parameter.shape)
        return whole if rank == writer else None

    def load(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Set this rank's shard of a parameter's main weight and state.

        Args:
            parameter: A trained parameter.
            tensors: The whole main weight and, after the first step, the whole state by kind, in
                the parameter's shape.
            steps: Number of steps after which the state was saved.
        """
        shard = self._shards[parameter]
        if shard.main is None:
            return
        parts = {
            kind: tensor.view(-1)[shard.start : shard.stop].view(shard.main.shape)
            for kind, tensor in tensors.items()
        }
        shard.main.data.copy_(parts[WEIGHT])
        state: dict[str, Any] = {}
        for kind in parts.keys() - {WEIGHT}:
            state[kind] = parts[kind].to(shard.main.device, copy=True)
        if state and isinstance(shard.optimizer, torch.optim.Adam):
            # torch's fused kernels read the step count on the device, the other kernels read it on
            # the host.
            device = shard.main.device if shard.optimizer.param_groups[0].get("fused") else None
            state["step"] = torch.tensor(float(steps), device=device)
        shard.optimizer.state[shard.main] = state

    def set_steps(self, steps: int) -> None:
        """Set the step count of the optimizers that count the steps of a parameter group."""
        for optimizer in self._optimizers:
            if not isinstance(optimizer, torch.optim.Adam):
                for group in optimizer.param_groups:
                    group["step"] = steps

    def _local_tensors(self, shard: _StateShard) -> dict[str, Tensor]:
        """Return this rank's main weight and existing state of a shard, by kind."""
        if shard.main is None:
            return {}
        state = shard.optimizer.state.get(shard.main, {})
        return {
            WEIGHT: shard.main.detach(),
            **{
                kind: state[kind]
                for kind in _optimizer_state_kinds(shard.optimizer)
                if kind in state
            },
        }


def _torch_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers that hold state.

    megatron-core's offloading optimizer distributes the parameters over several of them.
    """
    return (
        list(optimizer.sub_optimizers)
        if isinstance(optimizer, HybridDeviceOptimizer)
        else [optimizer]
    )


def find_main_shard(
    part: DistributedOptimizer, parameter: nn.Parameter
) -> tuple[Tensor | None, int, int]:
    """Return the tensor in which a distributed optimizer updates this rank's shard of a parameter.

    Returns:
        The tensor, and the range (start, stop) of the flattened parameter that it covers; None and
        (0, 0) if the parameter lies outside this rank's range of the buffer.
    """
    if parameter not in part.model_param_group_index_map:
        return None, 0, 0
    group, position = part.model_param_group_index_map[parameter]
    flat_range = part._get_model_param_range_map(parameter)["param"]
    return (
        part.optimizer.param_groups[group]["params"][position],
        flat_range.start,
        flat_range.end,
    )


def _distributed_shards(part: DistributedOptimizer) -> dict[nn.Parameter, _StateShard]:
    """Return this rank's shard of each parameter in the DDP buffers of a distributed optimizer."""
    optimizers = {
        main: inner
        for inner in _torch_optimizers(part.optimizer)
        for group in inner.param_groups
        for main in group["params"]
    }
    shards = {}
    for buffer in part.buffers:
        for parameter in buffer.params:
            main, start, stop = find_main_shard(part, parameter)
            if main is not None and isinstance(part.optimizer, HybridDeviceOptimizer):
                main = part.optimizer.param_to_inner_param[main]
            shards[parameter] = _StateShard(
                optimizers.get(main), main, start, stop, part.data_parallel_group
            )
    return shards
