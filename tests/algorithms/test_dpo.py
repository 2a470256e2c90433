from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.preference_losses import pair_loss
from aligner.schema import PreferenceConfig

MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-4.0, -6.0, math.nan], [-11.0, math.inf, 3.0]])
REFERENCE = torch.tensor([[-12.0, 0.0, 5.0], [-11.5, math.nan, -1.0]])


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        (PreferenceConfig(), 0.620957),  # the walk-through's number: policy (-10, -11), reference (-12, -11.5), beta 0.1
        (PreferenceConfig(kind="ipo"), (1.5 - 5.0) ** 2),
        (PreferenceConfig(beta=2.0, label_smoothing=0.25), 0.75 * math.log1p(math.exp(-3)) + 0.25 * math.log1p(math.exp(3))),
    ],
    ids=["sigmoid", "ipo", "conservative"],
)
def test_a_pairs_loss_is_that_of_its_answers_own_tokens(settings: PreferenceConfig, loss: float) -> None:
    value, stats = pair_loss(LOGPROBS, REFERENCE, MASK, settings, pairs=1)
    assert value.item() == pytest.approx(loss, abs=1e-5)
    assert stats["loss"].item() == value.item()
    assert stats["margin"].item() == pytest.approx(1.5 * settings.beta)
    assert stats["accuracy"].item() == 1


def test_parts_of_a_batch_add_up_to_it() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, reference = (-torch.rand(8, 5, generator=generator) for _ in range(2))
    mask = torch.rand(8, 5, generator=generator) < 0.6
    whole, stats = pair_loss(logprobs, reference, mask, PreferenceConfig(), pairs=4)
    parts = [
        pair_loss(logprobs[rows], reference[rows], mask[rows], PreferenceConfig(), pairs=4)
        for rows in (slice(0, 2), slice(2, 8))
    ]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    for name, value in stats.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), value)
