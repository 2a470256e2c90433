"""The directory in which PyTriton sets up Triton: a temporary one, or below PYTRITON_HOME."""

from __future__ import annotations

import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from aligner.servers.triton_host import create_workspace


@pytest.fixture(autouse=True)
def without_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is a directory below a file, in which nothing can be created, not even by root."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PYTRITON_HOME", raising=False)


@pytest.mark.parametrize("variable", ["TMPDIR", "PYTRITON_HOME"])
@pytest.mark.parametrize("name", ["plain", "a b", "ü", "it's", "a,b", "#", "x" * 80])
def test_workspace_moves_to_tmp_if_path_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    directory = tmp_path / name
    directory.mkdir()
    monkeypatch.setenv(variable, str(directory))
    monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
    monkeypatch.setattr("aligner.servers.triton_host._MAX_PATH_LENGTH", len(str(tmp_path)) + 20)
    workspace = create_workspace()
    try:
        assert workspace.path.parent == (directory if name == "plain" else Path("/tmp"))
        assert stat.S_IMODE(workspace.path.stat().st_mode) == stat.S_IRWXU
    finally:
        shutil.rmtree(workspace.path)


def test_workspace_is_temporary_if_home_cannot_be_written() -> None:
    workspace = create_workspace()
    try:
        assert workspace.path.is_relative_to(tempfile.gettempdir())
    finally:
        shutil.rmtree(workspace.path)
