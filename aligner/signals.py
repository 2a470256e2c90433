"""Signals that roles and launcher agree on."""

import signal

STOP_SIGNAL = signal.SIGUSR1
"""A trainer rank, and the launcher, that get it end the run with a checkpoint. Slurm sends it before a time limit or a
preemption (`sbatch --signal`). Ranks are started with it blocked; a trainer takes it when it can heed it."""
