"""The critic of a run: what it begins with, and how fast its head learns, at every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from aligner.models.model_source import NORMALIZATION
from tests.megatron import jobs
from tests.megatron.test_layouts import layouts, ranks

GAIN = 0.25


@pytest.fixture(scope="module")
def normalized_llama(reward_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose rewards are normalized."""
    directory = tmp_path_factory.mktemp("normalized") / "model"
    shutil.copytree(reward_llama, directory)
    (directory / NORMALIZATION).write_text(json.dumps({"gain": GAIN, "bias": 3.0}))
    return directory


@layouts("single", "tp2", "pp2", "tp2-sp-pp2", "vpp2", "cp2", "dp2-distributed")
def test_a_critic_from_a_reward_model_begins_with_its_numbers_and_learns_alike(pool, normalized_llama, layout, settings):
    rewards = pool.run(jobs.reward_values, 1, str(normalized_llama), {})[0]
    single = pool.run(jobs.begun_critic, 1, str(normalized_llama), {}, {})[0]
    torch.testing.assert_close(single["before"], GAIN * rewards, rtol=1e-4, atol=1e-5)
    assert rewards.abs().max() > 1e-3
    assert single["stats"][1]["loss"] < single["stats"][0]["loss"]
    for result in pool.run(jobs.begun_critic, ranks(layout), str(normalized_llama), layout, settings):
        torch.testing.assert_close(result["before"], single["before"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["after"], single["after"], rtol=1e-4, atol=1e-4)
        assert result["stats"] == [pytest.approx(stats, rel=1e-3, abs=1e-6) for stats in single["stats"]]


@pytest.mark.parametrize("source", ["cut", "language model"])
def test_a_critic_begins_with_a_head_of_zeros_where_no_head_is_of_its_last_layer(pool, normalized_llama, untied_llama, source):
    directory, settings = (normalized_llama, {"num_layers": 2}) if source == "cut" else (untied_llama, {})
    result = pool.run(jobs.begun_critic, 1, str(directory), {}, settings)[0]
    assert result["before"].abs().max() == 0 < result["after"].abs().max()
