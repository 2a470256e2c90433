"""A rank as a task of a Slurm job's step: it learns from Slurm which one it is."""

from __future__ import annotations

import os

IS_TASK = "ALIGNER_SLURM_TASK"
"""Environment variable of the ranks that are started so."""


def adopt_task() -> None:
    """In such a rank: say which it is as torch's own launcher would."""
    if os.environ.get(IS_TASK):
        os.environ["RANK"], os.environ["LOCAL_RANK"] = os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"]
