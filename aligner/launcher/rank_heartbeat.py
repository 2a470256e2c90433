"""The heartbeat of a rank's process: a thread that updates the rank's file, from the first line of
the process to its end. Imports nothing that takes long.
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
"""A rank that receives it prints the Python stacks of its threads into its log. A process that has
not set it up yet ignores the signal, as do the helper processes of a rank."""
_STANDARD_ERROR = 2

_condition: Callable[[], bool] | None = None


def start_heartbeat() -> None:
    """Send heartbeats until this process ends, and print all stacks on `STACKS_SIGNAL`.

    Does nothing in a process that no launcher has started as a rank.
    """
    # Removed, so that a process that this rank starts does not send heartbeats for it.
    setting = os.environ.pop(HEARTBEAT, None)
    if setting is None:
        return
    faulthandler.register(STACKS_SIGNAL, file=_STANDARD_ERROR, all_threads=True)

    pause_s, _, prefix = setting.partition(":")
    rank = os.environ.get("SLURM_PROCID" if os.environ.get(IS_TASK) else "RANK", "0")
    file = Path(f"{prefix}{rank}")
    threading.Thread(
        target=_send_heartbeats, args=(file, float(pause_s)), name="heartbeat", daemon=True
    ).start()


def require_for_heartbeat(condition: Callable[[], bool]) -> None:
    """Send further heartbeats only while `condition` returns True; the heartbeat's thread calls
    it."""
    global _condition
    _condition = condition


def _send_heartbeats(file: Path, pause_s: float) -> None:
    while True:
        if _condition is None or _condition():
            # The disk may be full. The launcher has created the file, and updating its time takes
            # no space.
            with contextlib.suppress(OSError):
                file.parent.mkdir(exist_ok=True)
                file.touch()
        time.sleep(pause_s)
