"""PyTriton on rank 0: endpoints bound to functions, errors told to the caller they belong to."""

import atexit
import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from aligner.errors import AlignerError, TransientError
from aligner.placement.addresses import Endpoint
from aligner.placement.tls import TLSFiles
from aligner.schema import PortsConfig
from aligner.servers.gateway_settings import (
    READY,
    GatewaySettings,
    triton_addresses,
    triton_sockets,
)
from aligner.servers.private_child import private_children
from aligner.servers.wire_protocol import EndpointError, EndpointSpec, TensorSpec
from aligner.triton_cleanup import (
    claim_paths,
    claim_triton_files,
    close_triton_memory,
    is_alive,
    kill_processes,
    remove_triton_files,
    shared_memory,
    triton_environments,
)

_LAST_ANSWERS_S = 0.5
"""For what was answered last to reach its caller, through Triton and the gateway."""
Serve = Callable[[dict[str, NDArray]], dict[str, NDArray]]
"""A request's tensors to the response's; an AlignerError goes to the caller."""

_LOOK_S = 0.5
_POLL_S = 0.05


@dataclass(frozen=True)
class Guard:
    """What is asked of who sends requests, and how much of one is taken."""

    key: str | None = field(default=None, repr=False)
    """The run's key; None serves anyone."""
    tls: TLSFiles | None = None
    max_request_bytes: int = 2**26


class TritonHost:
    """A Triton server that listens on one address.

    Triton's own dynamic batcher is off: it joins only requests of equal shapes, counts rows but no
    tokens, and PyTriton answers a batch with one error, so that one caller's bad request would fail
    the others in its batch. Instead a batching endpoint takes `concurrent` requests at a time, each
    checked and answered alone, and the executor joins what waits.
    """

    def __init__(
        self,
        address: str,
        ports: PortsConfig,
        max_batch_size: int,
        concurrent: int = 1,
        guard: Guard = Guard(),  # frozen
        log: Path | None = None,
        start_timeout_s: float = 90.0,
    ) -> None:
        """Triton writes into `log`, and may take `start_timeout_s` to load its models.

        Raises AlignerError when a port is in use; port 0 takes a free one.
        """
        self._guard, self._log = guard, log
        self._start_timeout_s = start_timeout_s
        self.endpoint = Endpoint(
            address,
            http=_claimed(address, "http", ports.http),
            grpc=_claimed(address, "grpc", ports.grpc),
            metrics=_claimed(address, "metrics", ports.metrics),
        )
        self._max_batch_size = max_batch_size
        self._concurrent = concurrent
        self._triton: Any = None
        self._gateway: subprocess.Popen[str] | None = None
        self._processes: list[psutil.Process] = []
        self._directories: list[Path] = []
        self._last_answer = -math.inf

    def start(self, endpoints: Mapping[EndpointSpec, Serve]) -> None:
        """Serve the endpoints; they are ready when this returns. Raises TransientError when Triton
        does not come up."""
        from pytriton.utils.workspace import Workspace

        # A refused request is told to its caller and noted by us; PyTriton's traceback of it has no
        # news.
        logging.getLogger("pytriton.proxy.inference").setLevel(logging.ERROR)
        _prepare_environment()
        sockets = claim_triton_files()
        workspace = Workspace()
        claim_paths([workspace.path])
        gateway = self._gateway = self._start_gateway(sockets)
        self._triton = self._bound_triton(workspace, sockets, endpoints)
        before = triton_environments()
        try:
            with private_children():  # requests and answers are in Triton's shared memory
                self._triton._run_server()
            with self._interrupted_when_triton_fails():
                self._load_models(triton_sockets(sockets)["grpc"])
                close_triton_memory()  # where the kernel has no filters
                _await_gateway(gateway)
        except (Exception, _TritonFailed) as error:
            why = error if isinstance(error, _TritonFailed) else f"{type(error).__name__}: {error}"
            raise TransientError(
                f"Triton did not start ({why}); see {self._log or 'the output above'}"
            ) from error
        finally:
            self._directories = [workspace.path, *(triton_environments() - before)]
            claim_paths(self._directories)
        self._processes = [psutil.Process(gateway.pid), *_triton_processes()]

    def _start_gateway(self, sockets: Path) -> "subprocess.Popen[str]":
        """Beside Triton's start, which takes longer."""
        guard, here = self._guard, self.endpoint
        settings = GatewaySettings(
            address=here.host,
            http=here.http,
            grpc=here.grpc,
            metrics=here.metrics,
            sockets=str(sockets),
            max_request_bytes=guard.max_request_bytes,
            key=guard.key,
            tls=guard.tls,
        )
        command = [sys.executable, "-m", "aligner.servers.gateway"]
        gateway = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert gateway.stdin is not None
        gateway.stdin.write(settings.to_json())
        gateway.stdin.flush()
        return gateway

    def _bound_triton(
        self, workspace: Any, directory: Path, endpoints: Mapping[EndpointSpec, Serve]
    ) -> Any:
        from pytriton.model_config import ModelConfig
        from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

        triton = Triton(
            config=TritonConfig(
                **triton_addresses(directory),
                allow_gpu_metrics=False,
                # PyTriton reads Triton's output byte by byte: a few refused requests would fill the
                # pipe and stall Triton.
                log_file=self._log,
                # Triton would keep the memory of several requests.
                grpc_infer_allocation_pool_size=0,
            ),
            workspace=workspace,
            security_config=TritonSecurityConfig(restricted_endpoints=[]),
        )
        atexit.unregister(triton.stop)  # which asks Triton over a network
        # PyTriton's configurations are complete: having Triton complete them takes a helper
        # process, 1.6 s a model. There is no public option for it.
        triton._triton_server_config["strict-model-config"] = True
        for spec, serve in endpoints.items():
            triton.bind(
                model_name=spec.name,
                # PyTriton tells a model's instances apart by their functions.
                infer_func=[
                    self._answering(serve)
                    for _ in range(self._concurrent if spec.batching else spec.instances)
                ],
                inputs=[_bound(tensor, spec.batching) for tensor in spec.inputs],
                # PyTriton refuses the word at outputs, and takes answers without them.
                outputs=[
                    _bound(replace(tensor, optional=False), spec.batching)
                    for tensor in spec.outputs
                ],
                config=ModelConfig(
                    batching=spec.batching,
                    max_batch_size=self._max_batch_size if spec.batching else 0,
                    batcher=None,
                ),
            )
        return triton

    def _load_models(self, socket: str) -> None:
        """As Triton.connect() does, which knows no Unix sockets."""
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        triton = self._triton
        triton._triton_server.unregister_on_exit(triton._on_tritonserver_exit)  # `check` finds out
        with InferenceServerClient(f"unix:{socket}") as client:
            while True:
                with contextlib.suppress(InferenceServerException):
                    if client.is_server_live(client_timeout=_LOOK_S):
                        break
                time.sleep(_POLL_S)
            for model in triton._model_manager.models:
                files = model.get_proxy_model_files()
                client.load_model(
                    model.model_name, config=json.dumps(model.get_model_config()), files=files
                )
                model.setup()

    @contextlib.contextmanager
    def _interrupted_when_triton_fails(self) -> Iterator[None]:
        """Raise _TritonFailed inside soon after Triton ends, or takes too long. Main thread only.

        PyTriton would ask one that has ended for two minutes more, and one that hangs, between fork
        and exec, for ever.
        """
        deadline = time.monotonic() + self._start_timeout_s

        def look(*_: object) -> None:
            found = _triton_processes()
            self._processes = [*{*found, *self._processes}]
            if not any(map(is_alive, found[:1])):
                raise _TritonFailed("it exited")
            if time.monotonic() > deadline:
                raise _TritonFailed(
                    f"it did not load its models within {self._start_timeout_s:g} s"
                )

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def check(self) -> None:
        """Raise AlignerError when Triton has ended, or one of its helpers; claim what is shared by
        now.

        Triton starts a helper again, but may hand the late answer of the one before to the next
        request.
        """
        if (
            self._triton is None
            or not self._triton.is_alive()
            or not all(map(is_alive, self._processes))
        ):
            raise AlignerError(
                "the Triton server or one of its helper processes exited unexpectedly; see"
                f" {self._log or 'the output above'}"
            )
        claim_paths([*self._directories, *shared_memory()])

    def _answering(self, serve: Serve) -> Callable[[list[Any]], list[dict[str, NDArray]]]:
        def answer(requests: list[Any]) -> list[dict[str, NDArray]]:
            try:
                return [serve(dict(request.items())) for request in requests]
            except AlignerError as error:
                raise EndpointError(error) from None
            finally:
                self._last_answer = time.monotonic()

        return answer

    def stop(self) -> None:
        """End Triton with all its processes and remove what it leaves behind: its requests have
        been drained before."""
        time.sleep(max(0.0, self._last_answer + _LAST_ANSWERS_S - time.monotonic()))
        # Its own end would take two seconds. What had ended by itself has left stubs that are
        # nobody's children by now, and that take it for alive until it was waited for.
        servers = _triton_processes()
        kill_processes([*{*servers, *self._processes}])
        psutil.wait_procs(servers[:1], timeout=_LOOK_S)
        if self._gateway is not None:
            self._gateway.kill()
            self._gateway.communicate()
        if self._triton is not None:
            remove_triton_files(os.getpid())


def _await_gateway(gateway: "subprocess.Popen[str]") -> None:
    """Return once it listens. Raises AlignerError where it has ended instead."""
    assert gateway.stdout is not None
    if gateway.stdout.readline().strip() != READY:
        raise AlignerError(f"the server's gateway process exited with code {gateway.wait()}")


class _TritonFailed(BaseException):
    """Triton ended or hung while it was started; nothing in between may swallow it."""


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
            raise AlignerError(
                f"ports.{name}={port}: cannot listen on {interface}:{port}: {error.strerror}"
            ) from error
        return probe.getsockname()[1]


def _triton_processes() -> list[psutil.Process]:
    """The Triton server that this process started, first, and its stubs."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "tritonserver":
                found += [child, *child.children(recursive=True)]
    return found


def _prepare_environment() -> None:
    """Let Triton's Python stub load this interpreter's libpython: with another one it dies at
    start.

    The dynamic linker reads LD_LIBRARY_PATH when a process starts, so setting it here reaches the
    stub, and a restart of this process is not needed. A model's instances start one after another:
    PyTriton's others wait a second for the first to tell them its settings, and on a busy machine
    the first is not up by then if all start at once.
    """
    os.environ["TRITON_PARALLEL_INSTANCE_LOADING"] = "0"
    own = sysconfig.get_config_var("LIBDIR")
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if own and paths[:1] != [own]:
        os.environ["LD_LIBRARY_PATH"] = ":".join([own, *paths])
