"""Virtual environments of the programs that benchmarks compare with, which are no dependencies of ours."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from aligner.files import write_file
from aligner.paths import cache_directory
from benchmarks.runs import REPOSITORY


def peer_python(name: str) -> Path:
    """The interpreter of an environment that has what `benchmarks/peers/<name>.txt` requires.

    It is made the first time, in the cache directory, and anew when that file, the constraints or our interpreter have
    changed. Raises SystemExit where pip cannot install it, which has told why.
    """
    requirements = REPOSITORY / "benchmarks" / "peers" / f"{name}.txt"
    asked = hashlib.sha256(requirements.read_bytes() + (REPOSITORY / "constraints.txt").read_bytes() + sys.version.encode())
    place, digest = cache_directory() / "peers" / name, asked.hexdigest()
    python, installed = place / "bin" / "python", place / ".installed"
    if installed.exists() and installed.read_text() == digest:
        return python
    print(f"Installing {name} into {place}: some minutes, the first time only", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--requirement", requirements]
    if code := subprocess.run(pip, stdout=sys.stderr).returncode:
        raise SystemExit(f"pip could not install {requirements} (exit code {code})")
    write_file(installed, digest)
    return python
