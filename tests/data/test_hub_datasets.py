"""Data sets by their Hugging Face Hub names: download, the cache, and errors without a network."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pyarrow
import pytest
from pyarrow import parquet

from aligner.config.compose import compose_config
from aligner.data.hub_datasets import HubDataset, parse_hub_dataset, resolve_hub_datasets
from aligner.data.record_sources import open_record_source
from benchmarks.runs import python_path
from tests.data.published_data import GSM8K
from tests.hub_server import HubHandler, serve_hub

RESOLVE = """
import sys
from aligner.data.hub_datasets import resolve_hub_path
from aligner.errors import ConfigError
try:
    print(resolve_hub_path(sys.argv[1], "data.path="))
except ConfigError as error:
    sys.exit(str(error))
"""


def _write_parquet(records: list[dict[str, str]]) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), stream)
    return stream.getvalue()


class Hub(HubHandler):
    """A Hub with the data set org/sums."""

    repository = "datasets/org/sums"
    files: ClassVar[dict[str, bytes]] = {
        "README.md": b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main-train.parquet
  - split: test
    path: main-test.parquet
- config_name: socratic
  data_files:
  - split: train
    path: socratic-train.parquet
---
""",
        "main-train.parquet": _write_parquet(GSM8K),
        "main-test.parquet": _write_parquet(GSM8K[:1]),
        "socratic-train.parquet": _write_parquet(GSM8K[1:]),
    }


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a Hub with the data set org/sums."""
    with serve_hub(Hub) as address:
        yield address


def resolve(place: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `resolve_hub_path` in a subprocess: the Hub's client reads its variables on import."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "HF_HOME": str(place / "hf"),
        "HF_HUB_CACHE": str(place / "hf" / "hub"),
        "ALIGNER_CACHE": str(place / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
    )


@pytest.mark.slow
def test_split_is_downloaded_once(tmp_path: Path, hub: str) -> None:
    done = resolve(tmp_path, "org/sums:main", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr
    assert "data.path=org/sums:main: loading split train" in done.stderr
    directory = Path(done.stdout.strip())
    assert directory == tmp_path / "cache" / "datasets" / "org--sums--main--train"
    records = [record.content for record in open_record_source(directory, "").read()]
    assert records == GSM8K
    assert [entry.name for entry in directory.parent.iterdir()] == [directory.name]

    again = resolve(tmp_path, "org/sums:main:train", HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout and "loading" not in again.stderr

    test_split = resolve(tmp_path, "org/sums:main:test", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    test_records = open_record_source(Path(test_split.stdout.strip()), "").read()
    assert [record.content for record in test_records] == GSM8K[:1]

    without_config = resolve(tmp_path, "org/sums", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    assert without_config.returncode == 1 and "['main', 'socratic']" in without_config.stderr
    bad_split = resolve(tmp_path, "org/sums:main:dev", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    assert bad_split.returncode == 1 and "['train', 'test']" in bad_split.stderr


@pytest.mark.slow
def test_data_set_without_network_is_reported(tmp_path: Path) -> None:
    done = resolve(tmp_path, "org/sums:main", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "data.path=org/sums:main: no such file or directory, and split train" in done.stderr
    command = "load_dataset('org/sums', 'main', split='train').save_to_disk('sums')"
    assert command in done.stderr and "copy the directory sums to this machine" in done.stderr


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("openai/gsm8k", HubDataset("openai/gsm8k", None, "train")),
        ("openai/gsm8k:main", HubDataset("openai/gsm8k", "main", "train")),
        ("org/name:main:test", HubDataset("org/name", "main", "test")),
        ("org/name::test", HubDataset("org/name", None, "test")),
        ("data/absent.jsonl", None),
        ("data/absent.jsonl.gz", None),
        ("function:module:records", None),
        ("experiment:openings/samples.jsonl", None),
        ("/data/absent", None),
        ("a/b/c", None),
        ("-", None),
    ],
)
def test_names_of_data_sets_are_recognised(path: str, expected: HubDataset | None) -> None:
    assert parse_hub_dataset(path) == expected


def test_existing_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "sums").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_hub_dataset("org/sums") is None


def test_names_in_all_data_keys_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path))
    for name in ("org--sums--default--train", "org--sums--main--test"):
        (tmp_path / "datasets" / name).mkdir(parents=True)
        for file in ("state.json", "dataset_info.json"):
            (tmp_path / "datasets" / name / file).write_text("{}")
    keys = [
        "+data.sources.sums={path: org/sums}",
        *("evaluation.every=1", "+evaluation.suites.test={path: 'org/sums:main:test'}"),
    ]
    config = resolve_hub_datasets(compose_config(["experiment=tiny_ppo", *keys]))
    assert config.data.sources["sums"]["path"].endswith("org--sums--default--train")
    assert config.evaluation.suites["test"]["path"].endswith("org--sums--main--test")
