"""A model's weights in host memory while another model has the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter


class OffloadedWeights:
    """Parameters whose memory on the device is given up until `restore`.

    The storages themselves are emptied and filled again, so that whatever looks into them stays valid: megatron-core's
    parameter buffers, the distributed optimizer's shards, tied weights. Gradient buffers mean nothing between updates and
    are given up without a copy; optimizer state stays.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        parameters = list(parameters)
        self._weights = [(storage, _to_host(storage)) for storage in _storages(parameters)]
        self._gradients = [
            (storage, storage.nbytes())
            for storage in _storages(getattr(parameter, "main_grad", None) for parameter in parameters)
        ]
        for storage in (*(storage for storage, _ in self._weights), *(storage for storage, _ in self._gradients)):
            storage.resize_(0)

    def restore(self) -> None:
        """Bring the weights back, bit for bit; gradient buffers hold anything."""
        for storage, host in self._weights:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)
        for storage, size in self._gradients:
            storage.resize_(size)


def _storages(tensors: Iterable[Tensor | None]) -> Iterator[torch.UntypedStorage]:
    """Each storage once, however many of the tensors lie in it."""
    seen = set()
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
