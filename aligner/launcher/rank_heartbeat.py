"""The heartbeat of a rank: a thread that updates the rank's file while the process lives.

`aligner.cli` imports this module first, so it imports nothing that is slow.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

HEARTBEAT = "ALIGNER_HEARTBEAT"
"""Environment variable of a rank: seconds between heartbeats, a colon, and the path of the
heartbeat file without the rank's number at its end."""
IS_TASK = "ALIGNER_SLURM_TASK"
"""Environment variable of ranks that are tasks of a Slurm job's step."""
STACKS_SIGNAL = signal.SIGURG
"""Signal on which a rank prints the Python stacks of its threads into its log.

The default action of this signal is to ignore it, so it is harmless for a process without the
handler, such as a helper of a rank.
"""
# File descriptor of standard error, which is the rank's log.
_STANDARD_ERROR = 2

_condition: Callable[[], bool] | None = None


def start_heartbeat() -> None:
    """Send heartbeats until this process ends, and print all stacks on `STACKS_SIGNAL`.

    Does nothing in a process that the launcher did not start as a rank.
    """
    # Remove the variable, so that processes that this rank starts do not send heartbeats for it.
    setting = os.environ.pop(HEARTBEAT, None)
    if setting is None:
        return
    faulthandler.register(STACKS_SIGNAL, file=_STANDARD_ERROR, all_threads=True)

    interval_s, _, prefix = setting.partition(":")
    rank = os.environ.get("SLURM_PROCID" if os.environ.get(IS_TASK) else "RANK", "0")
    file = Path(f"{prefix}{rank}")
    threading.Thread(
        target=_send_heartbeats, args=(file, float(interval_s)), name="heartbeat", daemon=True
    ).start()


def require_for_heartbeat(condition: Callable[[], bool]) -> None:
    """Send further heartbeats only while `condition` returns True.

    The heartbeat thread calls `condition`, so a condition that blocks also stops the heartbeats.
    """
    global _condition
    _condition = condition


def _send_heartbeats(file: Path, interval_s: float) -> None:
    """Update the heartbeat file every `interval_s` seconds, forever."""
    while True:
        if _condition is None or _condition():
            # The disk may be full, but an update of an existing file's time needs no space. The
            # launcher has created the file.
            with contextlib.suppress(OSError):
                file.parent.mkdir(exist_ok=True)
                file.touch()
        time.sleep(interval_s)
