"""Entries of the cache: recorded uses, and which entries are deleted."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.cache_entries import KINDS, CacheEntry, list_entries, prune, record_use

DAY = 86400.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add_entry(path: Path, size: int = 1, days: float = 0.0) -> Path:
    """Create a directory with one file that was written some days ago."""
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x" * size)
    set_age(path / "file", days)
    set_age(path, days)
    return path


def set_age(path: Path, days: float) -> None:
    modified = time.time() - days * DAY
    os.utime(path, (modified, modified))


def add_use(entry: Path, run: Path, days: float = 0.0) -> Path:
    """Record that an existing run used an entry some days ago."""
    run.mkdir(parents=True, exist_ok=True)
    uses = entry.parents[1] / "uses" / entry.parent.name / entry.name
    before = {*uses.glob("*")}
    record_use(entry, run)
    (record,) = {*uses.glob("*")} - before
    set_age(record, days)
    return run


def is_never_active(run: Path) -> None:
    return None


def names(entries: list[CacheEntry]) -> set[str]:
    return {entry.name for entry in entries}


@dataclass(frozen=True)
class Planned:
    """An entry of the property tests."""

    kind: str
    size: int
    days: int
    is_active: bool


ENTRIES = st.lists(
    st.builds(
        Planned, st.sampled_from(KINDS), st.integers(0, 50), st.integers(0, 60), st.booleans()
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(ENTRIES, st.none() | st.integers(0, 60), st.none() | st.integers(0, 200))
def test_prune_deletes_exactly_the_oldest_inactive_entries(
    planned: list[Planned], limit_days: int | None, max_bytes: int | None
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        cache = Path(name, "cache")
        patch.setenv("ALIGNER_CACHE", str(cache))
        for index, entry in enumerate(planned):
            path = add_entry(cache / entry.kind / f"entry_{index}", entry.size, 60)
            state = "active" if entry.is_active else "ended"
            # Half an hour per index orders entries of the same day.
            add_use(path, Path(name, f"{state}_{index}"), entry.days + 0.01 + index / 48)

        before = list_entries()
        report = prune(
            lambda run: "running" if run.name.startswith("active") else None,
            older_than_s=None if limit_days is None else limit_days * DAY,
            max_bytes=max_bytes,
        )
        after = list_entries()

    assert names(before) == names(after) | names(report.deleted)
    assert report.freed_bytes == sum(entry.size for entry in report.deleted)
    assert report.remaining_bytes == sum(entry.size for entry in after)
    inactive = [entry for entry in after if not entry.runs[0].name.startswith("active")]
    assert not any(entry.runs[0].name.startswith("active") for entry in report.deleted)
    if max_bytes is not None:
        assert not inactive or report.remaining_bytes <= max_bytes
    newest_deleted = max((entry.last_use for entry in report.deleted), default=0.0)
    assert all(entry.last_use >= newest_deleted for entry in inactive)
    if limit_days is not None:
        limit = time.time() - limit_days * DAY
        assert all(entry.last_use >= limit - 60 for entry in inactive)
        # With an age only, no younger entry is deleted.
        assert max_bytes is not None or newest_deleted <= limit
    assert limit_days is not None or max_bytes is not None or not report.deleted


def test_uses_of_concurrent_processes_are_all_recorded(cache: Path, tmp_path: Path) -> None:
    entry = add_entry(cache / "models" / "model")
    program = (
        "import sys; from pathlib import Path; from aligner.cache_entries import record_use\n"
        "for _ in range(20): record_use(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    runs = [tmp_path / "runs" / str(index) for index in range(4)]
    for run in runs:
        run.mkdir(parents=True)
    # Two processes of each run record the same use.
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(entry / "file"), str(run)])
        for run in (*runs, *runs)
    ]
    assert [process.wait(60) for process in processes] == [0] * 8
    (listed,) = list_entries()
    assert {*listed.runs} == {*runs}


def test_use_may_be_recorded_before_entry_exists(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record_use(cache / "data" / "new", tmp_path / "run")
    assert list_entries() == []
    add_entry(cache / "data" / "new")
    assert [entry.runs for entry in list_entries()] == [(tmp_path / "run",)]


def test_paths_outside_of_entries_record_nothing(cache: Path, tmp_path: Path) -> None:
    for path in (
        tmp_path / "model",
        cache,
        cache / "data",
        cache / "other" / "name",
        Path("experiment:pairs"),
        Path("aligner"),
    ):
        record_use(path, tmp_path / "run")
    assert not cache.exists()


def test_read_only_cache_does_not_fail_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "file"))  # also root cannot write below it
    record_use(tmp_path / "file" / "models" / "model", tmp_path / "run")
    assert list_entries() == []


def test_deleted_run_counts_for_last_use_but_is_not_listed(cache: Path, tmp_path: Path) -> None:
    entry = add_entry(cache / "models" / "model", days=90)
    add_use(entry, tmp_path / "existing", days=60)
    add_use(entry, tmp_path / "deleted", days=10).rmdir()
    add_use(entry, tmp_path / "earlier", days=20).rmdir()
    (listed,) = list_entries()
    assert listed.runs == (tmp_path / "existing",)
    assert 10 * DAY <= time.time() - listed.last_use < 10.1 * DAY

    prune(is_never_active, older_than_s=30 * DAY)
    assert list_entries() == [listed], "the use of the deleted run is 10 days old"
    records = {path.read_text() for path in (cache / "uses" / "models" / "model").iterdir()}
    assert records == {str(tmp_path / "existing"), str(tmp_path / "deleted")}


def test_pruned_entry_loses_its_uses(cache: Path, tmp_path: Path) -> None:
    entry = add_entry(cache / "models" / "model", days=90)
    add_use(entry, tmp_path / "run", days=60)
    prune(is_never_active, older_than_s=30 * DAY)
    add_entry(entry, days=40)
    assert [listed.runs for listed in list_entries()] == [()]


@pytest.mark.parametrize("kind", KINDS)
def test_entry_has_lost_its_name_before_its_files_are_deleted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    entry = add_entry(cache / kind / "entry")
    delete = shutil.rmtree
    deleted = []

    def delete_and_check(directory: Path) -> None:
        assert not entry.exists() and (directory / "file").is_file()
        assert list_entries() == [], "a directory that is being deleted is not an entry"
        deleted.append(directory)
        delete(directory)

    monkeypatch.setattr(shutil, "rmtree", delete_and_check)
    prune(is_never_active, max_bytes=0)
    assert len(deleted) == 1
    assert {path.name for path in (cache / kind).iterdir()} <= {"entry.lock"}


def test_prune_keeps_locked_entries(cache: Path) -> None:
    data_set = add_entry(cache / "data" / "train", days=90)
    experiment = add_entry(cache / "experiments" / "pairs", days=90)
    with (
        (cache / "data" / "train.lock").open("w") as data_lock,
        (experiment / "lock").open("w") as experiment_lock,
    ):
        set_age(experiment, 90)
        fcntl.flock(data_lock, fcntl.LOCK_EX)
        fcntl.flock(experiment_lock, fcntl.LOCK_EX)
        for dry_run in (True, False):
            report = prune(is_never_active, older_than_s=DAY, dry_run=dry_run)
            assert report.deleted == []
            assert {entry.path for entry, _ in report.kept} == {data_set, experiment}
            assert {reason for _, reason in report.kept} == {
                "another process is creating or checking it"
            }
    assert names(prune(is_never_active, older_than_s=DAY).deleted) == {"train", "pairs"}
    assert list_entries() == []


def test_prune_deletes_only_old_unlocked_leftovers(cache: Path) -> None:
    old = [
        add_entry(cache / kind / name, days=2)
        for kind, name in (
            ("data", ".train-12.abcdef"),
            ("models", ".model-0.1.Q4_1.abcdef"),
            ("packages", "package.abcdef.tmp"),
            ("engines", "vllm.partial"),
        )
    ]
    in_use = [
        add_entry(cache / "data" / ".locked.abcdef", days=2),
        add_entry(cache / "data" / ".recent.abcdef", days=2),
    ]
    (in_use[1] / "rows.arrow").touch()
    set_age(in_use[1], 2)
    with (cache / "data" / "locked.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = prune(is_never_active, older_than_s=1000 * DAY)
    assert report.leftovers == old and report.freed_bytes == 4
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in in_use)
    assert list_entries() == []


def test_dry_run_changes_nothing(cache: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        add_use(add_entry(cache / kind / "entry", days=90), tmp_path / kind, days=80).rmdir()
        add_entry(cache / kind / ".leftover.ab", days=90)
    before = {path: path.lstat().st_mtime for path in cache.rglob("*")}
    report = prune(is_never_active, older_than_s=DAY, dry_run=True)
    assert len(report.deleted) == len(report.leftovers) == len(KINDS)
    assert before == {path: path.lstat().st_mtime for path in cache.rglob("*")}


def test_prune_of_one_kind_ignores_the_others(cache: Path) -> None:
    add_entry(cache / "models" / "model", size=100, days=90)
    add_entry(cache / "data" / "train", size=10, days=90)
    report = prune(is_never_active, max_bytes=10, kinds=("data",))
    assert (report.deleted, report.remaining_bytes) == ([], 10)
    report = prune(is_never_active, max_bytes=9, kinds=("data",))
    assert names(report.deleted) == {"train"} and names(list_entries()) == {"model"}


def test_prune_deletes_a_link_but_not_its_target(cache: Path, tmp_path: Path) -> None:
    target = add_entry(tmp_path / "large", size=1000)
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "model").symlink_to(target)
    assert [entry.size for entry in list_entries()] == [0]
    prune(is_never_active, max_bytes=-1)
    assert list_entries() == [] and [*(cache / "models").iterdir()] == []
    assert (target / "file").stat().st_size == 1000
