"""Text output of commands. On a terminal, long lines are wrapped at spaces.

Files and pipes receive each line unchanged, so that other programs can search them.
"""

import re
import shutil
import sys
import textwrap
from typing import TextIO

from aligner.masking import mask_secrets

# A command at the beginning of an indented line, or after a colon, with an optional comment. It
# gets a line of its own, which is never wrapped, so that users can copy it.
_COMMAND = re.compile(r"(\s+|.*?: +)((?:aligner|sbatch|scancel|squeue|cd) .*?)(?: +# (.*))?$")
MAX_FIELD_LENGTH = 40
"""Maximum length of a field, such as `reward 0.250`, that is kept whole where lines are wrapped.

Fields are separated by two spaces.
"""
_NO_BREAK_SPACE = "\u00a0"


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print a text without secrets, and wrap its lines if the file is a terminal.

    Args:
        text: One or more lines.
        file: A text file; default is standard output.
    """
    file = sys.stdout if file is None else file
    text = mask_secrets(text)
    if file.isatty():
        text = wrap_text(text, shutil.get_terminal_size().columns)
    print(text, file=file, flush=True)


def print_note(text: str) -> None:
    """Print a note about the command on standard error."""
    print_text(f"aligner: note: {text}", sys.stderr)


def wrap_text(text: str, width: int) -> str:
    """Return a text whose lines are wrapped at spaces.

    Continuation lines are indented by two more columns than the line. Words that are longer than a
    line, such as paths, remain whole. So do commands, which get lines of their own.

    Args:
        text: One or more lines.
        width: Number of columns.
    """
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    if match := _COMMAND.match(line):
        introduction, command, comment = match.groups()
        is_indentation = introduction.isspace()
        indent = introduction if is_indentation else "  "
        lines = [] if is_indentation else [_wrap_line(introduction.rstrip(), width)]
        lines += [] if comment is None else [_wrap_line(f"{indent}# {comment}", width)]
        return "\n".join([*lines, f"{indent}{command}"])
    body = line.lstrip(" ")
    indent = " " * (len(line) - len(body))

    fields = body.split("  ")
    if len(fields) > 1:
        body = "  ".join(
            field.replace(" ", _NO_BREAK_SPACE) if len(field) <= MAX_FIELD_LENGTH else field
            for field in fields
        )
    wrapped = textwrap.fill(
        body,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace(_NO_BREAK_SPACE, " ")
