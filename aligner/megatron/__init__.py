"""megatron-core models of the roles: construction, training, log-probs and checkpoints.

This is the only package that imports megatron.core. The package's initialization imports
megatron.core without the optional dependencies that aligner does not use, and without GPU
libraries that cannot be imported.
"""

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from aligner.gpu_libraries import build_import_error, hide_libraries, import_libraries

# megatron-core warns at import, and in every model that it builds, about each optional GPU library
# that is not installed. It falls back to torch, which is intended on a CPU, and the warnings would
# hide the relevant lines of a log.
warnings.filterwarnings(
    "ignore", message=r".*(Apex|Transformer Engine|apex|transformer_engine).*not installed"
)

# torch warns about the old names of two collectives; megatron-core warns about an environment
# variable that concerns CUDA streams.
warnings.filterwarnings(
    "ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated"
)
warnings.filterwarnings("ignore", message=r".*CUDA_DEVICE_MAX_CONNECTIONS")

# Release 0.19 logs for every model that it prefers HybridModel over GPTModel.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Make `torch.compile` return functions unchanged within the context.

    megatron-core decorates its GPU functions with `torch.compile`. The decoration alone imports the
    compiler, which adds two seconds to the start of every rank.
    """
    compiler = torch.compile
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


@contextlib.contextmanager
def _replaced_modules(replacements: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Replace modules for all imports within the context, unless they were imported before.

    Args:
        replacements: Replacement by module name; None makes the import raise ModuleNotFoundError.
    """
    added = {name: module for name, module in replacements.items() if name not in sys.modules}
    sys.modules.update(added)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


class _PostponedModule(ModuleType):
    """Stand-in of a module whose functions import the module when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **keywords)

        return call


_CHECKPOINT_STUB = ModuleType("torch.distributed.checkpoint")
_CHECKPOINT_STUB.default_planner = None  # type: ignore[attr-defined]
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
# Since release 0.17, `import megatron.core` imports the first two modules, and with them torch's
# checkpoints and setuptools; since release 0.18 also the third one, and with it torch's DTensor.
_POSTPONED = (
    "megatron.core.dist_checkpointing.serialization",
    "torch.utils.cpp_extension",
    f"{_FSDP}.utils",
)

# megatron-core imports wandb, if it is installed, for its own inference engine. The import adds a
# second to the start of every rank.
_UNUSED_EVERYWHERE = {"wandb": None}
# megatron-core imports these modules for its FSDP, its checkpoints and its timers, none of which
# aligner uses. With sympy, the import of their 900 modules adds 0.6 s to the start of every rank.
_UNUSED_ON_CPUS = {
    "torch.distributed.checkpoint": _CHECKPOINT_STUB,
    "torch.distributed.fsdp": None,
    "torch.distributed.tensor": None,
    "torch.utils.tensorboard": None,
    _FSDP: None,
    **{name: _PostponedModule(name) for name in _POSTPONED},
}

BROKEN_LIBRARIES = import_libraries()
"""Reason for each GPU library that is installed but cannot be imported. On GPUs there is none."""
if BROKEN_LIBRARIES and torch.cuda.is_available():
    # Without the library, megatron-core would work, but much more slowly.
    raise build_import_error(BROKEN_LIBRARIES)
if not torch.cuda.is_available():
    # megatron-core would use a library that can be imported, for example its optimizer, which
    # computes on GPUs only. Imports of a broken library would raise errors that megatron-core does
    # not expect.
    hide_libraries()

if torch.cuda.is_available():
    with _replaced_modules(_UNUSED_EVERYWHERE):
        from megatron.core import jit
else:
    with _replaced_modules(_UNUSED_EVERYWHERE | _UNUSED_ON_CPUS), _without_compiler():
        from megatron.core import jit

if not torch.cuda.is_available():
    # This affects megatron-core's modules that are imported later.
    jit.disable_jit_fuser()
