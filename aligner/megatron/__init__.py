"""The only room that imports megatron.core."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch

# megatron-core tells, at import and in every model it builds, of each optional GPU library that is
# absent. It falls back to torch, which is what a CPU run wants, and the lines would drown what a
# log is read for.
warnings.filterwarnings(
    "ignore", message=r".*(Apex|Transformer Engine|apex|transformer_engine).*not installed"
)

# Of torch's newer names for two collectives, and of an environment variable that is about CUDA
# streams.
warnings.filterwarnings(
    "ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated"
)
warnings.filterwarnings("ignore", message=r".*CUDA_DEVICE_MAX_CONNECTIONS")


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """`torch.compile` is no decoration at all inside.

    What megatron-core decorates is for GPUs. Decorating alone imports the compiler: two seconds of
    every rank's start.
    """
    compiler = torch.compile
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """wandb is not to be had inside, unless it is there already.

    megatron-core imports it where it is installed, for an inference engine of its own: a second of
    every rank's start.
    """
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


with (
    _without_wandb(),
    contextlib.nullcontext() if torch.cuda.is_available() else _without_compiler(),
):
    from megatron.core import jit

if not torch.cuda.is_available():
    jit.disable_jit_fuser()  # for its modules that are imported later
