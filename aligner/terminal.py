"""Text output of commands. On a terminal, long lines are wrapped at spaces.

Files and pipes receive each line whole, so that other programs can search them. Control characters
are escaped everywhere: the text may be a model's response, a prompt, or the message of a server's
or a user's exception, and a pipe often ends in a terminal.
"""

import json
import logging
import re
import shutil
import sys
import textwrap
from typing import Any, TextIO

from aligner.masking import mask_secrets

# A command at the beginning of an indented line, or after a colon, with an optional comment. It
# gets a line of its own, which is never wrapped, so that users can copy it.
_COMMAND = re.compile(r"(\s+|.*?: +)((?:aligner|sbatch|scancel|squeue|cd) .*?)(?: +# (.*))?$")
MAX_FIELD_LENGTH = 40
"""Maximum length of a field, such as `reward 0.250`, that is kept whole where lines are wrapped.

Fields are separated by two spaces.
"""
_NO_BREAK_SPACE = "\u00a0"


# Characters that change a terminal or the order of its text: control characters except tab and line
# feed, line separators, and marks of the writing direction. Halves of surrogate pairs cannot be
# printed at all.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""Return a text whose control characters are visible, such as `\x1b` for the escape character.

    All output of commands passes through this function.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def format_json(value: Any, indent: int | None = None) -> str:
    r"""Return a value as JSON, with control characters as escapes of JSON, such as `\u001b`."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    # Outside of strings, JSON has only ASCII characters, and json.dumps escapes those below 32.
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class TerminalFormatter(logging.Formatter):
    """Formatter of log records that a command prints on the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message without secrets and control characters."""
        return escape_controls(mask_secrets(super().format(record)))


def print_text(text: str, file: TextIO | None = None, *, style: str = "") -> None:
    """Print a text without secrets and control characters, and wrap its lines if the file is a
    terminal.

    Args:
        text: One or more lines.
        file: A text file; default is standard output.
        style: Escape sequence of the text's color; empty for no color.
    """
    file = sys.stdout if file is None else file
    text = escape_controls(mask_secrets(text))
    text = f"{style}{text}\033[0m" if style else text
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
