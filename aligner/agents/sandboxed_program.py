"""What runs a model's program within a sandbox, given as a script: of Python's own library alone.

Its argument is a JSON object of limits, its input the program. It gives up what it may do beyond
them, then runs the program as `__main__`; an exception is printed as Python does, with the
program's lines.
"""

import json
import linecache
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from typing import Any

_NAME = "program.py"


def limit(limits: Mapping[str, Any]) -> None:
    """Bound this process and those that it starts, for good; with a `user` it is that one's from
    now on."""
    os.chdir(limits["directory"])
    if limits["user"]:
        os.setgroups([])
        os.setgid(limits["user"])
        os.setuid(limits["user"])
    bounds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["scratch_bytes"],
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def run(text: str) -> int:
    """The program's exit code."""
    linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
    try:
        code = compile(text, _NAME, "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        raise end from None
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


if __name__ == "__main__":
    limit(json.loads(sys.argv[1]))
    program = sys.stdin.buffer.read().decode(errors="replace")
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    sys.argv[:], sys.path[:1] = [_NAME], []
    sys.exit(run(program))
