"""Weight sync from Megatron's slices to TensorRT-LLM's workers, in worlds of several processes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines import engines
from tests.engines.tensorrt_llm import contract, jobs
from tests.rounds import slow, typical


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def directory(request, tmp_path_factory) -> Path:
    return engines.save_tiny(
        tmp_path_factory.mktemp("model"), seed=0, kv_heads=4, tied=request.param
    )


def _cut(whole: np.ndarray, cut) -> np.ndarray:
    return whole if cut.axis is None else whole.take(range(cut.start, cut.stop), cut.axis)


@pytest.mark.promise("weight-sync-writes-each-element-once")
@pytest.mark.parametrize(
    ("tensor", "data"), [slow(1, 4), (2, 2), slow(4, 1)], ids=["tp1-dp4", "tp2-dp2", "tp4-dp1"]
)
def test_worker_weights_equal_trainer_weights_bitwise(pool, directory, tensor, data):
    results = pool.run(
        jobs.publish_and_generate, 4, directory, {"tensor": 2, "pipeline": 2}, tensor, data
    )
    engines_weights = [whole for result in results for whole in result["whole"]]
    assert len(engines_weights) == data
    for weights in engines_weights:
        for result in results:
            for name, (cut, part) in result["slices"].items():
                assert np.array_equal(_cut(weights[name], cut), part), name
        assert set(weights) == {name for result in results for name in result["slices"]}
    assert any(
        not np.array_equal(engines_weights[0][name], stored.numpy())
        for name, stored in engines.file_tensors(directory).items()
    )
    leading = [result for result in results if result["leads"]]
    assert len(leading) == data
    assert all(result["versions"] == {1} for result in leading)
    assert all(result["takes"][0] == result["takes"][1] for result in results)
    # Samples do not depend on the replica or its layout; the first rank of a replica returns them.
    assert all(result["samples"] == leading[0]["samples"] for result in leading)
    model = engines.reference_model(directory)
    model.load_state_dict(
        {name: torch.from_numpy(whole) for name, whole in engines_weights[0].items()}, strict=False
    )
    wanted = [engines.greedy(model, prompt.tokens, 6) for prompt in engines.prompts()]
    assert all(result["greedy"] == wanted for result in leading)


def test_failed_weight_collection_names_rank_on_all_ranks(pool, directory):
    begin = time.monotonic()
    messages = pool.run(jobs.load_where_one_rank_fails, 2, directory, 2)
    assert all(
        "collecting weights failed on rank 1" in one
        and "their views were never requested: model.norm.weight" in one
        for one in messages
    )
    assert time.monotonic() - begin < 25


@pytest.mark.parametrize("state", typical(contract.WEIGHT_UPDATES, ["1.2", "1.4"]))
def test_failed_worker_fails_update_on_all_ranks(pool, directory, state):
    version = state if state in contract.VERSIONS else "1.4"
    outcomes = pool.run(
        jobs.publish_to_a_broken_worker, 2, directory, {"tensor": 2}, 2, version, state
    )
    for outcome in outcomes:
        assert "RuntimeError: out of memory" in outcome["publish"]
        assert outcome["version"] is None
        assert (
            "the weight update to version 2 failed after it had started to overwrite the old"
            " weights; sync weights to the engine again" in outcome["generate"]
        )
    assert outcomes[0]["again"] == [3, 3]
