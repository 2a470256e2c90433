"""Modules that are imported by megatron-core and by training with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch

compiler = torch.compile
import aligner.megatron, megatron.core
from aligner.megatron import cpu_backend
from aligner.megatron.policy import Policy

cpu_backend.install()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())

unwanted = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "wandb")
assert not set(unwanted) & set(sys.modules), set(unwanted) & set(sys.modules)
assert torch.compile is compiler

import torch.distributed.checkpoint.default_planner, torch.distributed.tensor, torch.utils.tensorboard
import torch._dynamo, wandb

assert torch.distributed.checkpoint.DefaultLoadPlanner and wandb.__version__
"""


@pytest.mark.slow
def test_training_does_not_import_compiler_or_wandb() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
