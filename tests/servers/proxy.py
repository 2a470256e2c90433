"""A TCP proxy that treats what comes back from the server badly."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from types import TracebackType


class BadProxy:
    """Listens on `port`, forwards to `target`; answers are delayed, doubled, or lost together with their connection."""

    def __init__(self, port: int, target: int, seed: int, *, delay: float, double: float, lose: float) -> None:
        """The three are probabilities for each piece that the server sends."""
        self._target, self._random = target, random.Random(seed)
        self._delay, self._double, self._lose = delay, double, lose
        self.suffered = {"delayed": 0, "doubled": 0, "lost": 0}
        self._listener = socket.create_server(("127.0.0.1", port))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> BadProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            for work in ((self._requests, client, server), (self._answers, server, client)):
                thread = threading.Thread(target=work[0], args=work[1:])
                thread.start()
                self._threads.append(thread)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
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


def _cut(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
    side.close()
