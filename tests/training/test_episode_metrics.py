"""Metrics of failed episodes, and the warning about episodes that are not trained on."""

from __future__ import annotations

import torch

from aligner.data.episode_reports import EpisodeReport, FailureKind
from aligner.data.types import Sample
from aligner.training.episode_metrics import compute_episode_metrics, warn_of_left_out_episodes


def an_episode(reward: float | None, report: EpisodeReport | None = None) -> Sample:
    rewards = None if reward is None else torch.tensor([reward])
    zero = torch.zeros(1)
    return Sample(
        0, 0, torch.tensor([5, 6]), 1, zero, zero.long(), "stop", rewards=rewards, report=report
    )


def test_failures_retries_and_left_out_episodes_are_counted(caplog):
    error, infrastructure = FailureKind.ERROR, FailureKind.INFRASTRUCTURE
    nan = float("nan")
    samples = [
        an_episode(1.0),
        an_episode(nan, EpisodeReport(infrastructure, (infrastructure, error))),
        an_episode(-1.0, EpisodeReport(error, metrics={"calls": 3.0})),
        an_episode(0.5, EpisodeReport(None, (infrastructure,), {"calls": 1.0})),
        an_episode(0.0),
        an_episode(0.0),
    ]
    metrics = compute_episode_metrics(samples, 2)
    assert metrics == {
        "episode/failures/error": 1.0,
        "episode/failures/infrastructure": 1.0,
        "episode/left_out_fraction": 2 / 6,
        "episode/metrics/calls": 2.0,
        "episode/retries/error": 1.0,
        "episode/retries/infrastructure": 2.0,
    }
    warn_of_left_out_episodes(metrics)
    assert "33.3% of the step's episodes" in caplog.text
    assert "error 1, infrastructure 1" in caplog.text


def test_steps_without_failures_have_no_metrics_and_no_warning(caplog):
    metrics = compute_episode_metrics([an_episode(None), an_episode(1.0)], 1)
    warn_of_left_out_episodes(metrics)
    assert metrics == {} and not caplog.text
