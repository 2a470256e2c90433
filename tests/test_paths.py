"""Environment variables of processes whose home directory cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aligner.paths import redirect_library_caches

VARIABLES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "HF_HOME")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the function sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))


def read_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_library_caches_are_redirected_if_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # nothing can be created below a file, not even by root
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    redirect_library_caches()
    directory = str(tmp_path / "cache" / "libraries")
    assert read_variables() == {
        "XDG_CACHE_HOME": directory,
        "TRITON_CACHE_DIR": "/elsewhere",
        "FLASHINFER_WORKSPACE_BASE": directory,
    }


def test_library_caches_stay_in_a_writable_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    redirect_library_caches()
    assert read_variables() == {}
