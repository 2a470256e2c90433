"""Weight sync of only the changed elements, over gloo from trainer ranks to engine ranks."""

from __future__ import annotations

import pytest
import torch

from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding import encoding_jobs
from tests.rounds import slow

LAYOUTS = [
    (ParallelConfig(tensor=2), EngineParallelConfig(data=2)),
    (ParallelConfig(pipeline=2), EngineParallelConfig(tensor=2)),
    (ParallelConfig(data=2, expert=2), EngineParallelConfig(tensor=2)),
]
IDS = ["tensor2 to data2", "pipeline2 to tensor2", "expert2 to tensor2"]


@pytest.mark.promise("delta-publish-is-lossless")
@pytest.mark.parametrize(
    ("layouts", "dtype", "group_bytes"),
    [
        (LAYOUTS[0], torch.bfloat16, None),
        slow(LAYOUTS[1], torch.float32, None),
        slow(LAYOUTS[2], torch.bfloat16, 4_000),
    ],
    ids=IDS,
)
def test_delta_sync_gives_engine_identical_bits(pool, layouts, dtype, group_bytes):
    ranks = sum(layout.ranks for layout in layouts)
    results = pool.run(encoding_jobs.publish_changes, ranks, *layouts, dtype, group_bytes, 0)
    assert all(each == results[0] for each in results)
    shares = [share for _, share in results[0]]
    assert [share is None for share in shares] == [
        number % 4 == 0 for number in range(encoding_jobs.PUBLISHES)
    ]
    assert max(moved for moved, _ in results[0]) == results[0][0][0], "never more than all"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_delta_sync_sends_only_changed_elements(pool, dtype):
    (whole, nothing, few, all_again), _ = pool.run(encoding_jobs.publish_few_changes, 2, dtype)
    numbers = whole[0] // dtype.itemsize
    assert whole[1] is None
    assert nothing == (0, 0.0)
    assert few == (4 * (4 + dtype.itemsize), 4 / numbers)
    assert all_again[0] == whole[0]


@pytest.mark.promise("delta-publish-is-lossless")
def test_full_weights_are_sent_once_after_failed_sync(pool):
    for shares in pool.run(encoding_jobs.fail_and_continue, 4):
        assert [share is None for share in shares] == [True, False, True, False]
