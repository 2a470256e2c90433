"""A run that is told to stop takes a checkpoint first: SIGUSR1, as Slurm sends before a time limit or a preemption."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from aligner.megatron.world import World

STOP_SIGNAL = signal.SIGUSR1


class StopRequest:
    """Whether the run was told to stop after the step that it is at."""

    def __init__(self, world: World) -> None:
        """Takes over the signal in this process; only the main thread may."""
        self._world = world
        self._told = False
        signal.signal(STOP_SIGNAL, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def agreed(self) -> bool:
        """Whether any rank was told, so that all stop after the same step. Collective."""
        return bool(self._world.max_(torch.tensor(int(self._told), device=self._world.device)))
