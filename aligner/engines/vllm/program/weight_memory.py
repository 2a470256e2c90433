"""The memory by which weights reach vLLM's workers, for both ends of that way: it imports torch alone.

The sender packs tensors one behind another and makes a handle of JSON values, by which every worker of the replica opens the
same memory: the machine's, or on a GPU that GPU's own, over CUDA IPC. A worker copies what it takes before it answers, and
the memory is the sender's again.
"""

import base64
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes at a multiple of which a tensor begins, so that it may be of any type."""
_SUMMED = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Words that a checksum looks at in one go: what stays in a processor's cache, or what keeps a GPU busy."""


class Memory(Protocol):
    """What a sender shares."""

    bytes: Tensor
    """Of its own, uint8 [n]."""

    def share(self) -> dict[str, Any]:
        """A handle by which `opened` opens it."""

    def close(self) -> None:
        """Nobody will open it any more, nor look into it."""


class HostMemory:
    """The machine's, opened by a path; gone with the process that made it at the latest. Who has opened it keeps it."""

    kind = "host"

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("aligner-weights")
        self._path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.bytes = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    def share(self) -> dict[str, Any]:
        """See `Memory`."""
        return {"kind": self.kind, "path": self._path, "size": len(self.bytes)}

    def close(self) -> None:
        """See `Memory`."""
        os.close(self._descriptor)
        del self.bytes

    @staticmethod
    def open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Bytes [n], for a reader on any device."""
        return torch.from_file(handle["path"], shared=False, size=handle["size"], dtype=torch.uint8)


class DeviceMemory:
    """A GPU's, which other processes of this machine open over CUDA IPC.

    torch counts who has yet to let go of it, and frees it after the last of them: so each reader has a handle of its own. For
    one that never opens it, since its update fails, the memory stays taken as long as this process lives.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, readers: Sequence[str], size: int) -> None:
        """For one process on each of the GPUs `readers`, which are named by `device_uuid`."""
        self._readers = readers
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def share(self) -> dict[str, Any]:
        """See `Memory`."""
        device = self.bytes.device
        torch.cuda.synchronize(device)  # readers wait for no event
        handles = {reader: self._share() for reader in self._readers}
        return {"kind": self.kind, "device": device_uuid(device), "handles": handles}

    def _share(self) -> list[Any]:
        _, allocation, size, start, counter, place, _, _ = self.bytes.untyped_storage()._share_cuda_()
        return [base64.b64encode(allocation).decode(), size, start, base64.b64encode(counter).decode(), place]

    def close(self) -> None:
        """See `Memory`."""
        del self.bytes
        torch.cuda.ipc_collect()

    @staticmethod
    def open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Bytes [n] where they are, for a reader on `device`, which may be another GPU.

        Raises ValueError naming the GPUs where nothing was shared with this one, or this process does not see the sender's.
        """
        mine, theirs, handles = device_uuid(device), handle["device"], handle["handles"]
        if mine not in handles:
            raise ValueError(f"weights were shared with workers on {', '.join(handles)}, and this one is on {mine}")
        visible = {device_uuid(ordinal): ordinal for ordinal in range(torch.cuda.device_count())}
        if theirs not in visible:
            raise ValueError(f"weights are in the memory of {theirs}, and this worker sees {', '.join(visible)} alone")
        allocation, size, start, counter, place = handles[mine]
        allocation, counter = base64.b64decode(allocation), base64.b64decode(counter)
        opened = torch.UntypedStorage._new_shared_cuda(visible[theirs], allocation, size, start, counter, place, b"", False)
        return torch.empty(0, dtype=torch.uint8, device=opened.device).set_(opened)


class SharedTensors:
    """Tensors that other processes of this machine open by `handle`."""

    def __init__(self, tensors: Mapping[str, Tensor], memory_of: Callable[[int], Memory]) -> None:
        """`memory_of` so many bytes is where they are packed."""
        entries: list[tuple[str, str, list[int], int]] = []
        size = 0
        for name, tensor in tensors.items():
            entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self._memory = memory_of(size)
        packed = self._memory.bytes
        for (_, kind, shape, start), tensor in zip(entries, tensors.values(), strict=True):
            tensor_at(packed, kind, shape, start).copy_(tensor.detach())
        sent = checksum(packed)
        self.handle: dict[str, Any] = {"memory": self._memory.share(), "tensors": entries, "checksum": sent}

    def close(self) -> None:
        """All have answered, or never will."""
        self._memory.close()


@contextlib.contextmanager
def opened(memory: Mapping[str, Any], device: torch.device) -> Iterator[Tensor]:
    """Bytes [n] that another process shares by this handle, while a reader on `device` copies what it takes of them."""
    kinds = {each.kind: each for each in (HostMemory, DeviceMemory)}
    try:
        yield kinds[memory["kind"]].open(memory, device)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copies are made


def tensor_at(memory: Tensor, kind: str, shape: Sequence[int], start: int) -> Tensor:
    """The tensor of a type, by its name, and a shape that begins at a byte of memory."""
    dtype = getattr(torch, kind)
    return memory[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def checksum(memory: Tensor) -> int:
    """Of bytes [n], n a multiple of four: the sum of 32-bit words, each times its place, modulo 2**64.

    It is the same wherever and in whichever order it is added up. Up to 16 GiB it is another one when any word differs, or
    any two have changed places.
    """
    words, count = memory.view(torch.int32), _SUMMED[memory.device.type]
    places = torch.arange(1, count + 1, device=memory.device)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for before, some in enumerate(words.split(count)):
        total += (some * places[: len(some)]).sum() + before * count * some.sum()
    return int(total) % 2**64


def device_uuid(device: torch.device | int) -> str:
    """A GPU's name that is the same in every process of this machine, whatever it sees of it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
