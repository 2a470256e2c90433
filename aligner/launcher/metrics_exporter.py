"""The launcher's HTTP server for Prometheus and for probes (`logging.prometheus.port`).

The server reads the files of the run directory when a request arrives, so that it needs no
connection to the ranks and costs nothing between two requests. It runs in threads of the launcher.
"""

import contextlib
import hmac
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aligner.errors import AlignerError, ConfigError
from aligner.launcher.rank_environment import build_server_opener, get_server_url
from aligner.launcher.run_directory import HEARTBEAT_S
from aligner.launcher.status import RunStatus, build_status
from aligner.observability.metrics import read_newest_metrics
from aligner.observability.prometheus import CONTENT_TYPE, MetricFamily, to_metric_name
from aligner.paths import CHECKPOINT_MANIFEST, RunPaths, find_complete_steps, get_run_paths
from aligner.placement.addresses import (
    KEY_HEADER,
    Endpoint,
    get_interface_address,
    load_access,
    load_endpoints,
)
from aligner.placement.tls import get_tls_files
from aligner.schema import Config
from aligner.version import __version__

# Connections at the same time. For a further one, the oldest is closed whose request is incomplete.
_MAX_CONNECTIONS = 32
# Seconds until the thread of a closed connection ends.
_CLOSE_TIMEOUT_S = 1.0
# Seconds in which a client must send its request.
_REQUEST_TIMEOUT_S = 5.0
# Timeout of a request to a server for the length of its queue.
_QUEUE_TIMEOUT_S = 1.0
_STATES = ("starting", "running", "finished", "failed", "stopped")
_HEALTH_OPERATION = json.dumps({"op": "health"})
_QUEUE_REQUEST = {
    "inputs": [{"name": "request", "shape": [1], "datatype": "BYTES", "data": [_HEALTH_OPERATION]}]
}


@contextlib.contextmanager
def export_metrics(config: Config) -> Iterator[str | None]:
    """Serve the metrics and the health of a run in a `with` block.

    Args:
        config: The run's configuration. The certificate of its servers must exist.

    Yields:
        The URL of the metrics; None if `logging.prometheus.port` is not set.

    Raises:
        ConfigError: The server cannot listen on the configured address.
    """
    settings = config.logging.prometheus
    if settings.port is None:
        yield None
        return
    address = get_interface_address(settings.interface, "logging.prometheus.interface")
    try:
        server = _Server((address, settings.port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"logging.prometheus.port={settings.port}: cannot listen on {address}:{settings.port}:"
            f" {error.strerror}; set another port, or end the program that uses it"
        ) from error
    with server:
        server.run = RunProbe(config)
        tls = get_tls_files(config)
        if tls is not None:
            # The handshake takes place in the thread of the connection, within its timeout.
            server.socket = tls.server_context().wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://{address}:{settings.port}/metrics"
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class RunProbe:
    """Reads the state of a run from its directory."""

    config: Config

    @property
    def _paths(self) -> RunPaths:
        return get_run_paths(self.config)

    def read_status(self) -> RunStatus:
        """Return the status of the run."""
        records = read_newest_metrics(self._paths.metrics)
        return build_status(self._paths, self.config, records, query_services=False)

    def is_alive(self) -> bool:
        """Return whether the launcher has watched the run within the last minute."""
        try:
            age_s = time.time() - self._paths.status.stat().st_mtime
        except OSError:
            return False
        return age_s < 6 * HEARTBEAT_S

    def find_missing(self) -> list[str]:
        """Return the reasons for which the run is not ready: it does not train, or one of its roles
        is not healthy; an empty list if it is ready."""
        status = self.read_status()
        reasons = [] if status.state == "running" else [f"the run is {status.state}"]
        return reasons + [
            f"{name} is {role.health}"
            for name, role in status.roles.items()
            if role.health != "healthy"
        ]

    def format_metrics(self) -> str:
        """Return all metrics of the run in Prometheus' text format."""
        status = self.read_status()
        families = [*_build_run_families(status), *self._build_checkpoint_families()]
        families.append(self._build_queue_family(status))
        names = {family.name for family in families}
        for metric, value in status.metrics.items():
            name = to_metric_name(metric)
            # Prometheus refuses an answer with two metrics of one name.
            if name not in names and metric != "step":
                names.add(name)
                help_text = f"{metric} of the last step (docs/metrics.md)"
                families.append(MetricFamily(name, help_text).add(value))
        return "".join(family.format() for family in families)

    def _build_checkpoint_families(self) -> Iterator[MetricFamily]:
        """Yield the step and the age of the newest complete checkpoint, if there is one."""
        directory = self._paths.checkpoints
        steps = find_complete_steps(directory)
        if not steps:
            return
        manifest = directory / f"step_{steps[-1]}" / CHECKPOINT_MANIFEST
        with contextlib.suppress(OSError):  # the checkpoint has just been deleted
            age_s = max(0.0, time.time() - manifest.stat().st_mtime)
            yield MetricFamily(
                "aligner_checkpoint_age_seconds", "Age of the newest complete checkpoint."
            ).add(age_s)
        yield MetricFamily(
            "aligner_checkpoint_step", "Step of the newest complete checkpoint."
        ).add(steps[-1])

    def _build_queue_family(self, status: RunStatus) -> MetricFamily:
        """Return the number of requests that wait in each server that answers."""
        family = MetricFamily(
            "aligner_server_queue_depth", "Commands that wait for the ranks of a server."
        )
        endpoints_file = self._paths.endpoints
        endpoints = load_endpoints(endpoints_file) if endpoints_file.is_file() else {}
        for group, endpoint in endpoints.items():
            role = status.roles.get(group)
            if role is not None and role.health == "healthy":
                depth = _read_queue_depth(self.config, endpoint)
                if depth is not None:
                    family.add(depth, server=group)
        return family


def _build_run_families(status: RunStatus) -> Iterator[MetricFamily]:
    """Yield the metrics of the launcher: progress, states and restarts."""
    yield MetricFamily("aligner_run_info", "Name and release of the run; always 1.").add(
        1, run=status.name, version=__version__
    )
    states = MetricFamily("aligner_run_state", "1 for the current state of the run, otherwise 0.")
    for state in _STATES:
        states.add(float(state == status.state), state=state)
    yield states
    yield MetricFamily("aligner_step", "Completed training steps.").add(status.step)
    yield MetricFamily("aligner_steps", "Steps of the whole run (run.steps).").add(status.steps)
    for name, help_text, value in (
        ("aligner_last_step_age_seconds", "Time since the last step.", status.last_step_age_s),
        ("aligner_step_seconds", "Mean time of the recent steps.", status.seconds_per_step),
        ("aligner_remaining_seconds", "Estimated time until the last step.", status.seconds_left),
    ):
        if value is not None:
            yield MetricFamily(name, help_text).add(value)
    ranks = MetricFamily("aligner_role_ranks", "Processes of a role.")
    healthy = MetricFamily("aligner_role_healthy", "1 if a role is healthy, otherwise 0.")
    restarts = MetricFamily(
        "aligner_role_restarts_total", "Restarts of a role in this launch.", "counter"
    )
    for role, role_status in status.roles.items():
        ranks.add(role_status.ranks, role=role)
        healthy.add(float(role_status.health == "healthy"), role=role)
        restarts.add(role_status.restarts, role=role)
    yield from (ranks, healthy, restarts)


def _read_queue_depth(config: Config, endpoint: Endpoint) -> int | None:
    """Return the number of pending commands of a server; None if it does not answer in time."""
    key = load_access(config).key
    request = urllib.request.Request(
        get_server_url(config, endpoint, "models/control/infer"),
        json.dumps(_QUEUE_REQUEST).encode(),
        {} if key is None else {KEY_HEADER: key},
    )
    try:
        opener = build_server_opener(config)
        with opener.open(request, timeout=_QUEUE_TIMEOUT_S) as response:
            (output,) = json.load(response)["outputs"]
        return int(json.loads(output["data"][0])["queue_depth"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None


class _Server(ThreadingHTTPServer):
    """HTTP server with a limited number of connections.

    Other users can open idle connections. They must not keep out probes, whose failure may end the
    run.
    """

    daemon_threads = True
    # Connections that wait to be accepted.
    request_queue_size = 128
    run: RunProbe

    def __init__(self, *arguments: Any) -> None:
        self._free_slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        # Connections whose request is incomplete, in the order of their arrival.
        self._incomplete: dict[socket.socket, None] = {}
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread; close it if all others are being answered."""
        if not self._free_slots.acquire(blocking=False):
            self._end_oldest_incomplete()
            if not self._free_slots.acquire(timeout=_CLOSE_TIMEOUT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._incomplete[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.mark_complete(request)
            self._free_slots.release()

    def mark_complete(self, request: socket.socket) -> None:
        """Note that the request of a connection has arrived, or that the connection is closed."""
        with self._lock:
            self._incomplete.pop(request, None)

    def _end_oldest_incomplete(self) -> None:
        """End the oldest connection whose request is incomplete; its thread then closes it."""
        with self._lock:
            oldest = next(iter(self._incomplete), None)
            if oldest is None:
                return
            del self._incomplete[oldest]
            # Of the TCP connection: its thread may use the TLS connection at the same time.
            with contextlib.suppress(OSError):  # the client has closed it
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that the client has closed or that timed out."""


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection with one request."""

    server: _Server
    timeout = _REQUEST_TIMEOUT_S
    # Do not reveal the release of Python.
    server_version = "aligner"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        self.server.mark_complete(self.connection)
        run = self.server.run
        match self.path:
            case "/healthz":
                is_alive = run.is_alive()
                self._respond(200 if is_alive else 503, "ok" if is_alive else "not watching")
            case "/readyz":
                try:
                    reasons = run.find_missing()
                except (AlignerError, OSError) as error:
                    reasons = [str(error)]
                self._respond(503 if reasons else 200, "; ".join(reasons) or "ok")
            case "/metrics":
                try:
                    if self._has_key():
                        self._respond(200, run.format_metrics(), CONTENT_TYPE)
                    else:
                        self._respond(401, "the run's access key is missing or wrong")
                except (AlignerError, OSError) as error:
                    self._respond(500, str(error))
            case _:
                self._respond(404, "only /metrics, /healthz and /readyz are served")

    def _has_key(self) -> bool:
        """Return whether the request carries the run's access key, in the servers' header or as a
        bearer token."""
        key = load_access(self.server.run.config).key
        if key is None:
            return True
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        sent = token if scheme.lower() == "bearer" else self.headers.get(KEY_HEADER, "")
        return hmac.compare_digest(sent.strip().encode(errors="replace"), key.encode())

    def _respond(self, code: int, text: str, content_type: str = "text/plain") -> None:
        content = text.rstrip("\n").encode(errors="replace") + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a scrape every few seconds would flood the terminal."""
