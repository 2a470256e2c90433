"""PyTriton on rank 0: endpoints bound to functions, errors told to the caller they belong to."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from aligner.errors import AlignerError, TransientError
from aligner.placement.addresses import KEY_HEADER, Endpoint, http_address
from aligner.schema import PortsConfig, TLSConfig
from aligner.servers.wire_protocol import EndpointError, EndpointSpec, TensorSpec
from aligner.triton_cleanup import claim_directories, claim_triton_files, remove_triton_files, triton_environments

Serve = Callable[[dict[str, NDArray]], dict[str, NDArray]]
"""A request's tensors to the response's; an AlignerError goes to the caller."""

_REQUESTS = ("inference", "metadata", "model-config", "statistics")
# Loading a model runs code that its sender chose; shared memory, traces and logs name files of this machine.
_MANAGEMENT = ("model-repository", "shared-memory", "trace", "logging")
_END_TIMEOUT_S = 10.0
_LOOK_S = 0.5
_EXIT_TIMEOUT_S = 1  # requests are drained before; unloading Triton's models one after another would take ten


@dataclass(frozen=True)
class Guard:
    """What Triton asks of those who speak to it. Health is open: it tells nothing, and launchers poll it.

    Triton manages models over the same ports, so that whoever may do that owns this process: without the run's key they
    are closed with one that no other process knows.
    """

    key: str | None = field(default=None, repr=False)
    """The run's key; None serves anyone."""
    tls: TLSConfig = field(default_factory=TLSConfig)
    own_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def management_key(self) -> str:
        """What Triton's HTTP asks for where models are managed, as PyTriton does from this process."""
        return self.own_key if self.key is None or self.tls.certificate is not None else self.key

    def triton_settings(self) -> dict[str, Any]:
        """Fields of PyTriton's TritonConfig."""
        everything = (*_REQUESTS, *_MANAGEMENT)
        closed = _MANAGEMENT if self.key is None else everything
        tls = self.tls
        settings: dict[str, Any] = {
            "http_restricted_api": _restricted(everything if tls.certificate else closed, self.management_key),
            "grpc_restricted_protocol": _restricted(closed, self.key or self.own_key),
        }
        if tls.certificate is not None:
            settings["grpc_use_ssl_mutual" if tls.mutual else "grpc_use_ssl"] = True
            settings["grpc_server_cert"] = Path(tls.certificate).resolve()
            settings["grpc_server_key"] = Path(tls.key or "").resolve()
            if tls.mutual:
                settings["grpc_root_cert"] = Path(tls.authorities or "").resolve()
        return settings


def _restricted(apis: tuple[str, ...], key: str) -> str:
    return f"{','.join(apis)}:{KEY_HEADER}={key}"


class TritonHost:
    """A Triton server that listens on one address.

    Triton's own dynamic batcher is off: it joins only requests of equal shapes, counts rows but no tokens, and PyTriton
    answers a batch with one error, so that one caller's bad request would fail the others in its batch. Instead a batching
    endpoint takes `concurrent` requests at a time, each checked and answered alone, and the executor joins what waits.
    """

    def __init__(
        self,
        address: str,
        ports: PortsConfig,
        max_batch_size: int,
        concurrent: int = 1,
        guard: Guard = Guard(),  # frozen
        log: Path | None = None,
    ) -> None:
        """Triton writes into `log`. Raises AlignerError when a port is in use; port 0 takes a free one."""
        self._guard, self._log = guard, log
        self._http_address = http_address(address, guard.tls)
        self.endpoint = Endpoint(
            address,
            http=_claimed(self._http_address, "http", ports.http),
            grpc=_claimed(address, "grpc", ports.grpc),
            metrics=_claimed(address, "metrics", ports.metrics),
        )
        self._max_batch_size = max_batch_size
        self._concurrent = concurrent
        self._triton: Any = None
        self._processes: list[psutil.Process] = []

    def start(self, endpoints: Mapping[EndpointSpec, Serve]) -> None:
        """Serve the endpoints; they are ready when this returns. Raises TransientError when Triton does not come up."""
        from pytriton.model_config import ModelConfig
        from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig
        from pytriton.utils.workspace import Workspace

        # A refused request is told to its caller and noted by us; PyTriton's traceback of it has no news.
        logging.getLogger("pytriton.proxy.inference").setLevel(logging.ERROR)
        _prepare_environment()
        claim_triton_files()
        workspace = Workspace()
        claim_directories([workspace.path])
        here = self.endpoint
        self._triton = Triton(
            config=TritonConfig(
                http_address=self._http_address,
                http_port=here.http,
                grpc_address=here.host,
                grpc_port=here.grpc,
                metrics_address=here.host,
                metrics_port=here.metrics,
                allow_gpu_metrics=False,
                # PyTriton reads Triton's output byte by byte: a few refused requests would fill the pipe and stall Triton.
                log_file=self._log,
                exit_timeout_secs=_EXIT_TIMEOUT_S,
                # A client may ping every few seconds while its request runs; by default Triton hangs up on it.
                grpc_http2_max_ping_strikes=0,
                **self._guard.triton_settings(),
            ),
            workspace=workspace,
            security_config=TritonSecurityConfig(access_token=self._guard.management_key, restricted_endpoints=[]),
        )
        # PyTriton's configurations are complete: having Triton complete them takes a helper process, 1.6 s a model. There is
        # no public option for it.
        self._triton._triton_server_config["strict-model-config"] = True
        for spec, serve in endpoints.items():
            self._triton.bind(
                model_name=spec.name,
                # PyTriton tells a model's instances apart by their functions.
                infer_func=[_answering(serve) for _ in range(self._concurrent if spec.batching else spec.instances)],
                inputs=[_bound(tensor, spec.batching) for tensor in spec.inputs],
                outputs=[_bound(tensor, spec.batching) for tensor in spec.outputs],
                config=ModelConfig(
                    batching=spec.batching, max_batch_size=self._max_batch_size if spec.batching else 0, batcher=None
                ),
            )
        before = triton_environments()
        try:
            self._triton._run_server()  # run() does this and connects; a Triton that ends in between is known only here
            with _interrupted_when_triton_ends():
                self._triton.connect()
        except (Exception, _TritonEnded) as error:  # often that of the HTTP client which lost Triton
            where = self._log or "the lines above"
            raise TransientError(f"Triton did not start ({type(error).__name__}: {error}); see {where}") from error
        finally:
            claim_directories([workspace.path, *_model_folders(), *(triton_environments() - before)])
        self._processes = _triton_processes()

    def check(self) -> None:
        """Raise AlignerError when Triton has ended, or one of its helpers.

        Triton starts a helper again, but may hand the late answer of the one before to the next request.
        """
        if self._triton is None or not self._triton.is_alive() or not all(map(_runs, self._processes)):
            raise AlignerError(
                f"the Triton server or a helper of it ended by itself; its last words are in {self._log or 'the lines above'}"
            )

    def stop(self) -> None:
        """End Triton with all its processes and remove what it leaves behind."""
        if self._triton is None:
            return
        processes = _triton_processes()
        if processes:
            # It asks Triton to end, and would then spend seconds on threads and helpers that end with this process anyway.
            threading.Thread(target=self._triton.stop, daemon=True).start()
            psutil.wait_procs(processes[:1], timeout=_END_TIMEOUT_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        remove_triton_files(os.getpid())


class _TritonEnded(BaseException):
    """Triton ended while it was started; nothing in between may swallow it."""


@contextlib.contextmanager
def _interrupted_when_triton_ends() -> Iterator[None]:
    """Raise _TritonEnded inside soon after a Triton ends: PyTriton would go on asking it for two minutes. Main thread only."""

    def look(*_: object) -> None:
        if not any(map(_runs, _triton_processes()[:1])):
            raise _TritonEnded("it ended by itself")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _answering(serve: Serve) -> Callable[[list[Any]], list[dict[str, NDArray]]]:
    def answer(requests: list[Any]) -> list[dict[str, NDArray]]:
        try:
            return [serve(dict(request.items())) for request in requests]
        except AlignerError as error:
            raise EndpointError(error) from None

    return answer


def _bound(spec: TensorSpec, batching: bool) -> Any:
    from pytriton.model_config import Tensor

    shape = spec.shape[1:] if batching else spec.shape
    dimensions = tuple(size if isinstance(size, int) else -1 for size in shape)
    dtype = bytes if spec.dtype is np.bytes_ else spec.dtype
    return Tensor(name=spec.name, dtype=dtype, shape=dimensions, optional=spec.optional)


def _claimed(interface: str, name: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((interface, port))
        except OSError as error:
            raise AlignerError(f"ports.{name}={port}: cannot listen on {interface}:{port}: {error.strerror}") from error
        return probe.getsockname()[1]


def _triton_processes() -> list[psutil.Process]:
    """The Triton server that this process started, first, and its stubs."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "tritonserver":
                found += [child, *child.children(recursive=True)]
    return found


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _model_folders() -> set[Path]:
    """Triton's temporary copies of the models, which it removes only when it may take its time."""
    folders: set[Path] = set()
    for process in _triton_processes():
        with contextlib.suppress(psutil.Error):
            folders.update(Path(argument).parent.parent for argument in process.cmdline() if argument.endswith("/1/model.py"))
    return folders


def _prepare_environment() -> None:
    """Let Triton's Python stub load this interpreter's libpython: with another one it dies at start.

    The dynamic linker reads LD_LIBRARY_PATH when a process starts, so setting it here reaches the stub, and a restart of
    this process is not needed. A model's instances start one after another: PyTriton's others wait a second for the first
    to tell them its settings, and on a busy machine the first is not up by then if all start at once.
    """
    os.environ["TRITON_PARALLEL_INSTANCE_LOADING"] = "0"
    own = sysconfig.get_config_var("LIBDIR")
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if own and paths[:1] != [own]:
        os.environ["LD_LIBRARY_PATH"] = ":".join([own, *paths])
