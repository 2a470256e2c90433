"""Models by their Hugging Face Hub names: lookup in the local cache, and download."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from aligner.models.model_source import _is_complete
from tests.hub_server import REVISION, HubHandler, serve_hub

FIND = """
import sys
from aligner.errors import ConfigError
from aligner.models.model_source import find_model
try:
    print(find_model(sys.argv[1], "model.path", weights=sys.argv[2] == "weights"))
except ConfigError as error:
    sys.exit(str(error))
"""


def cached(hub: Path, name: str, *files: str) -> Path:
    """Create a model's snapshot in the cache: links to blobs, and a ref to the revision."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for file in files:
        (repository / "blobs" / file).write_text("{}")
        (snapshot / file).symlink_to(Path("..") / ".." / "blobs" / file)
    return snapshot


def find(
    hub: Path, name: str, what: str = "weights", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `find_model` in a subprocess: huggingface_hub reads its variables when it is imported."""
    command = [sys.executable, "-c", FIND, name, what]
    environment = {**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_cached_model_is_found_by_hub_name(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", "config.json", "tokenizer.json", "model.safetensors")
    assert find(tmp_path, "org/name").stdout.strip() == str(snapshot)


def test_vocab_and_merges_count_as_cached_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "vocab.json"):
        (tmp_path / name).write_text("{}")
    assert not _is_complete(tmp_path, weights=False)

    (tmp_path / "merges.txt").write_text("")
    assert _is_complete(tmp_path, weights=False)


def test_cached_model_without_weights_is_enough_for_checks(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", "config.json", "tokenizer.json")
    assert find(tmp_path, "org/name", "no weights").stdout.strip() == str(snapshot)
    assert "not complete in the Hugging Face cache" in find(tmp_path, "org/name").stderr


def test_cached_model_with_missing_shard_is_incomplete(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", "config.json", "tokenizer.json", "model-1.safetensors")
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    assert "not complete" in find(tmp_path, "org/name").stderr
    (snapshot / "model-2.safetensors").write_text("")
    assert find(tmp_path, "org/name").stdout.strip() == str(snapshot)


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
)
def test_missing_model_without_network_is_reported(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = find(tmp_path, "org/absent", **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "model.path=org/absent: is not a directory, is not complete in the Hugging Face cache"
        f" ({tmp_path})" in done.stderr
    )
    assert "run `hf download org/absent`" in done.stderr and "HF_HUB_CACHE" in done.stderr


class Hub(HubHandler):
    """A Hub with the model org/name."""

    repository = "models/org/name"
    files: ClassVar[dict[str, bytes]] = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
    }


def test_uncached_model_downloads_weights_only_if_needed(tmp_path: Path) -> None:
    with serve_hub(Hub) as address:
        there = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        small = find(tmp_path, "org/name", "no weights", **there)
        assert small.returncode == 0, small.stderr
        assert {file.name for file in Path(small.stdout.strip()).iterdir()} == {
            "config.json",
            "tokenizer.json",
        }
        whole = find(tmp_path, "org/name", **there)
        assert whole.returncode == 0, whole.stderr
        assert (Path(whole.stdout.strip()) / "model.safetensors").read_bytes() == b"weights"
