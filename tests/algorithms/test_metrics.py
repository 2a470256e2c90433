from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.metrics import experience_metrics, update_metrics
from aligner.data.types import Experience


def test_the_mismatch_is_that_of_the_engine_against_the_trainer_over_response_tokens():
    ratios = torch.tensor([[9.0, 1.0, 1.009, 1.011, 0.989, 9.0]])  # engine over trainer; the response is the middle four
    trainer = torch.full((1, 6), -2.0)
    mask, nothing = torch.tensor([[False, True, True, True, True, False]]), torch.zeros(1, 6)
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    engine = trainer + ratios.log()
    experience = Experience(
        tokens, torch.tensor([6]), mask, engine, trainer, trainer, nothing, nothing, nothing, torch.arange(6.0)[None]
    )
    metrics = experience_metrics(experience)
    assert metrics["mismatch/fraction_above_1pct"] == 0.5
    logs = [math.log(ratio) for ratio in (1.009, 1.011, 0.989)]
    assert metrics["mismatch/logprob_abs"] == pytest.approx(sum(map(abs, logs)) / 4, rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(sum(math.exp(-log) - 1 + log for log in logs) / 4, rel=1e-2)


def test_a_steps_updates_are_means_but_maxima_and_running_counts_and_a_skipped_one_lacks_some():
    done = {"loss": 1.0, "ratio_max": 1.5, "skipped": 0.0, "skipped_total": 3.0}
    skipped = {"ratio_max": 1.25, "skipped": 1.0, "skipped_total": 4.0}
    expected = {"loss": 1.0, "ratio_max": 1.5, "skipped": 0.5, "skipped_total": 4.0}
    for updates in ([done, skipped], [skipped, done]):
        assert update_metrics("policy", updates) == {f"policy/{name}": value for name, value in expected.items()}
