"""Python packages that ship a model's file: those that are installed, and those that were fetched
for that file alone.

What such a package imports is of no use here, and may take minutes to compile: it is unpacked into
the cache, where Python does not look for modules, and what it depends on stays away.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from aligner.errors import AlignerError, ConfigError
from aligner.files import finish_directory, start_directory
from aligner.paths import cache_directory

_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(==[\w.+!-]+)?")


def package_directory(package: str) -> Path | None:
    """Where the files of an importable package are, installed or fetched; None where it is
    neither."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    found = (
        directory
        for directory in _fetched().glob(f"*/{package}")
        if "." not in directory.parent.name
    )
    return next(found, None)  # the names of what is still being fetched have dots


def package_version(package: str) -> str:
    """The version of a package that `package_directory` finds."""
    directory = package_directory(package)
    if directory is not None and _fetched() in directory.parents:
        return next(iter(metadata.distributions(path=[str(directory.parent)]))).version
    return metadata.version(metadata.packages_distributions()[package][0])


def fetch_package(requirement: str) -> Path:
    """Fetch a package, `NAME` or `NAME==VERSION`, without what it depends on; returns where it is
    unpacked.

    None of its code is run, and it replaces one that was fetched before. Raises ConfigError for
    another requirement, and AlignerError with what pip, or uv where there is no pip, says.
    """
    named = _REQUIREMENT.fullmatch(requirement)
    if named is None:
        raise ConfigError(f"{requirement}: must be a package NAME or NAME==VERSION")
    target = _fetched() / re.sub(r"[-_.]+", "_", named[1].lower())
    started = start_directory(target)
    command = [
        *_installer(),
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        str(started),
        requirement,
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(started)
        raise AlignerError(
            f"{requirement}: could not be fetched:"
            f" {done.stderr.strip() or f'exit code {done.returncode}'}"
        )
    finish_directory(started, target)
    return target


def _installer() -> list[str]:
    """The environments that uv makes have no pip, and uv names itself to what it runs."""
    # Not find_spec, of which setuptools' own finder concludes that this process is pip.
    if next(iter(metadata.distributions(name="pip")), None) is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ConfigError("fetching a package requires pip or uv; install one of them")
    return [uv, "pip", "install", "--python", sys.executable]


def _fetched() -> Path:
    return cache_directory().absolute() / "packages"
