"""Weight sync over gloo from simulated trainer shards to an engine with two sets of weights."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
from torch.distributed import TCPStore

from aligner.errors import AlignerError, EngineExited
from aligner.resharding.transport import Link, copy_local
from aligner.resharding.verify import checksum
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding import jobs
from tests.resharding.jobs import publish_twice

SMALLEST = 4 * 32 * 4
"""Bucket size in bytes, whose messages contain one row of the widest tensor."""


def layout_name(layout: ParallelConfig | EngineParallelConfig) -> str:
    sizes = {field.name: getattr(layout, field.name) or 1 for field in fields(layout)}
    return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (ParallelConfig(pipeline=2), EngineParallelConfig(data=2)),
        (ParallelConfig(tensor=2), EngineParallelConfig(data=2)),
        (ParallelConfig(data=2), EngineParallelConfig(tensor=2)),
        (ParallelConfig(pipeline=2), EngineParallelConfig(tensor=2)),
        (ParallelConfig(tensor=2, pipeline=2), EngineParallelConfig(data=2)),
        (ParallelConfig(tensor=2, pipeline=2), EngineParallelConfig(tensor=2)),
        (ParallelConfig(tensor=2, pipeline=2), EngineParallelConfig(tensor=2, data=2)),
        (ParallelConfig(tensor=4), EngineParallelConfig(tensor=2, data=2)),
        (ParallelConfig(pipeline=2, data=2), EngineParallelConfig(tensor=4)),
        (ParallelConfig(data=2, expert=2), EngineParallelConfig(tensor=2)),
        (
            ParallelConfig(tensor=2, pipeline=2, sequence=True, expert=2, expert_tensor=1),
            EngineParallelConfig(tensor=2, data=2),
        ),
        (
            ParallelConfig(tensor=2, pipeline=2, sequence=True),
            EngineParallelConfig(tensor=2, data=2, expert=2),
        ),
        (ParallelConfig(data=4, expert=4), EngineParallelConfig(tensor=4, expert=2)),
    ],
    ids=layout_name,
)
def test_colocated_engine_receives_expected_slices(pool, trainer, engine):
    for bucket_bytes in (SMALLEST, 1 << 16):
        for result in pool.run(
            publish_twice, trainer.ranks, trainer, engine, bucket_bytes=bucket_bytes
        ):
            assert result["staging"] <= bucket_bytes


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (ParallelConfig(tensor=2, pipeline=2), EngineParallelConfig(data=2)),
        (ParallelConfig(tensor=2, pipeline=2), EngineParallelConfig(tensor=2)),
        (ParallelConfig(pipeline=2), EngineParallelConfig(tensor=2)),
        (ParallelConfig(data=2, expert=2), EngineParallelConfig(tensor=2)),
        (ParallelConfig(tensor=2, sequence=True), EngineParallelConfig(tensor=2, expert=2)),
    ],
    ids=layout_name,
)
def test_separate_engine_receives_expected_slices(pool, trainer, engine):
    ranks = trainer.ranks + engine.ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = pool.run(
        publish_twice, ranks, trainer, engine, store.port, bucket_bytes=SMALLEST, fresh=True
    )
    assert [result["world"] for result in results] == [trainer.ranks] * trainer.ranks + [
        engine.ranks
    ] * engine.ranks


@pytest.mark.parametrize(
    "settings", [{"dtype": torch.bfloat16}, {"group_bytes": 2000}, {"group_bytes": 1}], ids=str
)
def test_weight_sync_supports_other_dtype_and_groups(pool, settings):
    pool.run(
        publish_twice,
        4,
        ParallelConfig(tensor=2, pipeline=2),
        EngineParallelConfig(tensor=2, data=2),
        **settings,
    )


@pytest.mark.promise("weight-sync-is-atomic")
@pytest.mark.parametrize(
    ("kind", "at", "told"),
    [
        ("read", 2, ["trainer rank 2: the disk is gone"]),
        ("open", 1, ["trainer rank 1: another update is open"]),
        (
            "fit",
            3,
            [
                "trainer rank 3: the engine does not match the transfer plan",
                "model.embed_tokens.weight: the engine has no such tensor",
                "model.norm.weight: the engine's tensor is (17,) of torch.float32, the transfer plan writes (16,)",
                "model.layers.3.self_attn.o_proj.weight: the engine's tensor is (3, 3)",
            ],
        ),
    ],
)
def test_failure_on_one_rank_keeps_old_version_on_all(pool, kind, at, told):
    for rank, result in enumerate(pool.run(jobs.fail_once, 4, kind, at, timeout_s=20)):
        assert all(text in result["error"] for text in told), result["error"]
        assert result["error"].startswith("weight version 2 was not synced to the engine")
        assert result["seconds"] < 5
        # An update is aborted by its owner; the failing rank's open update belongs to another one.
        assert result["aborted"] == (0 if (kind, rank) == ("open", at) else 1)
        assert "is closed and must be reconnected" in result["again"]


def test_failed_commit_aborts_and_next_version_succeeds(pool):
    for rank, result in enumerate(pool.run(jobs.fail_to_commit, 2, 1)):
        assert "version 2 may be loaded on only some of the engine ranks" in result["error"]
        assert "trainer rank 1: the old weights can not be freed" in result["error"]
        assert result["aborted"] == rank


def test_copying_source_keeps_one_copy_at_a_time(pool):
    (most_alive, staging), _ = pool.run(jobs.send_halves_of_copies, 2)
    assert most_alive == 1 << 20
    assert 1 << 20 < staging <= 4 << 20


@pytest.mark.slow
def test_rank_that_exceeds_timeout_is_named(pool):
    for result in pool.run(jobs.fail_once, 4, "late", 3, timeout_s=2):
        assert "trainer rank 3 did not answer within 2 s" in result["error"], result["error"]


@pytest.mark.promise("weight-sync-is-verified")
@pytest.mark.parametrize("group_bytes", [None, 2000])
def test_corrupted_tensor_is_reported_with_name_and_rank(pool, group_bytes):
    name = "model.layers.1.mlp.up_proj.weight"
    for result in pool.run(jobs.publish_to_faulty_memory, 4, 3, name, group_bytes):
        # Tensors that the engine receives in groups are compared before it loads them.
        failure, version, aborted = (
            ("the engine does not hold weight version 2 after its weight sync", None, 0)
            if group_bytes is None
            else (
                "weight version 2 was not synced to the engine; the engine aborts its update",
                1,
                1,
            )
        )
        assert result["error"] == (
            f"{failure}:\ntrainer rank 3: the engine's weights differ from the trainer's: {name}"
        )
        assert result["version"] == version
        assert result["aborted"] == aborted


@pytest.mark.promise("weight-sync-is-verified")
@pytest.mark.parametrize("mode", ["whole", "changes"])
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.layers.3.input_layernorm.weight"]
)
def test_flipped_bit_between_syncs_is_reported(pool, name, mode):
    for result in pool.run(jobs.publish_after_flipped_bit, 4, 3, name, mode):
        assert result["error"] == (
            "weight version 2 was not synced to the engine; the engine aborts its update:\n"
            "trainer rank 3: the engine's weights have changed since the last weight sync, so that"
            f" it may have generated with damaged weights: {name}"
        )


@pytest.mark.promise("weight-sync-is-verified")
def test_stale_engine_is_reported_and_discards_its_weights(pool):
    for result in pool.run(jobs.publish_to_stale_engine, 2, 1):
        assert result["error"].startswith(
            "the engine does not hold weight version 2 after its weight sync:\ntrainer rank 1: the"
            " engine's weights differ from the trainer's: model.embed_tokens.weight, "
        )
        assert "model.layers.3.mlp.down_proj.weight" in result["error"]
        assert result["version"] is None
        assert result["discarded"] == result["error"]


@pytest.mark.parametrize(
    ("verify", "wanted"),
    [
        ("sync", [True, True, True]),
        ("first", [True, False, False]),
        ("never", [False, False, False]),
    ],
)
def test_verify_selects_verified_weight_syncs(pool, verify, wanted):
    assert pool.run(jobs.count_verifications, 2, verify, 3) == [wanted] * 2


def test_publisher_that_does_not_match_plan_is_refused(pool):
    for rank, errors in enumerate(pool.run(jobs.refuse_construction, 2)):
        nothing, other_size, small = errors
        label = f"trainer rank {rank}"
        assert (
            nothing
            == f"{label}: the transfer plan requires this rank to send weights, but it has no"
            " weights; the transfer plan requires this rank to receive weights, but it has no engine"
        )
        assert "the transfer plan has 4 ranks, but the link has 2 ranks" in other_size
        assert (
            "torch.bfloat16 has 2 bytes per element, but the transfer plan requires 4 bytes"
            in other_size
        )
        assert "a bucket of 100 bytes is too small" in small


def test_ranks_that_do_not_connect_are_named(pool):
    assert (
        "trainer rank 1, engine rank 0 did not connect within 0.5 s"
        in pool.run(jobs.connect_alone, 2, 0.5)[0]
    )


def test_link_is_usable_once_every_rank_is_connected(pool):
    # Otherwise a rank that fails at once closes its connections while another rank still connects.
    times = pool.run(jobs.connect_slowly, 2)
    assert min(usable for _, usable in times) >= max(connected for connected, _ in times)


def test_local_copy_skips_views_of_the_source():
    plan = jobs.make_plan(ParallelConfig(), EngineParallelConfig())
    whole = jobs.whole_weights(plan.table)
    shared = dict(whole)
    shared["model.norm.weight"] = torch.zeros(16)
    versions = {name: tensor._version for name, tensor in shared.items()}
    copy_local(plan, 0, whole.__getitem__, shared)
    assert torch.equal(shared["model.norm.weight"], whole["model.norm.weight"])
    written = [name for name, tensor in shared.items() if tensor._version != versions[name]]
    assert written == ["model.norm.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "axis"), [((37, 53), 0), ((37, 53), 1), ((37, 1, 4), 0)])
def test_checksums_of_disjoint_slices_add_up(dtype, shape, axis):
    whole = torch.randn(shape).to(dtype)
    total = checksum(whole, whole.shape, None, 0)
    size = whole.shape[axis]
    parts = [
        checksum(whole.narrow(axis, low, high - low), whole.shape, axis, low)
        for low, high in pairwise((0, 5, 20, size))
    ]
    assert sum(parts) == total
    bits = whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()]).long().flatten()
    assert total == (bits * (2 * torch.arange(whole.numel()) + 1)).sum()


def test_checksum_detects_swapped_elements_and_zero_sign():
    whole = torch.zeros(4, 4)
    whole[0, 0], whole[1, 1] = 1.0, 2.0
    swapped = whole.clone()
    swapped[0, 0], swapped[1, 1] = 2.0, 1.0
    negative = whole.clone()
    negative[3, 3] = -0.0
    sums = {int(checksum(tensor, (4, 4), None, 0)) for tensor in (whole, swapped, negative)}
    assert len(sums) == 3


@pytest.mark.parametrize(
    "after_s", [0.0, 0.3], ids=["before_it_is_waited_for", "while_it_is_waited_for"]
)
def test_agreement_ends_without_timeout_after_give_up(after_s):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client():
        return TCPStore("127.0.0.1", store.port, is_master=False)

    def link(rank):
        return Link(client(), rank, ["trainer", "engine"], timeout=timedelta(seconds=60))

    with ThreadPoolExecutor(2) as threads:
        ours, theirs = threads.map(link, (0, 1))
    begin = time.monotonic()
    giving_up = threading.Timer(after_s, lambda: ours.abort(client()))
    giving_up.start()
    if not after_s:
        giving_up.join()
    expects_error = pytest.raises(
        AlignerError, match=r"it was not taken:\n(.*aborted|engine does not answer)"
    )
    with expects_error, ours.agreement("it was not taken"):
        pass
    giving_up.join()
    theirs.close()
    assert time.monotonic() - begin < 20


def test_lost_engine_fails_agreement_on_all_ranks():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agree(rank):
        client = TCPStore("127.0.0.1", store.port, is_master=False)
        link = Link(client, rank, ["trainer", "engine"], timeout=timedelta(seconds=60))
        with link.agreement("it was not taken"):
            if rank == 1:
                raise EngineExited("its worker was killed")

    with ThreadPoolExecutor(2) as threads:
        trainer, engine = [threads.submit(agree, rank) for rank in (0, 1)]
        with pytest.raises(AlignerError, match=r"it was not taken:\nengine: its worker was killed"):
            trainer.result()
        with pytest.raises(EngineExited, match="its worker was killed"):
            engine.result()
