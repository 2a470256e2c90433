"""Shared prefixes are computed once, and results equal those of separate rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligner.megatron.packing import PackedBatch, PackingLayout, pack, pack_micro_batches
from aligner.megatron.shared_prefixes import (
    _common_prefix_lengths,
    _compute_largest_ends,
    attend,
    bundle_rows,
    bundle_without_sharing,
)
from aligner.schema import ParallelConfig
from tests.megatron import jobs

CPU = torch.device("cpu")
GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)
"""Lengths of prompts and of their responses, in tokens"""


def batch_of(groups: list[tuple[int, list[int]]], order: int = 0) -> tuple[Tensor, Tensor]:
    """Return right-padded rows of each prompt with each of its responses, shuffled with the seed
    `order`, and their lengths; responses share no tokens."""
    rows, next_token = [], 1
    for prompt, responses in groups:
        beginning = torch.arange(next_token, next_token + prompt)
        next_token += prompt
        for response in responses:
            rows.append(torch.cat([beginning, torch.arange(next_token, next_token + response)]))
            next_token += response
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order))
    shuffled = [rows[index] for index in chosen]
    return torch.nn.utils.rnn.pad_sequence(shuffled, batch_first=True), torch.tensor(
        [len(row) for row in shuffled]
    )


def shared_pack(tokens: Tensor, lengths: Tensor, sequence: int = 1) -> PackedBatch:
    return pack(
        tokens,
        lengths,
        bundle_rows(tokens, lengths, max_tokens=10_000),
        CPU,
        PackingLayout(sequence_size=sequence, should_share_prefixes=True),
    )


@settings(deadline=None)
@given(GROUPS, st.integers(0, 3))
def test_samples_are_bundled_by_prompt_in_any_order(groups, order):
    tokens, lengths = batch_of(groups, order)
    found = bundle_rows(tokens, lengths, max_tokens=10_000)
    assert sorted(row for bundle in found for row in bundle.rows) == list(range(len(lengths)))
    fewest = sum(
        sum(sizes) + prompt * (1 if prompt >= 4 else len(sizes)) for prompt, sizes in groups
    )
    assert sum(bundle.computed_tokens for bundle in found) == fewest


@settings(deadline=None)
@given(GROUPS, st.integers(1, 60))
def test_multi_row_bundles_stay_within_token_limit(groups, most):
    tokens, lengths = batch_of(groups)
    assert all(
        bundle.computed_tokens <= most or len(bundle.rows) == 1
        for bundle in bundle_rows(tokens, lengths, most)
    )


def sorted_rows(groups: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `batch_of` in the order of their tokens, and their lengths."""
    tokens, lengths = batch_of(groups)
    order = sorted(range(len(tokens)), key=lambda row: tokens[row].tolist())
    return tokens[order].numpy(), lengths[order].numpy()


@settings(deadline=None)
@given(GROUPS, st.integers(1, 60))
def test_candidate_ends_include_every_allowed_bundle(groups, most):
    data, counts = sorted_rows(groups)
    common = _common_prefix_lengths(data, counts)
    ends = _compute_largest_ends(common, counts, most)
    for start in range(len(data)):
        for end in range(start + 2, len(data) + 1):
            shared = common[start : end - 1].min()
            computed = counts[start:end].sum() - (end - start - 1) * shared
            assert end <= ends[start] or shared < 4 or computed > most


def test_number_of_candidate_bundles_is_linear_in_rows():
    def count_candidates(prompts: int) -> int:
        data, counts = sorted_rows([(8, [5] * 4)] * prompts)
        ends = _compute_largest_ends(_common_prefix_lengths(data, counts), counts, 10_000)
        return int((ends - np.arange(len(data))).sum())

    assert count_candidates(32) == 32 * count_candidates(1)


def test_candidate_bundles_of_one_prompt_are_limited_by_budget():
    data, counts = sorted_rows([(8, [5] * 64)])
    ends = _compute_largest_ends(_common_prefix_lengths(data, counts), counts, max_tokens=50)
    assert (ends - np.arange(len(data))).max() == 10


def test_rows_compared_by_loss_stay_ordered_in_one_bundle():
    tokens, lengths = batch_of([(8, [3, 5, 2, 4]), (6, [2, 2])], order=2)
    for bundle in bundle_rows(tokens, lengths, max_tokens=10_000, group_size=2):
        pairs = torch.tensor(bundle.rows).view(-1, 2)
        assert (pairs[:, 0] % 2 == 0).all()
        assert torch.equal(pairs[:, 1], pairs[:, 0] + 1)


def test_large_prompt_group_is_split_over_data_ranks():
    tokens, lengths = batch_of([(16, [4] * 12)])
    options = {
        "data_size": 2,
        "budget": 1000,
        "device": CPU,
        "layout": PackingLayout(should_share_prefixes=True),
    }
    shares = [pack_micro_batches(tokens, lengths, data_rank=rank, **options) for rank in range(2)]
    computed = [sum(batch.tokens.numel() for batch in share) for share in shares]
    assert max(computed) <= 16 + 8 * 4


def test_prompts_stay_whole_when_shares_are_even():
    tokens, lengths = batch_of([(16, [4] * 3), (16, [4] * 3)])
    options = {
        "data_size": 2,
        "budget": 1000,
        "device": CPU,
        "layout": PackingLayout(should_share_prefixes=True),
    }
    shares = [pack_micro_batches(tokens, lengths, data_rank=rank, **options) for rank in range(2)]
    assert [sum(batch.tokens.numel() for batch in share) for share in shares] == [16 + 3 * 4] * 2


@settings(deadline=None)
@given(GROUPS, st.integers(0, 3), st.sampled_from([1, 2, 3]))
def test_shared_prefix_batch_unpacks_to_original_rows(groups, order, sequence):
    tokens, lengths = batch_of(groups, order)
    batch = shared_pack(tokens, lengths, sequence)
    rows, counts = tokens[batch.batch_rows], lengths[batch.batch_rows]
    steps = torch.arange(tokens.shape[1])
    inside = steps < counts[:, None]
    assert torch.equal(batch.unpack_tokens(batch.tokens[0]), rows)
    assert torch.equal(batch.unpack_tokens(batch.positions[0]), torch.where(inside, steps, 0))
    assert torch.equal(batch.unpack_targets(batch.targets), rows[:, 1:])
    asked = batch.unpack_targets(batch.tokens[0, batch.target_index])
    assert torch.equal(asked, torch.where(inside[:, 1:], rows[:, :-1], 0))


def separately(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Return causal attention of each row, [N, L, heads, dim]; zeros at the padding."""
    each, width = query.shape[2] // key.shape[2], query.shape[1]
    key, value = (tensor.repeat_interleave(each, 2) for tensor in (key, value))
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key) * query.shape[-1] ** -0.5
    seen = torch.ones(width, width, dtype=torch.bool).tril()
    attended = torch.einsum(
        "nhqk,nkhd->nqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value
    )
    return torch.where((torch.arange(width) < lengths[:, None])[..., None, None], attended, 0.0)


@settings(deadline=None, max_examples=40)
@given(GROUPS, st.integers(0, 3), st.sampled_from([(2, 2), (6, 2)]), st.sampled_from([1, 3]))
def test_tree_attention_equals_separate_rows(groups, order, heads, sequence):
    tokens, lengths = batch_of(groups, order)
    batch = shared_pack(tokens, lengths, sequence)
    draw = torch.Generator().manual_seed(0)
    # A token's query, key and value depend only on the token. The test uses float64, because the
    # rounding error in float32 depends on the number of terms in a gradient's sum.
    tables = [
        torch.randn(int(tokens.max()) + 1, count, 8, generator=draw, dtype=torch.float64)
        for count in (heads[0], heads[1], heads[1])
    ]
    weights = torch.randn(
        len(lengths), tokens.shape[1], heads[0], 8, generator=draw, dtype=torch.float64
    )
    results = []
    for shared in (True, False):
        leaves = [table.clone().requires_grad_() for table in tables]
        if shared:
            packed = attend(
                *(leaf[batch.tokens[0]] for leaf in leaves), batch.sequences.attention_tree, None
            )
            attended = batch.unpack_tokens(packed)
        else:
            rows = tokens[batch.batch_rows]
            attended = separately(*(leaf[rows] for leaf in leaves), lengths[batch.batch_rows])
        (attended * weights[:, : attended.shape[1]]).sum().backward()
        results.append([attended.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            ours[1:] if ours.dim() == 3 else ours,
            expected[1:] if ours.dim() == 3 else expected,
            atol=1e-12,
            rtol=1e-12,
        )


def test_bf16_shared_prefix_gradients_are_rounded_once():
    tokens, lengths = batch_of([(40, [5] * 64)])
    batch = shared_pack(tokens, lengths)
    draw = torch.Generator().manual_seed(0)
    values = [
        torch.randn(batch.tokens.shape[1], heads, 8, generator=draw).bfloat16()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(values[0].shape, generator=draw).bfloat16()
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [value.to(dtype, copy=True).requires_grad_() for value in values]
        attend(*leaves, batch.sequences.attention_tree, None).backward(weights.to(dtype))
        gradients.append([leaf.grad.float() for leaf in leaves])
    for ours, exact in zip(*gradients, strict=True):
        assert (ours - exact).norm() < 0.003 * exact.norm()


def test_prefixes_are_shared_only_with_tree_packing():
    tokens, lengths = batch_of([(9, [3, 4])])
    (batch,) = pack_micro_batches(tokens, lengths, data_rank=0, data_size=1, budget=100, device=CPU)
    assert batch.tokens.numel() == int(lengths.sum())
    assert batch.sequences.attention_tree is None
    (batch,) = pack_micro_batches(
        tokens,
        lengths,
        data_rank=0,
        data_size=1,
        budget=100,
        device=CPU,
        layout=PackingLayout(should_share_prefixes=True),
    )
    assert batch.tokens.numel() == 9 + 3 + 4


def test_filler_batch_has_finite_tree_attention():
    tokens, lengths = batch_of([(9, [3, 4])])
    batch = pack(
        tokens, lengths, [], CPU, PackingLayout(sequence_size=2, should_share_prefixes=True)
    )
    query = torch.randn(batch.tokens.numel(), 2, 4)
    assert attend(query, query, query, batch.sequences.attention_tree, None).isfinite().all()


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3]])
def test_unshared_rows_are_bundles_of_one(lengths):
    assert [bundle.rows for bundle in bundle_without_sharing(torch.tensor(lengths))] == [
        (row,) for row in range(len(lengths))
    ]


@pytest.mark.promise("shared-prefix-gradients")
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor": 2, "sequence": True},
        {"pipeline": 2},
        pytest.param({"data": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "virtual_pipeline": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "sequence": True, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "settings",
    [{"micro_batch_tokens": 64}, {"micro_batch_tokens": 40, "recompute": "full"}],
    ids=str,
)
def test_shared_prefix_gradients_equal_separate_rows(pool, untied_llama, layout, settings):
    count = ParallelConfig(**layout).ranks
    shared, separate = (
        pool.run(
            jobs.shared_prefix_update, count, str(untied_llama), layout, settings, shared=shared
        )
        for shared in (True, False)
    )
    assert sum(rank["saved"] for rank in shared) > sum(rank["saved"] for rank in separate)
    for once, each in zip(shared, separate, strict=True):
        # Another order of summation changes the last bits of float32; the CPU's GEMM kernels
        # determine how many.
        torch.testing.assert_close(once["logprobs"], each["logprobs"], atol=2e-6, rtol=1e-6)
        assert once["stats"] == pytest.approx(each["stats"], rel=1e-5, abs=1e-6)
        assert once["gradients"].keys() == each["gradients"].keys()
        for name, (_, gradient) in each["gradients"].items():
            torch.testing.assert_close(once["gradients"][name][1], gradient, atol=1e-6, rtol=1e-5)
