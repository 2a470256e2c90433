"""Test which checkpoints a run keeps, deletes, sets aside and resumes from."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from aligner.data import fencing
from aligner.data.checkpoint_files import Entry, Manifest, Piece
from aligner.data.checksums import seal
from aligner.data.model_directory import TensorEntry, write_safetensors
from aligner.errors import AlignerError
from aligner.paths import RunPaths
from aligner.schema import CheckpointConfig, Config, RunConfig
from aligner.servers.critic_client import RunId, UpdateLedger
from aligner.training.preference_sampling import PairWriter
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from tests.small_disk import small_disk


def checkpoints(directory, **settings):
    return RunCheckpoints(
        Config(run=RunConfig(dir=str(directory)), checkpoint=CheckpointConfig(**settings))
    )


def commit(kept, step, metric=None, **state):
    (kept._directory / f"step_{step}" / "policy").mkdir(parents=True)
    kept.commit(
        TrainingState(step, kl_coefficient=0.05, critic_updates=step, position=8 * step, **state),
        metric,
    )
    newest = kept.read_newest_states()  # the journal starts after the oldest of them
    kept.prune()
    assert kept.read_newest_states() == newest


def test_only_last_checkpoints_are_kept(tmp_path):
    kept = checkpoints(tmp_path, keep=2)
    assert kept.read_newest_states() == []
    for step in (2, 4, 10):
        commit(kept, step)
    assert kept.list_steps() == [4, 10]
    assert not (tmp_path / "checkpoints" / "step_2").exists()
    assert kept.read_newest_states() == [
        TrainingState(4, 0.05, 4, 32),
        TrainingState(10, 0.05, 10, 80),
    ]


def test_best_checkpoint_is_kept_and_newest_wins_ties(tmp_path):
    kept = checkpoints(tmp_path, keep=1, best_metric="reward/mean")
    for step, metric in ((1, 0.5), (2, float("nan")), (3, 0.5), (4, 0.4), (5, 0.3)):
        commit(kept, step, metric)
    assert kept.find_best() == 3
    assert kept.list_steps() == [3, 5]
    commit(kept, 6, 0.6)
    assert kept.list_steps() == [6]


def test_timed_checkpoints_do_not_evict_regular_ones(tmp_path):
    kept = checkpoints(tmp_path, every=4, keep=2)
    found = []
    for step in range(1, 14):
        commit(kept, step, by_time=step % 4 > 0)
        found.append(kept.list_steps())
    assert found[:5] == [[1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert found[5:] == [
        [4, 6],
        [4, 7],
        [4, 8],
        [4, 8, 9],
        [4, 8, 10],
        [4, 8, 11],
        [8, 12],
        [8, 12, 13],
    ]
    kept = checkpoints(tmp_path / "by_time", keep=2)
    for step in range(1, 6):
        commit(kept, step, by_time=step < 5)
    assert kept.list_steps() == [4, 5]


def test_unknown_best_metric_is_refused(tmp_path):
    kept = checkpoints(tmp_path, best_metric="reward/max")
    with pytest.raises(
        AlignerError,
        match=r"best_metric=reward/max: unknown metric; metrics of this step: kl/coef, reward/mean",
    ):
        kept.check_metric({"reward/mean": 1.0, "kl/coef": 0.0})
    kept.check_metric({"kl/coef": 0.0})
    assert kept.get_metric({"kl/coef": 0.0}) is None
    assert checkpoints(tmp_path).get_metric({}) is None


@pytest.mark.parametrize(
    "name", ["eval/loss", "policy/approx_kl", "mismatch/kl", "eval/reference_perplexity"]
)
def test_lowest_loss_kl_or_perplexity_is_the_best(tmp_path, name):
    kept = checkpoints(tmp_path, keep=1, best_metric=name)
    for step, loss in enumerate((0.3, 0.1, 0.2), 1):
        commit(kept, step, loss)
    assert kept.find_best() == 2


def test_best_checkpoint_is_an_evaluated_step(tmp_path):
    kept = checkpoints(tmp_path, keep=1, best_metric="eval/score")
    for step, stats in enumerate(
        ({"eval/score": 0.2}, {"eval/score": 0.4}, {"reward/mean": 9.0}, {"eval/score": 0.3}), 1
    ):
        commit(kept, step, kept.get_metric(stats))
    assert kept.list_steps() == [2, 4]
    with pytest.raises(
        AlignerError,
        match=r"best_metric=eval/score: unknown metric; metrics of this step: eval/loss",
    ):
        kept.check_metric({"eval/loss": 1.0})


def test_unfinished_checkpoint_is_ignored(tmp_path):
    kept = checkpoints(tmp_path)
    commit(kept, 3)
    (tmp_path / "checkpoints" / "step_4" / "policy").mkdir(parents=True)
    assert kept.read_newest_states() == [TrainingState(3, 0.05, 3, 24)]


def test_manifest_lists_contents_and_other_format_is_refused(tmp_path):
    kept = checkpoints(tmp_path)
    commit(kept, 3)
    file = tmp_path / "checkpoints" / "step_3" / "manifest.json"
    manifest = json.loads(file.read_text())
    assert manifest["holds"].keys() == {"policy", "rng", "data"}  # no critic was saved
    assert manifest["config"] == dataclasses.asdict(kept._config)
    file.write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(
        AlignerError,
        match=r"manifest\.json: damaged: the content does not match the checksum",
    ):
        kept.read_newest_states()
    for text in (
        seal(json.dumps(manifest | {"format": 0})),
        '{\n "format": 0,\n "aligner": "0.1"\n}',
    ):
        file.write_text(text)
        with pytest.raises(
            AlignerError,
            match=(
                f"{file}: checkpoint format 0 is not supported; this release of aligner reads"
                " format 4"
            ),
        ):
            kept.rename_damaged(0)


def commit_whole(kept, step):
    """Commit a checkpoint with every kind of file; return its directory."""
    directory = kept._directory / f"step_{step}"
    for part in ("policy", "critic"):
        (directory / part).mkdir(parents=True)
        entry = TensorEntry("weight", torch.float32, (4,))
        record = write_safetensors(
            directory / part / "rank_0.safetensors", [entry], lambda name: torch.ones(4)
        )
        index = {"weight": Entry((4,), False, (Piece(0, None, 0, 0),))}
        files = {"rank_0.safetensors": record}
        manifest = Manifest(
            "1", {}, "scalar", "", {}, {}, {}, None, 1, 1, 1, files=files, index=index
        )
        (directory / part / "manifest.json").write_text(manifest.to_json())
    UpdateLedger(RunId("run"), 7, {"loss": 0.1}).save(directory / "critic" / "updates.json")
    (directory / "rollouts").mkdir()
    (directory / "rollouts" / "rollouts.json").write_text('{"batches": []}')
    (directory / "rollouts" / "rollouts.safetensors").write_bytes(bytes(64))
    kept.commit(TrainingState(step, kl_coefficient=0.05, critic_updates=step, position=8 * step))
    return directory


def flip(place):
    def harm(file):
        content = bytearray(file.read_bytes())
        content[place] ^= 2
        file.write_bytes(content)

    return harm


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("manifest.json", flip(3)),
        ("manifest.json", flip(-30)),
        ("manifest.json", lambda file: file.write_bytes(b"")),
        ("policy/manifest.json", flip(-30)),
        ("policy/rank_0.safetensors", flip(3)),
        ("policy/rank_0.safetensors", flip(40)),
        ("policy/rank_0.safetensors", flip(-1)),
        ("policy/rank_0.safetensors", lambda file: file.unlink()),
        ("critic/manifest.json", flip(-30)),
        ("critic/rank_0.safetensors", flip(-9)),
        ("critic/rank_0.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-1])),
        ("critic/updates.json", flip(-12)),
        ("rollouts/rollouts.json", flip(4)),
        ("rollouts/rollouts.safetensors", flip(40)),
    ],
)
def test_damaged_checkpoints_are_set_aside(tmp_path, caplog, file, harm):
    kept = checkpoints(tmp_path, keep=3)
    for step in (2, 4, 6):
        commit_whole(kept, step)
    kept.rename_damaged(0)
    assert kept.list_steps() == [2, 4, 6] and not caplog.messages
    (kept._directory / "step_6.damaged").mkdir()
    harm(kept._directory / "step_6" / file)
    harm(kept._directory / "step_4" / file)
    kept.rename_damaged(0)
    assert [state.step for state in kept.read_newest_states()] == [2]
    for name in ("step_6.damaged.2", "step_4.damaged"):
        assert file in (kept._directory / name / "damage.txt").read_text()
    assert len(caplog.messages) == 2 and all(
        message.startswith("DAMAGED: ") and file in message for message in caplog.messages
    )
    with pytest.raises(AlignerError, match=rf"every checkpoint is damaged(.|\n)*step_2: .*{file}"):
        harm(kept._directory / "step_2" / file)
        kept.rename_damaged(0)
    assert kept.list_steps() == [2]


def test_older_damaged_manifest_is_ignored(tmp_path):
    kept = checkpoints(tmp_path, keep=3)
    for step in (2, 4, 6):
        commit_whole(kept, step)
    flip(-30)(kept._directory / "step_4" / "manifest.json")
    kept.rename_damaged(0)
    assert [state.step for state in kept.read_newest_states()] == [2, 6]


@pytest.mark.promise("damaged-checkpoint-is-never-resumed")
def test_checkpoint_with_missing_file_is_not_committed(tmp_path):
    kept = checkpoints(tmp_path)
    directory = commit_whole(kept, 4)
    (directory / "manifest.json").unlink()
    (directory / "critic" / "rank_0.safetensors").unlink()
    with pytest.raises(
        AlignerError,
        match=r"step_4/critic: the checkpoint is incomplete: rank_0\.safetensors is missing",
    ):
        kept.commit(TrainingState(4, 0.05, 4, 32))
    assert kept.list_steps() == []


def test_undeletable_checkpoint_is_reported_and_deleted_later(tmp_path, caplog):
    kept = checkpoints(tmp_path, keep=1)
    commit(kept, 1)
    (kept._directory / "step_1_backup").mkdir()
    (kept._directory / "step_1_backup" / "manifest.json").write_text("{}")
    (kept._directory / "step_x").mkdir()
    with small_disk(kept._directory / "step_1" / "busy", "64k"):
        commit(kept, 2)
        commit(kept, 3)
        assert kept.list_steps() == [3]
        # Everything else in it was deleted.
        assert [path.name for path in (kept._directory / "step_1").iterdir()] == ["busy"]
    assert (
        len(caplog.messages) == 1
        and "cannot delete old checkpoint" in caplog.messages[0]
        and "step_1: " in caplog.messages[0]
    )
    (kept._directory / "step_5").mkdir()  # a checkpoint that is being written
    commit(kept, 4)
    assert sorted(path.name for path in kept._directory.iterdir()) == [
        "step_1_backup",
        "step_4",
        "step_5",
        "step_x",
    ]


def test_superseded_trainer_changes_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(fencing, "_writer_claim", None)
    kept = checkpoints(tmp_path, keep=1)
    for step in (2, 4):
        commit_whole(kept, step)
    flip(-30)(kept._directory / "step_4" / "manifest.json")
    (kept._directory / "step_6" / "policy").mkdir(parents=True)
    for name in ("preferences", "responses"):
        (tmp_path / f"{name}.jsonl.unfinished").write_text('{"step": 1}\n')
    pairs = PairWriter(RunPaths(tmp_path), None)
    fencing.set_writer_claim(kept._config, fencing.claim_run(kept._config))
    fencing.claim_run(kept._config)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    changes = [
        *(lambda: kept.rename_damaged(0), lambda: kept.commit(TrainingState(6, 0.05, 6, 48))),
        *(
            lambda: kept.record_evaluation(2, None),
            lambda: kept._delete(kept._directory / "step_2"),
        ),
        *(
            pairs.finish,
            lambda: pairs.resume(0),
            lambda: pairs.write(2, [], SimpleNamespace(samples=[], prompts=[]), []),
        ),
    ]
    for change in changes:
        with pytest.raises(
            AlignerError, match=r"attempt 1 \(.*\) has taken over the run; attempt 0 may no longer"
        ):
            change()
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
