"""Function that worker ranks run for the tests of the trainer's requests to servers."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.errors import AlignerError
from aligner.training.services import run_and_broadcast_result


def wait_on_all_ranks(seconds: float, timeout_s: float, error: str | None = None) -> Any:
    """Return each rank's answer if rank 0 waits for a server longer than the collective timeout."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)

    def wait() -> str | None:
        if dist.get_rank() == 0:
            time.sleep(seconds)
            if error is not None:
                raise AlignerError(error)
        return f"rank {dist.get_rank()}"

    try:
        return run_and_broadcast_result(wait)
    except AlignerError as problem:
        return f"refused: {problem}"
    finally:
        distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
