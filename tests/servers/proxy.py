"""A TCP proxy that delays, duplicates and loses data."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class BadProxy:
    """Listens on `port`, forwards to `target`.

    Answers are delayed, duplicated, or lost together with their connection. The requests of a
    connection may reach the server twice: the second time over another connection, immediately or
    late, and the proxy discards the answers to these copies.
    """

    def __init__(
        self,
        port: int,
        target: int,
        seed: int,
        *,
        delay: float,
        double: float,
        lose: float,
        repeat: float,
    ) -> None:
        """Set the probabilities: `delay`, `double` and `lose` per chunk of the server's answers,
        `repeat` per connection."""
        self._target, self._random = target, random.Random(seed)
        self._delay, self._double, self._lose, self._repeat = delay, double, lose, repeat
        self.suffered = {"delayed": 0, "doubled": 0, "lost": 0, "repeated": 0}
        self._listener = socket.create_server(("127.0.0.1", port))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> BadProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for side in self._sockets:
            _cut(side)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            echo: queue.SimpleQueue[bytes] | None = None
            if self._random.random() < self._repeat:
                echo = queue.SimpleQueue()
                self._start(self._repeats, echo)
            self._start(self._requests, client, server, echo)
            self._start(self._answers, server, client)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        self._threads.append(thread)

    def _requests(
        self, client: socket.socket, server: socket.socket, echo: queue.SimpleQueue[bytes] | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if echo is not None:
                    echo.put(data)
                server.sendall(data)
        if echo is not None:
            echo.put(b"")
        _cut(server)

    def _repeats(self, echo: queue.SimpleQueue[bytes]) -> None:
        """Send the chunks of `echo` over another connection, each immediately or late; discard the
        answers."""
        with contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(server)
            self._start(_forget, server)
            while data := echo.get():
                time.sleep(self._random.choice([0, 0, 0.02, 0.2]))
                server.sendall(data)
                self.suffered["repeated"] += 1
            _cut(server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                fate = self._random.random()
                if fate < self._lose:
                    self.suffered["lost"] += 1
                    break
                if fate < self._lose + self._double:
                    self.suffered["doubled"] += 1
                    data += data
                elif fate < self._lose + self._double + self._delay:
                    self.suffered["delayed"] += 1
                    time.sleep(self._random.uniform(0, 0.1))
                client.sendall(data)
        _cut(client)
        _cut(server)


def _forget(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while server.recv(1 << 16):
            pass


def _cut(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
    side.close()
