from __future__ import annotations

import pytest

from tests.worker_pool import free_port


@pytest.fixture
def one_rank(monkeypatch):
    """The environment of a world of one."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
