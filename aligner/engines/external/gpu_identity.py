"""GPUs of a replica's ranks.

An external engine needs this information to start its workers on the same GPUs.
"""

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from aligner.engines.external.replica import Replica
from aligner.errors import AlignerError


def gather_gpus(
    replica: Replica, device: torch.device, *, allows_several_machines: bool = False
) -> list[dict[str, Any]]:
    """Return the GPU of each rank of the replica, in rank order. Collective.

    Args:
        replica: The replica.
        device: Device of this rank.
        allows_several_machines: Whether the ranks may run on several machines.

    Returns:
        One dictionary per rank: `host` is the host name, `name` is the GPU's name in
        CUDA_VISIBLE_DEVICES, and `uuid` is its UUID (GPU-…).

    Raises:
        AlignerError: The ranks run on several machines.
    """
    gpus = replica.run_on_all_ranks(
        "finding the GPU of each rank", lambda: _describe_gpu(device, replica.rank)
    )
    if allows_several_machines:
        return gpus
    hosts = sorted({gpu["host"] for gpu in gpus})
    # The workers read the ranks' weights from shared memory, which does not span machines.
    if len(hosts) > 1:
        raise AlignerError(
            f"engine.parallel: all {replica.size} ranks of a replica must run on one machine, got"
            f" {', '.join(hosts)}"
        )
    return gpus


def get_gpu_name(environ: Mapping[str, str], ordinal: int) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES gives to a GPU of this process.

    This is the index of the GPU on the machine, or a UUID.

    Args:
        environ: Environment variables of the process.
        ordinal: Index of the GPU among the visible ones.
    """
    visible_gpus = environ.get("CUDA_VISIBLE_DEVICES")
    return visible_gpus.split(",")[ordinal] if visible_gpus else str(ordinal)


def _describe_gpu(device: torch.device, rank: int) -> dict[str, str]:
    """Return this rank's entry of `gather_gpus`.

    A rank without a GPU gets the names of a CPU with the rank's number. Only tests have such ranks,
    with a substitute for the external engine.
    """
    name = str(rank)
    uuid = f"CPU-{rank}"
    if device.type == "cuda":
        # CUDA numbers the GPUs that CUDA_VISIBLE_DEVICES lists, in the order of the list.
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        name = get_gpu_name(os.environ, ordinal)
        uuid = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
    return {"host": socket.gethostname(), "name": name, "uuid": uuid}
