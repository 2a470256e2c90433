"""GPU libraries of megatron-core that are installed but cannot be imported.

megatron-core works without these libraries, but expects that an installed library can be imported.
The import fails, for example, on a machine without a GPU driver, in an image that was built for
other releases of CUDA or torch, or if only a part of a library is installed.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from aligner.errors import ConfigError

_MODULES = {
    "transformer-engine": ("transformer_engine", "transformer_engine.pytorch"),
    "apex": ("apex", "amp_C", "fused_weight_gradient_mlp_cuda"),
}
"""Modules of each library, in the order of their import."""
_TIMEOUT_S = 120.0
# The imports print messages and may crash the process; the last line is the result.
_PROGRAM = (
    "import json; from aligner.gpu_libraries import import_libraries;"
    " print('\\n' + json.dumps(import_libraries()))"
)


def import_libraries() -> dict[str, str]:
    """Import the installed libraries.

    Returns:
        The reason of each library that is installed but cannot be imported.
    """
    reasons = {}
    for library, modules in _MODULES.items():
        for module in modules:
            if find_spec(module.partition(".")[0]) is None:
                continue
            try:
                importlib.import_module(module)
            # A broken library raises any exception: OSError without a driver, ImportError with
            # another torch, RuntimeError if a part of it is not installed.
            except Exception as error:
                first_line = (str(error).strip().splitlines() or [""])[0]
                reasons[library] = f"{type(error).__name__}: {first_line}"
                break
    return reasons


def hide_libraries() -> None:
    """Let imports of the libraries fail as if they were not installed."""
    roots = {module.partition(".")[0] for modules in _MODULES.values() for module in modules}
    # A failed import may leave submodules, which would still be found.
    for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
        del sys.modules[name]
    for root in roots:
        sys.modules[root] = None  # type: ignore[assignment]


def find_broken_libraries() -> dict[str, str]:
    """Import the installed libraries in a child process, which takes seconds.

    Returns:
        See `import_libraries`; without installed libraries, no process is started.
    """
    installed = [library for library, (root, *_) in _MODULES.items() if find_spec(root) is not None]
    if not installed:
        return {}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if result.returncode:
        return {" and ".join(installed): f"the import exited with code {result.returncode}"}
    reasons: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return reasons


def describe_broken_library(library: str, reason: str) -> str:
    """Return a message about a library that cannot be imported, without its consequence."""
    return f"{library} is installed, but cannot be imported: {reason}"


def build_import_error(reasons: Mapping[str, str]) -> ConfigError:
    """Return the error of a run that computes on GPUs and has broken libraries."""
    return ConfigError(
        "\n".join(
            f"{describe_broken_library(library, reason)}; correct the installation, or uninstall"
            f" {library} to train without it"
            for library, reason in reasons.items()
        )
    )


def find_library_notes(*, on_gpus: bool) -> list[str]:
    """Return notes about broken libraries for `aligner validate`.

    Args:
        on_gpus: Whether the run computes on GPUs of this machine.

    Raises:
        ConfigError: The run computes on GPUs and has broken libraries.
    """
    reasons = find_broken_libraries()
    if reasons and on_gpus:
        raise build_import_error(reasons)
    return [
        f"note: {describe_broken_library(library, reason)}; runs on CPUs do not use it, and runs on"
        " GPUs would fail"
        for library, reason in reasons.items()
    ]
