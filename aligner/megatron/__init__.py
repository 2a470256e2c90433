"""The only room that imports megatron.core."""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType

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
def _replaced_modules(replacements: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Have imports inside find these modules instead, or none for None, unless the real ones were
    imported before."""
    added = {name: module for name, module in replacements.items() if name not in sys.modules}
    sys.modules.update(added)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


_NO_PLANNER = ModuleType("torch.distributed.checkpoint")
_NO_PLANNER.default_planner = None  # type: ignore[attr-defined]

_UNUSED_EVERYWHERE = {"wandb": None}
"""megatron-core imports wandb if it is installed, for an inference engine of its own: a second of
every rank's start."""
_UNUSED_ON_CPUS = {
    "torch.distributed.checkpoint": _NO_PLANNER,
    "torch.distributed.fsdp": None,
    "torch.distributed.tensor": None,
    "torch.utils.tensorboard": None,
}
"""Modules that megatron-core imports for its FSDP, its checkpoints and its timers, none of which
aligner uses. With sympy they are 900 modules: 0.6 s of every rank's start."""

if torch.cuda.is_available():
    with _replaced_modules(_UNUSED_EVERYWHERE):
        from megatron.core import jit
else:
    with _replaced_modules(_UNUSED_EVERYWHERE | _UNUSED_ON_CPUS), _without_compiler():
        from megatron.core import jit

if not torch.cuda.is_available():
    jit.disable_jit_fuser()  # for its modules that are imported later
