"""Transfer plans: each element is written once, senders are balanced, invalid plans are refused."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligner.errors import AlignerError
from aligner.models.weight_slices import Slice, TensorSpec
from aligner.resharding import transfer_plan, transport
from aligner.resharding.transfer_plan import TransferPlan, extent, plan_resharding, plan_transfers
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding.layouts import cut, tiny_shape, whole_weights

SIZES = st.sampled_from([1, 2, 4])
SHAPES = st.builds(
    tiny_shape,
    family=st.sampled_from(["llama", "mixtral", "qwen3_moe", "gpt2", "gpt_neox"]),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
)


def make_plan(
    trainer: ParallelConfig, engine: EngineParallelConfig, first_engine_rank: int = 0
) -> TransferPlan:
    return plan_resharding(tiny_shape(), trainer, engine, first_engine_rank=first_engine_rank)


def bytes_sent(plan: TransferPlan, rank: int) -> int:
    return plan.itemsize * sum(
        one.numel for one in plan.transfers if one.source == rank and one.target != rank
    )


def bytes_received(plan: TransferPlan, rank: int) -> int:
    return plan.itemsize * sum(
        one.numel for one in plan.transfers if one.target == rank and one.source != rank
    )


def bytes_local(plan: TransferPlan, rank: int) -> int:
    return plan.itemsize * sum(one.numel for one in plan.transfers_between(rank, rank))


@st.composite
def plans(draw) -> TransferPlan:
    """Draw plans of any model at any valid layouts, in one world or in two worlds."""
    # a vocabulary size that the tensor-parallel ranks divide, or one that needs padding
    shape = dataclasses.replace(draw(SHAPES), vocab_size=draw(st.sampled_from([32, 31])))
    tensor, pipeline, data, context = (
        draw(SIZES),
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
    )
    trainer = ParallelConfig(
        tensor=tensor,
        sequence=tensor > 1,
        pipeline=pipeline,
        virtual_pipeline=draw(st.sampled_from([1, 2])) if pipeline == 2 else 1,
        data=data,
        context=context,
        expert=draw(SIZES) if shape.num_experts else 1,
        expert_tensor=draw(st.sampled_from([None, 1, 2])) if shape.num_experts else None,
    )
    assume(tensor * data * context % (trainer.expert * trainer.expert_tensor_size) == 0)
    engine = EngineParallelConfig(
        tensor=draw(SIZES),
        data=draw(SIZES),
        expert=draw(SIZES) if shape.num_experts else 1,
        pipeline=draw(st.sampled_from([1, 1, 3, 4])),
    )
    assume(engine.tensor % engine.expert == 0)
    first = draw(st.sampled_from([0, trainer.ranks]))
    # with 24, ranks have different numbers of the 32 rows, or one rank has only padding
    padding = draw(st.sampled_from([1, 24]))
    return plan_resharding(
        shape,
        trainer,
        engine,
        first_engine_rank=first,
        vocabulary_multiple=padding,
        has_outer_weights_on_all_stages=draw(st.booleans()),
    )


@pytest.mark.promise("weight-sync-writes-each-element-once")
@settings(max_examples=40, deadline=None)
@given(plan=plans(), limit=st.integers(32, 400), small=st.integers(0, 32))
def test_each_target_element_is_written_once(plan, limit, small):
    whole = whole_weights(plan.table)
    for target, slices in plan.target.items():
        views = {name: torch.zeros_like(cut(whole[name], piece)) for name, piece in slices.items()}
        writes = {name: torch.zeros_like(view) for name, view in views.items()}
        for source in plan.source:
            for message in transport.split_into_messages(
                plan.transfers_between(source, target), plan.specs, limit, small
            ):
                assert sum(piece.numel for piece in message) <= limit
                assert len(message) == 1 or all(piece.numel <= small for piece in message)
                for piece in message:
                    rows = slice(piece.start, piece.stop)
                    given_part = transport.source_view(
                        plan,
                        piece.transfer,
                        lambda name, s=source: cut(whole[name], plan.source[s][name]),
                    )
                    transport.target_view(plan, piece.transfer, views)[rows] = given_part[rows]
                    transport.target_view(plan, piece.transfer, writes)[rows] += 1
        for name, piece in slices.items():
            assert torch.equal(views[name], cut(whole[name], piece)), (target, name)
            assert torch.equal(writes[name], torch.ones_like(writes[name])), (target, name)


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_only_missing_elements_are_transferred(plan):
    for transfer in plan.transfers:
        held = plan.source.get(transfer.target, {}).get(transfer.name)
        if transfer.source != transfer.target and held is not None:
            low, high = extent(plan.specs[transfer.name], held, transfer.axis)
            assert transfer.stop <= low or high <= transfer.start, transfer


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_replicas_send_equal_bytes_within_one_tensor(plan):
    largest = max(spec.numel for spec in plan.table) * plan.itemsize
    for one, other in combinations(plan.source, 2):
        if plan.source[one] == plan.source[other]:
            assert abs(bytes_sent(plan, one) - bytes_sent(plan, other)) <= largest


@settings(max_examples=40, deadline=None)
@given(plan=plans(), bucket=st.integers(4 * 32 * 4, 4000))
def test_sender_and_receiver_agree_on_batch_order(plan, bucket):
    """Sender and receiver have the same i-th batch in the same step of their round."""
    world = len(plan.labels)
    steps = {rank: transport.plan_steps(plan, rank, bucket) for rank in range(world)}
    for rank, mine in steps.items():
        rounds = [(step.to_rank - rank) % world for step in mine]
        assert rounds == sorted(rounds)
        for other in set(range(world)) - {rank}:
            sent = [step.outgoing for step in mine if step.to_rank == other]
            received = [step.incoming for step in steps[other] if step.from_rank == rank]
            assert [batch for batch in sent if batch] == [batch for batch in received if batch]
            assert all(batch == received[place] for place, batch in enumerate(sent) if batch)
            assert all(
                sum(map(transport.message_numel, batch)) * plan.itemsize <= bucket // 4
                for batch in sent
            )


@settings(max_examples=20, deadline=None)
@given(plan=plans(), limit=st.integers(1, 5000))
def test_groups_partition_plan_into_consecutive_tensors(plan, limit):
    groups = plan.split_into_groups(limit)
    assert [spec for group in groups for spec in group.table] == list(plan.table)
    assert sorted(map(str, plan.transfers)) == sorted(
        str(transfer) for group in groups for transfer in group.transfers
    )
    for group in groups:
        assert (
            len(group.table) == 1
            or sum(spec.numel for spec in group.table) * plan.itemsize <= limit
        )
        for rank, slices in group.target.items():
            assert slices == {
                spec.name: plan.target[rank][spec.name]
                for spec in group.table
                if spec.name in plan.target[rank]
            }


def test_weight_that_no_engine_rank_holds_is_an_error(monkeypatch):
    """For example if the engine's stages had fewer layers than the model."""
    compute = transfer_plan.compute_engine_slices
    dropped = "model.layers.3.mlp.up_proj.weight"

    def compute_all_but_one(*args, **kwargs):
        slices = compute(*args, **kwargs)
        slices.pop(dropped, None)
        return slices

    monkeypatch.setattr(transfer_plan, "compute_engine_slices", compute_all_but_one)
    with pytest.raises(AlignerError, match=f"no rank of the engine holds {dropped}"):
        make_plan(ParallelConfig(pipeline=2), EngineParallelConfig(pipeline=2))


def test_rank_labels_contain_their_role():
    assert make_plan(ParallelConfig(data=2), EngineParallelConfig(data=2)).labels == (
        "trainer rank 0",
        "trainer rank 1",
    )
    two_worlds = make_plan(
        ParallelConfig(data=2), EngineParallelConfig(tensor=2), first_engine_rank=2
    )
    assert two_worlds.labels == (
        "trainer rank 0",
        "trainer rank 1",
        "engine rank 0",
        "engine rank 1",
    )


def test_indivisible_layout_is_refused_with_every_problem():
    shape = tiny_shape("mixtral")
    with pytest.raises(AlignerError) as caught:
        plan_resharding(
            shape,
            ParallelConfig(tensor=3, pipeline=3, expert=3, expert_tensor=5),
            EngineParallelConfig(tensor=7, data=1),
        )
    message = str(caught.value)
    for wanted in (
        "actor.parallel.tensor=3: must divide the model's 4 attention heads",
        "actor.parallel.tensor=3: must divide the model's 4 key-value heads or be a multiple of",
        ("actor.parallel.expert_tensor=5: must divide the 24 feed-forward rows of each expert"),
        "actor.parallel.expert=3: must divide the model's 4 experts",
        ("actor.parallel.expert=3 x expert_tensor=5: must divide the 3 ranks of a pipeline stage"),
        "engine.parallel.tensor=7: must divide the model's 4 attention heads",
        ("engine.parallel.tensor=7: must divide the 24 feed-forward rows of each expert"),
    ):
        assert wanted in message
    with pytest.raises(
        AlignerError,
        match=(
            "leaves 1 of the model's 4 layers, but each of the 2 earlier stages needs at least one"
        ),
    ):
        plan_resharding(
            shape, ParallelConfig(pipeline=3, last_stage_layers=3), EngineParallelConfig()
        )


@pytest.mark.parametrize(("family", "key_heads"), [("llama", 3), ("gpt_neox", 9)])
def test_tensor_size_that_splits_heads_is_refused(family, key_heads):
    shape = replace(
        tiny_shape(family), num_heads=9, num_kv_heads=key_heads, hidden_size=36, vocab_size=36
    )
    with pytest.raises(
        AlignerError,
        match=r"engine\.parallel\.tensor=2: must divide the model's 9 attention heads",
    ):
        plan_resharding(shape, ParallelConfig(), EngineParallelConfig(tensor=2))
    plan_resharding(shape, ParallelConfig(), EngineParallelConfig(tensor=3))


def test_tensor_size_that_splits_kv_heads_unevenly_is_refused():
    shape = replace(tiny_shape(), num_heads=24, num_kv_heads=6, hidden_size=96)
    message = (
        r"engine\.parallel\.tensor=4: must divide the model's 6 key-value heads or be a multiple of"
        r" them; valid sizes: 1, 2, 3, 6$"
    )
    with pytest.raises(AlignerError, match=message):
        plan_resharding(shape, ParallelConfig(), EngineParallelConfig(tensor=4))


@pytest.mark.parametrize("trainer", [1, 2, 4, 8])
@pytest.mark.parametrize("engine", [1, 2, 4, 8])
def test_engine_ranks_receive_the_kv_head_of_their_queries(trainer, engine):
    shape = replace(tiny_shape(kv_heads=2), num_heads=8)
    plan = plan_resharding(
        shape, ParallelConfig(tensor=trainer), EngineParallelConfig(tensor=engine)
    )
    whole = whole_weights(plan.table)
    heads_per_rank = 8 // engine
    for rank in range(engine):
        received: dict[str, list[Tensor]] = {}
        for transfer in (one for one in plan.transfers if one.target == rank):
            held = cut(whole[transfer.name], plan.source[transfer.source][transfer.name])
            axis = transfer.axis
            if axis is not None:
                start, _ = extent(
                    plan.specs[transfer.name],
                    plan.source[transfer.source][transfer.name],
                    axis,
                )
                held = held.narrow(axis, transfer.start - start, transfer.stop - transfer.start)
            received.setdefault(transfer.name, []).append(held)
        # Query head h reads KV head h // 4.
        heads = range(rank * heads_per_rank, (rank + 1) * heads_per_rank)
        key = torch.cat(received["model.layers.0.self_attn.k_proj.weight"])
        rows = [4 * head + row for head in sorted({h // 4 for h in heads}) for row in range(4)]
        assert torch.equal(key, whole["model.layers.0.self_attn.k_proj.weight"][rows])


def table_of(rows: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("w", (rows, 3), 0),)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 30))
def test_uneven_and_overlapping_slices_are_sent_once(data, rows):
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
        written = [
            row for t in plan.transfers if t.target == rank for row in range(t.start, t.stop)
        ]
        assert sorted(written) == list(range(low, high))
    for transfer in plan.transfers:
        assert (
            held[transfer.source].start
            <= transfer.start
            < transfer.stop
            <= held[transfer.source].stop
        )


def test_equal_layouts_need_only_local_copies():
    plan = make_plan(ParallelConfig(tensor=2, data=2), EngineParallelConfig(tensor=2, data=2))
    assert all(transfer.source == transfer.target for transfer in plan.transfers)
    assert all(bytes_sent(plan, rank) == bytes_received(plan, rank) == 0 for rank in range(4))
    whole = sum(spec.numel * 4 // (1 if spec.axis is None else 2) for spec in plan.table)
    assert [bytes_local(plan, rank) for rank in range(4)] == [whole] * 4


def test_replicas_send_equal_shares():
    table = tuple(TensorSpec(f"w{index}", (8, 4), 0) for index in range(12))
    full = {spec.name: Slice(spec.name, None, 0, 0) for spec in table}
    plan = plan_transfers(table, dict.fromkeys(range(3), full), {3: full})
    assert [bytes_sent(plan, rank) for rank in range(3)] == [4 * 8 * 4 * 4] * 3
    assert bytes_received(plan, 3) == 12 * 8 * 4 * 4


def test_tensors_without_source_are_named_in_error():
    table = (*table_of(4), TensorSpec("v", (4,), None), TensorSpec("held", (4,), None))
    whole = {spec.name: Slice(spec.name, None, 0, 0) for spec in table}
    source = {0: {"w": Slice("w", 0, 0, 2), "held": whole["held"]}}
    with pytest.raises(
        AlignerError,
        match=r"w \[2, 4\) along dimension 0: required by rank 1, but missing(.|\n)*v: required by rank 1, but missing",
    ) as caught:
        plan_transfers(table, source, {1: whole})
    assert "held:" not in str(caught.value)


def test_slices_along_different_dimensions_are_refused():
    with pytest.raises(AlignerError, match=r"w .*different dimensions"):
        plan_transfers(
            table_of(4), {0: {"w": Slice("w", 0, 0, 4)}}, {0: {"w": Slice("w", 1, 0, 3)}}
        )


def test_slice_outside_tensor_or_table_is_refused():
    with pytest.raises(
        AlignerError, match=r"slice \[2, 5\) along dimension 0 is outside the tensor"
    ):
        plan_transfers(
            table_of(4), {0: {"w": Slice("w", 0, 2, 5)}}, {0: {"w": Slice("w", 0, 2, 4)}}
        )
    with pytest.raises(AlignerError, match="not in the weight table: x"):
        plan_transfers(table_of(4), {0: {"x": Slice("x", None, 0, 0)}}, {})
