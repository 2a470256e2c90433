"""After each weight sync, the engine proves that it holds the trainer's weights."""

from __future__ import annotations

import re

import pytest

from tests.megatron import families
from tests.training import verification_jobs as jobs

pytestmark = pytest.mark.promise("weight-sync-is-verified")

EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(families.save("llama3", tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(families.save("qwen3_moe", tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        ({"data": 2}, {"update": "shared"}),
        ({"data": 2}, {"update": "in_place", "publish": "changes"}),
        ({"pipeline": 2}, {"parallel": {"tensor": 2}}),
        ({"tensor": 2}, {"parallel": {"data": 2}, "sleep": True}),
    ],
    ids=str,
)
def test_every_sync_is_verified_and_recorded(pool, dense, trainer, engine):
    for stats, spans in pool.run(jobs.publish_and_train, 2, dense, engine, trainer):
        assert [each.version for each in stats] == [0, 1, 2]
        for each in stats:
            assert each.verify_seconds > 0
            assert each.probe_seconds > 0
            assert each.probe_logprob_abs < 1e-4
        # Before the update, of the trainer's weights, after the update; and the probe.
        assert spans == ["verify", "verify", "verify", "probe"] * 3


def test_experts_on_several_ranks_are_verified(pool, experts):
    engine = {"parallel": {"tensor": 2, "expert": 2}}
    trainer = {"data": 2, "expert": 2}
    for stats, _ in pool.run(jobs.publish_and_train, 2, experts, engine, trainer):
        assert all(each.probe_logprob_abs < 1e-4 for each in stats)


def test_merged_adapters_are_verified(pool, dense):
    for stats, _ in pool.run(jobs.publish_and_train, 2, dense, {}, {"data": 2}, 4):
        assert all(each.probe_logprob_abs < 1e-4 for each in stats)


@pytest.mark.parametrize(
    ("verify", "wanted"), [("first", [True, False, False]), ("never", [False] * 3)]
)
def test_verify_selects_verified_syncs(pool, dense, verify, wanted):
    for stats, _ in pool.run(jobs.publish_and_train, 2, dense, {"verify": verify}, {"data": 2}):
        assert [each.verify_seconds is not None for each in stats] == wanted
        assert [each.probe_seconds is not None for each in stats] == wanted


@pytest.mark.parametrize("update", ["atomic", "in_place", "shared"])
def test_corrupted_tensor_is_named_at_first_sync(pool, dense, update):
    name = "model.layers.1.self_attn.k_proj.weight"
    for error in pool.run(
        jobs.publish_with_fault, 2, dense, {"update": update}, "corrupt", name, 1
    ):
        assert error == (
            "the engine does not hold weight version 1 after its weight sync:\ntrainer rank 1: the"
            f" engine's weights differ from the trainer's: {name}"
        )


def test_missing_expert_is_named_at_first_sync(pool, experts):
    for error in pool.run(jobs.publish_with_fault, 2, experts, {}, "missing", EXPERT, 0):
        assert error.endswith(
            f"trainer rank 0: the engine's weights differ from the trainer's: {EXPERT}"
        )


def test_stale_version_is_named_at_its_first_sync(pool, dense):
    for error in pool.run(jobs.publish_to_stale_engine, 2, dense, 1):
        assert error.startswith("the engine does not hold weight version 2 after its weight sync")
        assert "trainer rank 1: " in error
        assert "model.layers.0.self_attn.q_proj.weight" in error


@pytest.mark.parametrize("update", ["atomic", "in_place", "shared"])
def test_flipped_bit_is_named_at_next_sync(pool, dense, update):
    name = "model.layers.0.self_attn.q_proj.weight"
    settings = {"update": update}
    for error, is_shared in pool.run(jobs.publish_after_flipped_bit, 2, dense, settings, name, 1):
        assert not is_shared
        assert error == (
            "weight version 2 was not synced to the engine; the engine aborts its update:\n"
            "trainer rank 1: the engine's weights have changed since the last weight sync, so that"
            f" it may have generated with damaged weights: {name}"
        )


def test_wrong_computation_is_reported_with_position_and_values(pool, dense):
    for error in pool.run(jobs.publish_with_wrong_computation, 2, dense, 1):
        assert re.fullmatch(
            r"with weight version 1, the engine does not compute the trainer's log-probs:\n"
            r"engine replica 1: position \d+ of probe sequence \d \(token \d+\): the log-prob of the"
            r" engine is -[\d.]+, that of the trainer is -[\d.]+; the tolerance is 0.001",
            error,
        )
