"""Functions of TRL's source, for tests that compare with TRL.

TRL is installed in a separate environment (`python -m benchmarks.peer_environment trl`), because its
packages conflict with those of this environment. The functions are read from TRL's files, and run
with the packages of this environment.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_environment import installed_python

needs_trl = pytest.mark.skipif(
    installed_python("trl") is None,
    reason="not installed: python -m benchmarks.peer_environment trl",
)


def trl_files(pattern: str) -> list[Path]:
    """Return the sorted files of the package `trl`; empty if TRL is not installed."""
    python = installed_python("trl")
    if python is None:
        return []
    return sorted(python.parents[1].glob(f"lib/*/site-packages/trl/{pattern}"))


def trl_functions(path: str, *names: str, **scope: Any) -> dict[str, Callable[..., Any]]:
    """Return functions of one of TRL's files by name, including nested functions.

    Args:
        path: Path in the package `trl`.
        names: Names of the functions.
        scope: Values of the global names that the functions use.
    """
    [file] = trl_files(path)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *wanted], []), str(file), "exec"), scope)
    return {name: scope[name] for name in names if name in scope}
