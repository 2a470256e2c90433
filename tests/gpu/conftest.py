from __future__ import annotations

import os

import pytest
import torch

from tests.megatron import families
from tests.worker_pool import free_port

DEVICE = os.environ.get("ALIGNER_DEVICE", "cuda")
"""Device of the tests. With ALIGNER_DEVICE=cpu they run without a GPU, except the tests of CUDA
itself."""
needs_device = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)
FAMILIES = tuple(families.CONFIGS) if DEVICE == "cuda" else ("llama3", "qwen3_moe")
"""On the CPU, one dense and one mixture-of-experts family suffice: tests/megatron and tests/engines
compare every family with transformers."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def one_rank(monkeypatch):
    """Set the environment variables of a world of one rank."""
    names = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
