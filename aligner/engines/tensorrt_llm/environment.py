"""The environment that TensorRT-LLM is started in, which its workers inherit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from aligner.errors import AlignerError

_OTHER_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_")
_OTHER_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def worker_environment(environ: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """The driving rank's environment without its own launcher and world, with the workers' GPUs visible.

    `devices` are the machine's GPU indices. Every driver starts a Ray cluster of its own, which takes the visible GPUs.
    """
    kept = {
        name: value for name, value in environ.items() if not name.startswith(_OTHER_LAUNCHERS) and name not in _OTHER_WORLD
    }
    return kept | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "TLLM_DISABLE_MPI": "1",
        # Weights of an update would be copied from several threads, on streams that nothing waits for.
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }


def device_index(environ: Mapping[str, str], ordinal: int) -> int:
    """The machine's index of this process's `ordinal`-th GPU.

    Raises AlignerError when CUDA_VISIBLE_DEVICES does not list indices: Ray and TensorRT-LLM count GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return ordinal
    try:
        return int(visible.split(",")[ordinal])
    except (ValueError, IndexError) as error:
        raise AlignerError(f"CUDA_VISIBLE_DEVICES={visible}: TensorRT-LLM needs GPU indices there, such as 0,1") from error


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have exactly these environment variables meanwhile."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
