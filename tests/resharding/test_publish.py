"""Real publishes over gloo between simulated trainer shards and an engine's views."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aligner.config.schema import EngineParallel, Parallel
from aligner.config.weights import engine_slices, trainer_slices, weight_table
from aligner.errors import AlignerError
from aligner.resharding.plan import plan_transfers
from aligner.resharding.resharder import Resharder
from aligner.resharding.verify import checksum, verify
from tests.resharding.layouts import cut, empty_views, tiny_shape, whole_weights


def publish(trainer: Parallel, engine: EngineParallel, bucket_bytes: int, corrupt: tuple[int, str] | None = None) -> dict:
    """One rank: publish twice with other weights, verify, and compare with the slices of the whole tensors."""
    rank, shape = dist.get_rank(), tiny_shape(tied=trainer.pipeline > 1)
    table = weight_table(shape)
    plan = plan_transfers(
        table,
        {at: trainer_slices(table, shape.num_layers, trainer, at) for at in range(trainer.ranks)},
        {at: engine_slices(table, engine, at) for at in range(engine.ranks)},
    )
    resharder = Resharder(plan, rank, bucket_bytes=bucket_bytes)
    views = empty_views(table, dict(plan.target[rank]))
    for seed in (1, 2):
        whole = whole_weights(table, seed)

        def read(name: str, whole: dict[str, torch.Tensor] = whole) -> torch.Tensor:
            return cut(whole[name], plan.source[rank][name])

        stats = resharder.publish(read, views)
        verify(plan, rank, read, views)
        for name, piece in plan.target[rank].items():
            assert torch.equal(views[name], cut(whole[name], piece)), name
    error = ""
    if corrupt:
        if corrupt[0] == rank:
            views[corrupt[1]].view(torch.int32).flatten()[-1] ^= 1
        try:
            verify(plan, rank, read, views)
        except AlignerError as caught:
            error = str(caught)
    held = sum(view.nbytes for view in views.values())
    return {
        "error": error,
        "held": held,
        "local": stats.bytes_local,
        "remote": stats.bytes_remote,
        "plan": plan.bytes_received(rank),
    }


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (Parallel(pipeline=2), EngineParallel(data=2)),
        (Parallel(tensor=2), EngineParallel(data=2)),
        (Parallel(data=2), EngineParallel(tensor=2)),
        (Parallel(tensor=2, pipeline=2), EngineParallel(tensor=2, data=2)),
        (Parallel(tensor=4), EngineParallel(tensor=2, data=2)),
        (Parallel(pipeline=2, data=2), EngineParallel(tensor=4)),
        (Parallel(pipeline=4), EngineParallel(data=4)),
    ],
    ids=["pp2-dp2", "tp2-dp2", "dp2-tp2", "tp2pp2-tp2dp2", "tp4-tp2dp2", "pp2dp2-tp4", "pp4-dp4"],
)
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20], ids=["small-buckets", "one-bucket"])
def test_engine_slices_equal_the_whole_tensors(pool, trainer, engine, bucket_bytes):
    for result in pool.run(publish, trainer.ranks, trainer, engine, bucket_bytes):
        assert result["local"] + result["remote"] == result["held"]
        assert result["remote"] == result["plan"]


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "model.layers.3.input_layernorm.weight"])
def test_one_wrong_bit_is_reported_on_every_rank_with_the_tensors_name(pool, name):
    results = pool.run(publish, 4, Parallel(tensor=2, pipeline=2), EngineParallel(tensor=2, data=2), 1 << 20, (3, name))
    for result in results:
        assert f"{name} on rank(s) 3" in result["error"]
        assert result["error"].count("on rank(s)") == 1


def missing_view() -> str:
    spec = weight_table(tiny_shape())
    slices = {rank: engine_slices(spec, EngineParallel(), rank) for rank in range(1)}
    plan = plan_transfers(spec, slices, slices)
    views = empty_views(spec, slices[0])
    del views["model.norm.weight"]
    try:
        Resharder(plan, 0).publish(lambda name: whole_weights(spec)[name], views)
    except AlignerError as error:
        return str(error)
    return ""


def test_a_view_that_the_engine_does_not_give_is_named():
    assert missing_view().startswith("model.norm.weight: the engine gives no view")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
def test_checksums_of_disjoint_slices_add_up(dtype, axis):
    whole = torch.randn(37, 53).to(dtype)
    total = checksum(whole, whole.shape, None, 0)
    size = whole.shape[axis]
    parts = [
        checksum(whole.narrow(axis, low, high - low), whole.shape, axis, low) for low, high in ((0, 5), (5, 20), (20, size))
    ]
    assert sum(parts) == total
    bits = whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()]).long().flatten()
    assert total == (bits * (2 * torch.arange(whole.numel()) + 1)).sum()


def test_a_checksum_sees_exchanged_elements_and_signs_of_zero():
    whole = torch.zeros(4, 4)
    whole[0, 0], whole[1, 1] = 1.0, 2.0
    swapped = whole.clone()
    swapped[0, 0], swapped[1, 1] = 2.0, 1.0
    negative = whole.clone()
    negative[3, 3] = -0.0
    sums = {int(checksum(tensor, (4, 4), None, 0)) for tensor in (whole, swapped, negative)}
    assert len(sums) == 3
