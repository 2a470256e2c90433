"""Repeated attempts to start Triton."""

from __future__ import annotations

import signal
import threading
from unittest.mock import MagicMock

import pytest

from aligner.schema import PortsConfig
from aligner.servers import triton_host
from aligner.servers.triton_host import TritonHost


def test_exit_code_of_each_crashed_start_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTriton reports the exit of Triton a moment after Triton's process has ended."""
    monkeypatch.setattr(triton_host, "_list_triton_processes", list)
    host = TritonHost("127.0.0.1", PortsConfig(), 16)
    host._triton = MagicMock()  # PyTriton, which would start tritonserver
    crash = (None, False, -signal.SIGABRT)

    for _ in range(2):
        host._run_triton()
        report = threading.Timer(0.05, host._record_triton_exit, crash)
        report.start()
        assert host._should_retry_start(is_late=False)
        report.join()
