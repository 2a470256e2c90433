"""Install TRL or verifiers into a separate virtual environment, for benchmarks and tests.

    python -m benchmarks.peer_environment verifiers

The environment is created in the cache directory of aligner. Its packages are listed in
benchmarks/peers/. The command prints the path of its Python interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from aligner.files import write_file
from aligner.paths import get_cache_directory
from benchmarks.runs import REPOSITORY

_INSTALLED = ".installed"


def peer_python(name: str) -> Path:
    """Return the Python interpreter of an environment with the packages in
    `benchmarks/peers/<name>.txt`.

    The environment is created in the cache directory, and created anew if that file, the
    constraints or this interpreter have changed. Raises SystemExit if pip fails; pip has then
    printed the reason.
    """
    if (found := installed_python(name)) is not None:
        return found
    place, requirements = _place(name), _requirements(name)
    print(
        f"Installing {name} into {place}; this takes some minutes, the first time only",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-qq",
        "install",
        "--requirement",
        requirements,
    ]
    if code := subprocess.run(pip, stdout=sys.stderr).returncode:
        raise SystemExit(
            f"{requirements}: pip exited with code {code}; its messages are printed above"
        )
    write_file(place / _INSTALLED, _digest(name))
    return python


def installed_python(name: str) -> Path | None:
    """Return the interpreter of an environment that exists and is up to date, else None."""
    mark = _place(name) / _INSTALLED
    return (
        _place(name) / "bin" / "python"
        if mark.exists() and mark.read_text() == _digest(name)
        else None
    )


def _place(name: str) -> Path:
    return get_cache_directory() / "peers" / name


def _requirements(name: str) -> Path:
    return REPOSITORY / "benchmarks" / "peers" / f"{name}.txt"


def _digest(name: str) -> str:
    """Return a digest of everything that determines the contents of an environment."""
    parts = (
        _requirements(name).read_bytes(),
        (REPOSITORY / "constraints.txt").read_bytes(),
        sys.version.encode(),
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(file.stem for file in (REPOSITORY / "benchmarks" / "peers").glob("*.txt"))
    parser.add_argument("name", choices=known, help="environment to install")
    print(peer_python(parser.parse_args().name))
