"""Optimizer steps on one CUDA device equal AdamW and Muon references, in each optimizer
configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.gpu.conftest import DEVICE, needs_device
from tests.megatron import jobs, optimizer_jobs
from tests.megatron.reference import save_llama
from tests.megatron.test_layouts import assert_slices_equal
from tests.megatron.test_muon import GUIDED, muon
from tests.megatron.test_optimizer import SETTINGS, adam

pytestmark = needs_device

STEPS = [1, 2, 3, 4]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensorflow": {"epsilon_placement": "tensorflow"},
    "distributed": {"distributed": True},
    "half on the host": {"distributed": True, "offload_fraction": 0.5},
    "all on the host": {"distributed": True, "offload_fraction": 1.0},
}
TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 1e-6}, "bf16": {"rtol": 1e-2, "atol": 1e-3}}
"""Tolerance per precision; bf16 compares the rounded weights, whose main weights are fp32."""


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("way", WAYS)
def test_optimizer_steps_equal_adam_reference(one_rank, tmp_path, way, precision):
    directory, settings = save_llama(tmp_path, tied=False), SETTINGS | WAYS[way]
    actor = {"optimizer": settings, "precision": precision}
    found = optimizer_jobs.guided_steps(str(directory), {}, actor, STEPS)
    expected = adam(
        load_file(directory / "model.safetensors"),
        dataclasses.replace(jobs.OPTIMIZER, **settings),
        len(STEPS),
    )
    after = {name: (cut, weight.float().cpu()) for name, (cut, weight) in found["after"].items()}
    assert_slices_equal([after], expected, **TOLERANCE[precision])
    hosts = {"half on the host": {"cpu", DEVICE}, "all on the host": {"cpu"}}
    assert found["devices"] == hosts.get(way, {DEVICE})


@pytest.mark.parametrize("precision", TOLERANCE)
def test_optimizer_steps_equal_muon_reference(one_rank, tmp_path, precision):
    directory = save_llama(tmp_path, tied=False)
    found = optimizer_jobs.guided_steps(
        str(directory), {}, {"optimizer": GUIDED, "precision": precision}, STEPS
    )
    expected = muon(
        load_file(directory / "model.safetensors"),
        dataclasses.replace(jobs.OPTIMIZER, **GUIDED),
        STEPS,
    )
    after = {name: (cut, weight.float().cpu()) for name, (cut, weight) in found["after"].items()}
    assert_slices_equal([after], expected, **TOLERANCE[precision])
