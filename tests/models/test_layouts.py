"""Validation of layouts, and the weight slices of each rank of the trainer and the engine."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aligner.models.hugging_face import read_config
from aligner.models.layouts import engine_problems, layout_problems
from aligner.models.pipeline_stages import (
    count_engine_stage_layers,
    count_part_layers,
    get_engine_stage_layers,
    stage_layers,
)
from aligner.models.weight_slices import (
    Slice,
    compute_coordinates,
    compute_engine_slices,
    compute_trainer_slices,
    cut_shape,
    weight_table,
)
from aligner.placement.placement_table import describe_layout
from aligner.schema import EngineParallelConfig, ParallelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "hidden_act": "silu",
}
QWEN3_5 = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 8,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
}
DELTA_NETS = read_config(QWEN3_5, "test")
DENSE, EXPERTS = read_config(LLAMA, "test"), read_config(MIXTRAL, "test")
assert EXPERTS.experts is not None
THREE_EXPERTS = dataclasses.replace(
    EXPERTS, experts=dataclasses.replace(EXPERTS.experts, count=3, ffn_hidden_size=23)
)
BIASED_EXPERTS = dataclasses.replace(
    EXPERTS, experts=dataclasses.replace(EXPERTS.experts, has_biases=True)
)


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        (
            DENSE,
            {"tensor": 3},
            "actor.parallel.tensor=3: must divide the model's 4 attention heads",
        ),
        (DENSE, {"sequence": True}, "sequence=true: requires actor.parallel.tensor above 1"),
        (
            DENSE,
            {"virtual_pipeline": 2},
            "virtual_pipeline=2: requires actor.parallel.pipeline above 1",
        ),
        (
            DENSE,
            {"pipeline": 3, "virtual_pipeline": 3},
            "actor.parallel.pipeline=3 x virtual_pipeline=3: must be at most the model's 8 layers",
        ),
        (DENSE, {"pipeline": 9}, "actor.parallel.pipeline=9: must be at most the model's 8 layers"),
        (
            DENSE,
            {"pipeline": 2, "last_stage_layers": 8},
            "last_stage_layers=8: leaves 0 of the model's 8 layers, but each of the 1 earlier stages"
            " needs at least one; must be at most 7",
        ),
        (
            DENSE,
            {"pipeline": 2, "stage_layers": [3, 3, 2]},
            "stage_layers=[3, 3, 2]: must have 2 numbers, for 2 stages",
        ),
        (
            DENSE,
            {"pipeline": 2, "virtual_pipeline": 2, "stage_layers": [4, 4]},
            "stage_layers=[4, 4]: must have 4 numbers, for 2 stages x 2 chunks",
        ),
        (
            DENSE,
            {"pipeline": 2, "stage_layers": [8, 0]},
            "stage_layers=[8, 0]: each number must be at least 1",
        ),
        (
            DENSE,
            {"pipeline": 2, "stage_layers": [4, 3]},
            "stage_layers=[4, 3]: the sum is 7, but must be the model's 8 layers",
        ),
        (
            DENSE,
            {"pipeline": 2, "stage_layers": [4, 4], "last_stage_layers": 4},
            "stage_layers=[4, 4]: cannot be combined with actor.parallel.last_stage_layers=4",
        ),
        (
            DENSE,
            {"pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 2},
            "set actor.parallel.stage_layers instead",
        ),
        (DENSE, {"expert": 2, "data": 2}, "expert=2: requires a mixture-of-experts model"),
        (EXPERTS, {"expert": 3, "data": 3}, "expert=3: must divide the model's 4 experts"),
        (EXPERTS, {"expert": 2}, "must divide the 1 ranks of a pipeline stage"),
        (
            EXPERTS,
            {"tensor": 2, "sequence": True, "expert_tensor": 5},
            "expert_tensor=5: must divide the 24 feed-forward rows of each expert",
        ),
        (
            DELTA_NETS,
            {"tensor": 2},
            "actor.parallel.tensor=2: must divide the model's 3 key heads of delta nets",
        ),
        (
            DELTA_NETS,
            {"context": 2},
            "actor.parallel.context=2: must be 1 for a model with gated delta nets",
        ),
        (
            BIASED_EXPERTS,
            {"tensor": 2, "sequence": True},
            "expert_tensor=2: must be 1 for a model whose experts have biases; set"
            " actor.parallel.expert_tensor=1",
        ),
        (
            EXPERTS,
            {"tensor": 2},
            "requires actor.parallel.sequence=true for a mixture-of-experts model",
        ),
    ],
)
def test_invalid_layout_is_reported_with_its_key(shape, layout, message):
    assert message in "\n".join(layout_problems("actor.parallel", ParallelConfig(**layout), shape))


@pytest.mark.parametrize(
    "layout",
    [{"context": 2}, {"pipeline": 2, "virtual_pipeline": 4}, {"tensor": 2, "sequence": True}],
)
def test_valid_layout_has_no_problems(layout):
    assert not list(layout_problems("actor.parallel", ParallelConfig(**layout), DENSE))


def layouts():
    for tensor, pipeline, chunks, data, context in product(
        (1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2)
    ):
        for expert, expert_tensor in product((1, 2, 4), (None, 1)):
            layout = ParallelConfig(
                tensor=tensor,
                sequence=tensor > 1,
                pipeline=pipeline,
                virtual_pipeline=chunks,
                data=data,
                context=context,
                expert=expert,
                expert_tensor=expert_tensor,
            )
            if not list(layout_problems("layout", layout, EXPERTS)):
                yield layout


@pytest.mark.parametrize("layout", layouts(), ids=describe_layout)
def test_all_ranks_hold_each_weight_equally_often(layout):
    table = weight_table(EXPERTS)
    held = {spec.name: 0 for spec in table}
    for rank in range(layout.ranks):
        for name, piece in compute_trainer_slices(table, EXPERTS, layout, rank).items():
            spec = next(spec for spec in table if spec.name == name)
            held[name] += (
                spec.numel
                if piece.axis is None
                else spec.numel // spec.shape[piece.axis] * (piece.stop - piece.start)
            )
    for spec in table:
        of_expert = spec.expert is not None
        inside = layout.expert_tensor_size if of_expert else layout.tensor
        ranks = layout.ranks // layout.pipeline // (layout.expert if of_expert else 1)
        # With four tensor ranks, two of them hold each of the two KV heads.
        is_kv_head = ".k_proj." in spec.name or ".v_proj." in spec.name
        copies = 2 if is_kv_head and layout.tensor == 4 else 1
        holders = ranks if spec.axis is None else ranks // inside * copies
        assert held[spec.name] == spec.numel * holders, spec.name


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"pipeline": 2}, [[range(4)], [range(4, 8)]]),
        ({"pipeline": 2, "last_stage_layers": 2}, [[range(6)], [range(6, 8)]]),
        ({"pipeline": 2, "stage_layers": [5, 3]}, [[range(5)], [range(5, 8)]]),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "stage_layers": [3, 2, 2, 1]},
            [[range(3), range(5, 7)], [range(3, 5), range(7, 8)]],
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2},
            [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]],
        ),
    ],
)
def test_pipeline_stages_hold_expected_layers(layout, expected):
    assert [stage_layers(DENSE, ParallelConfig(**layout), stage) for stage in range(2)] == expected


QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
LLAMA_61 = LLAMA | {
    "num_hidden_layers": 61,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("entries", "layout", "expected"),
    [
        # The head takes the time of 3 of the small layers, and of 1.2 of the large layers.
        (QWEN3_235B, {"pipeline": 4}, (24, 24, 24, 22)),
        (QWEN3_235B, {"pipeline": 8}, (12, 12, 12, 12, 12, 12, 12, 10)),
        (QWEN3_235B, {"pipeline": 2, "virtual_pipeline": 2}, (24, 24, 24, 22)),
        (LLAMA_61, {"pipeline": 4}, (15, 16, 16, 14)),
        (LLAMA_61, {"pipeline": 4, "last_stage_layers": 16}, (15, 15, 15, 16)),
        (LLAMA_61, {"pipeline": 4, "last_stage_layers": 14}, (15, 16, 16, 14)),
        # Equal stages stay equal.
        (QWEN3_235B, {"pipeline": 2}, (47, 47)),
        (LLAMA | {"vocab_size": 320000}, {"pipeline": 4}, (2, 2, 2, 2)),
        # A head that takes longer than all layers leaves one layer for the last stage.
        (LLAMA | {"vocab_size": 320000}, {"pipeline": 3}, (3, 4, 1)),
    ],
)
def test_stages_have_about_equal_times(entries, layout, expected):
    shape = read_config(entries, "test")
    assert count_part_layers(shape, ParallelConfig(**layout)) == expected


@settings(max_examples=80, deadline=None)
@given(data=st.data(), layers=st.integers(2, 40), pipeline=st.integers(2, 6))
def test_every_layer_is_in_one_chunk_of_one_stage(data, layers, pipeline):
    chunks = data.draw(st.integers(1, 3))
    parts = pipeline * chunks
    assume(parts <= layers)
    layout = ParallelConfig(pipeline=pipeline, virtual_pipeline=chunks)
    if data.draw(st.booleans()):
        edges = data.draw(
            st.lists(
                st.integers(1, layers - 1), min_size=parts - 1, max_size=parts - 1, unique=True
            )
        )
        edges = [0, *sorted(edges), layers]
        layout.stage_layers = [stop - start for start, stop in pairwise(edges)]
    shape = DENSE.with_layers(layers)
    assert not list(layout_problems("actor.parallel", layout, shape))
    stages = [stage_layers(shape, layout, stage) for stage in range(pipeline)]
    in_order = [layer for chunk in zip(*stages, strict=True) for part in chunk for layer in part]
    assert in_order == list(range(layers))
    assert all(part for stage in stages for part in stage)


def test_rank_coordinates_follow_default_order():
    layout = ParallelConfig(tensor=2, context=2, data=2, pipeline=2)
    places = [compute_coordinates(rank, layout) for rank in range(layout.ranks)]
    assert [(at.tensor, at.context, at.data, at.pipeline) for at in places[:5]] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 1, 0),
    ]
    assert places[8].pipeline == 1


def test_first_and_last_stage_hold_tied_embedding():
    tied = dataclasses.replace(DENSE, tied_embeddings=True)
    table = weight_table(tied)
    assert all(spec.name != "lm_head.weight" for spec in table)
    for rank in range(2):
        assert "model.embed_tokens.weight" in compute_trainer_slices(
            table, tied, ParallelConfig(pipeline=2), rank
        )


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        (DENSE, {"tensor": 2, "expert": 2}, "expert=2: requires a mixture-of-experts model"),
        (EXPERTS, {"expert": 2}, "expert=2: must divide engine.parallel.tensor=1"),
        (THREE_EXPERTS, {"tensor": 2, "expert": 2}, "expert=2: must divide the model's 3 experts"),
        (
            THREE_EXPERTS,
            {"tensor": 4, "expert": 2},
            "tensor=4 / expert=2: must divide the 23 feed-forward rows of each expert",
        ),
    ],
)
def test_invalid_engine_layout_is_reported_with_its_key(shape, layout, message):
    assert message in "\n".join(engine_problems(EngineParallelConfig(**layout), shape))


def test_engine_ranks_hold_each_expert_equally_often():
    table = weight_table(EXPERTS)
    experts = [spec for spec in table if spec.expert is not None]
    for tensor, expert in ((2, 2), (4, 2), (4, 4)):
        layout = EngineParallelConfig(tensor=tensor, expert=expert, data=2)
        counts = dict.fromkeys((spec.name for spec in experts), 0)
        for rank in range(layout.ranks):
            slices = compute_engine_slices(table, layout, rank)
            for spec in experts:
                if spec.name in slices:
                    piece = slices[spec.name]
                    shape = cut_shape(spec.shape, piece.axis, piece.start, piece.stop)
                    counts[spec.name] += math.prod(shape)
        assert counts == {spec.name: layout.data * spec.numel for spec in experts}


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_engine_stages_divide_layers_like_vllm(stages):
    sizes = count_engine_stage_layers(8, stages)
    assert sizes == {2: (4, 4), 3: (3, 3, 2), 5: (1, 2, 2, 2, 1)}[stages]
    layers = [get_engine_stage_layers(8, stages, stage) for stage in range(stages)]
    assert [layer for stage in layers for layer in stage] == list(range(8))


@pytest.mark.parametrize("is_tied", [False, True])
def test_engine_stage_holds_its_layers_and_the_weights_that_it_uses(is_tied):
    shape = dataclasses.replace(DENSE, tied_embeddings=is_tied)
    table = weight_table(shape)
    layout = EngineParallelConfig(tensor=2, pipeline=3, data=2)
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    outer = {0: {embedding}, 1: set(), 2: {norm, embedding if is_tied else "lm_head.weight"}}
    for rank in range(layout.ranks):
        slices = compute_engine_slices(table, layout, rank)
        stage = rank // 2 % 3
        layers = get_engine_stage_layers(8, 3, stage)
        held = {spec for spec in table if spec.name in slices}
        assert {spec.layer for spec in held if spec.layer is not None} == set(layers)
        assert {spec.name for spec in held if spec.layer is None} == outer[stage]
        replica = compute_engine_slices(table, layout, rank % 6)
        assert slices == replica
        flat = compute_engine_slices(table, EngineParallelConfig(tensor=2), rank % 2)
        assert all(flat[name] == piece for name, piece in slices.items())


def test_engine_stages_may_all_hold_the_weights_outside_the_layers():
    table = weight_table(EXPERTS)
    layout = EngineParallelConfig(tensor=2, expert=2, pipeline=4)
    outer = {spec.name for spec in table if spec.layer is None}
    for rank in range(layout.ranks):
        slices = compute_engine_slices(table, layout, rank, has_outer_weights_on_all_stages=True)
        assert outer <= slices.keys()
        held = [spec for spec in table if spec.name in slices and spec.expert is not None]
        assert {spec.expert for spec in held} == ({0, 1} if rank % 2 == 0 else {2, 3})
        assert {spec.layer for spec in held} == set(range(rank // 2 * 2, rank // 2 * 2 + 2))


def test_engine_slices_exclude_vocabulary_padding():
    table = weight_table(dataclasses.replace(DENSE, vocab_size=72))
    name = "model.embed_tokens.weight"
    ranks = [
        compute_engine_slices(table, EngineParallelConfig(tensor=2), rank, 64) for rank in range(2)
    ]
    assert [slices[name] for slices in ranks] == [Slice(name, 0, 0, 64), Slice(name, 0, 64, 72)]
    even = [compute_engine_slices(table, EngineParallelConfig(tensor=2), rank) for rank in range(2)]
    assert [slices[name] for slices in even] == [Slice(name, 0, 0, 36), Slice(name, 0, 36, 72)]
    for with_padding, without in zip(ranks, even, strict=True):
        assert {at for at in table if with_padding[at.name] != without[at.name]} == {
            at for at in table if 72 in at.shape
        }
