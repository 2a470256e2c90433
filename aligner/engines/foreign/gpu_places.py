"""Which GPUs a replica's ranks have, for a program of another's that is to run on the same ones."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from aligner.engines.foreign.replica import Replica
from aligner.errors import AlignerError


def gpu_places(replica: Replica, device: torch.device) -> list[dict[str, Any]]:
    """Of each rank of the replica what CUDA_VISIBLE_DEVICES calls its GPU (`name`), and its `uuid`
    (GPU-…). Collective.

    Raises AlignerError where the ranks are on several machines.
    """
    places = replica.gather("finding the GPU of each rank", lambda: _place(device, replica.rank))
    if len(hosts := sorted({place["host"] for place in places})) > 1:
        raise AlignerError(
            f"engine.parallel.tensor={replica.size}: all ranks of a replica must run on one"
            f" machine, got {', '.join(hosts)}"
        )
    return places


def gpu_name(environ: Mapping[str, str], ordinal: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls this process's `ordinal`-th GPU: the machine's index, or a
    UUID."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[ordinal] if visible else str(ordinal)


def _place(device: torch.device, rank: int) -> dict[str, str]:
    """This rank's. CPUs, which only a stand-in for a program on GPUs has, are counted by rank."""
    name, uuid = str(rank), f"CPU-{rank}"
    if device.type == "cuda":
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        name = gpu_name(os.environ, ordinal)
        uuid = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
    return {"host": socket.gethostname(), "name": name, "uuid": uuid}
