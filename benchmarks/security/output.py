"""Attempts of a reward function to fill the disk or the terminal with what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.security.registry import HELD, Outcome, finding, probe

_LIMIT_MIB = 1
_PRINTED_MIB = 100
"""Size of one printed text."""
_PRINTS_PER_CALL = 6
# A single call of the kernel writes a printed text, and nothing can shorten the log meanwhile. A
# busy machine may write the next one before the log is shortened.
_MAX_PEAK_MIB = 3 * _PRINTED_MIB
_MAX_ERROR_BYTES = 100_000
_TIMEOUT_S = 600.0

# The function writes directly to the log, as a C++ library does: Python's streams mask secrets,
# which takes seconds for this much text.
_PRINTING = f"""
import os

def score(requests):
    for _ in range({_PRINTS_PER_CALL}):
        os.write(2, (b"x" * 1023 + b"\\n") * ({_PRINTED_MIB} * 1024))
    return [1.0 for _ in requests]
"""
# `prepare` calls the function once; it fails only in the server.
_FAILING = """
import os

def score(requests):
    if os.path.exists(os.environ["SERVERS_STARTED"]):
        print("x" * (5 << 20), flush=True)
        raise ValueError("y" * (1 << 20))
    return [1.0 for _ in requests]
"""


def _launch(directory: Path, program: str) -> tuple[int, str, float]:
    """Run one step with a reward function.

    Returns:
        The exit code, the terminal output, and the maximum total size of the logs in MiB.
    """
    (directory / "attack.py").write_text(program)
    run = directory / "run"
    started = directory / "started"
    command = [sys.executable, "-m", "aligner", "launch", "experiment=tiny_ppo", "run.steps=1"]
    command += [f"run.dir={run}", "reward.function=attack:score"]
    command += [f"logging.file_mib={_LIMIT_MIB}", "rollout.max_skipped_prompts=0"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}",
        "SERVERS_STARTED": str(started),
    }
    output_file = directory / "output"
    peak_bytes = 0
    deadline = time.monotonic() + _TIMEOUT_S
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the run took longer than {_TIMEOUT_S:g} s")
                if (run / "endpoints.json").exists():
                    started.touch()
                sizes = [file.stat().st_size for file in (run / "logs").glob("*.log")]
                peak_bytes = max(peak_bytes, sum(sizes))
                time.sleep(0.02)
        finally:
            process.terminate()
            process.wait()
    return process.returncode, output_file.read_text(errors="replace"), peak_bytes / 2**20


def _find_excess(directory: Path, peak_mib: float) -> str | None:
    """Return what the logs of a run exceed; None if they stayed within their limits."""
    if peak_mib > _MAX_PEAK_MIB:
        return f"the logs had {peak_mib:.0f} MiB"
    logs = sorted((directory / "run" / "logs").glob("*.log"))
    for log in logs:
        if log.stat().st_size > _LIMIT_MIB << 20:
            return f"{log.name} has {log.stat().st_size} bytes after the run"
    return None


@probe(
    "output",
    attempt=f"print {_PRINTS_PER_CALL * _PRINTED_MIB} MiB in each call of the reward function",
    expected="the run finishes, and its logs stay near logging.file_mib",
    component="logging.file_mib",
)
def printing_reward_function() -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        code, output, peak_mib = _launch(directory, _PRINTING)
        if code != 0:
            return finding(f"the run exited with code {code}: {output[-300:]}")
        if (excess := _find_excess(directory, peak_mib)) is not None:
            return finding(excess)
        first_line = (directory / "run/logs/reward-0.log").read_text().partition("\n")[0]
        if "bytes of older output were dropped" not in first_line:
            return finding("the log does not say that output was dropped")
    return HELD


@probe(
    "output",
    attempt="print a line of 5 MiB in the reward function, and raise an error of 1 MiB",
    expected="the error on the terminal is short, and the logs stay near logging.file_mib",
    component="aligner launch",
)
def long_line_and_error() -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        code, output, peak_mib = _launch(directory, _FAILING)
        if code != 1:
            return finding(f"the run exited with code {code}: {output[-300:]}")
        if len(output) > _MAX_ERROR_BYTES:
            return finding(f"the terminal received {len(output)} bytes")
        if "ValueError in attack.py:" not in output:
            return finding(f"the terminal does not name the error: {output[-300:]}")
        if (excess := _find_excess(directory, peak_mib)) is not None:
            return finding(excess)
    return HELD
