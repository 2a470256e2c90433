"""Estimate of the device memory that vLLM reserves."""

from __future__ import annotations

import pytest

from aligner.config.compose import compose_config
from aligner.models.hugging_face import read_config
from aligner.placement.memory.role_memory import compute_engine_memory

MODEL = "model=llama3_8b"


@pytest.mark.parametrize(
    ("gpus", "overrides"), [("0", []), ("8", []), ("8", ["engine.kv_cache_mib=1024"])]
)
def test_vllm_memory_reserves_kv_cache_in_advance(
    monkeypatch: pytest.MonkeyPatch, gpus: str, overrides: list[str]
) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", gpus)
    common = ["experiment=tiny_ppo", MODEL, "cluster.device_memory_gib=80", *overrides]
    embedded, vllm = (
        compose_config([*common, f"engine={kind}", "engine.update=in_place"])
        for kind in ("embedded", "vllm")
    )
    shape = read_config(dict(vllm.model.config), "model.config")
    ours, theirs = compute_engine_memory(embedded, shape), compute_engine_memory(vllm, shape)
    assert theirs.weights == ours.weights and theirs.transfer > ours.transfer, (
        "whole tensors lie beside the bucket"
    )
    if overrides:
        assert theirs.cache == 1 << 30
    elif gpus == "8":
        assert theirs.cache + theirs.weights + theirs.transfer + theirs.work == pytest.approx(
            0.4 * 80 * 2**30, abs=2
        )
    else:
        assert theirs.cache >= ours.cache
