"""Virtual environments of programs that are no dependencies of ours, which benchmarks compare with
and tests train.

python -m benchmarks.peer_environment verifiers      # installs it
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from aligner.files import write_file
from aligner.paths import cache_directory
from benchmarks.runs import REPOSITORY

_INSTALLED = ".installed"


def peer_python(name: str) -> Path:
    """The interpreter of an environment that has what `benchmarks/peers/<name>.txt` requires.

    It is made the first time, in the cache directory, and anew when that file, the constraints or
    our interpreter have changed. Raises SystemExit where pip cannot install it, which has told why.
    """
    if (found := installed_python(name)) is not None:
        return found
    place, requirements = _place(name), _requirements(name)
    print(
        f"Installing {name} into {place}: some minutes, the first time only",
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
        raise SystemExit(f"pip could not install {requirements} (exit code {code})")
    write_file(place / _INSTALLED, _digest(name))
    return python


def installed_python(name: str) -> Path | None:
    """The same, where it has been made and is as it would be made now."""
    mark = _place(name) / _INSTALLED
    return (
        _place(name) / "bin" / "python"
        if mark.exists() and mark.read_text() == _digest(name)
        else None
    )


def _place(name: str) -> Path:
    return cache_directory() / "peers" / name


def _requirements(name: str) -> Path:
    return REPOSITORY / "benchmarks" / "peers" / f"{name}.txt"


def _digest(name: str) -> str:
    """Changes with what an environment is made of."""
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
    parser.add_argument("name", choices=known)
    print(peer_python(parser.parse_args().name))
