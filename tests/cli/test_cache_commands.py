"""`aligner cache`: its table, its JSON, and its reports of deleted and kept entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.cli.command_table import COMMANDS, parse_arguments
from aligner.config.compose import compose_config, save_config
from aligner.errors import ConfigError
from aligner.launcher.run_directory import lock_directory
from tests.test_cache_entries import add_entry, add_use


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a data set of 3 MiB, last used 45 days ago, and a model, used 3 hours ago."""
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    data_set = add_entry(tmp_path / "cache" / "data" / "train-12", 3 * 2**20, days=90)
    add_use(data_set, tmp_path / "run", days=45)
    add_entry(tmp_path / "cache" / "models" / "small", 2048, days=3.01 / 24)
    return tmp_path / "cache"


def run_cache(*arguments: str) -> None:
    COMMANDS["cache"].run(parse_arguments(["cache", *arguments]))


def test_table_shows_size_age_and_state_of_runs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cache.parent / "run"
    with lock_directory(run):
        run_cache()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["data", "train-12", "3.0 MiB", "45 days ago", f"{run} (running)"],
        ["models", "small", "2.0 KiB", "3 h ago", ""],
    ]
    assert lines[-1] == f"{cache}: 2 entries, 3.0 MiB"


def test_table_shows_active_runs_and_the_number_of_others(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(7):
        add_use(cache / "models" / "small", cache.parent / f"run_{index}", days=index)
    with lock_directory(cache.parent / "run_6"):
        run_cache("list", "--kind=models")
    out = capsys.readouterr().out
    shown = [f"run_{index} " in out for index in range(7)]
    assert shown == [True, True, True, True, False, False, True]
    assert "run_6 (running)" in out and "and 2 more" in out and "train" not in out


def test_json_lists_the_fields_of_the_table(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cache("--json")
    data_set, model = json.loads(capsys.readouterr().out)
    assert data_set.pop("last_use") < model["last_use"]
    assert data_set == {
        "kind": "data",
        "name": "train-12",
        "path": str(cache / "data" / "train-12"),
        "size_bytes": 3 * 2**20,
        "runs": [{"directory": str(cache.parent / "run"), "active_state": None}],
    }
    assert model["runs"] == []


def test_empty_cache_prints_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "none"))
    run_cache()
    assert capsys.readouterr().out == f"{tmp_path / 'none'}: no entries\n"
    run_cache("prune", "--max-size=0GiB")
    assert capsys.readouterr().out == f"freed 0 B; 0 B remain in {tmp_path / 'none'}\n"


def test_prune_prints_deleted_entries_and_freed_space(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leftover = add_entry(cache / "data" / ".train-12.abcdef", 2**20, days=2)
    for words, dry_run in (
        (("would delete", "would free", "would remain"), ["--dry-run"]),
        (("deleted", "freed", "remain"), []),
    ):
        run_cache("prune", "--older-than", "30d", *dry_run)
        assert capsys.readouterr().out.splitlines() == [
            f"{words[0]} {leftover}, the leftover of a killed process",
            f"{words[0]} data/train-12: 3.0 MiB, last used 45 days ago",
            f"{words[1]} 4.0 MiB; 2.0 KiB {words[2]} in {cache}",
        ]
        assert (cache / "data" / "train-12").exists() == bool(dry_run)


def test_prune_skips_entries_of_running_runs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cache.parent / "run"
    with lock_directory(run):
        run_cache("prune", "--max-size", "1MiB")
    assert capsys.readouterr().out.splitlines() == [
        "deleted models/small: 2.0 KiB, last used 3 h ago",
        f"kept data/train-12: used by {run}, which is running",
        f"freed 2.0 KiB; 3.0 MiB remain in {cache}",
        "--max-size 1.0 MiB is not reached, because the kept entries cannot be deleted now",
    ]
    assert (cache / "data" / "train-12" / "file").is_file()


def test_prune_skips_entries_of_queued_jobs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cache.parent / "run"
    config = compose_config(["experiment=tiny_ppo", "cluster=slurm", f"run.dir={run}"])
    save_config(config, run / "config.yaml")
    run_cache("prune", "--older-than=1d")
    assert f"used by {run}, which is queued" in capsys.readouterr().out


def test_prune_deletes_entries_of_stopped_runs(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cache.parent / "run"
    save_config(compose_config(["experiment=tiny_ppo", f"run.dir={run}"]), run / "config.yaml")
    run_cache("prune", "--older-than=1d")
    assert "deleted data/train-12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--older-than", "xyz", "a number of hours, days or weeks, such as 12h, 30d or 8w"),
        ("--older-than", "30", "a number of hours, days or weeks, such as 12h, 30d or 8w"),
        ("--older-than", "-1d", "a number of hours"),
        ("--max-size", "50", "a size in MB, MiB, GB, GiB, TB or TiB, such as 50GiB"),
        ("--max-size", "infGiB", "a size in MB"),
        ("--kind", "dataset", "'data', 'datasets', 'models', 'packages', 'experiments', 'engines'"),
    ],
)
def test_wrong_value_exits_2_with_the_allowed_values(
    cache: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, allowed: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_cache("prune", f"{option}={value}")
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"argument {option}: " in error and value in error and allowed in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune"], "aligner cache prune: set --older-than"),
        (["prune", "--older-than=1d", "--json"], "--json: is an option of `aligner cache list`"),
        (["--older-than=1d"], "are options of `aligner cache prune`"),
        (["list", "--dry-run"], "are options of `aligner cache prune`"),
    ],
)
def test_option_of_the_other_action_is_refused(
    cache: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_cache(*arguments)
    assert (cache / "data" / "train-12").exists()


@pytest.mark.parametrize(
    ("text", "value"), [("12h", 43200), ("1.5d", 129600), ("8W", 4838400), ("1 w", 604800)]
)
def test_ages_are_parsed_in_seconds(text: str, value: float) -> None:
    assert parse_arguments(["cache", "prune", f"--older-than={text}"]).older_than == value


@pytest.mark.parametrize(
    ("text", "value"), [("5GB", 5e9), ("1.5GiB", 1.5 * 2**30), ("7mib", 7 * 2**20)]
)
def test_sizes_are_parsed_in_bytes(text: str, value: float) -> None:
    assert parse_arguments(["cache", "prune", f"--max-size={text}"]).max_size == value
