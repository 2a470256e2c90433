"""The critic of a run: its initial values, and the learning rate of its head, at every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from aligner.models.model_source import NORMALIZATION
from tests.megatron import jobs
from tests.megatron.test_layouts import assert_slices_equal, layouts, ranks

GAIN = 0.25
HEAD = "score.weight"


@pytest.fixture(scope="module")
def normalized_llama(reward_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose rewards are normalized."""
    directory = tmp_path_factory.mktemp("normalized") / "model"
    shutil.copytree(reward_llama, directory)
    (directory / NORMALIZATION).write_text(json.dumps({"gain": GAIN, "bias": 3.0}))
    return directory


@layouts("single", "tp2", "pp2", "tp2-sp-pp2", "vpp2", "cp2", "dp2-distributed")
def test_critic_starts_from_scaled_rewards(pool, normalized_llama, layout, settings):
    """The values after two updates, and the updates' statistics, equal those of one rank."""
    rewards = pool.run(jobs.reward_values, 1, str(normalized_llama), {})[0]
    single = pool.run(jobs.initialized_critic, 1, str(normalized_llama), {}, {})[0]
    torch.testing.assert_close(single["before"], GAIN * rewards, rtol=1e-4, atol=1e-5)
    assert rewards.abs().max() > 1e-3
    assert single["stats"][1]["loss"] < single["stats"][0]["loss"]
    for result in pool.run(
        jobs.initialized_critic, ranks(layout), str(normalized_llama), layout, settings
    ):
        torch.testing.assert_close(result["before"], single["before"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["after"], single["after"], rtol=1e-4, atol=1e-4)
        assert result["stats"] == [
            pytest.approx(stats, rel=1e-3, abs=1e-6) for stats in single["stats"]
        ]


@pytest.mark.parametrize("source", ["cut", "language model"])
def test_critic_without_head_starts_with_zero_values(pool, normalized_llama, untied_llama, source):
    directory, settings = (
        (normalized_llama, {"num_layers": 2}) if source == "cut" else (untied_llama, {})
    )
    result = pool.run(jobs.initialized_critic, 1, str(directory), {}, settings)[0]
    assert result["before"].abs().max() == 0 < result["after"].abs().max()


OWN = {"head_learning_rate": 5e-3, "optimizer": {"min_learning_rate": 2e-4, "warmup_steps": 1}}
"""The head's learning rate is five times the learning rate of the other weights."""


def own(settings):
    return OWN | settings | {"optimizer": OWN["optimizer"] | settings.get("optimizer", {})}


def whole(result, update):
    """Return all weights of a critic on one rank after `update` updates."""
    return {name: tensor for name, (_, tensor) in result["weights"][update].items()}


@pytest.fixture(scope="module")
def updates(pool, normalized_llama):
    """Updates on one rank with the head's own learning rate."""
    return pool.run(jobs.critic_updates, 1, str(normalized_llama), {}, OWN)[0]


def test_head_learning_rate_follows_shared_schedule(pool, normalized_llama, updates):
    alike = pool.run(
        jobs.critic_updates, 1, str(normalized_llama), {}, OWN | {"head_learning_rate": None}
    )[0]
    rates = [stats["lr"] for stats in updates["stats"]]
    assert (
        rates
        == [stats["lr"] for stats in alike["stats"]]
        == pytest.approx([0, 1e-3, 7.333e-4, 4.667e-4], rel=1e-3)
    )
    assert [stats["head_lr"] for stats in updates["stats"]] == pytest.approx(
        [5 * rate for rate in rates], rel=1e-9
    )
    assert not any("head_lr" in stats for stats in alike["stats"])
    before, first, plain = whole(updates, 1), whole(updates, 2), whole(alike, 2)
    for name, weight in first.items():
        if name != HEAD:
            assert torch.equal(weight, plain[name]), name
    torch.testing.assert_close(
        first[HEAD] - before[HEAD], 5 * (plain[HEAD] - before[HEAD]), rtol=1e-4, atol=1e-7
    )
    assert (first[HEAD] - before[HEAD]).abs().max() > 1e-3


@layouts(
    "tp2",
    "pp2",
    "tp2-sp-pp2",
    "vpp2",
    "cp2",
    "dp2-distributed",
    "pp2-dp2-distributed",
    "dp2-overlap",
)
def test_head_learning_rate_does_not_depend_on_layout(
    pool, normalized_llama, updates, layout, settings
):
    results = pool.run(
        jobs.critic_updates, ranks(layout), str(normalized_llama), layout, own(settings)
    )
    for result in results:
        for stats, expected in zip(result["stats"], updates["stats"], strict=True):
            assert stats == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert_slices_equal(
        [result["weights"][-1] for result in results], whole(updates, 4), rtol=0, atol=5e-5
    )


@layouts("single", "pp2", "dp2-distributed")
def test_resumed_critic_equals_undisturbed_run(
    pool, normalized_llama, updates, tmp_path, layout, settings
):
    call, checkpoint = (str(normalized_llama), layout, own(settings)), str(tmp_path / "critic")
    through = pool.run(jobs.critic_updates, ranks(layout), *call, save=checkpoint)
    for resumed, one in zip(
        pool.run(jobs.critic_updates, ranks(layout), *call, resume=checkpoint), through, strict=True
    ):
        assert resumed["stats"] == one["stats"][2:]
        for again, once in zip(resumed["weights"], one["weights"][2:], strict=True):
            assert all(torch.equal(tensor, once[name][1]) for name, (_, tensor) in again.items())
    elsewhere = pool.run(
        jobs.critic_updates, 2, str(normalized_llama), {"tensor": 2}, OWN, resume=checkpoint
    )
    assert_slices_equal(
        [result["weights"][-1] for result in elsewhere], whole(updates, 4), rtol=0, atol=5e-5
    )
