"""Ports that nothing else of this machine has, nor is about to have."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Collection, Iterable
from types import TracebackType

from aligner.errors import AlignerError
from aligner.placement.addresses import LOOPBACK, port_is_free

PORTS = range(20000, 32000)
"""Below those that the kernel gives to outgoing connections: such a one would often be gone before a server has started."""


class FreePorts:
    """Iterator over distinct ports, those of `candidates` that are free on all of `addresses`, in random order.

    A port is given long before its server listens on it. Until then it is claimed, by an abstract Unix socket that bears
    its number: no other FreePorts of this machine gives it, whoever's process that is. Claims are those of a network
    namespace, as ports are, and end with `close`, the `with` block or the process, however it ends.
    """

    def __init__(self, addresses: Iterable[str] = (LOOPBACK,), candidates: Collection[int] = PORTS) -> None:
        self._addresses = frozenset(addresses)
        self._candidates = list(candidates)
        random.SystemRandom().shuffle(self._candidates)
        self._claims = contextlib.ExitStack()

    def __enter__(self) -> FreePorts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give up the claims; who listens on a port by now keeps it."""
        self._claims.close()

    def __iter__(self) -> FreePorts:
        return self

    def __next__(self) -> int:
        """The next port. Raises AlignerError when there is none, and OSError for an address that this machine lacks."""
        while self._candidates:
            port = self._candidates.pop()
            if self._claim(port) and all(port_is_free(address, port) for address in self._addresses):
                return port
        raise AlignerError(f"no port is left that is free on {' and '.join(sorted(self._addresses))}")

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0aligner-port-{port}")
        except OSError:
            claim.close()
            return False
        self._claims.enter_context(claim)
        return True
