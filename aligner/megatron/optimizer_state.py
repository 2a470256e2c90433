"""What an optimizer keeps of each parameter, wherever megatron-core keeps it: for checkpoints, at
any layout."""

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
    """The optimizers that are chained: one for dense parameters, and one for experts where there
    are any; of each kind."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


@dataclass(frozen=True)
class _Share:
    """What this rank holds of one parameter's state: the elements `[start, stop)` of the flattened
    parameter."""

    optimizer: Any
    """The torch optimizer that updates it; None where there is nothing."""
    main: Tensor | None
    """What it updates, fp32, `stop - start` elements."""
    start: int
    stop: int
    group: dist.ProcessGroup | None
    """The ranks over which the parameter is cut; None: this rank holds all of it."""


def _kinds(optimizer: Any) -> tuple[str, ...]:
    """What it keeps of a parameter beside the main weight; Adam's where a rank keeps nothing, which
    only ever cuts Adam's."""
    return MOMENTUM if isinstance(optimizer, Muon) else MOMENTS


class OptimizerState:
    """Main weights, and Adam's moments or Muon's momentum, of what is trained, wherever
    megatron-core keeps them.

    The plain optimizers hold a parameter's state, and the fp32 main weight of a bf16 parameter, on
    every replica; the distributed one cuts them, flattened, over the data and context ranks.
    """

    def __init__(self, optimizer: MegatronOptimizer, parameters: Iterator[nn.Parameter]) -> None:
        # A rank that trains nothing has an optimizer without any parameter.
        parts = [
            part
            for part in optimizer_parts(optimizer)
            if not getattr(part, "is_stub_optimizer", False)
        ]
        self._optimizers = [inner for part in parts for inner in _torch_optimizers(part.optimizer)]
        self._shares: dict[nn.Parameter, _Share] = {}
        plain: dict[Tensor, torch.optim.Optimizer] = {}
        for part in parts:
            if isinstance(part, DistributedOptimizer):
                self._shares |= _distributed_shares(part)
            else:
                plain |= {
                    main: part.optimizer
                    for group in part.optimizer.param_groups
                    for main in group["params"]
                }
        for parameter in parameters:
            main = getattr(parameter, "main_param", parameter)
            if parameter not in self._shares and main in plain:
                self._shares[parameter] = _Share(plain[main], main, 0, parameter.numel(), None)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is trained."""
        return parameter in self._shares

    @property
    def steps(self) -> int:
        """Steps that were made here; 0 where this rank trains nothing."""
        found = [0]
        for optimizer in self._optimizers:
            # Muon, transformer-engine's and apex's Adam count in the group, torch's at each
            # parameter.
            found += [int(group.get("step", 0)) for group in optimizer.param_groups]
            found += [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        return max(found)

    @property
    def missing_bytes(self) -> int:
        """Bytes of this rank's state that is still to be made, by the first step, where the weights
        are."""
        total = 0
        for parameter, share in self._shares.items():
            if (
                share.main is not None
                and share.main.device == parameter.device
                and self._held(share).keys() == {WEIGHT}
            ):
                total += len(_kinds(share.optimizer)) * share.main.numel() * torch.float32.itemsize
        return total

    def kinds(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """What is kept of a parameter that is trained, from the first step on: MOMENTS or
        MOMENTUM."""
        return _kinds(self._shares[parameter].optimizer)

    def gather(self, parameter: nn.Parameter, writer: int) -> dict[str, Tensor] | None:
        """A parameter's main weight and state, shaped as it is, on rank `writer`; None on the
        others.

        State is left out before the first step. Collective over the ranks over which the state is
        cut, the writer's only; whoever holds all of it takes no part in anything.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        share = self._shares[parameter]
        if share.group is None:
            return self._held(share) if rank == writer else None
        if writer not in dist.get_process_group_ranks(share.group):
            return None
        whole = {}
        for kind in (WEIGHT, *_kinds(share.optimizer)):
            buffer = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            held = self._held(share)
            if kind in held:
                buffer[share.start : share.stop] = held[kind].to(buffer.device).view(-1)
            # As integers: adding zeros to the bits keeps every one of them, a negative zero's sign
            # too.
            dist.reduce(buffer.view(torch.int32), writer, group=share.group)
            whole[kind] = buffer.view(parameter.shape)
        return whole if rank == writer else None

    def load(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take this rank's share of a main weight and, where `tensors` has it, of the state after
        `steps` steps."""
        share = self._shares[parameter]
        if share.main is None:
            return
        parts = {
            kind: tensor.view(-1)[share.start : share.stop].view(share.main.shape)
            for kind, tensor in tensors.items()
        }
        share.main.data.copy_(parts[WEIGHT])
        state: dict[str, Any] = {}
        for kind in parts.keys() - {WEIGHT}:
            state[kind] = parts[kind].to(share.main.device, copy=True)
        if state and isinstance(share.optimizer, torch.optim.Adam):
            # Where its fused kernels and its others look for it.
            device = share.main.device if share.optimizer.param_groups[0].get("fused") else None
            state["step"] = torch.tensor(float(steps), device=device)
        share.optimizer.state[share.main] = state

    def set_steps(self, steps: int) -> None:
        """Tell the optimizers that count in their groups how many steps were made."""
        for optimizer in self._optimizers:
            if not isinstance(optimizer, torch.optim.Adam):
                for group in optimizer.param_groups:
                    group["step"] = steps

    def _held(self, share: _Share) -> dict[str, Tensor]:
        if share.main is None:
            return {}
        state = share.optimizer.state.get(share.main, {})
        return {
            WEIGHT: share.main.detach(),
            **{kind: state[kind] for kind in _kinds(share.optimizer) if kind in state},
        }


def _torch_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that hold state: megatron-core's offloading one spreads parameters over
    several."""
    return (
        list(optimizer.sub_optimizers)
        if isinstance(optimizer, HybridDeviceOptimizer)
        else [optimizer]
    )


def _distributed_shares(part: DistributedOptimizer) -> dict[nn.Parameter, _Share]:
    holders = {
        main: inner
        for inner in _torch_optimizers(part.optimizer)
        for group in inner.param_groups
        for main in group["params"]
    }
    shares = {}
    for buffer in part.buffers:
        for parameter in buffer.params:
            main, start, stop = None, 0, 0
            if parameter in part.model_param_group_index_map:
                group, position = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][position]
                if isinstance(part.optimizer, HybridDeviceOptimizer):
                    main = part.optimizer.param_to_inner_param[main]
                flat = part._get_model_param_range_map(parameter)["param"]
                start, stop = flat.start, flat.end
            shares[parameter] = _Share(
                holders.get(main), main, start, stop, part.data_parallel_group
            )
    return shares
