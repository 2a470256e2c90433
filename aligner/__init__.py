"""aligner: a Megatron-native alignment pipeline (RLHF and RLVR). docs/python.md has what is here
for Python."""

import importlib
from typing import TYPE_CHECKING, Any

from aligner.version import __version__

if TYPE_CHECKING:
    from aligner.api.drawing import generate
    from aligner.api.run_handle import Run, launch, load_run
    from aligner.errors import AlignerError, ConfigError, Interrupted, Stopped

_PLACES = {
    "launch": "aligner.api.run_handle",
    "load_run": "aligner.api.run_handle",
    "Run": "aligner.api.run_handle",
    "generate": "aligner.api.drawing",
    **dict.fromkeys(("AlignerError", "ConfigError", "Interrupted", "Stopped"), "aligner.errors"),
}
"""Where each name is. A module is imported when a name of it is first asked for, so that `import
aligner` takes no time."""

__all__ = [
    "AlignerError",
    "ConfigError",
    "Interrupted",
    "Run",
    "Stopped",
    "__version__",
    "generate",
    "launch",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'aligner' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
