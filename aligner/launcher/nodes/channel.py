"""An authenticated stream of JSON messages between the supervisor and the agent of a node.

Both sides prove that they know the run's node key, which is in a private file of the run directory.
Each message carries an HMAC-SHA256 code over its number and content, so that nobody else in the
network can send, change, repeat or reorder messages. The messages are not encrypted.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from aligner.errors import AlignerError
from aligner.files import create_private_file
from aligner.paths import get_run_paths
from aligner.schema import Config

# Seconds that the other side has to answer the handshake.
_HANDSHAKE_TIMEOUT_S = 10.0
# Maximum bytes of a line: a nonce during the handshake, then a message.
_MAX_NONCE_BYTES = 128
_MAX_MESSAGE_BYTES = 4 << 20
# Seconds until an unreachable peer counts as disconnected.
_PEER_TIMEOUT_S = 60


class ChannelError(AlignerError):
    """The other side of a channel does not know the key, or does not follow the protocol."""


def load_node_key(config: Config) -> bytes:
    """Return the key with which the processes of all nodes of a run authenticate each other.

    The first process that needs the key creates it in a file that only its owner may read.
    """
    path = get_run_paths(config).node_key
    create_private_file(path, secrets.token_hex(32) + "\n")
    return path.read_bytes().strip()


def derive_secret(key: bytes, text: str) -> str:
    """Return a secret that follows from the node key and a text that is sent without encryption."""
    return hmac.new(key, b"secret" + text.encode(), hashlib.sha256).hexdigest()


class Channel:
    """One side of a connection. `send` may be called from several threads."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_listener: bool) -> None:
        """Exchange nonces with the other side, from which the keys of this connection follow.

        Args:
            connection: Connected socket. The channel closes it.
            key: The run's node key.
            is_listener: Whether this side accepted the connection.

        Raises:
            OSError: The connection was lost, or the other side did not answer in time.
            ChannelError: The other side does not follow the protocol.
        """
        self._connection = connection
        self._lock = threading.Lock()
        self._sent = 0
        self._received = 0
        connection.settimeout(_HANDSHAKE_TIMEOUT_S)
        self._reader = connection.makefile("rb")
        own_nonce = secrets.token_hex(32).encode()
        connection.sendall(own_nonce + b"\n")
        peer_nonce = self._reader.readline(_MAX_NONCE_BYTES).strip()
        if len(peer_nonce) != len(own_nonce):
            raise ChannelError("the other side sent no nonce")
        # A different key for each direction, so that no message can be sent back to its sender.
        nonces = own_nonce + peer_nonce if is_listener else peer_nonce + own_nonce
        listener_key = hmac.digest(key, b"listener" + nonces, hashlib.sha256)
        connector_key = hmac.digest(key, b"connector" + nonces, hashlib.sha256)
        self._send_key = listener_key if is_listener else connector_key
        self._receive_key = connector_key if is_listener else listener_key

    def accept_silence(self) -> None:
        """Let `receive` wait without a timeout, as long as the other machine is reachable.

        Call this method when the first message has proved that the other side knows the key.
        """
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": _PEER_TIMEOUT_S // 3,
            "TCP_KEEPINTVL": _PEER_TIMEOUT_S // 6,
            "TCP_KEEPCNT": 4,
            "TCP_USER_TIMEOUT": _PEER_TIMEOUT_S * 1000,
        }
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:
                self._connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The connection is lost.
        """
        content = json.dumps(message).encode()
        with self._lock:
            code = _authenticate(self._send_key, self._sent, content)
            self._sent += 1
            self._connection.sendall(code + b" " + content + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the other side has closed the connection.

        Raises:
            OSError: The connection is lost.
            ChannelError: The other side does not know the key, or does not follow the protocol.
        """
        line = self._reader.readline(_MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            return None
        code, _, content = line.rstrip(b"\n").partition(b" ")
        # Nothing of a message is parsed before its code is verified.
        expected = _authenticate(self._receive_key, self._received, content)
        if not hmac.compare_digest(code, expected):
            raise ChannelError("the other side does not have the node key of this run")
        self._received += 1
        message: dict[str, Any] = json.loads(content)
        return message

    def receive_all(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the connection is closed or lost."""
        with contextlib.suppress(OSError, ChannelError):
            while (message := self.receive()) is not None:
                yield message

    def close(self) -> None:
        """Close the connection; a call of `receive` that waits returns None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _authenticate(key: bytes, number: int, content: bytes) -> bytes:
    """Return the code of a message, in hexadecimal digits."""
    return hmac.new(key, b"%d:%b" % (number, content), hashlib.sha256).hexdigest().encode()
