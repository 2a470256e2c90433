"""After which step a run ends: its last, or the one that it is at when it is told to stop.

The run ends with a checkpoint either way; where it is told before its first step there is nothing new to keep.
"""

import signal
from types import FrameType

import torch

from aligner.exit_codes import STOP_SIGNAL
from aligner.megatron.world import World
from aligner.schema import RunConfig


class StopCondition:
    """One rank's view of it; all ranks agree."""

    def __init__(self, run: RunConfig, world: World) -> None:
        """Takes over the signal to stop in this process; only the main thread may."""
        self.last = min(run.steps, run.stop_after or run.steps)
        self.is_early = False
        """Whether the run was told to stop, and has ended before its last step."""
        self._world = world
        self._told = False
        signal.signal(STOP_SIGNAL, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def is_early_after(self, done: int) -> bool:
        """Whether the run was told to stop, with so many steps done and others to come. Collective."""
        told = bool(self._world.max_(torch.tensor(int(self._told), device=self._world.device)))
        self.is_early = told and done < self.last
        return self.is_early

    def is_after(self, done: int) -> bool:
        """Whether the run ends after the step `done`: with that many done, none follows. Collective."""
        return self.is_early_after(done) or done == self.last
