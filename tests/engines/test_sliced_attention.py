"""Attention over each row's slice of the KV cache, with a fake of the kernel that torch has only on
GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aligner.engines.embedded import embedded_engine, sliced_attention
from aligner.engines.embedded.cache import CacheSize
from aligner.engines.embedded.decoder_step import Step
from aligner.engines.embedded.graphs import GraphedForward
from aligner.engines.engine_protocol import SamplingOptions
from aligner.models.shape import ModelShape
from aligner.schema import SpeculationConfig
from tests.engines.engines import generate
from tests.engines.test_embedded import make_engine, make_requests, save_model, shape_of
from tests.engines.test_generation import mixed_requests, record_steps
from tests.engines.test_steps_per_sync import assert_same

SIZES = {"mistral": {"sliding_window": 6}, "llama": {}}


def flash(
    query, key, value, starts_q, starts_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
):  # fmt: skip
    """Compute what FlashAttention-2's varlen function computes, for one query per sequence, and the
    log-sum-exp of the scores."""
    assert (max_q, dropout_p, is_causal, return_debug_mask, scale, alibi_slopes) == (
        1,
        0.0,
        False,
        False,
        None,
        None,
    )
    assert {each.dtype for each in (starts_q, starts_k, seqused_k)} == {torch.int32}
    assert starts_q.tolist() == list(range(len(query) + 1)) and len(starts_k) == len(query) + 1
    assert int(seqused_k.min()) > 0 and int(seqused_k.max()) <= max_k and key.stride(-1) == 1
    group, found, totals = query.shape[1] // key.shape[1], [], []
    for one, begin, count in zip(query, starts_k.tolist(), seqused_k.tolist(), strict=False):
        left = 0 if window_size_left is None else max(0, count - 1 - window_size_left)
        assert (window_size_left is None) == (window_size_right is None) and window_size_right in (
            None,
            0,
        )
        keys, values = (
            each[begin + left : begin + count].repeat_interleave(group, 1) for each in (key, value)
        )
        scores = torch.einsum("hd,thd->ht", one, keys) / one.shape[-1] ** 0.5
        found.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
        totals.append(scores.logsumexp(-1))
    empty = query.new_empty(0)
    return torch.stack(found), torch.stack(totals, 1), empty, empty, empty


@pytest.fixture
def kernel(monkeypatch) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash, "CPU")
    monkeypatch.setattr(embedded_engine, "can_slice", lambda *_: True)
    yield
    library._destroy()


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("settings", [{}, {"batch_size": 3}, {"steps_per_sync": 4}], ids=str)
def test_responses_equal_masked_attention(
    tmp_path: Path, kernel, family: str, settings: dict
) -> None:
    directory = save_model(tmp_path, family, **SIZES[family])
    options = SamplingOptions(12, stop_token_ids=tuple(range(0, 200, 9)))
    engine = make_engine(directory, **settings)
    assert engine._state.decoder.is_sliced and engine._state.cache._is_token_major
    samples = generate(engine, mixed_requests(3), options)
    embedded_engine.can_slice = lambda *_: False
    plain = make_engine(directory)
    assert not plain._state.decoder.is_sliced
    assert_same(samples, generate(plain, mixed_requests(3), options))


def test_speculative_responses_equal_masked_attention(tmp_path: Path, kernel) -> None:
    """Steps with several tokens per row use masked attention; rows in use need not be adjacent."""
    directory = save_model(tmp_path, "llama")
    options = SamplingOptions(12, greedy=True)
    guessing = {"tokens": 3, "ngram": 1, "rows": 64}
    engine = make_engine(directory, speculation=SpeculationConfig(**guessing))
    steps = record_steps(engine)
    samples = generate(engine, make_requests(2), options)
    assert {step.tokens_per_row for step in steps} >= {1, 4}
    embedded_engine.can_slice = lambda *_: False
    assert_same(samples, generate(make_engine(directory), make_requests(2), options))


def test_graph_padding_rows_read_only_one_token(tmp_path: Path, kernel) -> None:
    """Uses a graph's tensors without a graph. Two of five rows are in use; the others write to the
    null block."""
    engine = make_engine(save_model(tmp_path, "llama"))
    state = engine._state
    state.cache._has_null_block = True
    state.cache.resize(CacheSize.from_sequences(5, 16, block_tokens=4))
    state.cache.keys.normal_()
    state.cache.values.normal_()
    tables = torch.tensor([[9, 0, 0], [3, 17, 4]])
    step = Step(torch.tensor([7, 11]), torch.tensor([3, 9]), tables)
    static_step = GraphedForward(state.decoder)._build_static_step(5, 4, step, state.cache)
    null = state.cache.null_block
    assert static_step.positions.tolist() == [3, 9, 0, 0, 0]
    assert static_step.block_tables.tolist() == [
        [9, 0, 0, null],
        [3, 17, 4, null],
        *[[null] * 4] * 3,
    ]
    with torch.inference_mode():
        expected = state.decoder.forward(step, state.cache)
        before = state.cache.keys[:, :null].clone()
        found = state.decoder.forward(static_step, state.cache)[:2]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(state.cache.keys[:, :null], before)


def test_spans_locate_blocks_in_cache() -> None:
    tables, lengths = torch.tensor([[0], [2], [5]]), torch.tensor([4, 1, 8])
    spans = sliced_attention.compute_spans(tables, lengths, block_tokens=8)
    assert spans.starts.tolist()[:3] == [0, 16, 40]
    assert spans.lengths.tolist() == [4, 1, 8]


def test_spans_of_sliding_window_hide_blocks_before_it() -> None:
    tables, lengths = torch.tensor([[3, 1, 2], [4, 0, 0]]), torch.tensor([9, 2])
    spans = sliced_attention.compute_spans(tables, lengths, block_tokens=4, window=3)
    assert spans.is_hidden.tolist() == [[True, False, False], [False, True, True]]
    # Row 0 attends to its tokens 6 to 8: two of block 1, and one of block 2.
    assert spans.starts.tolist()[1:3] == [4 + 2, 8]
    assert spans.lengths.tolist()[1:3] == [2, 1]
    assert (spans.starts[3], spans.lengths[3]) == (16, 2)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 64, True),
        ("cuda", torch.float32, 128, False),
        ("cpu", torch.bfloat16, 128, False),
        ("cuda", torch.bfloat16, 36, False),
        ("cuda", torch.bfloat16, 320, False),
    ],
)
def test_can_slice_depends_on_device_dtype_and_head_size(
    tmp_path: Path, device: str, dtype: torch.dtype, head_dim: int, expected: bool
) -> None:
    shape: ModelShape = shape_of(save_model(tmp_path, "llama", head_dim=head_dim))
    assert sliced_attention.can_slice(shape, torch.device(device), dtype) is expected
