"""The gateway: the one way to a Triton server, which itself listens on sockets in a directory of
its owner's alone.

Triton takes all of a request before it looks at a key, of any size, and has its management on the
same ports. So the gateway stands before it, over HTTP and gRPC: it lets through what clients need,
and the rest for nobody; it has the run's key checked before any of a request's body is taken, and
bounds that.

`python -m aligner.servers.gateway` reads its settings as a line of JSON from its input, says
`ready`, and ends with its input, when it has handed over the answers under way.
"""

import asyncio
import contextlib
import ctypes
import hmac
import json
import os
import platform
import re
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from yarl import URL

from aligner.placement.addresses import GRPC_KEY_HEADER, KEY_HEADER
from aligner.placement.tls import TLSFiles

READY = "ready"
"""What the gateway says once it listens."""


@dataclass(frozen=True)
class GatewaySettings:
    """Where the gateway listens, what it asks for, and where Triton is."""

    address: str
    http: int
    grpc: int
    metrics: int
    sockets: str
    """Directory of Triton's sockets: see `triton_sockets`."""
    max_request_bytes: int
    key: str | None
    """The run's key; None lets anyone in."""
    tls: TLSFiles | None = None
    """gRPC and HTTP are behind TLS."""

    def to_json(self) -> str:
        """As a line of the gateway's input."""
        return json.dumps(asdict(self), default=str) + "\n"

    @staticmethod
    def from_json(line: str) -> "GatewaySettings":
        """What `to_json` gave."""
        fields = json.loads(line)
        if (tls := fields.pop("tls")) is not None:
            mutual = tls.pop("mutual")
            tls = TLSFiles(**{name: Path(file) for name, file in tls.items()}, mutual=mutual)
        return GatewaySettings(**fields, tls=tls)


def triton_addresses(directory: Path) -> dict[str, Any]:
    """Fields of PyTriton's TritonConfig, for a Triton that listens on Unix sockets in a directory,
    and nowhere else."""
    protocols = ("http", "grpc", "metrics")
    return {f"{name}_address": f"unix:{directory}/{name}" for name in protocols} | {
        f"{name}_port": 1 for name in protocols
    }


def triton_sockets(directory: Path) -> dict[str, str]:
    """The paths of those sockets: Triton hangs its port on gRPC's."""
    return {
        "http": f"{directory}/http",
        "grpc": f"{directory}/grpc:1",
        "metrics": f"{directory}/metrics",
    }


_CALLS = {"x86_64": (0xC000003E, 91, 54), "aarch64": (0xC00000B7, 52, 208)}
"""The numbers of fchmod and setsockopt, by the machine's architecture, which has a number of its
own in the kernel's filters."""
_IPPROTO_TCP, _TCP_NODELAY = 6, 1
_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000
"""A filter's decisions: run the system call, or return 0 without running it."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_forks_privately = False


@contextmanager
def private_children() -> Iterator[None]:
    """What this process forks inside keeps what it makes to itself, and so do its own children, for
    good."""
    global _forks_privately
    _forks_privately = True
    try:
        yield
    finally:
        _forks_privately = False


def _after_fork() -> None:
    if not _forks_privately:
        return
    os.umask(0o077)
    # Boost, of which Triton has its shared memory, opens that to everyone in spite of the mask, by
    # fchmod: here that does nothing. Triton's HTTP server sets TCP_NODELAY, also on a Unix socket,
    # which has no such option, and warns that this fails: here it does nothing.
    architecture, fchmod, setsockopt = _CALLS.get(platform.machine(), (0, 0, 0))
    load, jump_if_equal, return_value = 0x20, 0x15, 0x06
    instructions = [
        (load, 0, 0, 4),  # the architecture
        (jump_if_equal, 0, 8, architecture),  # another one: allow
        (load, 0, 0, 0),  # the call's number
        (jump_if_equal, 5, 0, fchmod),
        (jump_if_equal, 0, 5, setsockopt),  # another call: allow
        (load, 0, 0, 24),  # the call's second argument
        (jump_if_equal, 0, 3, _IPPROTO_TCP),
        (load, 0, 0, 32),  # the call's third argument
        (jump_if_equal, 0, 1, _TCP_NODELAY),
        (return_value, 0, 0, _DO_NOTHING),
        (return_value, 0, 0, _ALLOW),
    ]
    filters = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *one) for one in instructions)
    )
    program = ctypes.create_string_buffer(
        struct.pack("HL", len(instructions), ctypes.addressof(filters))
    )
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)


os.register_at_fork(after_in_child=_after_fork)


_SERVICE = "/inference.GRPCInferenceService/"
_OPEN = frozenset({"ServerLive", "ServerReady", "ModelReady"})
"""Health, which tells nothing: launchers poll it."""
_GUARDED = frozenset(
    {
        "ModelInfer",
        "ModelStreamInfer",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "ModelStatistics",
    }
)
_MODEL = r"/v2/models/\w+(/versions/[0-9]+)?"
_OPEN_PATHS = re.compile(rf"/v2/health/(live|ready)|{_MODEL}/ready")
_GUARDED_PATHS = re.compile(rf"/v2/?|{_MODEL}(/(config|stats|infer|generate|generate_stream))?")
_OF_A_CONNECTION = frozenset(
    {"connection", "expect", "host", "keep-alive", "te", "transfer-encoding", "upgrade", KEY_HEADER}
)
"""Headers that are not handed on."""
_CONNECTIONS = 64
"""To Triton, which says a line of each."""
_DRAIN_S = 5.0
"""For the requests in flight at the end of the input; whoever waits for it may kill it earlier."""
_READ_AHEAD_BYTES = 2**20
_NO_KEY = "the run's access key is missing or wrong"
_CLOSED = "this method or path is not served"


def _is_key(shown: str | bytes | None, key: str | None) -> bool:
    if key is None:
        return True
    given = shown.encode(errors="replace") if isinstance(shown, str) else shown or b""
    return hmac.compare_digest(given, key.encode())


class GrpcGateway(grpc.GenericRpcHandler):
    """Hands calls on to Triton as they are. A call's handler starts before its message is taken."""

    def __init__(self, channel: grpc.aio.Channel, key: str | None) -> None:
        self._channel, self._key = channel, key

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """See grpc.GenericRpcHandler."""
        method = str(handler_call_details.method)
        name = method.removeprefix(_SERVICE)
        shown = dict(handler_call_details.invocation_metadata or ()).get(GRPC_KEY_HEADER)
        if name not in _OPEN | _GUARDED:
            return grpc.stream_stream_rpc_method_handler(
                _refusal(grpc.StatusCode.PERMISSION_DENIED, _CLOSED)
            )
        if name in _GUARDED and not _is_key(shown, self._key):
            return grpc.stream_stream_rpc_method_handler(
                _refusal(grpc.StatusCode.UNAUTHENTICATED, _NO_KEY)
            )
        return grpc.stream_stream_rpc_method_handler(self._forwarded(method))

    def _forwarded(self, method: str) -> Callable[..., AsyncIterator[bytes]]:
        call_triton = self._channel.stream_stream(method)

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[bytes]:
            call = call_triton(requests)
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return forward


def _refusal(code: grpc.StatusCode, words: str) -> Callable[..., Coroutine[Any, Any, None]]:
    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, words)

    return refuse


class HttpGateway:
    """Hands requests on to Triton, and its answers back, piece by piece."""

    def __init__(self, settings: GatewaySettings, triton: ClientSession) -> None:
        self._settings, self._triton = settings, triton

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """What a client gets for a request."""
        settings, path = self._settings, request.raw_path
        if _OPEN_PATHS.fullmatch(path):
            return await self._forward(request)
        if not _GUARDED_PATHS.fullmatch(path) or request.method not in ("GET", "POST"):
            return _error(403, _CLOSED)
        if not _is_key(request.headers.get(KEY_HEADER), settings.key):
            return _error(401, _NO_KEY)
        if request.body_exists and request.content_length is None:
            return _error(411, "Content-Length is missing; a request must declare its length")
        if (request.content_length or 0) > settings.max_request_bytes:
            return _error(
                413,
                f"got a request of {request.content_length} bytes, must be at most"
                f" {settings.max_request_bytes}",
            )
        return await self._forward(request)

    async def metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Triton's metrics, for anyone."""
        if (request.method, request.raw_path) != ("GET", "/metrics"):
            return _error(404, "only GET /metrics is served here")
        return await self._forward(request, "metrics")

    async def _forward(self, request: web.BaseRequest, to: str = "triton") -> web.StreamResponse:
        body = request.content if request.method == "POST" and request.content_length else None
        url = URL(f"http://{to}{request.raw_path}", encoded=True)
        try:
            asked = self._triton.request(
                request.method,
                url,
                data=body,
                headers=_kept(request.headers),
                allow_redirects=False,
            )
            async with asked as told:
                answer = web.StreamResponse(status=told.status, headers=_kept(told.headers))
                await answer.prepare(request)
                async for piece in told.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except (ClientError, OSError) as error:
            return _error(503, f"Triton does not respond: {error}")


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OF_A_CONNECTION}


def _error(status: int, words: str) -> web.Response:
    return web.json_response({"error": words}, status=status)


async def _listen_http(
    handler: Any,
    address: str,
    port: int,
    closing: contextlib.AsyncExitStack,
    tls: ssl.SSLContext | None = None,
) -> None:
    runner = web.ServerRunner(
        web.Server(handler, access_log=None, auto_decompress=False, handler_cancellation=True),
        shutdown_timeout=_DRAIN_S,
    )
    await runner.setup()
    closing.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, address, port, ssl_context=tls).start()


async def _serve(settings: GatewaySettings) -> None:
    triton, tls = triton_sockets(Path(settings.sockets)), settings.tls
    to_triton: list[tuple[str, int]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # A Triton that is restarted is found soon.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
    async with contextlib.AsyncExitStack() as closing:

        async def session(socket: str) -> HttpGateway:
            connector = UnixConnector(path=socket, limit=_CONNECTIONS)
            client = ClientSession(
                connector=connector, auto_decompress=False, timeout=ClientTimeout(total=None)
            )
            return HttpGateway(settings, await closing.enter_async_context(client))

        channel = await closing.enter_async_context(
            grpc.aio.insecure_channel(f"unix:{triton['grpc']}", to_triton)
        )
        server = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", settings.max_request_bytes),
                ("grpc.so_reuseport", 0),
                # By default it reads ahead of whom it refuses, too, as far as the connection is
                # fast: many MiB.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _READ_AHEAD_BYTES),
                # A client may ping every few seconds while its request runs; by default it would be
                # hung up on.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 0),
            ]
        )
        server.add_generic_rpc_handlers((GrpcGateway(channel, settings.key),))
        where = f"{settings.address}:{settings.grpc}"
        if tls is None:
            server.add_insecure_port(where)
        else:
            server.add_secure_port(where, _credentials(tls))
        await server.start()
        closing.push_async_callback(server.stop, _DRAIN_S)
        http, secure = await session(triton["http"]), None if tls is None else tls.server_context()
        await _listen_http(http.handle, settings.address, settings.http, closing, secure)
        await _listen_http(
            (await session(triton["metrics"])).metrics, settings.address, settings.metrics, closing
        )
        print(READY, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def _credentials(tls: TLSFiles) -> grpc.ServerCredentials:
    authorities = tls.authorities.read_bytes() if tls.mutual else None
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())], authorities, tls.mutual
    )


if __name__ == "__main__":
    # The server process sends the settings when Triton is ready, unless it ends before that.
    if line := sys.stdin.readline():
        asyncio.run(_serve(GatewaySettings.from_json(line)))
    os._exit(0)
