"""Processes that see the machine with a read-only root, like those in a Pyxis container."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aligner.agents.sandboxes.bubblewrap import find_bubblewrap

REPOSITORY = Path(__file__).parents[1]


def run_with_read_only_root(
    command: list[str], writable: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command; it can write only to `writable` and to an empty /tmp.

    The home directory is empty and read-only. Skip the test if this machine has no namespaces.
    """
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        pytest.skip("bubblewrap is not installed")
    home = writable / "home"
    home.mkdir()
    # Both may be below /tmp, which is hidden.
    visible = {REPOSITORY, Path(sys.prefix).resolve()}
    arguments = [
        *("--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"),
        *("--tmpfs", "/tmp"),
        *(text for path in sorted(visible) for text in ("--ro-bind", path, path)),
        *("--bind", writable, writable, "--ro-bind", home, home),
        *("--unshare-pid", "--die-with-parent", "--chdir", "/", "--clearenv"),
    ]
    variables = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        **environment,
    }
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    sandbox = [str(bubblewrap), *map(str, arguments)]
    probe = subprocess.run([*sandbox, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"bubblewrap does not work here: {probe.stderr.strip()}")
    return subprocess.run(
        [*sandbox, *command], capture_output=True, text=True, check=False, timeout=timeout_s
    )
