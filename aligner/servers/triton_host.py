"""The Triton server of a role, hosted by the role's rank 0, and restarted when it exits.

`TritonHost` starts Triton through PyTriton, with the gateway process (`gateway.py`) in front of it,
and calls a Python function for each request. Triton's own processes work in a private workspace
directory (`create_workspace`). An AlignerError of an endpoint function is returned only to the
caller of that request.
"""

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
import tempfile
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
    build_triton_addresses,
    list_triton_sockets,
    private_children,
)
from aligner.servers.restart_budget import RestartBudget
from aligner.servers.tensor_payload import create_serializer_class
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
    find_triton_environments,
    is_alive,
    kill_processes,
    remove_claimed_paths,
    remove_triton_files,
    restrict_triton_memory,
)

_log = logging.getLogger(__name__)

# PyTriton splits command lines at spaces and writes paths as ASCII, so that other paths do not
# work.
_USABLE_PATH = re.compile(r"[\w./+@-]+", re.ASCII)
# In characters. Unix sockets are created below the workspace, and the path of a socket may have
# 107.
_MAX_PATH_LENGTH = 60
_FALLBACK_DIRECTORY = "/tmp"


def create_workspace() -> Any:
    """Create the directory in which PyTriton sets up a Triton server.

    Only this user can read the directory. It is below PYTRITON_HOME if the user has set this
    variable, and otherwise a temporary directory, or in /tmp if Triton cannot use that path.
    PyTriton's own default, a directory below HOME, is read-only in many containers, and network
    file systems may have no Unix sockets.
    """
    from pytriton.utils.workspace import Workspace

    home = os.environ.get("PYTRITON_HOME") or tempfile.gettempdir()
    if not _USABLE_PATH.fullmatch(home) or len(home) > _MAX_PATH_LENGTH:
        home = _FALLBACK_DIRECTORY
    workspace = Workspace(Path(home) / f"aligner-triton-{secrets.token_hex(8)}")
    workspace.path.chmod(0o700)
    return workspace


# At a stop, the last answers need this time to pass through Triton and the gateway to their
# callers.
_DRAIN_S = 0.5
EndpointFunction = Callable[[dict[str, NDArray]], dict[str, NDArray]]
"""Function that computes the output tensors of a request from its input tensors. An AlignerError
that it raises is sent to the caller."""

_CHECK_INTERVAL_S = 0.5
_POLL_S = 0.05
# PyTriton's handshakes with Triton time out after one second. A busy or suspended machine may need
# longer, so that another attempt can succeed.
_START_ATTEMPTS = 3
# A negative exit code is the number of the signal that ended the process.
_CRASH_EXIT_CODES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
# How long a start of Triton in the watcher thread may take to fail after Triton was killed.
_ABORTED_START_TIMEOUT_S = 5.0
# If Triton and its gateway exit more often, this process exits too, so that the launcher restarts
# it.
_RESTARTS_PER_HOUR = 60
# File names of aligner's model and of PyTriton's model in Triton's model repository.
_MODEL_FILE = "model.py"
_PYTRITON_FILE = "pytriton_model.py"


@dataclass(frozen=True)
class Guard:
    """Authentication, encryption and size limit of requests."""

    key: str | None = field(default=None, repr=False)
    """The run's access key; None accepts requests without a key."""
    tls: TLSFiles | None = None
    """Certificate files of the server; None disables TLS."""
    max_request_bytes: int = 2**26
    """Maximum size of a request in bytes."""


class TritonHost:
    """A Triton server that listens on one address, and the gateway in front of it.

    `serve_role` creates it on rank 0 of a server role.

    Triton's own dynamic batcher is disabled: it joins only requests of equal shapes, and counts
    rows instead of tokens. In addition, PyTriton answers a batch with a single error, so that one
    invalid request would fail all requests of its batch. Instead, a batching endpoint serves
    `concurrent` requests at a time. Each of them is checked and answered separately, and
    `SpmdExecutor` batches the commands that wait.
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
        """Choose the ports, without starting Triton.

        Args:
            address: IP address on which the server listens.
            ports: Ports of the server. Port 0 means a free port.
            max_batch_size: Maximum number of rows in a request to a batching endpoint.
            concurrent: Number of requests that a batching endpoint serves at a time.
            guard: Authentication, encryption and size limit of requests.
            log: File to which Triton writes its log; None means the output of this process.
            start_timeout_s: Maximum time in seconds for Triton to load its models.

        Raises:
            AlignerError: A port is in use.
        """
        self._guard = guard
        self._log = log
        self._start_timeout_s = start_timeout_s
        self.endpoint = Endpoint(
            address,
            http=_probe_port(address, "http", ports.http),
            grpc=_probe_port(address, "grpc", ports.grpc),
            metrics=_probe_port(address, "metrics", ports.metrics),
        )
        self._max_batch_size = max_batch_size
        self._concurrent = concurrent
        self._triton: Any = None
        self._gateway: subprocess.Popen[str] | None = None
        self._processes: list[psutil.Process] = []
        self._thread_pools: list[ThreadPoolExecutor] = []
        self._endpoints: Mapping[EndpointSpec, EndpointFunction] = {}
        self._socket_directory = Path()
        self._restarts = RestartBudget(_RESTARTS_PER_HOUR)
        self._triton_exit_code = 0
        """Exit code of the Triton that exited last; a negative number is the signal that ended it.
        """
        self._triton_ended = threading.Event()
        self._failure: AlignerError | None = None
        """The error because of which the watcher could not restart Triton."""
        self._stop_requested = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="triton-watcher", daemon=True)

    def start(self, endpoints: Mapping[EndpointSpec, EndpointFunction]) -> None:
        """Start Triton and the gateway, and return when the endpoints are ready.

        A thread then restarts Triton whenever Triton or one of its helper processes exits. The
        requests in progress are lost, and their callers send them again. The state of this process
        is not affected. Call this method in the main thread, because it uses a signal.

        Args:
            endpoints: The function of each endpoint.

        Raises:
            TransientError: Triton does not start.
        """
        # An error of a request is sent to its caller and logged by `serving`. PyTriton's traceback
        # would only repeat it.
        logging.getLogger("pytriton.proxy.inference").setLevel(logging.ERROR)
        _set_library_path()

        self._endpoints = endpoints
        self._socket_directory = claim_triton_files()
        self._gateway = _start_gateway()
        deadline = time.monotonic() + self._start_timeout_s
        self._start_triton(lambda: self._raise_when_triton_fails(deadline))
        self._watcher.start()

    def _start_triton(self, guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Start Triton, in several attempts if it does not load its models.

        Args:
            guard: Creates a context that bounds the time for loading the models.

        Raises:
            TransientError: Triton did not start.
        """
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start_triton_once(guard)
                return
            except (Exception, _TritonStartFailed) as error:
                is_timeout_or_exit = isinstance(error, _TritonStartFailed)
                reason = str(error) if is_timeout_or_exit else f"{type(error).__name__}: {error}"
                is_hopeless = not self._should_retry_start(is_late=is_timeout_or_exit)
                message = f"Triton did not start ({reason}); see {self._log or 'the output above'}"
                if is_hopeless or attempt == _START_ATTEMPTS or self._stop_requested.is_set():
                    raise TransientError(message) from error
                _log.warning("%s; trying again", message)
                self._discard_triton()

    def _start_triton_once(
        self, guard: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        """Create a workspace, start Triton in it, load its models and open the gateway."""
        import pytriton.proxy.types

        workspace = create_workspace()
        claim_paths([workspace.path])
        self._triton = self._create_triton(workspace, self._socket_directory, self._endpoints)

        # By default, PyTriton sends the models to Triton, which reports an error for each model
        # that is not in a directory. Therefore the models are written to a directory instead.
        for model in self._triton._model_manager.models:
            model._serializer_deserializer = create_serializer_class(pytriton.proxy.types)()
            _write_model(model, workspace.model_store_path)
        earlier_environments = find_triton_environments()
        gateway = self._gateway
        assert gateway is not None
        try:
            # Triton's shared memory contains requests and answers: other users must not read it.
            with private_children():
                self._run_triton()
            with guard():
                self._load_models(list_triton_sockets(self._socket_directory)["grpc"])
                # For kernels without the system call filters of `private_children`.
                restrict_triton_memory()
                self._open_gateway(gateway)
        finally:
            claim_paths([workspace.path, *(find_triton_environments() - earlier_environments)])
        self._processes = [psutil.Process(gateway.pid), *_list_triton_processes()]

    def _should_retry_start(self, is_late: bool) -> bool:
        """Return whether another attempt to start Triton may succeed after a failed attempt.

        A Triton that exits by itself at its first start would exit again. A Triton that was
        suspended during its start may abort, so that a retry can help after a crash. If Triton is
        still alive, a retry helps unless the attempt has used up its time (`is_late`).
        """
        if any(map(is_alive, _list_triton_processes()[:1])):
            return not is_late
        self._triton_ended.wait(_CHECK_INTERVAL_S)
        return self._triton_exit_code in _CRASH_EXIT_CODES or self._watcher.is_alive()

    def _record_triton_exit(self, command: object, success: bool, exit_code: int) -> None:
        """Store the exit code of Triton. PyTriton calls this method."""
        self._triton_exit_code = exit_code
        self._triton_ended.set()

    def _run_triton(self) -> None:
        """Start the Triton process, without PyTriton's handling of its exit."""
        triton = self._triton
        self._triton_exit_code = 0
        self._triton_ended.clear()
        triton._initialize_server()

        # PyTriton warns of every Triton that was killed, also by `stop`. The watcher reports a
        # Triton that exits by itself.
        triton._triton_server._handle_exit = self._record_triton_exit
        server_config = triton._triton_server._server_config
        server_config.to_args_list = functools.partial(_build_triton_arguments, server_config)

        triton._run_server()
        triton._triton_server.unregister_on_exit(triton._on_tritonserver_exit)

    def _watch(self) -> None:
        """Restart Triton or the gateway when one of their processes exits, until `stop`."""
        while not self._stop_requested.wait(_CHECK_INTERVAL_S):
            exited = [process for process in self._processes if not is_alive(process)]
            if not exited and self._triton.is_alive():
                continue
            try:
                self._restart()
            except Exception as error:
                if not self._stop_requested.is_set():
                    self._failure = AlignerError(f"restarting Triton failed: {error}")
                return

    def _restart(self) -> None:
        """Restart Triton with its helper processes, and the gateway if it has exited.

        The new Triton has a new workspace, and therefore new sockets to this process. An answer to
        a request of the old Triton cannot reach it.

        Raises:
            AlignerError: Triton was restarted too often.
            TransientError: Triton does not start.
        """
        log_location = self._log or "the output above"
        if self._restarts.is_spent:
            raise AlignerError(
                "the Triton server or one of its helper processes exited unexpectedly, more than"
                f" {self._restarts.describe()}; see {log_location}"
            )
        self._restarts.record()
        _log.warning(
            "the Triton server or one of its helper processes exited unexpectedly; restarting"
            " Triton (%s). Log: %s",
            self._restarts.describe(),
            log_location,
        )

        started = time.monotonic()
        gateway = self._gateway
        assert gateway is not None
        triton_processes = [process for process in self._processes if process.pid != gateway.pid]
        if gateway.poll() is not None:
            gateway.communicate()
            gateway = self._gateway = _start_gateway()

        if self._triton.is_alive() and all(map(is_alive, triton_processes)):
            self._open_gateway(gateway)
            self._processes = [psutil.Process(gateway.pid), *triton_processes]
        else:
            self._discard_triton()
            self._start_triton(self._kill_triton_after_timeout)
        _log.info("Triton is ready again after %.1f s", time.monotonic() - started)

    def _discard_triton(self) -> None:
        """Kill Triton and its helper processes, remove their files, release PyTriton's threads."""
        gateway = self._gateway
        self._kill_triton(
            [process for process in self._processes if gateway and process.pid != gateway.pid]
        )
        self._processes = []

        remove_claimed_paths(os.getpid())
        for socket_file in list_triton_sockets(self._socket_directory).values():
            Path(socket_file).unlink(missing_ok=True)

        self._cancel_waiting_requests()
        models = [] if self._triton is None else self._triton._model_manager.models
        for model in models:
            # The cleanup waits for the requests that the model's threads still serve, which may
            # take long. Nothing depends on its end.
            threading.Thread(
                target=_clean_up_model, args=(model,), name="triton-cleaner", daemon=True
            ).start()

    def _cancel_waiting_requests(self) -> None:
        """Cancel the requests of an exited Triton that no thread serves yet.

        The callers send these requests again, to the next Triton.
        """
        for pool in self._thread_pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self._thread_pools = []

    def _kill_triton(self, processes: Sequence[psutil.Process]) -> None:
        """Kill Triton and the given helper processes."""
        servers = _list_triton_processes()
        kill_processes([*{*servers, *processes}])
        # If Triton exited by itself, its stubs are orphans, and consider Triton alive until this
        # process has waited for it.
        psutil.wait_procs(servers[:1], timeout=_CHECK_INTERVAL_S)

    def _open_gateway(self, gateway: "subprocess.Popen[str]") -> None:
        """Send the gateway its settings, and return when it listens.

        If it listens already, the method returns immediately.

        Raises:
            AlignerError: The gateway has exited.
        """
        assert gateway.stdin is not None and gateway.stdout is not None
        if gateway.stdout.closed:  # closed below, when the gateway was opened
            return

        guard = self._guard
        endpoint = self.endpoint
        settings = GatewaySettings(
            address=endpoint.host,
            http=endpoint.http,
            grpc=endpoint.grpc,
            metrics=endpoint.metrics,
            sockets=str(self._socket_directory),
            max_request_bytes=guard.max_request_bytes,
            key=guard.key,
            tls=guard.tls,
        )

        # If the gateway has exited, the error below contains its exit code.
        with contextlib.suppress(BrokenPipeError):
            gateway.stdin.write(settings.to_json())
            gateway.stdin.flush()
        if gateway.stdout.readline().strip() != READY:
            raise AlignerError(f"the server's gateway process exited with code {gateway.wait()}")
        gateway.stdout.close()

    def _create_triton(
        self, workspace: Any, directory: Path, endpoints: Mapping[EndpointSpec, EndpointFunction]
    ) -> Any:
        """Create PyTriton's server object, and bind each endpoint to its function."""
        from pytriton.model_config import ModelConfig
        from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

        triton = Triton(
            config=TritonConfig(
                **build_triton_addresses(directory),
                allow_gpu_metrics=False,
                # Without a file, PyTriton reads Triton's output byte by byte. The messages about a
                # few invalid requests would fill the pipe and block Triton.
                log_file=self._log,
                # With a pool, Triton would retain the memory of several requests.
                grpc_infer_allocation_pool_size=0,
            ),
            workspace=workspace,
            security_config=TritonSecurityConfig(restricted_endpoints=[]),
        )
        # `Triton.stop` would send requests to Triton over a network.
        atexit.unregister(triton.stop)

        for endpoint, serve in endpoints.items():
            spec = with_request_number(endpoint)
            triton.bind(
                model_name=spec.name,
                infer_func=self._create_infer_function(
                    serve, self._concurrent if spec.batching else spec.concurrent_requests
                ),
                inputs=[_to_pytriton_tensor(tensor, spec.batching) for tensor in spec.inputs],
                # PyTriton rejects optional outputs in a model's declaration, but accepts answers
                # that lack a declared output.
                outputs=[
                    _to_pytriton_tensor(replace(tensor, optional=False), spec.batching)
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
        """Load all models into Triton.

        PyTriton's `Triton.connect` does the same, but does not support Unix sockets.
        """
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        triton = self._triton
        # By default, gRPC tries to connect to Triton's socket only once a second.
        poll_ms = round(1000 * _POLL_S)
        backoff = [
            (f"grpc.{limit}_reconnect_backoff_ms", poll_ms) for limit in ("initial", "min", "max")
        ]
        with InferenceServerClient(f"unix:{socket}", channel_args=backoff) as client:
            while triton._triton_server.is_alive():
                with contextlib.suppress(InferenceServerException):
                    if client.is_server_live(client_timeout=_CHECK_INTERVAL_S):
                        break
                time.sleep(_POLL_S)

            def load(model: Any) -> None:
                # Triton would wait without a limit for a stub that was suspended during its start.
                client.load_model(
                    model.model_name, client_timeout=self._start_timeout_s / _START_ATTEMPTS
                )
                model.setup()

            def load_concurrently(models: Sequence[Any]) -> None:
                with ThreadPoolExecutor(max(1, len(models))) as loaders:
                    for loading in [loaders.submit(load, model) for model in models]:
                        loading.result()

            models = triton._model_manager.models
            if self._watcher.is_alive():
                # This is a restart: clients are connected, and assume that all models are ready
                # when `control` is ready. Therefore `control` is loaded last.
                *endpoint_models, control = models
                load_concurrently(endpoint_models)
                load(control)
            else:
                # At the first start, the gateway does not listen yet: the order does not matter.
                load_concurrently(models)

    @contextlib.contextmanager
    def _raise_when_triton_fails(self, deadline: float) -> Iterator[None]:
        """Raise _TritonStartFailed inside the context soon after Triton exits, or at the deadline.

        PyTriton itself would send requests to a Triton that has exited for another two minutes. It
        would wait for ever for a Triton that hangs between fork and exec. Only the main thread can
        use this context, because it uses a timer signal.

        Args:
            deadline: Time of `time.monotonic`.
        """

        def check(*_: object) -> None:
            """Check that Triton is alive and has not exceeded its start-up timeout.

            Raises:
                _TritonStartFailed: Triton has exited, or did not load its models in time.
            """
            processes = _list_triton_processes()
            self._processes = [*{*processes, *self._processes}]
            if not any(map(is_alive, processes[:1])):
                raise _TritonStartFailed("it exited")
            if time.monotonic() > deadline:
                raise _TritonStartFailed(
                    f"it did not load its models within {self._start_timeout_s:g} s"
                )

        previous_handler = signal.signal(signal.SIGALRM, check)
        signal.setitimer(signal.ITIMER_REAL, _CHECK_INTERVAL_S, _CHECK_INTERVAL_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)

    @contextlib.contextmanager
    def _kill_triton_after_timeout(self) -> Iterator[None]:
        """Kill Triton if it takes too long to load its models, so that the loading fails.

        Any thread can use this context.
        """
        timer = threading.Timer(self._start_timeout_s, self._kill_triton, [()])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def check(self) -> None:
        """Raise AlignerError if Triton has exited and could not be restarted."""
        if self._failure is not None:
            raise self._failure

    def _create_infer_function(
        self, serve: EndpointFunction, concurrent: int
    ) -> Callable[[list[Any]], Any]:
        """Return the function that PyTriton calls with a request.

        `concurrent` requests are served at a time. The other requests wait in the order of their
        arrival.
        """
        pool = ThreadPoolExecutor(concurrent, thread_name_prefix="endpoint")
        self._thread_pools.append(pool)

        def serve_requests(requests: list[Any]) -> list[dict[str, NDArray]]:
            try:
                return [_call_endpoint(serve, request) for request in requests]
            except AlignerError as error:
                raise EndpointError(error) from None

        async def infer(requests: list[Any]) -> list[dict[str, NDArray]]:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, serve_requests, requests)

        return infer

    def stop(self) -> None:
        """Stop the gateway and Triton, and remove their files.

        The caller must have drained the requests before.
        """
        self._stop_requested.set()
        self._drain_gateway()
        self._kill_triton(self._processes)  # an orderly shutdown of Triton takes two seconds
        if self._watcher.is_alive():
            # The watcher may have been restarting Triton, which fails now.
            self._watcher.join(_ABORTED_START_TIMEOUT_S)
            self._kill_triton(self._processes)
        if self._gateway is not None:
            with self._gateway as gateway:
                gateway.kill()
        self._cancel_waiting_requests()
        if self._triton is not None:
            remove_triton_files(os.getpid())

    def _drain_gateway(self) -> None:
        """Close the gateway's standard input, and wait until it has sent the last answers."""
        gateway = self._gateway
        if gateway is None:
            return
        assert gateway.stdin is not None
        with contextlib.suppress(OSError):  # the gateway may have exited
            gateway.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            gateway.wait(_DRAIN_S)


def _start_gateway() -> "subprocess.Popen[str]":
    """Start the gateway process.

    The process imports its modules while Triton starts, and then waits for its settings.
    """
    command = [sys.executable, "-m", "aligner.servers.gateway"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _build_triton_arguments(server_config: Any) -> list[str]:
    """Return Triton's command line, without PyTriton's splitting of values at spaces.

    The flags differ from PyTriton's in three points:

    - PyTriton's model configurations are complete. To complete them, Triton would start a helper
      process, which takes 1.6 s per model. The flag that disables this has no value, and PyTriton
      has no option for it.
    - Pinned memory serves models on GPUs, but these models run on the CPU. On a machine without
      CUDA, Triton would warn that it cannot allocate pinned memory.
    - Models are loaded one by one (`_load_models`), not when Triton starts.
    """
    arguments = ["--disable-auto-complete-config", "--pinned-memory-pool-byte-size=0"]
    for name, value in server_config.server_args().items():
        if name == "load-model":
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        arguments += [f"--{name}={entry}" for entry in values if entry is not None]
    return arguments


def _write_model(model: Any, repository: Path) -> None:
    """Write a model into Triton's model repository: PyTriton's files, and `triton_model.py`."""
    model.generate_model(repository)
    files = repository / model.model_name / str(model.model_version)
    (files / _MODEL_FILE).rename(files / _PYTRITON_FILE)
    source = Path(__file__).parent
    shutil.copyfile(source / "triton_model.py", files / _MODEL_FILE)
    shutil.copyfile(source / "tensor_payload.py", files / "tensor_payload.py")


def _call_endpoint(serve: EndpointFunction, request: Any) -> dict[str, NDArray]:
    """Return the answer to a request, with the request number if the request has one."""
    arrays = dict(request.items())
    number = arrays.pop(REQUEST_NUMBER, None)
    answer = serve(arrays)
    return answer if number is None else {**answer, REQUEST_NUMBER: number.copy()}


def _clean_up_model(model: Any) -> None:
    """Stop PyTriton's threads for a model of a Triton that has exited."""
    with contextlib.suppress(Exception):  # PyTriton's requests to the exited Triton fail
        model.clean()


class _TritonStartFailed(BaseException):
    """Triton exited or hung during its start.

    It is a BaseException so that no handler between the signal handler and `_start_triton` catches
    it.
    """


def _to_pytriton_tensor(spec: TensorSpec, batching: bool) -> Any:
    """Convert the specification of a tensor to PyTriton's; -1 denotes a variable dimension."""
    from pytriton.model_config import Tensor

    shape = spec.shape[1:] if batching else spec.shape
    dimensions = tuple(size if isinstance(size, int) else -1 for size in shape)
    dtype = bytes if spec.dtype is np.bytes_ else spec.dtype
    return Tensor(name=spec.name, dtype=dtype, shape=dimensions, optional=spec.optional)


def _probe_port(interface: str, name: str, port: int) -> int:
    """Return the port, or a free port for 0. Raise AlignerError if the port is in use."""
    with socket.socket() as probe:
        # Accept a port whose connections of an earlier server are still in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((interface, port))
        except OSError as error:
            raise AlignerError(
                f"ports.{name}={port}: cannot listen on {interface}:{port}: {error.strerror}"
            ) from error
        return probe.getsockname()[1]


def _list_triton_processes() -> list[psutil.Process]:
    """Return the Triton server that this process started, followed by its stubs."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "tritonserver":
                processes += [child, *child.children(recursive=True)]
    return processes


def _set_library_path() -> None:
    """Prepend this interpreter's library directory to LD_LIBRARY_PATH.

    Triton's Python stub must load the libpython of this interpreter; with another one, it crashes
    at its start. The dynamic linker reads LD_LIBRARY_PATH when a process starts. The value that is
    set here therefore reaches the stub, and this process does not need a restart.
    """
    library_directory = sysconfig.get_config_var("LIBDIR")
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if library_directory and paths[:1] != [library_directory]:
        os.environ["LD_LIBRARY_PATH"] = ":".join([library_directory, *paths])
