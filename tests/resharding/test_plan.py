from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.schema import EngineParallel, Parallel
from aligner.config.weights import Slice, TensorSpec, engine_slices, trainer_slices, weight_table
from aligner.errors import AlignerError
from aligner.resharding import transport
from aligner.resharding.plan import TransferPlan, plan_transfers
from tests.resharding.layouts import cut, empty_views, tiny_shape, whole_weights

SIZES = st.sampled_from([1, 2, 4])


def make_plan(trainer: Parallel, engine: EngineParallel, tied: bool = True) -> TransferPlan:
    shape = tiny_shape(tied=tied)
    table = weight_table(shape)
    return plan_transfers(
        table,
        {rank: trainer_slices(table, shape.num_layers, trainer, rank) for rank in range(trainer.ranks)},
        {rank: engine_slices(table, engine, rank) for rank in range(engine.ranks)},
    )


@settings(max_examples=40, deadline=None)
@given(
    tensor=SIZES,
    pipeline=SIZES,
    data=SIZES,
    engine_tensor=SIZES,
    engine_data=SIZES,
    tied=st.booleans(),
    limit=st.integers(1, 400),
)
def test_every_target_byte_is_written_once_and_with_the_right_value(
    tensor, pipeline, data, engine_tensor, engine_data, tied, limit
):
    plan = make_plan(
        Parallel(tensor=tensor, pipeline=pipeline, data=data), EngineParallel(tensor=engine_tensor, data=engine_data), tied
    )
    whole = whole_weights(plan.table)
    views = {rank: empty_views(plan.table, dict(slices)) for rank, slices in plan.target.items()}
    writes = {rank: {name: torch.zeros_like(view) for name, view in named.items()} for rank, named in views.items()}

    for source in plan.source:
        for target in plan.target:
            for bucket in transport.buckets(plan.between(source, target), plan.specs, limit):
                assert sum(piece.numel for piece in bucket) <= max(limit, 24)  # the widest row has 24 elements
                for piece in bucket:
                    rows = slice(piece.start, piece.stop)
                    given_part = transport.given(
                        plan, piece.transfer, lambda name, s=source: cut(whole[name], plan.source[s][name])
                    )
                    transport.wanted(plan, piece.transfer, views[target])[rows] = given_part[rows]
                    transport.wanted(plan, piece.transfer, writes[target])[rows] += 1

    for rank, slices in plan.target.items():
        for name, piece in slices.items():
            assert torch.equal(views[rank][name], cut(whole[name], piece)), (rank, name)
            assert torch.equal(writes[rank][name], torch.ones_like(writes[rank][name])), (rank, name)


def table_of(rows: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("w", (rows, 3), 0),)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 30))
def test_uneven_and_overlapping_slices_are_covered_exactly_once(data, rows):
    def pieces() -> list[Slice]:
        edges = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=5))})
        return [Slice("w", 0, low, high) for low, high in pairwise(edges)]

    held = pieces() + pieces()
    source = dict(enumerate({"w": piece} for piece in held))
    target = dict(enumerate({"w": piece} for piece in [*pieces(), Slice("w", None, 0, 0)]))
    plan = plan_transfers(table_of(rows), source, target)
    for rank, slices in target.items():
        piece = slices["w"]
        low, high = (0, rows) if piece.axis is None else (piece.start, piece.stop)
        written = [row for t in plan.transfers if t.target == rank for row in range(t.start, t.stop)]
        assert sorted(written) == list(range(low, high))
    for transfer in plan.transfers:
        assert held[transfer.source].start <= transfer.start < transfer.stop <= held[transfer.source].stop


def test_a_rank_copies_what_it_holds_itself():
    plan = make_plan(Parallel(tensor=2, data=2), EngineParallel(tensor=2, data=2))
    assert all(transfer.source == transfer.target for transfer in plan.transfers)
    assert all(plan.bytes_sent(rank) == plan.bytes_received(rank) == 0 for rank in range(4))
    whole = sum(spec.numel * 4 // (1 if spec.axis is None else 2) for spec in plan.table)
    assert [plan.bytes_local(rank) for rank in range(4)] == [whole] * 4


def test_replicas_share_the_sending_evenly():
    table = tuple(TensorSpec(f"w{index}", (8, 4), 0) for index in range(12))
    full = {spec.name: Slice(spec.name, None, 0, 0) for spec in table}
    plan = plan_transfers(table, dict.fromkeys(range(3), full), {3: full})
    assert [plan.bytes_sent(rank) for rank in range(3)] == [4 * 8 * 4 * 4] * 3
    assert plan.bytes_received(3) == 12 * 8 * 4 * 4


def test_an_error_names_every_tensor_that_no_source_holds():
    table = (*table_of(4), TensorSpec("v", (4,), None), TensorSpec("held", (4,), None))
    whole = {spec.name: Slice(spec.name, None, 0, 0) for spec in table}
    source = {0: {"w": Slice("w", 0, 0, 2), "held": whole["held"]}}
    with pytest.raises(
        AlignerError, match=r"w \[2, 4\) along dimension 0: rank 1 needs it(.|\n)*v: rank 1 needs it"
    ) as caught:
        plan_transfers(table, source, {1: whole})
    assert "held:" not in str(caught.value)


def test_slices_along_different_dimensions_are_refused():
    with pytest.raises(AlignerError, match=r"w .*different dimensions"):
        plan_transfers(table_of(4), {0: {"w": Slice("w", 0, 0, 4)}}, {0: {"w": Slice("w", 1, 0, 3)}})


def test_a_slice_outside_the_tensor_or_of_an_unlisted_one_is_refused():
    with pytest.raises(AlignerError, match=r"no slice \[2, 5\) along dimension 0"):
        plan_transfers(table_of(4), {0: {"w": Slice("w", 0, 2, 5)}}, {0: {"w": Slice("w", 0, 2, 4)}})
    with pytest.raises(AlignerError, match="does not list: x"):
        plan_transfers(table_of(4), {0: {"x": Slice("x", None, 0, 0)}}, {})
