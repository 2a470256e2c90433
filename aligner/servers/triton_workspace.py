"""The directory in which PyTriton sets up a Triton server."""

import re
import secrets
from pathlib import Path
from typing import Any

_USABLE = re.compile(r"[\w./+@-]+", re.ASCII)
"""Paths that PyTriton and Triton can use: PyTriton splits commands at spaces, and writes paths as
ASCII."""
_LONGEST = 60
"""Characters of such a path: those of Unix sockets below the workspace may have 107."""
_ELSEWHERE = Path("/tmp")


def create_workspace() -> Any:
    """Create a workspace that only this user can read, in PyTriton's directory (below HOME, unless
    PYTRITON_HOME is set), or in /tmp if Triton cannot use that directory's path."""
    from pytriton.constants import PYTRITON_HOME
    from pytriton.utils.workspace import Workspace

    home = str(PYTRITON_HOME)
    if _USABLE.fullmatch(home) and len(home) <= _LONGEST:
        return Workspace()
    workspace = Workspace(_ELSEWHERE / f"aligner-triton-{secrets.token_hex(8)}")
    workspace.path.chmod(0o700)
    return workspace
