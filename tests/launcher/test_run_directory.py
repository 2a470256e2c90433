"""A run directory is for its owner, and for one launch at a time."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from aligner.config.compose import compose_config, load_config, save_config
from aligner.data import claim
from aligner.errors import AlignerError, ConfigError
from aligner.launcher.run_directory import run_directory
from aligner.paths import RunPaths
from aligner.schema import Config
from tests import other_user


def settings(root: Path, *overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", f"run.dir={root}", *overrides])


def begin(root: Path, *overrides: str) -> RunPaths:
    """A run directory as a launch leaves it that has come to nothing."""
    with run_directory(settings(root, *overrides), Console(file=io.StringIO())):
        return RunPaths(root)


def test_a_run_directory_is_made_for_its_owner_alone_and_one_that_is_there_stays_as_it_is(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    assert begin(tmp_path / "runs" / "new").root.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o775)
    assert begin(opened).root.stat().st_mode & 0o777 == 0o775


def test_what_a_start_has_left_that_came_to_no_checkpoint_is_set_aside_whole(
    tmp_path: Path,
) -> None:
    paths = begin(tmp_path / "run")
    (paths.checkpoints / "step_2.tmp").mkdir(parents=True)
    paths.journal.mkdir()
    paths.metrics.touch()
    begin(paths.root, "run.resume=auto")
    assert not any(path.exists() for path in (*paths.of_training, paths.set_aside)), (
        "there was nothing in any of it"
    )
    for start in ("1", "2"):
        for path in (
            paths.metrics,
            paths.journal / "update_1",
            paths.checkpoints / "step_2.tmp" / "rank_0",
            paths.tensorboard / "a",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"of start {start}")
        with run_directory(
            settings(paths.root, "run.resume=auto"),
            Console(file=(told := io.StringIO()), width=999),
        ):
            assert not any(path.exists() for path in paths.of_training)
        assert (
            "the run starts again from step 0. The files of the earlier launch were moved to"
            f" {paths.set_aside / start}\n" in told.getvalue()
        )
        files = {file for file in (paths.set_aside / start).rglob("*") if file.is_file()}
        assert {str(file.relative_to(paths.set_aside / start)) for file in files} == {
            "metrics.jsonl",
            "journal/update_1",
            "checkpoints/step_2.tmp/rank_0",
            "tensorboard/a",
        }
        assert {file.read_text() for file in files} == {f"of start {start}"}


@other_user.needs_root
def test_another_user_sees_nothing_of_a_run() -> None:
    with other_user.open_directory() as place:
        paths = begin(place / "run")
        for attempt in (
            ["ls", paths.root],
            ["cat", paths.config],
            ["cat", paths.access_key],
            ["touch", paths.root / "lock"],
        ):
            assert not other_user.succeeds(*map(str, attempt)), attempt
        assert other_user.succeeds("ls", str(place))


@pytest.mark.parametrize(
    ("content", "what"),
    [("", "empty"), (" \n", "empty"), ("a\nb\n", "not valid"), ("\xff\n", "not valid")],
)
def test_a_file_that_is_no_access_key_is_told_before_anything_starts(
    tmp_path: Path, content: str, what: str
) -> None:
    paths = begin(tmp_path / "run")
    paths.access_key.write_text(content, encoding="latin-1")
    with pytest.raises(
        ConfigError,
        match=f"access key of the run, {paths.access_key}, is {what}; .* remove the file",
    ):
        begin(paths.root, "run.resume=auto")
    paths.access_key.unlink()
    assert begin(paths.root, "run.resume=auto").access_key.read_text().strip()


def test_a_launch_takes_the_run_before_it_removes_what_an_earlier_trainer_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_own", None)
    paths = begin(tmp_path / "run")
    assert not paths.claim.exists()  # nobody can have been there before
    config = compose_config(["experiment=tiny_ppo", f"run.dir={paths.root}"])
    claim.write_as(config, claim.take_run(config))
    paths.metrics.touch()
    begin(paths.root, "run.resume=auto")
    assert not paths.metrics.exists()
    with (
        pytest.raises(AlignerError, match=r"attempt 1 \(.*\) has taken over the run"),
        claim.writing(),
    ):
        pass


def test_the_date_is_that_of_the_first_launch_however_often_the_run_goes_on(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run")
    first = load_config(paths.config).run.date
    assert first is not None and abs(datetime.now() - datetime.fromisoformat(first)) < timedelta(
        minutes=5
    )
    long_ago = "2024-02-29T23:59:30"
    save_config(replace_date(load_config(paths.config), long_ago), paths.config)
    (paths.checkpoints / "step_1").mkdir(parents=True)
    (paths.checkpoints / "step_1" / "manifest.json").write_text("{}")
    for resume in ("true", "auto"):
        begin(paths.root, f"run.resume={resume}")
        assert load_config(paths.config).run.date == long_ago
    with pytest.raises(ConfigError, match=r'run\.date: "2024-02-29T23:59:30" -> "2025-01-01"'):
        begin(paths.root, "run.resume=true", "run.date=2025-01-01")
    # A run of before there was such a key goes on as it was.
    save_config(replace_date(load_config(paths.config), None), paths.config)
    begin(paths.root, "run.resume=true")
    assert load_config(paths.config).run.date is None
    assert (
        load_config(begin(tmp_path / "other", "run.date=2025-01-01").config).run.date
        == "2025-01-01"
    )


def replace_date(config: Config, date: str | None) -> Config:
    return replace(config, run=replace(config.run, date=date))
