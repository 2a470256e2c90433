"""Shared vLLM processes: a start takes most of a minute, so tests with one model share one."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from aligner.engines.vllm import vllm_engine
from aligner.engines.vllm.program_client import VLLMClient
from aligner.engines.vllm.replica_nodes import ReplicaNode
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig
from aligner.vllm_environment import get_default_vllm_directory

INSTALLED = pytest.mark.skipif(
    not (get_default_vllm_directory() / "package").is_file(),
    reason="`aligner install-vllm` was not run",
)
"""Marker of a test that inspects the installed vLLM."""
NEEDED = (pytest.mark.slow, INSTALLED)
"""Markers of a test that runs vLLM."""
_clients: dict[str, VLLMClient] = {}


def _client(
    python: str,
    directory: Path,
    shape: ModelShape,
    settings: EngineConfig,
    seed: int,
    dtype: torch.dtype,
    gpus: Sequence[str],
    node: ReplicaNode,
) -> VLLMClient:
    key = repr(
        (
            shape,
            settings.batch_size,
            settings.kv_cache_mib,
            settings.parallel,
            dtype,
            settings.vllm,
            gpus,
        )
    )
    if key not in _clients:
        _clients[key] = client = VLLMClient(python, directory, shape, settings, seed, dtype, gpus)
        atexit.register(VLLMClient.shutdown, client)
        client.shutdown = lambda: None
    client = _clients[key]
    client._response_generator = client._create_response_generator(seed)
    return client


@contextmanager
def shared() -> Iterator[None]:
    """Let engines that start in this context reuse a running vLLM process."""
    with mock.patch.object(vllm_engine, "VLLMClient", _client):
        yield
