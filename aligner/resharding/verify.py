"""Verification of a weight sync by checksums, and the key-value store through which ranks connect.

- `compute_expected` computes the checksums of the trainer's weights for each engine rank, without
  gathering a tensor; `find_different` compares an engine's tensors with them.
- `world_store` and `open_store` return torch's key-value store on the one address at which the
  ranks reach it. torch's stores do not authenticate clients, let every client list their keys, and
  listen on every interface by default. docs/running.md describes the remaining risk.
"""

import ctypes
import ipaddress
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from aligner.errors import AlignerError
from aligner.models.weight_slices import TensorSpec
from aligner.placement.addresses import LOOPBACK, WORLD_SECRET
from aligner.resharding.transfer_plan import (
    TransferPlan,
    extent,
    find_sharded_axis,
    range_numel,
    select_slices,
    split_at_boundaries,
)
from aligner.resharding.transport import Link, TensorReader, narrow_slice
from aligner.resharding.weight_update import ExpectedSlice

# setsockopt(2): attach a classic BPF program that filters the packets of a socket.
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0


# Integer dtype by element size in bytes.
_BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of elements that are converted to int64 at a time, by type of device: few enough to fit
# into the cache of a CPU, and enough to occupy a GPU.
_BLOCKS = {"cpu": 1 << 18, "cuda": 1 << 20}


def world_store(rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store of the world at MASTER_ADDR and MASTER_PORT, closed to other processes once
    all ranks are connected.

    Collective. Until all ranks are connected, other processes can connect too, and write keys. The
    ranks ignore such keys: they use only keys with the prefix of the world's secret, and wait until
    rank 0 reports under this prefix that the store accepts no further connections and that only
    ranks are connected. A world of one rank uses a store in memory.

    Raises:
        AlignerError: If rank 0 cannot listen at the address, or if a process that is not a rank is
            connected.
    """
    host = os.environ.get("MASTER_ADDR", LOOPBACK)
    if ipaddress.ip_address(_resolve(host, 0)[1][0]).is_loopback:
        # By default, gloo listens on the address that the machine's host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if size == 1:
        return HashStore()

    port = int(os.environ["MASTER_PORT"])
    secret = os.environ.get(WORLD_SECRET, "world")
    if rank:
        store = PrefixStore(secret, TCPStore(host, port, size, is_master=False, timeout=timeout))
        store.wait(["shut"])
        return store
    with _listen(host, port) as listener:
        store = PrefixStore(secret, _host_store(host, listener, timeout, size))
        _refuse_connections(listener, size)
    store.set("shut", "")
    return store


def open_store(host: str, timeout: timedelta) -> TCPStore:
    """Return a store that this process hosts at a free port, and only on the address `host`.
    Clients may connect at any time.

    Raises:
        AlignerError: If this process cannot listen on `host`.
    """
    with _listen(host, 0) as listener:
        return _host_store(host, listener, timeout)


def _host_store(
    host: str, listener: socket.socket, timeout: timedelta, size: int | None = None
) -> TCPStore:
    """Return a store that serves a listening socket. With `size`, wait for that many ranks."""
    port = listener.getsockname()[1]
    # The store closes its file descriptor itself: give it a duplicate.
    store_fd = os.dup(listener.fileno())
    return TCPStore(
        host,
        port,
        size,
        True,
        timeout,
        wait_for_workers=size is not None,
        master_listen_fd=store_fd,
    )


def _refuse_connections(listener: socket.socket, size: int) -> None:
    """Let a store's listening socket ignore all further connections.

    A store's socket cannot be closed, because the store's event loop owns it. A packet filter that
    drops all packets has the same effect.

    Raises:
        AlignerError: If there are more connections than ranks.
    """
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
    )
    # Count only after the filter is attached: no connection can be added after the count.
    address = listener.getsockname()[:2]
    connections = [
        connection
        for connection in psutil.net_connections("tcp")
        if connection.laddr == address and connection.status == psutil.CONN_ESTABLISHED
    ]
    if len(connections) > size:
        client_addresses = {connection.raddr.ip for connection in connections if connection.raddr}
        raise AlignerError(
            f"the rank store at {address[0]}:{address[1]} has {len(connections)} connections for"
            f" {size} ranks: another client has connected; connections come from"
            f" {', '.join(sorted(client_addresses))}"
        )


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raise AlignerError if the address cannot be used."""
    family, address = _resolve(host, port)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise AlignerError(
            f"the rank store cannot listen on {host}:{port}: {error.strerror}; MASTER_ADDR must"
            " be an address of rank 0's machine (in a Slurm job, the NodeAddr of its node), and"
            " MASTER_PORT must be free on that machine"
        ) from error
    return listener


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the address family and socket address of a host. Raise AlignerError if it cannot be
    resolved."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AlignerError(f"MASTER_ADDR={host}: cannot be resolved: {error.strerror}") from error
    return family, address


def checksum(tensor: Tensor, shape: tuple[int, ...], axis: int | None, start: int) -> Tensor:
    """Return the position-weighted checksum of a slice's raw bits: an int64 scalar, modulo 2**64.

    The bits of each element have the weight 2 * i + 1, where i is the element's linear index in the
    whole tensor. The checksums of disjoint slices therefore add up to the checksum of their union.
    Every change of one element, and every exchange of two different elements, changes the checksum
    (for elements of up to 32 bits and fewer than 2**31 elements).

    Args:
        tensor: The slice, which begins at `start` along `axis` of the whole tensor.
        shape: Shape of the whole tensor.
        axis: Dimension along which the slice is cut, the first one if there are more than two; None
            means the whole tensor.
        start: First index of the slice along `axis`.
    """
    if len(shape) > 2:
        tensor, shape = tensor.flatten(1), (shape[0], math.prod(shape[1:]))
    bits = (tensor if tensor.dim() == 2 else tensor[None]).view(_BITS_DTYPES[tensor.element_size()])
    columns = shape[-1]
    first_row, first_column = (
        (start, 0) if axis == 0 and len(shape) == 2 else (0, 0 if axis is None else start)
    )
    rows, width = bits.shape
    step = max(1, _BLOCKS[bits.device.type] // width)

    # 2 * i + 1 with i = row * columns + column is the sum of a row weight and a column weight, so
    # that two sums per block replace a weight tensor of the size of the block.
    row_weights = 2 * columns * torch.arange(first_row, first_row + rows, device=bits.device) + 1
    column_weights = 2 * torch.arange(first_column, first_column + width, device=bits.device)
    column_sums = torch.zeros(width, dtype=torch.int64, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for row in range(0, rows, step):
        block = bits[row : row + step].long()
        column_sums += block.sum(0)
        total += (block.sum(1) * row_weights[row : row + step]).sum()
    return total + (column_sums * column_weights).sum()


@dataclass(frozen=True)
class _CheckedRange:
    """A range of a tensor that no slice divides further, and the source rank that computes its
    checksum."""

    spec: TensorSpec
    axis: int | None
    start: int
    stop: int
    holder: int


def _plan_ranges(plan: TransferPlan) -> list[_CheckedRange]:
    """Return the ranges of every tensor that has a target, in table order.

    The source ranks share the work evenly.
    """
    load = dict.fromkeys(plan.source, 0)
    ranges: list[_CheckedRange] = []
    for spec in plan.table:
        source = select_slices(plan.source, spec)
        target = list(select_slices(plan.target, spec).values())
        if not target:
            continue
        axis = find_sharded_axis(spec, [*source.values(), *target])
        held_ranges = {rank: extent(spec, piece, axis) for rank, piece in source.items()}
        target_ranges = [extent(spec, piece, axis) for piece in target]
        boundaries = (
            edge for extents in (*held_ranges.values(), *target_ranges) for edge in extents
        )
        for start, stop in split_at_boundaries(boundaries):
            if not any(low <= start and stop <= high for low, high in target_ranges):
                continue
            holders = [
                rank for rank, (low, high) in held_ranges.items() if low <= start and stop <= high
            ]
            holder = min(holders, key=lambda rank: (load[rank], rank))
            load[holder] += range_numel(spec, axis, start, stop)
            ranges.append(_CheckedRange(spec, axis, start, stop, holder))
    return ranges


def _source_sums(
    plan: TransferPlan,
    ranges: list[_CheckedRange],
    link: Link,
    dtype: torch.dtype,
    read: TensorReader,
) -> Tensor:
    """Return the checksums of the source, int64 [ranges]: zero for the ranges
    whose checksums other ranks compute."""
    sums = torch.zeros(len(ranges), dtype=torch.int64, device=link.device)
    for index, checked in enumerate(ranges):
        if checked.holder == link.rank:
            held_slice = plan.source[link.rank][checked.spec.name]
            tensor = read(checked.spec.name)
            part = narrow_slice(
                tensor, checked.spec, held_slice, checked.axis, checked.start, checked.stop
            )
            sums[index] = checksum(
                part.to(link.device, dtype), checked.spec.shape, checked.axis, checked.start
            )
            # `tensor` may be a copy: free it before the next tensor is read.
            del tensor, part
    return sums


@torch.no_grad()
def compute_expected(
    plan: TransferPlan, link: Link, dtype: torch.dtype, read: TensorReader
) -> dict[str, ExpectedSlice]:
    """Return the checksums of the trainer's weights for this rank's target slices, by name.
    Collective.

    Only checksums are transferred between ranks.

    Args:
        plan: The transfer plan.
        link: The connection of the plan's ranks.
        dtype: Data type of the engine's tensors; source slices are converted to it.
        read: Reader of this rank's source slices.
    """
    ranges = _plan_ranges(plan)
    sums = _source_sums(plan, ranges, link, dtype, read)
    link.all_reduce(sums)

    # The checksum of a target slice is the sum over the ranges that the slice covers.
    totals: dict[str, Tensor] = {}
    own_slices = plan.target.get(link.rank, {})
    for index, checked in enumerate(ranges):
        name = checked.spec.name
        if name in own_slices:
            low, high = extent(checked.spec, own_slices[name], checked.axis)
            if low <= checked.start and checked.stop <= high:
                totals[name] = totals.get(name, torch.zeros_like(sums[0])) + sums[index]

    # One copy from the device for all checksums.
    checksums = torch.stack([*totals.values()]).tolist() if totals else []
    return {
        name: ExpectedSlice(
            plan.specs[name].shape, own_slices[name].axis, own_slices[name].start, checksum
        )
        for name, checksum in zip(totals, checksums, strict=True)
    }


@torch.no_grad()
def compute_checksums(
    tensors: Mapping[str, Tensor], slices: Mapping[str, ExpectedSlice], dtype: torch.dtype
) -> dict[str, int]:
    """Return the checksums of an engine's tensors by name, without those that it does not have.

    Args:
        tensors: The engine's slices by name.
        slices: The positions of the slices in the whole tensors, by name.
        dtype: Data type of the transfer's elements. The bits of a tensor in float32 count as
            several elements of a smaller type.
    """
    sums = {
        name: checksum(tensors[name].view(dtype), each.shape, each.axis, each.start)
        for name, each in slices.items()
        if name in tensors
    }
    values = torch.stack([*sums.values()]).tolist() if sums else []
    return dict(zip(sums, values, strict=True))


def find_different(
    tensors: Mapping[str, Tensor], expected: Mapping[str, ExpectedSlice], dtype: torch.dtype
) -> list[str]:
    """Return the names of the slices that an engine lacks, or whose bits differ from the trainer's.

    Args:
        tensors: The engine's slices by name.
        expected: The trainer's checksums by name.
        dtype: Data type of the transfer's elements.
    """
    checksums = compute_checksums(tensors, expected, dtype)
    return [name for name, each in expected.items() if checksums.get(name) != each.checksum]


def raise_if_different(names: Sequence[str]) -> None:
    """Raise AlignerError with the names of the engine's weights that differ from the trainer's, if
    there are any."""
    if names:
        raise AlignerError("the engine's weights differ from the trainer's: " + ", ".join(names))
