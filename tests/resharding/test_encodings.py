"""Weights that travel as what has changed, or in eight bits a number, over gloo from a trainer's
ranks to an engine's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from aligner.errors import AlignerError
from aligner.resharding.microscaling import BLOCK, dequantize, quantize
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import plan_resharding
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding import encoding_jobs
from tests.resharding.layouts import tiny_shape
from tests.rounds import slow

LAYOUTS = [
    (ParallelConfig(tensor=2), EngineParallelConfig(data=2)),
    (ParallelConfig(pipeline=2), EngineParallelConfig(tensor=2)),
    (ParallelConfig(data=2, expert=2), EngineParallelConfig(tensor=2)),
]
IDS = ["tensor2 to data2", "pipeline2 to tensor2", "expert2 to tensor2"]
KINDS = ["mxfp8", "mxint8"]


@pytest.mark.parametrize(
    ("layouts", "dtype", "group_bytes"),
    [
        (LAYOUTS[0], torch.bfloat16, None),
        slow(LAYOUTS[1], torch.float32, None),
        slow(LAYOUTS[2], torch.bfloat16, 20_000),
    ],
    ids=IDS,
)
def test_changes_leave_the_engine_with_the_sources_bits(pool, layouts, dtype, group_bytes):
    ranks = sum(layout.ranks for layout in layouts)
    told = pool.run(encoding_jobs.publish_changes, ranks, *layouts, dtype, group_bytes, 0)
    assert all(each == told[0] for each in told)
    shares = [share for _, share in told[0]]
    assert [share is None for share in shares] == [
        number % 4 == 0 for number in range(encoding_jobs.PUBLISHES)
    ]
    assert max(moved for moved, _ in told[0]) == told[0][0][0], "never more than all"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_has_not_changed_does_not_travel(pool, dtype):
    (whole, nothing, few, all_again), _ = pool.run(encoding_jobs.publish_few_changes, 2, dtype)
    numbers = whole[0] // dtype.itemsize
    assert whole[1] is None
    assert nothing == (0, 0.0)
    assert few == (4 * (4 + dtype.itemsize), 4 / numbers)
    assert all_again[0] == whole[0]


def test_after_a_publish_that_failed_everything_travels_once(pool):
    for shares in pool.run(encoding_jobs.fail_and_go_on, 4):
        assert [share is None for share in shares] == [True, False, True, False]


@pytest.mark.parametrize(
    ("layouts", "kind", "dtype", "share"),
    [
        (LAYOUTS[0], "mxint8", torch.float32, 0.35),
        (LAYOUTS[1], "mxfp8", torch.bfloat16, 0.6),
        (LAYOUTS[2], "mxfp8", torch.float32, 0.35),
    ],
    ids=IDS,
)
def test_quantized_weights_are_the_same_at_every_layout(pool, layouts, kind, dtype, share):
    ranks = sum(layout.ranks for layout in layouts)
    for moved, whole in pool.run(encoding_jobs.publish_quantized, ranks, *layouts, kind, dtype):
        assert moved < whole * share


def test_a_cut_within_a_block_is_refused():
    plan = plan_resharding(
        tiny_shape(), ParallelConfig(tensor=2), EngineParallelConfig(), first_engine_rank=2
    )
    with pytest.raises(
        AlignerError, match=r"o_proj\.weight .* columns 8 to 16, within a block of 32"
    ):
        Publisher(
            plan,
            _Unconnected(plan.labels),  # type: ignore[arg-type]
            read=lambda name: torch.empty(0),
            begin_update=None,
            bucket_bytes=1 << 14,
            verify_every=0,
            travels="mxint8",
        )


class _Unconnected:
    """As much of a link as is looked at before anything moves."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.rank, self.labels, self.size = 0, labels, len(labels)


def _by_hand(row: np.ndarray, kind: str) -> list[float]:
    """A row through the format, number by number, in float64."""
    found: list[float] = []
    for start in range(0, len(row), BLOCK):
        block = [float(number) for number in row[start : start + BLOCK]]
        largest = max(map(abs, block))
        exponent = (
            0.0 if not largest else np.floor(np.log2(largest)) - (8 if kind == "mxfp8" else 0)
        )
        scale = 2.0**exponent
        for number in block:
            if kind == "mxfp8":
                element = float(np.clip(number / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn))
            else:
                element = float(np.clip(np.round(number / scale * 64), -127, 127)) / 64
            found.append(element * scale)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 64, 50, 7])
def test_blocks_hold_what_the_format_says(kind, width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn((20, width), generator=generator) * torch.logspace(-20, 20, 20)[:, None]
    rows[0] = 0.0
    packed = quantize(rows, kind)
    assert packed.dtype == torch.uint8
    assert packed.shape == (20, width + -(-width // BLOCK))
    found = dequantize(packed, width, kind, torch.float32)
    for mine, row in zip(found.double(), rows.double().numpy(), strict=True):
        np.testing.assert_array_equal(mine.numpy(), _by_hand(row, kind))
    assert torch.equal(dequantize(packed, width, kind, torch.bfloat16).float(), found), (
        "exact in bfloat16"
    )
    assert torch.equal(quantize(found, kind)[:, :width], packed[:, :width]) or kind == "mxfp8"
    assert torch.equal(dequantize(quantize(found, kind), width, kind, torch.float32), found), (
        "once is enough"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_with_what_is_not_finite_is_not_a_number(kind):
    rows = torch.ones(2, 64)
    rows[0, 3], rows[1, 40] = float("inf"), float("nan")
    found = dequantize(quantize(rows, kind), 64, kind, torch.float32)
    assert found[0, :32].isnan().all()
    assert found[1, 32:].isnan().all()
    assert torch.equal(found[0, 32:], torch.ones(32))
    assert torch.equal(found[1, :32], torch.ones(32))
