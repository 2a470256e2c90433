"""Driver script that runs a model's program inside the sandbox; see `python_sandbox`.

It is executed as a script and imports only the standard library. Its argument is a JSON object with
limits, and its stdin contains the program. The script applies the limits to itself, then runs the
program as `__main__`. An exception is printed in Python's format, with the lines of the program.
"""

import json
import linecache
import os
import resource
import sys
import traceback
from collections.abc import Mapping
from typing import Any

# file name of the program in tracebacks
_FILE_NAME = "program.py"


def apply_limits(limits: Mapping[str, Any]) -> None:
    """Apply limits to this process and to the processes that it starts, permanently.

    Args:
        limits: `directory`, the working directory; `user`, the user and group id to change to, 0
            for none; `memory_bytes`, `processes`, `scratch_bytes` (maximum size of a file), and
            `cpu_s`, the processor time in seconds.
    """
    os.chdir(limits["directory"])
    # set the groups first, because the process may not change them after setuid
    if limits["user"]:
        os.setgroups([])
        os.setgid(limits["user"])
        os.setuid(limits["user"])
    resource_limits = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["scratch_bytes"],
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    for kind, maximum in resource_limits.items():
        resource.setrlimit(kind, (maximum, maximum))
    # the caller recognizes SIGXCPU, sent at the soft limit; SIGKILL follows at the hard limit
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def run(text: str) -> int:
    """Run a program, and return its exit code: 1 after an exception, else 0.

    Raises SystemExit if the program does.
    """
    # tracebacks read the program's lines from this cache
    linecache.cache[_FILE_NAME] = (len(text), None, text.splitlines(keepends=True), _FILE_NAME)
    try:
        # `compile` itself raises SyntaxError, which is printed like an error of the program.
        code = compile(text, _FILE_NAME, "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        raise end from None
    except BaseException as error:
        # omit the frame of this function
        user_traceback = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, user_traceback)
        return 1
    return 0


if __name__ == "__main__":
    apply_limits(json.loads(sys.argv[1]))
    program = sys.stdin.buffer.read().decode(errors="replace")
    # the program gets an empty stdin
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    # the program must see neither the limits nor this script's directory
    sys.argv[:] = [_FILE_NAME]
    sys.path[:1] = []
    sys.exit(run(program))
