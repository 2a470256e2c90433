from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.reference import save_llama


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_llama(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tied=False)


@pytest.fixture(scope="session")
def reward_llama(tmp_path_factory) -> Path:
    from transformers import LlamaForSequenceClassification

    from tests.megatron.reference import llama_config

    torch.manual_seed(5)
    directory = tmp_path_factory.mktemp("reward")
    LlamaForSequenceClassification(llama_config(tied=False, num_labels=1)).save_pretrained(directory)
    return directory
