"""Test that the logs of an undisturbed run contain no warnings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.runs import run_to_end

pytestmark = pytest.mark.slow

_WARNING = re.compile(
    r"warn|resource_tracker|leaked|exited with failure|deprecat|Traceback|\berror\b|^[WE]\d{4} "
    r"|CUDA driver",
    re.IGNORECASE,
)
_CUDA_HELPER = 'server.cc:241] "CudaDriverHelper has not been initialized."'
"""Message of Triton's binary, which is built with CUDA, on a machine without libcuda.so.

No option of Triton disables this message.
"""


@pytest.mark.promise("undisturbed-logs-have-no-warnings")
def test_undisturbed_run_logs_no_warning(tmp_path: Path) -> None:
    run = run_to_end(
        tmp_path / "run",
        *("run.steps=2", "checkpoint.every=2", "run.name=quiet", "logging.tensorboard=false"),
        *("algorithm=ppo_decoupled", "engine.placement=server", "rollout.max_staleness=1"),
    )
    logs = sorted((run.paths.root / "logs").glob("*.log"))
    assert {"critic-0.log", "generator-0.log", "reward-0.log"} <= {log.name for log in logs}
    warnings = [
        f"{log.name}: {line}"
        for log in logs
        for line in log.read_text().splitlines()
        if _WARNING.search(line) and _CUDA_HELPER not in line
    ]
    assert not warnings, "\n".join(warnings)
    assert not _WARNING.search(run.error), run.error
