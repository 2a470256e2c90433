"""Script that runs a model's Python program; the tool `python` passes its text to `python3 -c`.

It imports only the standard library. The program is read from standard input, and runs as
`__main__`. An exception is printed in Python's format, with the lines of the program.
"""

import linecache
import os
import sys
import traceback

# file name of the program in tracebacks
_FILE_NAME = "program.py"


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
    program = sys.stdin.buffer.read().decode(errors="replace")
    # the program gets an empty stdin
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    # the program must see neither this script nor its directory
    sys.argv[:] = [_FILE_NAME]
    sys.path[:1] = []
    sys.exit(run(program))
