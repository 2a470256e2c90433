"""Checking by checksum that every engine rank holds the trainer's weights, without gathering a
tensor."""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
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
    atoms,
    cut_axis,
    extent,
    numel_of,
    slices_of,
)
from aligner.resharding.transport import Link, Read, part

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0


def world_store(rank: int, size: int, timeout: timedelta) -> Store:
    """The store of the world that MASTER_ADDR and MASTER_PORT tell of, where nobody else comes in
    once all ranks are there.

    Collective. Until then others may come, and leave what they like under names that nobody looks
    for: all wait for rank 0 to say, under the world's own, that it has shut the door, with the
    ranks alone inside. A rank that is alone needs no door.

    Raises AlignerError where rank 0 cannot listen there, and where someone else is inside.
    """
    host = os.environ.get("MASTER_ADDR", LOOPBACK)
    if ipaddress.ip_address(_resolved(host, 0)[1][0]).is_loopback:
        # By default gloo listens on the address that the machine's name stands for.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if size == 1:
        return HashStore()
    port, secret = int(os.environ["MASTER_PORT"]), os.environ.get(WORLD_SECRET, "world")
    if rank:
        own = PrefixStore(secret, TCPStore(host, port, size, is_master=False, timeout=timeout))
        own.wait(["shut"])
        return own
    with _listener(host, port) as listener:
        own = PrefixStore(secret, _hosted(host, listener, timeout, size))
        _shut(listener, size)
    own.set("shut", "")
    return own


def open_store(host: str, timeout: timedelta) -> TCPStore:
    """A store that this process hosts on `host` alone, at a free port, for others to come when they
    like.

    Raises AlignerError where it cannot listen there.
    """
    with _listener(host, 0) as listener:
        return _hosted(host, listener, timeout)


def _hosted(
    host: str, listener: socket.socket, timeout: timedelta, size: int | None = None
) -> TCPStore:
    port, its_own = listener.getsockname()[1], os.dup(listener.fileno())
    return TCPStore(
        host, port, size, True, timeout, wait_for_workers=size is not None, master_listen_fd=its_own
    )


def _shut(listener: socket.socket, size: int) -> None:
    """Let nobody else connect; raises AlignerError where there are more connections than ranks.

    A store's socket cannot be closed: it is one of a loop that ends with the store. But it can be
    made deaf.
    """
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
    )
    here = listener.getsockname()[:2]
    inside = [
        each
        for each in psutil.net_connections("tcp")
        if each.laddr == here and each.status == psutil.CONN_ESTABLISHED
    ]
    if len(inside) > size:
        raise AlignerError(
            f"the rank store at {here[0]}:{here[1]} has {len(inside)} connections for {size} ranks:"
            " another client has connected; connections come from"
            f" {', '.join(sorted({each.raddr.ip for each in inside if each.raddr}))}"
        )


def _listener(host: str, port: int) -> socket.socket:
    family, address = _resolved(host, port)
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


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AlignerError(f"MASTER_ADDR={host}: cannot be resolved: {error.strerror}") from error
    return family, address


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 17
"""Elements that are widened to int64 at a time: small enough to stay in the cache."""


def checksum(tensor: Tensor, shape: tuple[int, ...], axis: int | None, start: int) -> Tensor:
    """Position-weighted checksum of a slice's raw bits: int64 scalar, modulo 2**64.

    `tensor` is the part of a whole tensor of `shape` (one or two dimensions) that begins at `start`
    along `axis`. Each element's bits are weighted with 2 * i + 1, i being its linear index in the
    whole tensor, so that the checksums of disjoint slices add up to their union's, and any change
    of one element, or exchange of two different ones, changes it (for elements of up to 32 bits and
    fewer than 2**31 of them).
    """
    bits = (tensor if tensor.dim() == 2 else tensor[None]).view(_BITS[tensor.element_size()])
    columns = shape[-1]
    first_row, first_column = (
        (start, 0) if axis == 0 and len(shape) == 2 else (0, 0 if axis is None else start)
    )
    rows, width = bits.shape
    step = max(1, _BLOCK // width)
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
class _Atom:
    """A part of a tensor that no slice cuts further, and the rank that answers for its source."""

    spec: TensorSpec
    axis: int | None
    start: int
    stop: int
    holder: int


def _plan_atoms(plan: TransferPlan) -> list[_Atom]:
    """Atoms of every tensor that has a target, in table order; holders share the work evenly."""
    load = dict.fromkeys(plan.source, 0)
    found: list[_Atom] = []
    for spec in plan.table:
        source, target = slices_of(plan.source, spec), list(slices_of(plan.target, spec).values())
        if not target:
            continue
        axis = cut_axis(spec, [*source.values(), *target])
        held = {rank: extent(spec, piece, axis) for rank, piece in source.items()}
        wanted = [extent(spec, piece, axis) for piece in target]
        for start, stop in atoms(edge for ends in (*held.values(), *wanted) for edge in ends):
            if not any(low <= start and stop <= high for low, high in wanted):
                continue
            complete = [rank for rank, (low, high) in held.items() if low <= start and stop <= high]
            holder = min(complete, key=lambda rank: (load[rank], rank))
            load[holder] += numel_of(spec, axis, start, stop)
            found.append(_Atom(spec, axis, start, stop, holder))
    return found


def _source_sums(
    plan: TransferPlan, plan_atoms: list[_Atom], link: Link, dtype: torch.dtype, read: Read
) -> Tensor:
    """int64 [atoms]: checksums of those that this rank answers for, zero elsewhere."""
    sums = torch.zeros(len(plan_atoms), dtype=torch.int64, device=link.device)
    for index, atom in enumerate(plan_atoms):
        if atom.holder == link.rank:
            held = plan.source[link.rank][atom.spec.name]
            whole = read(atom.spec.name)
            given = part(whole, atom.spec, held, atom.axis, atom.start, atom.stop)
            sums[index] = checksum(
                given.to(link.device, dtype), atom.spec.shape, atom.axis, atom.start
            )
            del whole, given  # before another is read: it may be a copy
    return sums


@torch.no_grad()
def verify(
    plan: TransferPlan,
    link: Link,
    dtype: torch.dtype,
    read: Read,
    views: Mapping[str, Tensor],
) -> None:
    """Compare every rank's views with the source slices as `dtype`, bit by bit by checksums;
    collective.

    Only checksums travel. Raises AlignerError on every rank, naming each tensor that differs and
    the ranks where it does.
    """
    plan_atoms = _plan_atoms(plan)
    sums = _source_sums(plan, plan_atoms, link, dtype, read)
    link.all_reduce(sums)
    expected: dict[str, Tensor] = {}
    mine = plan.target.get(link.rank, {})
    for index, atom in enumerate(plan_atoms):
        if atom.spec.name in mine:
            low, high = extent(atom.spec, mine[atom.spec.name], atom.axis)
            if low <= atom.start and atom.stop <= high:
                expected[atom.spec.name] = (
                    expected.get(atom.spec.name, torch.zeros_like(sums[0])) + sums[index]
                )
    differs = torch.zeros(len(plan.table), link.size, dtype=torch.int32, device=link.device)
    for index, spec in enumerate(plan.table):
        if spec.name in mine:
            wanted = mine[spec.name]
            found = checksum(views[spec.name], spec.shape, wanted.axis, wanted.start)
            differs[index, link.rank] = (found != expected[spec.name]).int()
    link.all_reduce(differs)
    wrong = [
        f"{spec.name} on {', '.join(link.labels[at] for at in row.nonzero().flatten().tolist())}"
        for spec, row in zip(plan.table, differs.cpu(), strict=True)
        if row.any()
    ]
    if wrong:
        raise AlignerError("the engine's weights differ from the trainer's:\n" + "\n".join(wrong))
