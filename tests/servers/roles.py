"""Starts and stops server roles as processes."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import psutil

from aligner.placement.addresses import Access, Endpoint
from aligner.triton_cleanup import is_alive, kill_processes, remove_triton_files
from tests.certificates import Certificates
from tests.worker_pool import free_port


class RunningRole:
    """The processes of a role's ranks. `stop` ends them and returns rank 0's exit code."""

    def __init__(
        self,
        role: str,
        directory: Path,
        ranks: int = 1,
        endpoint: Endpoint | None = None,
        tls: Certificates | None = None,
        **environment: str,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.endpoint = endpoint or Endpoint("127.0.0.1", free_port(), free_port(), free_port())
        self.log = directory / f"{role}-{free_port()}.log"
        self.seen: set[psutil.Process] = set()
        self.tls, self.http = None, f"http://127.0.0.1:{self.endpoint.http}"
        if tls is not None:
            environment["TLS"] = json.dumps(
                [str(tls.certificate), str(tls.key), str(tls.authorities)]
            )
            self.tls, self.http = (
                ssl.create_default_context(cafile=tls.authorities),
                f"https://127.0.0.1:{self.endpoint.http}",
            )
            self.tls.load_cert_chain(tls.certificate, tls.key)
        world = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        ports = [
            str(port) for port in (self.endpoint.http, self.endpoint.grpc, self.endpoint.metrics)
        ]
        command = [sys.executable, "-m", "tests.servers.role_main", role, str(directory), *ports]
        with self.log.open("w") as log:
            self.ranks = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **world, "RANK": str(rank), **environment},
                    stdout=log,
                    stderr=log,
                )
                for rank in range(ranks)
            ]

    def wait_ready(self, timeout_s: float = 150) -> RunningRole:
        """Wait for Triton's HTTP readiness, as the launcher does."""
        deadline = time.monotonic() + timeout_s
        for path in ("health/ready", "models/control/ready"):
            while not self._ready(path):
                dead = any(rank.poll() is not None for rank in self.ranks)
                if dead or time.monotonic() > deadline:
                    text = self.log.read_text()[-6000:]
                    self.stop()
                    raise AssertionError(text)
                time.sleep(0.1)
        self.note_processes()
        return self

    def _ready(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(
                f"{self.http}/v2/{path}", timeout=2, context=self.tls
            ) as response:
                return response.status == 200
        except OSError:
            return False

    @property
    def access(self) -> Access:
        """Credentials of a client."""
        key = self.log.parent / "access_key"
        return Access(key.read_text().strip() if key.exists() else None)

    def note_processes(self) -> None:
        for rank in self.ranks:
            if psutil.pid_exists(rank.pid):
                process = psutil.Process(rank.pid)
                self.seen.update([process, *process.children(recursive=True)])

    def survivors(self) -> list[psutil.Process]:
        """Return the processes of the role that still run, without zombies."""
        return [process for process in self.seen if is_alive(process)]

    def kill(self) -> None:
        """Kill every process of the role, including Triton. A launcher would end the processes that
        remain."""
        self.note_processes()
        kill_processes(self.survivors())
        for rank in self.ranks:
            rank.wait(5)
            remove_triton_files(rank.pid)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 15) -> int:
        self.note_processes()
        if self.ranks[0].poll() is None:
            self.ranks[0].send_signal(number)
        try:
            deadline = time.monotonic() + timeout_s
            for rank in self.ranks:
                rank.wait(max(0.1, deadline - time.monotonic()))
            return self.ranks[0].returncode
        finally:
            for process in self.survivors():
                if process.pid in [rank.pid for rank in self.ranks]:
                    process.kill()
            for rank in self.ranks:
                rank.wait(5)


def stop_all(roles: Iterable[RunningRole]) -> None:
    """Stop several roles concurrently."""
    roles = list(roles)
    for role in roles:
        role.note_processes()
        if role.ranks[0].poll() is None:
            role.ranks[0].terminate()
    for role in roles:
        role.stop()
