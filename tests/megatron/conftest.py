from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.reference import save_llama, save_reward_llama


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_llama(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tied=False)


@pytest.fixture(scope="session", params=["tied", "untied"])
def odd_llama(request, tmp_path_factory) -> Path:
    """A model whose vocabulary size is not divisible by two tensor-parallel ranks."""
    tied = request.param == "tied"
    return save_llama(tmp_path_factory.mktemp("odd"), tied=tied, vocab_size=71)


@pytest.fixture(scope="session")
def reward_llama(tmp_path_factory) -> Path:
    return save_reward_llama(tmp_path_factory.mktemp("reward"))
