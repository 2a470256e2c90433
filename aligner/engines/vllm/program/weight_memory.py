"""The memory by which weights reach vLLM's workers, for both ends of that way: it imports torch
alone.

A rank of the replica packs its slices of tensors one behind another and makes a handle of JSON
values, by which the worker in its place opens the same memory: the machine's, or that of the GPU
that they share, over CUDA IPC. The worker copies what it takes before it answers, and the memory is
the rank's again.
"""

import base64
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes at a multiple of which a tensor begins, so that it may be of any type."""
_SUMMED = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Words that a checksum looks at in one go: what stays in a processor's cache, or what keeps a GPU
busy."""


class Memory(Protocol):
    """What a sender shares."""

    bytes: Tensor
    """Of its own, uint8 [n]."""

    def share(self) -> dict[str, Any]:
        """A handle by which `opened` opens it."""

    def close(self) -> None:
        """Nobody will open it any more, nor look into it."""


class HostMemory:
    """The machine's, opened by a path; gone with the process that made it at the latest. Who has
    opened it keeps it."""

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
    """A GPU's, which another process on that GPU opens over CUDA IPC.

    torch frees it when the reader has let go of it. Where none opens it, since its update fails,
    the memory stays taken as long as this process lives.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def share(self) -> dict[str, Any]:
        """See `Memory`."""
        device = self.bytes.device
        torch.cuda.synchronize(device)  # the reader waits for no event
        _, allocation, size, start, counter, place, _, _ = (
            self.bytes.untyped_storage()._share_cuda_()
        )
        handle = [
            base64.b64encode(allocation).decode(),
            size,
            start,
            base64.b64encode(counter).decode(),
            place,
        ]
        return {"kind": self.kind, "device": device_uuid(device), "handle": handle}

    def close(self) -> None:
        """See `Memory`."""
        del self.bytes
        torch.cuda.ipc_collect()

    @staticmethod
    def open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Bytes [n] where they are, for a reader on `device`. Raises ValueError naming both GPUs
        where it is another one."""
        if (mine := device_uuid(device)) != (theirs := handle["device"]):
            raise ValueError(
                f"the trainer's weights are in the memory of {theirs}, but this vLLM worker runs on"
                f" {mine}; both must use the same GPU"
            )
        allocation, size, start, counter, place = handle["handle"]
        allocation, counter = base64.b64decode(allocation), base64.b64decode(counter)
        opened = torch.UntypedStorage._new_shared_cuda(
            device.index, allocation, size, start, counter, place, b"", False
        )
        return torch.empty(0, dtype=torch.uint8, device=opened.device).set_(opened)


@dataclass(frozen=True)
class Placed:
    """A piece of a checkpoint's tensor: what begins at `start` along `axis`; all of it where `axis`
    is None."""

    name: str
    shape: Sequence[int]
    """Of the whole tensor."""
    axis: int | None
    start: int
    piece: Tensor


class SharedPieces:
    """Pieces of tensors that another process of this machine opens by `handle`."""

    def __init__(self, pieces: Sequence[Placed], memory_of: Callable[[int], Memory]) -> None:
        """Those of one tensor are neighbours. `memory_of` so many bytes is where they are
        packed."""
        entries: list[tuple[str, str, list[int], int | None, int, list[int], int]] = []
        size = 0
        for placed in pieces:
            piece, kind = placed.piece, str(placed.piece.dtype).removeprefix("torch.")
            entries.append(
                (
                    placed.name,
                    kind,
                    [*placed.shape],
                    placed.axis,
                    placed.start,
                    [*piece.shape],
                    size,
                )
            )
            size += -(-piece.nbytes // _ALIGNED) * _ALIGNED
        self._memory = memory_of(size)
        packed = self._memory.bytes
        for (_, kind, *_, shape, begin), placed in zip(entries, pieces, strict=True):
            tensor_at(packed, kind, shape, begin).copy_(placed.piece.detach())
        sent = checksum(packed)
        self.handle: dict[str, Any] = {
            "memory": self._memory.share(),
            "pieces": entries,
            "checksum": sent,
        }

    def close(self) -> None:
        """It has been answered, or never will be."""
        self._memory.close()


def taken(
    memory: Tensor, pieces: Iterable[Sequence[Any]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Copies of a handle's tensors on `device`, by name and of the whole shape: NaN where a piece
    has not come.

    So whoever cuts them otherwise than the sender has no number that could be taken for a weight.
    """
    for name, of_one in itertools.groupby(pieces, key=lambda entry: entry[0]):
        whole: Tensor | None = None
        for _, kind, shape, axis, start, part, begin in of_one:
            piece = tensor_at(memory, kind, part, begin)
            if list(part) == list(shape):
                whole = piece.to(device, copy=True)
                break
            if whole is None:
                whole = torch.full(shape, torch.nan, dtype=piece.dtype, device=device)
            whole.narrow(axis, start, part[axis]).copy_(piece)
        assert whole is not None
        yield name, whole


@contextlib.contextmanager
def opened(memory: Mapping[str, Any], device: torch.device) -> Iterator[Tensor]:
    """Bytes [n] that another process shares by this handle, while a reader on `device` copies what
    it takes of them."""
    kinds = {each.kind: each for each in (HostMemory, DeviceMemory)}
    try:
        yield kinds[memory["kind"]].open(memory, device)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copies are made


def tensor_at(memory: Tensor, kind: str, shape: Sequence[int], start: int) -> Tensor:
    """The tensor of a type, by its name, and a shape that begins at a byte of memory."""
    dtype = getattr(torch, kind)
    return (
        memory[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
    )


def checksum(memory: Tensor) -> int:
    """Of bytes [n], n a multiple of four: the sum of 32-bit words, each times its place, modulo
    2**64.

    It is the same wherever and in whichever order it is added up. Up to 16 GiB it is another one
    when any word differs, or any two have changed places.
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
