"""Models by their Hugging Face Hub names: lookup in the local cache, and download."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from aligner.models.model_source import _is_complete

REVISION = "0123456789abcdef0123456789abcdef01234567"
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


class Hub(BaseHTTPRequestHandler):
    """Handle the requests of a download: the list of a revision's files, and the files."""

    files: ClassVar[dict[str, bytes]] = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
    }

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in self.files]
            tree = [
                {"type": "file", "path": name, "oid": "1" * 40, "size": len(body)}
                for name, body in self.files.items()
            ]
            content = json.dumps(
                tree
                if "/tree/" in path
                else {"id": "org/name", "sha": REVISION, "siblings": siblings}
            ).encode()
        else:
            content = self.files.get(path.rpartition("/")[2], b"")
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_uncached_model_downloads_weights_only_if_needed(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        try:
            small = find(tmp_path, "org/name", "no weights", **there)
            assert small.returncode == 0, small.stderr
            assert {file.name for file in Path(small.stdout.strip()).iterdir()} == {
                "config.json",
                "tokenizer.json",
            }
            whole = find(tmp_path, "org/name", **there)
            assert whole.returncode == 0, whole.stderr
            assert (Path(whole.stdout.strip()) / "model.safetensors").read_bytes() == b"weights"
        finally:
            server.shutdown()
