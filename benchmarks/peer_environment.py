"""Install packages of other projects into separate environments, for benchmarks and tests.

    python -m benchmarks.peer_environment verifiers
    python -m benchmarks.peer_environment langgraph ai_sdk

The environments are created in the cache directory of aligner. The packages of environment NAME are
listed in benchmarks/peers/: in NAME.txt for Python, and in NAME.json, a package.json, for Node. The
command prints the path of each Python interpreter, or of the directory that contains
`node_modules`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from aligner.files import write_file
from aligner.paths import get_cache_directory
from benchmarks.runs import REPOSITORY

_PEERS = REPOSITORY / "benchmarks" / "peers"
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
    place = _start_installation(name)
    _run([sys.executable, "-m", "venv", place], name)
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    _run([*pip, "--requirement", _requirements(name)], name)
    write_file(place / _INSTALLED, _digest(name))
    return python


def peer_node_directory(name: str) -> Path:
    """Return the directory whose `node_modules` contains the packages in
    `benchmarks/peers/<name>.json`.

    The directory is created in the cache directory, and created anew if that file has changed.
    Raises SystemExit if npm does not exist or fails; npm has then printed the reason.
    """
    if (found := installed_node_directory(name)) is not None:
        return found
    place = _start_installation(name)
    place.mkdir(parents=True)
    shutil.copyfile(_requirements(name), place / "package.json")
    npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    _run([*npm, "--prefix", place], name)
    write_file(place / _INSTALLED, _digest(name))
    return place


def installed_python(name: str) -> Path | None:
    """Return the interpreter of an environment that exists and is up to date, else None."""
    return _place(name) / "bin" / "python" if _is_up_to_date(name) else None


def installed_node_directory(name: str) -> Path | None:
    """Return the directory of Node packages that exist and are up to date, else None."""
    return _place(name) if _is_up_to_date(name) else None


def is_node_environment(name: str) -> bool:
    """Return whether an environment contains packages for Node, not for Python."""
    return (_PEERS / f"{name}.json").exists()


def _start_installation(name: str) -> Path:
    """Delete what an earlier installation has left, and return the directory of the new one."""
    place = _place(name)
    print(
        f"Installing {name} into {place}; this takes some minutes, the first time only",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(place, ignore_errors=True)
    return place


def _run(command: Sequence[str | Path], name: str) -> None:
    """Run a command with its output on stderr. Raises SystemExit if it fails or does not exist."""
    program = Path(command[0]).name
    try:
        code = subprocess.run(command, stdout=sys.stderr).returncode
    except FileNotFoundError:
        raise SystemExit(f"{_requirements(name)}: {program} is not installed") from None
    if code:
        raise SystemExit(
            f"{_requirements(name)}: {program} exited with code {code}; its messages are printed"
            " above"
        )


def _is_up_to_date(name: str) -> bool:
    mark = _place(name) / _INSTALLED
    return mark.exists() and mark.read_text() == _digest(name)


def find_interpreter(version: str) -> Path | None:
    """Return an interpreter of a version from pyenv or PATH, or None.

    The interpreter must be able to start; pyenv's shim on PATH may not.
    """
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    on_path = shutil.which(f"python{version}")
    for python in [
        *sorted(installed.glob(f"{version}.*/bin/python")),
        *([Path(on_path)] if on_path else []),
    ]:
        if subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    return None


def site_packages(python: Path) -> str:
    """Return the directory with the packages of an environment's interpreter."""
    (directory,) = python.parent.parent.glob("lib/python3*/site-packages")
    return str(directory)


def _place(name: str) -> Path:
    return get_cache_directory() / "peers" / name


def _requirements(name: str) -> Path:
    return _PEERS / f"{name}.{'json' if is_node_environment(name) else 'txt'}"


def _digest(name: str) -> str:
    """Return a digest of everything that determines the contents of an environment."""
    parts = [_requirements(name).read_bytes()]
    if not is_node_environment(name):
        parts += [(REPOSITORY / "constraints.txt").read_bytes(), sys.version.encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _install_all(names: Sequence[str]) -> None:
    """Install environments and print their paths. Raises SystemExit after the last environment if
    any failed."""
    errors = []
    for name in names:
        try:
            print(peer_node_directory(name) if is_node_environment(name) else peer_python(name))
        except SystemExit as error:
            errors.append(str(error))
    if errors:
        raise SystemExit("\n".join(errors))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(file.stem for file in _PEERS.iterdir())
    parser.add_argument(
        "name", choices=known, nargs="+", metavar="NAME", help=f"any of {', '.join(known)}"
    )
    _install_all(parser.parse_args().name)
