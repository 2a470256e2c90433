"""Functions of TRL's source, for tests that compare with TRL.

TRL has an environment of its own (`python -m benchmarks.peer_environment trl`), whose packages clash
with those of this one. The functions are read from its files, and run with the packages of this
environment.
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
    """Files of the installed package `trl`, sorted; none where it is not installed."""
    python = installed_python("trl")
    if python is None:
        return []
    return sorted(python.parents[1].glob(f"lib/*/site-packages/trl/{pattern}"))


def trl_functions(path: str, *names: str, **scope: Any) -> dict[str, Callable[..., Any]]:
    """Functions of a file of TRL by their names, also nested ones; `scope` has the names that their
    code refers to."""
    [file] = trl_files(path)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *wanted], []), str(file), "exec"), scope)
    return {name: scope[name] for name in names if name in scope}
