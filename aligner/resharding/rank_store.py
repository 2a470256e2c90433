"""Where ranks find each other: torch's key-value store, on the one address that they reach it at.

Torch's stores ask for no key, list what they have to whoever asks, and would listen on every
interface. docs/running.md tells what is left of that.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from aligner.errors import AlignerError
from aligner.placement.addresses import LOOPBACK, WORLD_SECRET

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
