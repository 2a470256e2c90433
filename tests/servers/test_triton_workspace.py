"""The directory in which PyTriton sets up Triton if HOME has unusual characters or is too long."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from aligner.servers.triton_host import create_workspace


@pytest.mark.parametrize("name", ["plain", "a b", "ü", "it's", "a,b", "#", "x" * 80])
def test_workspace_moves_to_tmp_if_home_path_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    home = tmp_path / name
    monkeypatch.setattr("pytriton.constants.PYTRITON_HOME", home)
    monkeypatch.setattr("aligner.servers.triton_host._MAX_PATH_LENGTH", len(str(tmp_path)) + 20)
    workspace = create_workspace()
    try:
        assert workspace.path.is_relative_to(home if name == "plain" else Path("/tmp"))
        assert workspace.path.is_relative_to(home) == (name == "plain")
        assert stat.S_IMODE(workspace.path.stat().st_mode) == stat.S_IRWXU
    finally:
        shutil.rmtree(workspace.path)
