"""A rank as a task of a Slurm job's step: it learns from Slurm which one it is, and which devices it has."""

from __future__ import annotations

import os

from aligner.errors import AlignerError

IS_TASK = "ALIGNER_SLURM_TASK"
"""Environment variable of the ranks that are started so."""
DEVICES = "ALIGNER_DEVICES"
"""Which of the devices that Slurm gives a step are its role's, by their places; all of them where it is not set."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def adopt_task() -> None:
    """In such a rank: say which it is, and which devices it sees, as torch's own launcher would.

    Raises AlignerError where the step has not got the devices that are its role's.
    """
    if not os.environ.get(IS_TASK):
        return
    os.environ["RANK"], os.environ["LOCAL_RANK"] = os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"]
    if chosen := os.environ.pop(DEVICES, ""):
        # Chosen here: what srun is started with Slurm replaces by all that the job has on the node.
        os.environ[_VISIBLE] = ",".join(_visible(chosen))


def _visible(chosen: str) -> list[str]:
    given = os.environ.get(_VISIBLE)
    if given is None:  # Slurm counts no devices here
        return chosen.split(",")
    names = given.split(",")
    try:
        return [names[int(place)] for place in chosen.split(",")]
    except IndexError:
        raise AlignerError(
            f"this role's devices are numbers {chosen} of its node's, and Slurm gives the step {_VISIBLE}={given} alone;"
            " see cluster.devices_per_node and cluster.slurm.roles.ROLE.devices"
        ) from None
