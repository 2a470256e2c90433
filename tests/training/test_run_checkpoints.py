from __future__ import annotations

import dataclasses
import json

import pytest

from aligner.errors import AlignerError
from aligner.schema import CheckpointConfig, Config, RunConfig
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState


def checkpoints(directory, **settings):
    return RunCheckpoints(Config(run=RunConfig(dir=str(directory)), checkpoint=CheckpointConfig(**settings)))


def commit(kept, step, metric=None):
    (kept._directory / f"step_{step}" / "policy").mkdir(parents=True)
    kept.commit(TrainingState(step, kl_coefficient=0.05, critic_updates=step, position=8 * step), metric)
    kept.prune()


def test_the_last_ones_are_kept_and_the_newest_is_resumed_from(tmp_path):
    kept = checkpoints(tmp_path, keep=2)
    assert kept.newest() == []
    for step in (2, 4, 10):
        commit(kept, step)
    assert kept.steps() == [4, 10]
    assert not (tmp_path / "checkpoints" / "step_2").exists()
    assert kept.newest() == [TrainingState(4, 0.05, 4, 32), TrainingState(10, 0.05, 10, 80)]


def test_the_best_by_the_metric_stays_and_the_newest_of_equals(tmp_path):
    kept = checkpoints(tmp_path, keep=1, best_metric="reward/mean")
    for step, metric in ((1, 0.5), (2, float("nan")), (3, 0.5), (4, 0.4), (5, 0.3)):
        commit(kept, step, metric)
    assert kept.best() == 3
    assert kept.steps() == [3, 5]
    commit(kept, 6, 0.6)
    assert kept.steps() == [6]


def test_a_metric_that_the_step_does_not_have_is_named_with_those_that_it_has(tmp_path):
    kept = checkpoints(tmp_path, best_metric="reward/max")
    with pytest.raises(AlignerError, match=r"best_metric=reward/max: no such metric; this step's: kl/coef, reward/mean"):
        kept.check_metric({"reward/mean": 1.0, "kl/coef": 0.0})
    kept.check_metric({"kl/coef": 0.0})
    assert kept.metric({"kl/coef": 0.0}) is None
    assert checkpoints(tmp_path).metric({}) is None


@pytest.mark.parametrize("name", ["eval/loss", "policy/approx_kl", "mismatch/kl", "eval/reference_perplexity"])
def test_of_a_loss_a_distance_or_a_perplexity_the_lowest_is_the_best(tmp_path, name):
    kept = checkpoints(tmp_path, keep=1, best_metric=name)
    for step, loss in enumerate((0.3, 0.1, 0.2), 1):
        commit(kept, step, loss)
    assert kept.best() == 2


def test_of_evaluated_steps_the_best_stays_and_the_others_are_not_compared(tmp_path):
    kept = checkpoints(tmp_path, keep=1, best_metric="eval/score")
    for step, stats in enumerate(({"eval/score": 0.2}, {"eval/score": 0.4}, {"reward/mean": 9.0}, {"eval/score": 0.3}), 1):
        commit(kept, step, kept.metric(stats))
    assert kept.steps() == [2, 4]
    with pytest.raises(AlignerError, match=r"best_metric=eval/score: no such metric; this step's: eval/loss"):
        kept.check_metric({"eval/loss": 1.0})


def test_a_half_written_one_does_not_count(tmp_path):
    kept = checkpoints(tmp_path)
    commit(kept, 3)
    (tmp_path / "checkpoints" / "step_4" / "policy").mkdir(parents=True)
    assert kept.newest() == [TrainingState(3, 0.05, 3, 24)]


def test_a_manifest_says_what_the_checkpoint_holds_and_one_of_another_format_is_refused(tmp_path):
    kept = checkpoints(tmp_path)
    commit(kept, 3)
    file = tmp_path / "checkpoints" / "step_3" / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["holds"].keys() == {"policy", "rng", "data"}  # no critic where none was saved
    assert manifest["config"] == dataclasses.asdict(kept._config)
    file.write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(AlignerError, match=f"{file}: a checkpoint of format 0; this release of aligner reads format 3"):
        kept.newest()
