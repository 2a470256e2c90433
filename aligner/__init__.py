"""aligner: a Megatron-native alignment pipeline (RLHF and RLVR).

The Python API starts runs, reads their results, and generates responses:

    import aligner

    run = aligner.launch(model="model", algorithm="grpo", reward="gsm8k", data="data.jsonl")
    run.wait()
    run.metrics()["reward/mean"].plot()
    aligner.generate(run, ["3+4="])

`docs/python.md` describes the API for users.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aligner.version import __version__

if TYPE_CHECKING:
    from aligner.api.drawing import generate
    from aligner.api.run_handle import Run, launch, load_run
    from aligner.errors import AlignerError, ConfigError, Interrupted, Stopped

# Module of each public name. A module is imported when one of its names is first used, so that
# `import aligner` is fast.
_MODULES = {
    "launch": "aligner.api.run_handle",
    "load_run": "aligner.api.run_handle",
    "Run": "aligner.api.run_handle",
    "generate": "aligner.api.drawing",
    **dict.fromkeys(("AlignerError", "ConfigError", "Interrupted", "Stopped"), "aligner.errors"),
}

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
    if name not in _MODULES:
        raise AttributeError(f"module 'aligner' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
