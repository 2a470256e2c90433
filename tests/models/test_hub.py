"""Models by the names of the Hugging Face Hub, in a cache that is laid out as its library does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REVISION = "0123456789abcdef0123456789abcdef01234567"
FIND = """
import sys
from aligner.errors import ConfigError
from aligner.models.hub import find_model
try:
    print(find_model(sys.argv[1], "model.path", weights=sys.argv[2] == "weights"))
except ConfigError as error:
    sys.exit(str(error))
"""


def cached(hub: Path, name: str, *files: str) -> Path:
    """A model's snapshot: links to blobs, and a ref that names it."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for file in files:
        (repository / "blobs" / file).write_text("{}")
        (snapshot / file).symlink_to(Path("..") / ".." / "blobs" / file)
    return snapshot


def find(hub: Path, name: str, what: str = "weights", **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads its variables when it is imported."""
    command = [sys.executable, "-c", FIND, name, what]
    environment = {**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_a_model_that_the_cache_holds_is_found(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", "config.json", "tokenizer.json", "model.safetensors")
    assert find(tmp_path, "org/name").stdout.strip() == str(snapshot)


def test_a_model_without_its_weights_is_enough_to_check_a_run_and_not_to_start_one(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", "config.json", "tokenizer.json")
    assert find(tmp_path, "org/name", "no weights").stdout.strip() == str(snapshot)
    assert "not complete in the Hugging Face cache" in find(tmp_path, "org/name").stderr


def test_a_model_of_which_a_shard_is_missing_is_not_complete(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", "config.json", "tokenizer.json", "model-1.safetensors")
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    assert "not complete" in find(tmp_path, "org/name").stderr
    (snapshot / "model-2.safetensors").write_text("")
    assert find(tmp_path, "org/name").stdout.strip() == str(snapshot)


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_where_there_is_no_network_it_is_told_what_to_do(tmp_path: Path, environment: dict[str, str]) -> None:
    done = find(tmp_path, "org/absent", **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"model.path=org/absent: no such directory, not complete in the Hugging Face cache ({tmp_path})" in done.stderr
    assert "run `hf download org/absent`" in done.stderr and "HF_HUB_CACHE" in done.stderr
