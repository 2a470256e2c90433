"""PyTriton on rank 0: endpoints bound to functions, errors told to the caller they belong to."""

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from aligner.servers.gateway import (
    READY,
    GatewaySettings,
    private_children,
    triton_addresses,
    triton_sockets,
)
from aligner.servers.restart_budget import RestartBudget
from aligner.servers.tensor_payload import serializer_of
from aligner.servers.wire_protocol import (
    REQUEST_NUMBER,
    EndpointError,
    EndpointSpec,
    TensorSpec,
    with_request_number,
)
from aligner.triton_cleanup import (
    claim_paths,
    claim_triton_files,
    close_triton_memory,
    is_alive,
    kill_processes,
    remove_claimed_paths,
    remove_triton_files,
    triton_environments,
)

_USABLE = re.compile(r"[\w./+@-]+", re.ASCII)
"""Paths that PyTriton and Triton can use: PyTriton splits commands at spaces, and writes paths as
ASCII."""
_LONGEST = 60
"""Characters of such a path: those of Unix sockets below the workspace may have 107."""
_ELSEWHERE = Path("/tmp")


def create_workspace() -> Any:
    """Create a workspace that only this user can read, in PyTriton's directory (below HOME, unless
    PYTRITON_HOME is set), or in /tmp if Triton cannot use that directory's path."""
    from pytriton.constants import PYTRITON_HOME
    from pytriton.utils.workspace import Workspace

    home = str(PYTRITON_HOME)
    if _USABLE.fullmatch(home) and len(home) <= _LONGEST:
        return Workspace()
    workspace = Workspace(_ELSEWHERE / f"aligner-triton-{secrets.token_hex(8)}")
    workspace.path.chmod(0o700)
    return workspace


_DRAIN_S = 0.5
"""Time at a stop for the last answers to reach their callers, through Triton and the gateway."""
Serve = Callable[[dict[str, NDArray]], dict[str, NDArray]]
"""A request's tensors to the response's; an AlignerError goes to the caller."""

_LOOK_S = 0.5
_POLL_S = 0.05
_STARTS = 3
"""Attempts to start Triton. PyTriton's handshakes with Triton time out after one second, which a
busy or suspended machine may need longer for."""
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""Exit codes of a Triton that has crashed."""
_START_ENDS_S = 5.0
"""For a start of Triton to fail after Triton was killed."""
_RESTARTS_PER_HOUR = 60
"""Restarts of Triton and its gateway after which this process ends, to be restarted itself."""
_MODEL_FILE, _PYTRITON_FILE = "model.py", "pytriton_model.py"
"""Names of our model and of PyTriton's in Triton's model repository."""

_log = logging.getLogger(__name__)


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
        self._threads: list[ThreadPoolExecutor] = []
        self._endpoints: Mapping[EndpointSpec, Serve] = {}
        self._sockets = Path()
        self._restarts = RestartBudget(_RESTARTS_PER_HOUR)
        self._triton_exit_code = 0
        """Of the newest Triton that has ended; negative: the signal that ended it."""
        self._triton_ended = threading.Event()
        self._failure: AlignerError | None = None
        """Why the watcher could not restart Triton."""
        self._stops = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="triton-watcher", daemon=True)

    def start(self, endpoints: Mapping[EndpointSpec, Serve]) -> None:
        """Serve the endpoints; they are ready when this returns.

        From then on a thread restarts Triton when Triton or one of its helper processes ends. The
        requests in progress are lost, and their callers send them again; this process and what it
        holds are not affected.

        Raises TransientError when Triton does not start.
        """
        # A refused request is told to its caller and noted by us; PyTriton's traceback of it has no
        # news.
        logging.getLogger("pytriton.proxy.inference").setLevel(logging.ERROR)
        _prepare_environment()
        self._endpoints = endpoints
        self._sockets = claim_triton_files()
        self._gateway = _start_gateway()
        deadline = time.monotonic() + self._start_timeout_s
        self._start_triton(lambda: self._interrupted_when_triton_fails(deadline))
        self._watcher.start()

    def _start_triton(self, guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Start Triton, in several attempts if it does not load its models; `guard` surrounds the
        loading. Raises TransientError."""
        for attempt in range(1, _STARTS + 1):
            try:
                self._start_triton_once(guard)
                return
            except (Exception, _TritonFailed) as error:
                is_told = isinstance(error, _TritonFailed)
                why = str(error) if is_told else f"{type(error).__name__}: {error}"
                gave_up = not self._may_start_again(is_late=is_told)
                message = f"Triton did not start ({why}); see {self._log or 'the output above'}"
                if gave_up or attempt == _STARTS or self._stops.is_set():
                    raise TransientError(message) from error
                _log.warning("%s; trying again", message)
                self._discard_triton()

    def _start_triton_once(
        self, guard: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        import pytriton.proxy.types

        workspace = create_workspace()
        claim_paths([workspace.path])
        self._triton = self._bound_triton(workspace, self._sockets, self._endpoints)
        # PyTriton would send the models to Triton, which reports an error for each that is not in
        # a directory.
        for model in self._triton._model_manager.models:
            model._serializer_deserializer = serializer_of(pytriton.proxy.types)()
            _write_model(model, workspace.model_store_path)
        before = triton_environments()
        gateway = self._gateway
        assert gateway is not None
        try:
            with private_children():  # requests and answers are in Triton's shared memory
                self._run_triton()
            with guard():
                self._load_models(triton_sockets(self._sockets)["grpc"])
                close_triton_memory()  # where the kernel has no filters
                self._open_gateway(gateway)
        finally:
            claim_paths([workspace.path, *(triton_environments() - before)])
        self._processes = [psutil.Process(gateway.pid), *_triton_processes()]

    def _may_start_again(self, is_late: bool) -> bool:
        """Whether another attempt to start Triton may succeed where one has failed.

        A Triton that exits by itself at its first start would do so again. One that was suspended
        in its start may abort.
        """
        if any(map(is_alive, _triton_processes()[:1])):
            return not is_late
        self._triton_ended.wait(_LOOK_S)
        return self._triton_exit_code in _CRASHES or self._watcher.is_alive()

    def _note_triton_exit(self, command: object, success: bool, exit_code: int) -> None:
        self._triton_exit_code = exit_code
        self._triton_ended.set()

    def _run_triton(self) -> None:
        triton = self._triton
        self._triton_exit_code = 0
        self._triton_ended.clear()
        triton._initialize_server()
        # PyTriton warns of every Triton that was killed, as `stop` does; the watcher reports one
        # that has ended by itself.
        triton._triton_server._handle_exit = self._note_triton_exit
        server_config = triton._triton_server._server_config
        server_config.to_args_list = functools.partial(_triton_arguments, server_config)
        triton._run_server()
        triton._triton_server.unregister_on_exit(triton._on_tritonserver_exit)

    def _watch(self) -> None:
        """Restart Triton or the gateway when a process of theirs has ended, until `stop`."""
        while not self._stops.wait(_LOOK_S):
            ended = [process for process in self._processes if not is_alive(process)]
            if not ended and self._triton.is_alive():
                continue
            try:
                self._restart()
            except Exception as error:
                if not self._stops.is_set():
                    self._failure = AlignerError(f"restarting Triton failed: {error}")
                return

    def _restart(self) -> None:
        """Replace Triton with its helper processes, and the gateway if that has ended.

        The new Triton has a new workspace, and with it new sockets to this process: an answer to a
        request of the old one has no way to it.

        Raises AlignerError if there were too many restarts, TransientError if Triton does not
        start.
        """
        where = self._log or "the output above"
        if self._restarts.is_spent:
            raise AlignerError(
                "the Triton server or one of its helper processes exited unexpectedly, more than"
                f" {self._restarts.describe()}; see {where}"
            )
        self._restarts.record()
        _log.warning(
            "the Triton server or one of its helper processes exited unexpectedly; restarting"
            " Triton (%s). Log: %s",
            self._restarts.describe(),
            where,
        )
        started = time.monotonic()
        gateway = self._gateway
        assert gateway is not None
        triton = [process for process in self._processes if process.pid != gateway.pid]
        if gateway.poll() is not None:
            gateway.communicate()
            gateway = self._gateway = _start_gateway()
        if self._triton.is_alive() and all(map(is_alive, triton)):
            self._open_gateway(gateway)
            self._processes = [psutil.Process(gateway.pid), *triton]
        else:
            self._discard_triton()
            self._start_triton(self._killed_when_late)
        _log.info("Triton is ready again after %.1f s", time.monotonic() - started)

    def _discard_triton(self) -> None:
        """Kill Triton and its helpers, remove what they leave behind, and let go of PyTriton's
        threads for it."""
        gateway = self._gateway
        self._kill_triton(
            [process for process in self._processes if gateway and process.pid != gateway.pid]
        )
        self._processes = []
        remove_claimed_paths(os.getpid())
        for socket_file in triton_sockets(self._sockets).values():
            Path(socket_file).unlink(missing_ok=True)
        self._cancel_waiting_requests()
        models = [] if self._triton is None else self._triton._model_manager.models
        for model in models:
            # Ends when the requests that its threads work on have ended: nobody waits for that.
            threading.Thread(
                target=_clean_model, args=(model,), name="triton-cleaner", daemon=True
            ).start()

    def _cancel_waiting_requests(self) -> None:
        """Drop the requests of a Triton that is gone and that no thread serves yet: their callers
        send them again to the next Triton."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        self._threads = []

    def _kill_triton(self, processes: Sequence[psutil.Process]) -> None:
        servers = _triton_processes()
        kill_processes([*{*servers, *processes}])
        # What had ended by itself has left stubs that are nobody's children by now, and that take
        # it for alive until it was waited for.
        psutil.wait_procs(servers[:1], timeout=_LOOK_S)

    def _open_gateway(self, gateway: "subprocess.Popen[str]") -> None:
        """Have the gateway listen, if it does not yet. Raises AlignerError if it has exited."""
        assert gateway.stdin is not None and gateway.stdout is not None
        if gateway.stdout.closed:  # it has listened before
            return

        guard, here = self._guard, self.endpoint
        settings = GatewaySettings(
            address=here.host,
            http=here.http,
            grpc=here.grpc,
            metrics=here.metrics,
            sockets=str(self._sockets),
            max_request_bytes=guard.max_request_bytes,
            key=guard.key,
            tls=guard.tls,
        )
        with contextlib.suppress(BrokenPipeError):
            gateway.stdin.write(settings.to_json())
            gateway.stdin.flush()
        if gateway.stdout.readline().strip() != READY:
            raise AlignerError(f"the server's gateway process exited with code {gateway.wait()}")
        gateway.stdout.close()

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
        for endpoint, serve in endpoints.items():
            spec = with_request_number(endpoint)
            triton.bind(
                model_name=spec.name,
                infer_func=self._answering(
                    serve, self._concurrent if spec.batching else spec.concurrent_requests
                ),
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
        # gRPC would look for Triton's socket once a second.
        poll_ms = round(1000 * _POLL_S)
        backoff = [
            (f"grpc.{which}_reconnect_backoff_ms", poll_ms) for which in ("initial", "min", "max")
        ]
        with InferenceServerClient(f"unix:{socket}", channel_args=backoff) as client:
            while triton._triton_server.is_alive():
                with contextlib.suppress(InferenceServerException):
                    if client.is_server_live(client_timeout=_LOOK_S):
                        break
                time.sleep(_POLL_S)

            def load(model: Any) -> None:
                # A stub that was suspended in its start can make Triton wait for ever.
                client.load_model(model.model_name, client_timeout=self._start_timeout_s / _STARTS)
                model.setup()

            def load_together(models: Sequence[Any]) -> None:
                with ThreadPoolExecutor(max(1, len(models))) as loaders:
                    for loaded in [loaders.submit(load, model) for model in models]:
                        loaded.result()

            models = triton._model_manager.models
            if self._watcher.is_alive():
                # Clients are connected while Triton restarts, and take all models for ready when
                # `control` is: it is loaded last.
                *others, control = models
                load_together(others)
                load(control)
            else:
                # The gateway does not listen yet.
                load_together(models)

    @contextlib.contextmanager
    def _interrupted_when_triton_fails(self, deadline: float) -> Iterator[None]:
        """Raise _TritonFailed inside soon after Triton ends, or at the deadline. Main thread only.

        PyTriton would ask one that has ended for two minutes more, and one that hangs, between fork
        and exec, for ever.
        """

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

    @contextlib.contextmanager
    def _killed_when_late(self) -> Iterator[None]:
        """Kill Triton when it takes too long to load its models, which ends the loading with an
        error. For any thread."""
        timer = threading.Timer(self._start_timeout_s, self._kill_triton, [()])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def check(self) -> None:
        """Raise AlignerError when Triton has ended and could not be restarted."""
        if self._failure is not None:
            raise self._failure

    def _answering(self, serve: Serve, concurrent: int) -> Callable[[list[Any]], Any]:
        """Return the function that PyTriton calls with a request; `concurrent` requests are served
        at a time, the others wait in the order of their arrival."""
        threads = ThreadPoolExecutor(concurrent, thread_name_prefix="endpoint")
        self._threads.append(threads)

        def serve_requests(requests: list[Any]) -> list[dict[str, NDArray]]:
            try:
                return [_answer(serve, request) for request in requests]
            except AlignerError as error:
                raise EndpointError(error) from None

        async def answer(requests: list[Any]) -> list[dict[str, NDArray]]:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, serve_requests, requests)

        return answer

    def stop(self) -> None:
        """End Triton with all its processes and remove what it leaves behind: its requests have
        been drained before."""
        self._stops.set()
        self._drain_gateway()
        self._kill_triton(self._processes)  # its own end would take two seconds
        if self._watcher.is_alive():  # it may have been restarting Triton, which fails now
            self._watcher.join(_START_ENDS_S)
            self._kill_triton(self._processes)
        if self._gateway is not None:
            with self._gateway as gateway:
                gateway.kill()
        self._cancel_waiting_requests()
        if self._triton is not None:
            remove_triton_files(os.getpid())

    def _drain_gateway(self) -> None:
        """Let the gateway hand over the last answers: without an input it ends when it has."""
        gateway = self._gateway
        if gateway is None:
            return
        assert gateway.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            gateway.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            gateway.wait(_DRAIN_S)


def _start_gateway() -> "subprocess.Popen[str]":
    """Start the gateway's process, which imports while Triton starts, and then waits for its
    settings."""
    command = [sys.executable, "-m", "aligner.servers.gateway"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _triton_arguments(server_config: Any) -> list[str]:
    """Triton's command line, without PyTriton's splitting at spaces.

    PyTriton's model configurations are complete: having Triton complete them takes a helper
    process, 1.6 s a model. PyTriton has no option for that flag, which has no value.

    Pinned memory serves models on GPUs, and these run on the CPU. On a machine without CUDA, Triton
    would warn that it cannot allocate any. Models are loaded one by one (`_load_models`), not at
    Triton's start.
    """
    arguments = ["--disable-auto-complete-config", "--pinned-memory-pool-byte-size=0"]
    for name, value in server_config.server_args().items():
        if name == "load-model":
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        arguments += [f"--{name}={each}" for each in values if each is not None]
    return arguments


def _write_model(model: Any, repository: Path) -> None:
    """Write PyTriton's files of a model for Triton, and `triton_model` for the model itself."""
    model.generate_model(repository)
    files = repository / model.model_name / str(model.model_version)
    (files / _MODEL_FILE).rename(files / _PYTRITON_FILE)
    source = Path(__file__).parent
    shutil.copyfile(source / "triton_model.py", files / _MODEL_FILE)
    shutil.copyfile(source / "tensor_payload.py", files / "tensor_payload.py")


def _answer(serve: Serve, request: Any) -> dict[str, NDArray]:
    """Return the answer to a request, with the request's number where it has one."""
    arrays = dict(request.items())
    number = arrays.pop(REQUEST_NUMBER, None)
    answer = serve(arrays)
    return answer if number is None else {**answer, REQUEST_NUMBER: number.copy()}


def _clean_model(model: Any) -> None:
    """Stop PyTriton's threads for a model of a Triton that is gone."""
    with contextlib.suppress(Exception):  # of what it would tell Triton
        model.clean()


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
    stub, and a restart of this process is not needed.
    """
    own = sysconfig.get_config_var("LIBDIR")
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if own and paths[:1] != [own]:
        os.environ["LD_LIBRARY_PATH"] = ":".join([own, *paths])
