"""Memory snapshots and marks for Nsight Systems of training steps on a GPU."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from aligner.config.compose import compose_config
from aligner.training.step_profiler import StepProfiler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")

BYTES = 3 << 20


@pytest.mark.parametrize("tool", ["torch", "nsys"])
def test_step_with_memory_snapshot(tool: str, tmp_path: Path) -> None:
    config = compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={tmp_path}",
            "profile.steps=[1]",
            f"profile.tool={tool}",
            "profile.memory=true",
        ]
    )
    profiler = StepProfiler(config, 0)
    with profiler.profile(1), profiler.open_range("train"):
        values = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
        values += 1
    snapshot = pickle.loads((tmp_path / "profile/trainer-0-step_000001-memory.pickle").read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert BYTES in [event["size"] for event in events if event["action"] == "alloc"]
    trace = tmp_path / "profile/trainer-0-step_000001.json.gz"
    assert trace.exists() == (tool == "torch")
    if tool == "torch":
        trace_events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert "kernel" in {event.get("cat") for event in trace_events}
