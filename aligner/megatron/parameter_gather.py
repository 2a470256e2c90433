"""What each data rank has updated of the weights (ZeRO-1), gathered while the next forward pass
begins."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn


class ParameterGather:
    """The gathers that are under way behind an update, bucket by bucket: a layer waits for those of
    its own weights.

    megatron-core's own hooks wait for a module's own parameters alone, but experts that are
    multiplied together are read by the module around them. Here everything is on its way before the
    update returns, on every rank in the same order, so that whoever else reads weights may `finish`
    whenever he likes, without the other ranks.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        """Of chunks whose DDP was made with `overlap_param_gather`."""
        # Buckets were filled from the last layer on; the first is read first.
        self._groups = [
            group
            for ddp in wrapped
            for group in reversed(ddp.bucket_groups + ddp.expert_parallel_bucket_groups)
        ]
        for ddp in wrapped:
            ddp.disable_forward_pre_hook(param_sync=False)
            for module in _readers(ddp.module):
                trained = (
                    parameter
                    for parameter in module.parameters()
                    if parameter in ddp.param_to_bucket_group
                )
                groups = list(
                    {
                        id(group): group for group in map(ddp.param_to_bucket_group.get, trained)
                    }.values()
                )
                module.register_forward_pre_hook(
                    lambda module, inputs, groups=groups: _wait(groups)
                )

    def start(self) -> None:
        """Send on what was updated. Collective."""
        for group in self._groups:
            group.start_param_sync()

    def finish(self) -> None:
        """Return when all weights are this version's. Only the thread that trains may call it, and
        may look at weights."""
        _wait(self._groups)


def _readers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers, and what else has weights around them."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif next(module.parameters(recurse=False), None) is not None:
        yield module
    else:
        for child in module.children():
            yield from _readers(child)


def _wait(groups: Sequence[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
