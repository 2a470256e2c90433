"""Sandboxes of episodes, in which tools, environments and agents run programs (docs/sandboxes.md).

`create_sandbox` is the entry point. A sandbox runs under bubblewrap on this machine, in a
container, or on a server of `aligner serve-sandboxes`.
"""

from aligner.agents.sandboxes.creation import create_sandbox, set_default_settings
from aligner.agents.sandboxes.sandbox import (
    ExecResult,
    Sandbox,
    SandboxFileError,
    SandboxSettings,
)

__all__ = [
    "ExecResult",
    "Sandbox",
    "SandboxFileError",
    "SandboxSettings",
    "create_sandbox",
    "set_default_settings",
]
