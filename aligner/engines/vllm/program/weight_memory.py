"""Shared memory that transfers weights to vLLM's workers.

A sender (a rank of aligner's engine) transfers weights to a reader (vLLM's worker of the same
tensor-parallel rank). Both use this module, which imports only torch.

The sender packs its slices of tensors into one block of memory, and creates a handle of JSON
values. The reader opens the same memory with this handle. The memory is host memory, or memory of
the GPU that both processes use, opened with CUDA IPC. The reader copies the tensors before it
answers; the sender may then free the memory or use it again.
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

# Alignment of a tensor in the memory, in bytes; sufficient for every data type.
_ALIGNMENT = 16
# Number of 32-bit words that a checksum processes at a time, by type of device: few enough to fit
# into the cache of a CPU, and enough to occupy a GPU.
_CHECKSUM_BLOCK_WORDS = {"cpu": 1 << 17, "cuda": 1 << 24}


class Memory(Protocol):
    """Memory of the sender that the reader can open."""

    bytes: Tensor
    """Contents of the memory, uint8 [n]."""

    def share(self) -> dict[str, Any]:
        """Return a handle of JSON values, with which `open_memory` opens the memory."""

    def close(self) -> None:
        """Release the memory; the reader must not open or read it afterwards."""


class HostMemory:
    """Host memory, which the reader opens by a path.

    The reader can open the memory until the sender closes it or exits. If the reader has opened it
    before, it may use it even after that.
    """

    kind = "host"

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes."""
        # Unlike a file in /dev/shm, a memfd does not outlive its processes if they are killed.
        self._descriptor = os.memfd_create("aligner-weights")
        self._path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.bytes = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    def share(self) -> dict[str, Any]:
        """Return a handle; see `Memory.share`."""
        return {"kind": self.kind, "path": self._path, "size": len(self.bytes)}

    def close(self) -> None:
        """Release the memory; see `Memory.close`."""
        os.close(self._descriptor)
        del self.bytes

    @staticmethod
    def open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the bytes [n] in host memory, whichever device the reader has."""
        return torch.from_file(handle["path"], shared=False, size=handle["size"], dtype=torch.uint8)


class DeviceMemory:
    """Memory of a GPU, which the reader on the same GPU opens with CUDA IPC.

    torch frees the memory after the reader has released it. If the reader does not open it, because
    the update fails, the memory stays allocated until the sender exits.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate `size` bytes on a GPU."""
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def share(self) -> dict[str, Any]:
        """Return a handle; see `Memory.share`."""
        device = self.bytes.device
        # The reader does not wait for a CUDA event, so the contents must be complete now.
        torch.cuda.synchronize(device)
        # A handle of JSON values, instead of torch.multiprocessing's pickled storage, because
        # vLLM's environment may have another version of torch.
        _, allocation, size, offset, counter, counter_offset, _, _ = (
            self.bytes.untyped_storage()._share_cuda_()
        )
        handle = [
            base64.b64encode(allocation).decode(),
            size,
            offset,
            base64.b64encode(counter).decode(),
            counter_offset,
        ]
        return {"kind": self.kind, "device": get_device_uuid(device), "handle": handle}

    def close(self) -> None:
        """Release the memory; see `Memory.close`."""
        del self.bytes
        torch.cuda.ipc_collect()

    @staticmethod
    def open(handle: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the bytes [n] on the GPU, without a copy.

        Args:
            handle: Handle of the memory.
            device: The reader's GPU.

        Raises:
            ValueError: The memory is on another GPU than the reader; the message names both.
        """
        worker_gpu = get_device_uuid(device)
        sender_gpu = handle["device"]
        if worker_gpu != sender_gpu:
            raise ValueError(
                f"the trainer's weights are in the memory of {sender_gpu}, but this vLLM worker"
                f" runs on {worker_gpu}; both must use the same GPU"
            )

        allocation, size, offset, counter, counter_offset = handle["handle"]
        allocation = base64.b64decode(allocation)
        counter = base64.b64decode(counter)
        # The last two arguments are the event and whether to wait for it; see `share`.
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, allocation, size, offset, counter, counter_offset, b"", False
        )
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True)
class TensorSlice:
    """Slice of a tensor of the checkpoint."""

    name: str
    """Name of the tensor in the checkpoint."""
    shape: Sequence[int]
    """Shape of the whole tensor."""
    index: Sequence[slice]
    """Range of each dimension of the tensor; dimensions without one are whole."""
    data: Tensor
    """Values of the slice."""


class SharedSlices:
    """Slices of tensors, packed into memory that the reader can open.

    Attributes:
        handle: JSON values: the handle of the memory in `memory`, the header of each slice in
            `pieces`, and a checksum of the memory in `checksum`.
    """

    def __init__(self, slices: Sequence[TensorSlice], allocate: Callable[[int], Memory]) -> None:
        """Pack the slices into new memory.

        Args:
            slices: Slices of tensors. All slices of one tensor must be adjacent.
            allocate: Function that allocates memory of a given number of bytes.
        """
        # The header of each slice: name, data type and shape of the whole tensor; start, stop and
        # step of each dimension's range; shape of the slice; and the index of its first byte in the
        # memory.
        headers: list[tuple[str, str, list[int], list[list[int]], list[int], int]] = []
        size = 0
        for tensor_slice in slices:
            data = tensor_slice.data
            dtype_name = str(data.dtype).removeprefix("torch.")
            ranges = [
                [*each.indices(length)]
                for each, length in zip(tensor_slice.index, tensor_slice.shape, strict=False)
            ]
            shape = [*tensor_slice.shape]
            headers.append((tensor_slice.name, dtype_name, shape, ranges, [*data.shape], size))
            # Rounded up: a slice must be aligned, and the checksum reads whole 32-bit words.
            size += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT

        self._memory = allocate(size)
        packed = self._memory.bytes
        for (_, dtype_name, *_, shape, offset), tensor_slice in zip(headers, slices, strict=True):
            view_tensor(packed, dtype_name, shape, offset).copy_(tensor_slice.data.detach())

        packed_checksum = compute_checksum(packed)
        self.handle: dict[str, Any] = {
            "memory": self._memory.share(),
            "pieces": headers,
            "checksum": packed_checksum,
        }

    def close(self) -> None:
        """Release the memory, after the reader has answered or when no reader will open it."""
        self._memory.close()


def copy_tensors(
    memory: Tensor, headers: Iterable[Sequence[Any]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of a handle's tensors on `device`, with their names.

    Every tensor has the shape of the whole tensor, and contains NaN outside the transferred slices.
    If the reader slices tensors differently from the sender, the NaN values reveal the weights that
    it lacks.

    Args:
        memory: Contents of the memory, uint8 [n].
        headers: Headers of the slices: field `pieces` of the handle (see `SharedSlices`).
        device: Device of the copies.
    """
    for name, tensor_headers in itertools.groupby(headers, key=lambda header: header[0]):
        tensor: Tensor | None = None
        for _, dtype_name, shape, ranges, slice_shape, offset in tensor_headers:
            data = view_tensor(memory, dtype_name, slice_shape, offset)
            # A whole tensor is copied too: the sender may reuse the memory after the answer.
            if list(slice_shape) == list(shape):
                tensor = data.to(device, copy=True)
                break
            if tensor is None:
                tensor = torch.full(shape, torch.nan, dtype=data.dtype, device=device)
            tensor[tuple(slice(*each) for each in ranges)].copy_(data)
        assert tensor is not None
        yield name, tensor


def count_elements(headers: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Return the number of transferred elements of each tensor of a handle, by name."""
    counts: dict[str, int] = {}
    for name, _, _, _, slice_shape, _ in headers:
        counts[name] = counts.get(name, 0) + torch.Size(slice_shape).numel()
    return counts


@contextlib.contextmanager
def open_memory(handle: Mapping[str, Any], device: torch.device) -> Iterator[Tensor]:
    """Open the sender's memory in a `with` block, and yield its bytes [n].

    When the block ends, all copies from the memory to `device` are complete, so the sender may
    release it.

    Args:
        handle: Handle from `Memory.share`.
        device: Device to which the reader copies tensors.
    """
    memory_classes = {
        memory_class.kind: memory_class for memory_class in (HostMemory, DeviceMemory)
    }
    try:
        yield memory_classes[handle["kind"]].open(handle, device)
    finally:
        if device.type == "cuda":
            # Wait for the copies.
            torch.cuda.synchronize(device)


def view_tensor(memory: Tensor, dtype_name: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a view of memory as a tensor.

    Args:
        memory: uint8 [n].
        dtype_name: Name of the data type in torch, such as `bfloat16`.
        shape: Shape of the tensor.
        offset: Index of the tensor's first byte.
    """
    dtype = getattr(torch, dtype_name)
    byte_count = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + byte_count].view(dtype).view(shape)


def compute_checksum(memory: Tensor) -> int:
    """Return a checksum of bytes [n], where n is a multiple of four.

    The checksum is the sum of all 32-bit words, each multiplied by its index (starting at 1),
    modulo 2**64. It does not depend on the device or on the order of the sum. For at most 16 GiB,
    it changes if any single word changes, or if any two different words are exchanged.
    """
    words = memory.view(torch.int32)
    block_words = _CHECKSUM_BLOCK_WORDS[memory.device.type]
    indices = torch.arange(1, block_words + 1, device=memory.device)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)

    # Word i of block b has the index b * block_words + i. The block's sum of index times word is
    # therefore split into the sum for i, and the sum of the words times b * block_words.
    for block_index, block in enumerate(words.split(block_words)):
        # Products of int32 and int64 are int64. Overflow wraps around, which is the modulo 2**64.
        total += (block * indices[: len(block)]).sum() + block_index * block_words * block.sum()
    return int(total) % 2**64


def compute_tensor_checksum(tensor: Tensor) -> int:
    """Return `compute_checksum` of a tensor's bytes, padded with zeros to a multiple of four."""
    memory = tensor.contiguous().view(-1).view(torch.uint8)
    if padding := -len(memory) % 4:
        memory = torch.cat([memory, memory.new_zeros(padding)])
    return compute_checksum(memory)


def get_device_uuid(device: torch.device | int) -> str:
    """Return the UUID of a GPU.

    The UUID is the same in all processes of this machine, whichever GPUs are visible to them.
    """
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
