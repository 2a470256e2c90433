"""Import of user code that a configuration names, and reports of the exceptions that it raises."""

import contextlib
import errno
import importlib
import itertools
import json
import logging
import os
import site
import socket
import sysconfig
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.masking import mask_secrets

_log = logging.getLogger(__name__)

# New names of moved modules that configurations may name. The old names work for one release.
_MOVED_MODULES = {
    f"aligner.environments.{name}": f"aligner.agents.{name}"
    for name in ("gymnasium_environment", "tool_environment")
}


def import_object(module: str, name: str) -> Any:
    """Import a module, and return its attribute `name`.

    Raises:
        ConfigError: If the import fails or the attribute is missing. The message contains only the
            reason; the caller adds the configuration key.
    """
    if module in _MOVED_MODULES:
        new_module = _MOVED_MODULES[module]
        _log.warning("%s has moved to %s; the old name will be removed", module, new_module)
        module = new_module
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        # An error inside the module, such as a package that it imports in vain, needs its place.
        is_inside = _find_user_frames(error)
        reason = f"importing {module} failed with {describe_user_error(error)}"
        raise ConfigError(reason if is_inside else str(error)) from error
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        ) from error
    # A module that is a script may call sys.exit during its import.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {module} failed with {describe_user_error(error)}") from error


USER_ERRORS = "ALIGNER_USER_ERRORS"
"""Environment variable of a rank and its helper processes: path of the file of the rank to which
`report_user_error` appends, without the rank's number and the extension at its end."""
# Seconds between two reports of exceptions that were raised at the same place.
_REPORT_INTERVAL_S = 1.0
_MAX_MESSAGE_CHARACTERS = 300
_MAX_REASON_CHARACTERS = 1_000
# Maximum length of a message or a traceback of the user's code.
_MAX_TEXT_CHARACTERS = 20_000

_reported_at: dict[str, float] = {}
"""Time of the last report for each type and place of an exception."""


def locate_user_error(error: BaseException) -> str:
    """Return the type of an exception and the place where the user's code raised it, such as
    "ValueError in my_reward.py:12".

    The place is the innermost frame that is neither aligner's nor a library's.
    """
    user_frames = _find_user_frames(error)
    name = type(error).__name__
    if not user_frames:
        return name
    return f"{name} in {Path(user_frames[-1].filename).name}:{user_frames[-1].lineno}"


def _find_user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception that are neither aligner's nor a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not _is_library_file(frame.filename)]


def describe_user_error(error: BaseException) -> str:
    """Return the type, the place and the message of an exception of the user's code.

    An example is "ValueError in my_reward.py:12: no answer". See `locate_user_error`.
    """
    return f"{locate_user_error(error)}: {_shorten_text(str(error))}".removesuffix(": ")


def format_user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception of the user's code, without the frames of aligner that
    called this code."""
    formatted = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = formatted
    while part is not None:
        frames = itertools.dropwhile(lambda frame: _is_library_file(frame.filename), part.stack)
        # Of a library's exception that caused the user's exception, the last frame is enough.
        part.stack = traceback.StackSummary.from_list(list(frames) or part.stack[-1:])
        part = part.__cause__ or part.__context__
    return _shorten_text("".join(formatted.format()).rstrip())


def _shorten_text(text: str) -> str:
    """Return a text that fits on a terminal: without its middle if it is very long, and without
    secrets."""
    omitted = len(text) - _MAX_TEXT_CHARACTERS
    if omitted <= 0:
        return mask_secrets(text)
    # A secret that the first cut divides is not recognized, but the second cut removes its part.
    half = _MAX_TEXT_CHARACTERS // 2
    beginning = mask_secrets(text[: 2 * half])[:half]
    end = mask_secrets(text[-2 * half :])[-half:]
    return f"{beginning} … {omitted} characters omitted … {end}"


# Errors of the network for which Python has no class of its own.
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH)


def is_connection_error(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, means that a service is not reachable."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if isinstance(cause, OSError) and cause.errno in _UNREACHABLE:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def report_user_error(error: BaseException) -> None:
    """Append an exception of the user's code to the file of this rank, from which the launcher
    shows it on the terminal.

    The first report of a place contains the traceback. Later reports of the same place are short,
    and there is at most one per second. The function does nothing in a process that the launcher
    did not start.
    """
    prefix = os.environ.get(USER_ERRORS)
    place = locate_user_error(error)
    now = time.monotonic()
    last_report = _reported_at.get(place)
    if prefix is None or (last_report is not None and now - last_report < _REPORT_INTERVAL_S):
        return

    _reported_at[place] = now
    # Masking and shortening take seconds for millions of characters.
    text = mask_secrets(str(error)[:_MAX_TEXT_CHARACTERS])
    message = textwrap.shorten(text, _MAX_MESSAGE_CHARACTERS, placeholder=" …")
    record: dict[str, str] = {"place": place, "message": message}
    if last_report is None:
        record["traceback"] = format_user_traceback(error)
    _append_report(prefix, record)


def report_skipped_prompt(reason: str) -> None:
    """Append the reason why a prompt was skipped, for the step's line on the terminal.

    Unlike the record of an exception, the record has no place. See `report_user_error`.
    """
    prefix = os.environ.get(USER_ERRORS)
    if prefix is not None:
        _append_report(prefix, {"message": reason[:_MAX_REASON_CHARACTERS]})


def _append_report(prefix: str, record: Mapping[str, str]) -> None:
    """Append a report to the file of this rank."""
    # Only tasks of a Slurm job have SLURM_PROCID.
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    file = Path(f"{prefix}{rank}.jsonl")
    # Ignore errors: a full disk also fails other writes, which raise.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # One write: several processes of a rank append to the file.
        with file.open("ab", buffering=0) as stream:
            stream.write(json.dumps(record).encode() + b"\n")


def _is_library_file(name: str) -> bool:
    """Return whether a file of a traceback belongs to aligner, to Python or to a library."""
    return name.startswith("<") or any(
        Path(name).is_relative_to(directory) for directory in _library_directories()
    )


@lru_cache(maxsize=1)
def _library_directories() -> Sequence[Path]:
    paths = sysconfig.get_paths()
    directories = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [Path(__file__).parent, *map(Path, directories)]
