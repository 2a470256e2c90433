"""What Triton's processes need in the environment that they inherit."""

from __future__ import annotations

import os
import sysconfig


def ensure_server_environment() -> None:
    """Let Triton's Python stub load this interpreter's libpython: with another one it dies at start.

    The dynamic linker reads LD_LIBRARY_PATH when a process starts, so setting it here reaches the stub, and a restart of
    this process is not needed. A model's instances start one after another: PyTriton's others wait a second for the first
    to tell them its settings, and on a busy machine the first is not up by then if all start at once.
    """
    os.environ["TRITON_PARALLEL_INSTANCE_LOADING"] = "0"
    own = sysconfig.get_config_var("LIBDIR")
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if own and paths[:1] != [own]:
        os.environ["LD_LIBRARY_PATH"] = ":".join([own, *paths])
