"""Tests of the environment variables that configure the libraries of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aligner.launcher.rank_environment import library_environment

GOODBYE = """
import socket, struct, threading, time, grpc

def frame(kind, flags, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", 0) + payload

def serve():
    connection, _ = listening.accept()
    connection.recv(65536)
    connection.sendall(frame(4, 0, b"") + frame(4, 1, b""))  # settings
    time.sleep(0.3)
    connection.sendall(frame(7, 0, struct.pack(">II", 0, 2) + b"Cancelling all calls"))  # GOAWAY of a server that exits
    time.sleep(0.3)

listening = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, daemon=True).start()
channel = grpc.insecure_channel("127.0.0.1:%d" % listening.getsockname()[1])
print(channel.unary_unary("/a/b").future(b"", timeout=1).exception().code())
"""


@pytest.mark.parametrize(("chosen", "is_told"), [(None, False), ("INFO", True)])
def test_grpc_goaway_is_logged_only_if_configured(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, is_told: bool
) -> None:
    """A log of JSON lines must not contain the messages of gRPC."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", chosen)
    done = subprocess.run(
        [sys.executable, "-c", GOODBYE],
        env={**os.environ, **library_environment(1)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() in ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.UNAVAILABLE")
    assert ("Got goaway" in done.stderr) is is_told, done.stderr
    assert is_told or not done.stderr
