"""Tests of run directories: permissions, files of earlier launches, access key and date."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from aligner.cache_entries import list_entries
from aligner.config.compose import compose_config, load_config, save_config
from aligner.data import fencing
from aligner.errors import AlignerError, ConfigError
from aligner.launcher.run_directory import open_run_directory, reserve_run_directory
from aligner.observability.console import RunConsole
from aligner.paths import RunPaths
from aligner.schema import Config
from tests import other_user


def settings(root: Path, *overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", f"run.dir={root}", *overrides])


def begin(root: Path, *overrides: str) -> RunPaths:
    """Create a run directory like a launch that ends before its first step."""
    with open_run_directory(settings(root, *overrides), RunConsole(file=io.StringIO())):
        return RunPaths(root)


def test_only_new_run_directory_is_made_private(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    assert begin(tmp_path / "runs" / "new").root.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o775)
    assert begin(opened).root.stat().st_mode & 0o777 == 0o775


def reserve(config: Config, barrier: Barrier, names: Queue[str]) -> None:
    """Reserve the directory of a run at the same time as other processes."""
    barrier.wait()
    with reserve_run_directory(config) as reserved:
        names.put(f"{reserved.run.name} {reserved.run.dir}")
        barrier.wait()


def test_launches_in_the_same_second_get_own_directories(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "tiny"
    config = settings(root, "run.name=tiny")
    processes = get_context("spawn")
    barrier = processes.Barrier(4)
    names: Queue[str] = processes.Queue()
    launches = [processes.Process(target=reserve, args=(config, barrier, names)) for _ in range(4)]
    for launch in launches:
        launch.start()
    reserved = sorted(names.get(timeout=60) for _ in launches)
    for launch in launches:
        launch.join(60)
    expected = [root, *(root.with_name(f"tiny-{number}") for number in (2, 3, 4))]
    assert reserved == [f"{path.name} {path}" for path in expected]
    assert not list(tmp_path.glob("runs/*")), "unused run directories remain"


def test_launch_leaves_a_directory_with_its_default_name_alone(
    tmp_path: Path,
) -> None:
    """The launch fails after it has printed the run directory, because there is no Slurm."""
    start = datetime.now()
    names = [f"tiny_ppo-{start + timedelta(seconds=s):%Y%m%d-%H%M%S}" for s in range(60)]
    for name in names:
        (tmp_path / "runs" / name / "file").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "aligner", "launch", "experiment=tiny_ppo", "cluster=slurm"],
        cwd=tmp_path,
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    root = Path(done.stdout.splitlines()[0].removeprefix("run directory: "))
    assert root.name.removesuffix("-2") in names and root.name.endswith("-2")
    assert not root.exists()


def test_files_without_checkpoint_are_moved_aside(
    tmp_path: Path,
) -> None:
    paths = begin(tmp_path / "run")
    (paths.checkpoints / "step_2.tmp").mkdir(parents=True)
    paths.journal.mkdir()
    paths.metrics.touch()
    begin(paths.root, "run.resume=auto")
    assert not any(path.exists() for path in (*paths.training_files, paths.set_aside)), (
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
        with open_run_directory(
            settings(paths.root, "run.resume=auto"),
            RunConsole(file=(output := io.StringIO()), width=999),
        ):
            assert not any(path.exists() for path in paths.training_files)
        assert (
            "the run starts again from step 0. The files of the earlier launch were moved to"
            f" {paths.set_aside / start}\n" in output.getvalue()
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
def test_another_user_cannot_access_a_run_directory() -> None:
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
def test_invalid_access_key_file_is_refused(tmp_path: Path, content: str, what: str) -> None:
    paths = begin(tmp_path / "run")
    paths.access_key.write_text(content, encoding="latin-1")
    with pytest.raises(
        ConfigError,
        match=f"access key of the run, {paths.access_key}, is {what}; .* remove the file",
    ):
        begin(paths.root, "run.resume=auto")
    paths.access_key.unlink()
    assert begin(paths.root, "run.resume=auto").access_key.read_text().strip()


def test_new_launch_fences_the_earlier_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_writer_claim", None)
    paths = begin(tmp_path / "run")
    assert not paths.claim.exists()  # a new run has no earlier trainer
    config = compose_config(["experiment=tiny_ppo", f"run.dir={paths.root}"])
    fencing.set_writer_claim(config, fencing.claim_run(config))
    paths.metrics.touch()
    begin(paths.root, "run.resume=auto")
    assert not paths.metrics.exists()
    with (
        pytest.raises(AlignerError, match=r"attempt 1 \(.*\) has taken over the run"),
        fencing.fenced_write(),
    ):
        pass


def test_run_date_stays_that_of_the_first_launch(tmp_path: Path) -> None:
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
    # A run that was saved before the key run.date existed keeps its date of None.
    save_config(replace_date(load_config(paths.config), None), paths.config)
    begin(paths.root, "run.resume=true")
    assert load_config(paths.config).run.date is None
    assert (
        load_config(begin(tmp_path / "other", "run.date=2025-01-01").config).run.date
        == "2025-01-01"
    )


def replace_date(config: Config, date: str | None) -> Config:
    return replace(config, run=replace(config.run, date=date))


def test_run_records_the_cache_entries_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("ALIGNER_CACHE", str(cache))
    package = cache / "packages" / "packed_model"
    files = (
        cache / "experiments" / "pairs-12" / "result" / "preferences.jsonl",
        cache / "experiments" / "unused-12" / "result" / "preferences.jsonl",
        cache / "models" / "packed_model-1.0-weights" / "config.json",
        cache / "engines" / "vllm" / "package",
        package / "packed_model" / "weights.gguf",
        package / "packed_model-1.0.dist-info" / "METADATA",
    )
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("Name: packed-model\nVersion: 1.0\n")
    overrides = (
        "model.source=gguf",
        "model.package=packed_model",
        f"data.path={files[0]}",
        "engine.kind=vllm",
    )
    paths = begin(tmp_path / "run", *overrides)
    assert {entry.name: entry.runs for entry in list_entries()} == {
        "pairs-12": (paths.root,),
        "unused-12": (),
        "packed_model-1.0-weights": (paths.root,),
        "vllm": (paths.root,),
        "packed_model": (paths.root,),
    }
