"""The limit of open files of a server's process."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import logging, resource
from aligner.open_files import warn_if_too_few_files

logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
warn_if_too_few_files({connections}, "environment.workers=1")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def run(connections: int) -> tuple[str, str]:
    """Return the output and the log of a process whose hard limit is 300 files."""
    program = _PROGRAM.format(connections=connections)
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return process.stdout.strip(), process.stderr.strip()


def test_limit_is_raised_without_warning_if_it_suffices() -> None:
    assert run(40) == ("300", "")


def test_hard_limit_that_is_too_low_is_logged_with_its_cause() -> None:
    limit, log = run(64)
    assert limit == "300"
    assert log.startswith("environment.workers=1 may need 320 open files, but the hard limit")
    assert "ulimit -Hn" in log
