"""Validation of layouts, and the weight slices of each rank of the trainer and the engine."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from aligner.models.hugging_face import read_config
from aligner.models.layouts import layout_problems
from aligner.models.weight_slices import (
    Slice,
    compute_coordinates,
    compute_engine_slices,
    compute_trainer_slices,
    stage_layers,
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
            {"pipeline": 2, "virtual_pipeline": 3},
            "8 layers must be a multiple of 2 stages x 3 chunks",
        ),
        (
            DENSE,
            {"pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 2},
            "which requires chunks of equal size",
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
        for name, piece in compute_trainer_slices(table, EXPERTS.num_layers, layout, rank).items():
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
        (
            {"pipeline": 2, "virtual_pipeline": 2},
            [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]],
        ),
    ],
)
def test_pipeline_stages_hold_expected_layers(layout, expected):
    assert [stage_layers(8, ParallelConfig(**layout), stage) for stage in range(2)] == expected


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
            table, 8, ParallelConfig(pipeline=2), rank
        )


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
