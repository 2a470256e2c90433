"""Conversion of Python arguments to the command line, and `ChildCommand`, which runs a command.

An argument can be an option of a group, a section, records, or a function; the command line
contains the importable name of a function. `ChildCommand` runs `aligner` in a child process, and
raises the command's error in this process.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import IO, TYPE_CHECKING, Any

from aligner.config.compose import AUTOMATIC, make_default_name
from aligner.config.conf_files import find_config_sources, flatten_keys, list_group_options
from aligner.config.overrides import parse_override
from aligner.errors import ConfigError, build_exit_error
from aligner.files import write_file
from aligner.launcher.run_directory import reserve_directory
from aligner.observability.logs import ERROR_PREFIX
from aligner.paths import PRIVATE_MODE, RunPaths
from aligner.schema.keys import find_schema_key
from aligner.schema.scoring_functions import find_function_problem

if TYPE_CHECKING:
    import pandas as pd


class ChildCommand:
    """A running `aligner` command.

    The command continues if this process ends. It has its own session, so signals of this process's
    terminal do not reach it.
    """

    def __init__(self, arguments: Sequence[str], python_path: Path | None = None) -> None:
        """Start the command in the current working directory.

        Args:
            arguments: Arguments after `aligner`.
            python_path: Directory to add to PYTHONPATH, for modules of the user.
        """
        environment = {"COLUMNS": str(shutil.get_terminal_size((100, 24)).columns)} | os.environ
        # Jupyter sets these variables, but a cell shows escape codes as text.
        for variable in ("FORCE_COLOR", "CLICOLOR_FORCE"):
            environment.pop(variable, None)
        # Without buffers, standard output and error keep their common order.
        environment["PYTHONUNBUFFERED"] = "1"
        if python_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(python_path), os.environ.get("PYTHONPATH")])
            )
        # The output goes to an unnamed file, which disappears when it is closed. With a pipe, the
        # command would block while no process reads its output.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the file outlives this call
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aligner", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the command; None while it runs."""
        return self._process.poll()

    @property
    def printed(self) -> str:
        """Standard output and error so far, without the error message at the end."""
        return self._split_output()[0]

    def raise_error(self, otherwise: str | None = None) -> None:
        """Raise the error with which the command ended; do nothing if it succeeded or still runs.

        Args:
            otherwise: Error message for a command that reported no error; None uses the last line
                of the command's output.

        Raises:
            AlignerError: The command failed. The exit code determines the type: AlignerError,
                ConfigError, Stopped or Interrupted.
        """
        if code := self.exit_code:
            printed, error = self._split_output()
            last = (printed.splitlines() or [f"exited with code {code}"])[-1]
            raise build_exit_error(code, error or otherwise or last)

    def finish(self) -> None:
        """Wait until the command ends; if this wait is interrupted, end the command.

        Raises:
            AlignerError: The command failed; see `raise_error`.
        """
        try:
            self._process.wait()
        finally:
            self.end()
        self.raise_error()

    def end(self) -> None:
        """Interrupt the command if it still runs, like Ctrl-C, and wait until it has ended."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def _split_output(self) -> tuple[str, str]:
        """Return the output before the final error message, and the error message."""
        # `os.pread` does not move the file position, which the command shares.
        descriptor = self._output.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        output, separator, error = text.rpartition(f"\n{ERROR_PREFIX}")
        if separator:
            return (output + "\n" if output else output), error.strip()
        # The error message may be the only output.
        if text.startswith(ERROR_PREFIX):
            return "", text.removeprefix(ERROR_PREFIX).strip()
        return text, ""


Records = Sequence[Mapping[str, Any]]
# Texts that need no quotes on the command line.
_UNQUOTED = re.compile(r"[A-Za-z_./][\w./:-]*")
# Texts that the command line parses as values of other types, unless they are quoted.
_RESERVED_WORDS = ("null", "true", "false", "nan", "inf")


@dataclass(frozen=True)
class LaunchArguments:
    """Arguments of `aligner launch` that correspond to the arguments of `aligner.launch`."""

    overrides: tuple[str, ...]
    """Overrides `key=value`."""
    records: str | None = None
    """Records as JSON lines, for a file in the run directory; None without records."""
    python_path: Path | None = None
    """Directory of the module of the reward function; None without a function."""


def launch_arguments(
    model: str | os.PathLike[str] | None,
    algorithm: str | None,
    reward: "str | Callable[..., Any] | None",
    data: "str | os.PathLike[str] | Records | pd.DataFrame | None",
    keys: Mapping[str, Any],
    options: Mapping[str, Sequence[str]],
) -> LaunchArguments:
    """Convert the arguments of `aligner.launch` to arguments of the command line.

    Args:
        model: See `aligner.launch`.
        algorithm: See `aligner.launch`.
        reward: See `aligner.launch`.
        data: See `aligner.launch`.
        keys: Sections, options of groups, and keys.
        options: Names of the options of each group.

    Raises:
        ConfigError: A value cannot be expressed on the command line.
    """
    texts = []
    records = None
    python_path = None
    if model is not None:
        texts.append(_format_option_or_path("model", model, options))
    if algorithm is not None:
        texts.append(override_text("algorithm", algorithm))
    if isinstance(reward, str):
        texts.append(
            override_text(
                "reward.function" if find_function_problem(reward) is None else "reward", reward
            )
        )
    elif reward is not None:
        function, python_path = find_importable_name(reward)
        texts.append(override_text("reward.function", function))
    if isinstance(data, (str, os.PathLike)):
        texts.append(_format_option_or_path("data", data, options))
    elif data is not None:
        records = to_json_lines(data)
    for key, value in keys.items():
        is_section = isinstance(value, Mapping) and find_schema_key(key) is None
        entries = flatten_keys(f"{key}.", value) if is_section else {key: value}
        texts += [override_text(name, entry) for name, entry in entries.items()]
    return LaunchArguments(tuple(texts), records, python_path)


def _format_option_or_path(
    group: str, value: str | os.PathLike[str], options: Mapping[str, Sequence[str]]
) -> str:
    """Return an override that selects the group's option `value`, or sets the group's path if there
    is no such option."""
    is_option = isinstance(value, str) and value in options[group]
    return override_text(group if is_option else f"{group}.path", os.fspath(value))


def override_text(key: str, value: Any) -> str:
    """Return a key and its value as an override, which the command line parses to the same value.

    Example:
        >>> override_text("run.steps", 40)
        'run.steps=40'
    """
    return f"{key}={_format_value(value)}"


def _format_value(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{name}: {_format_value(entry)}" for name, entry in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if _UNQUOTED.fullmatch(text) and text.lower() not in _RESERVED_WORDS:
        return text
    # In Hydra's grammar, backslashes are escaped only before quotation marks, including the closing
    # quotation mark.
    quoted = re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + (match[2] and '\\"'), text)
    return '"' + quoted.replace("${", "\\${") + '"'


def to_json_lines(data: "Records | pd.DataFrame") -> str:
    """Return records as the text of a JSONL file.

    Raises:
        ConfigError: `data` is neither a sequence of mappings nor a data frame, or contains values
            that JSON does not support.
    """
    if hasattr(data, "to_json"):
        return str(data.to_json(orient="records", lines=True, force_ascii=False))
    try:
        if all(isinstance(record, Mapping) for record in data):
            return "".join(json.dumps(dict(record), ensure_ascii=False) + "\n" for record in data)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data: cannot be written as JSON: {error}; records may contain only JSON values, such"
            " as strings, numbers and lists"
        ) from error
    raise ConfigError("data: must be a path, a list of dicts, or a DataFrame")


def write_records(
    records: str, overrides: Sequence[str], config_directory: Path | None
) -> tuple[Path, tuple[str, ...]]:
    """Write records to the directory of the run that the overrides describe.

    Args:
        records: Records as JSON lines.
        overrides: Overrides of the run.
        config_directory: Directory with the user's own configuration groups.

    Returns:
        The file, and overrides that refer to the file and the directory.

    Raises:
        ConfigError: The directory contains a run with other records.
    """
    options = list_group_options(find_config_sources(config_directory))
    parsed = [parse_override(text, options) for text in overrides]
    values = {override.key_or_group: str(override.value()) for override in parsed}
    if values.keys() & {"run.name", "run.dir"}:
        root = Path(values.get("run.dir") or f"runs/{values['run.name']}").absolute()
    else:
        name = make_default_name(values.get("experiment", AUTOMATIC))
        root = reserve_directory(Path("runs", name).absolute())
    paths = RunPaths(root)
    file = paths.records
    if file.is_file() and file.read_text(encoding="utf-8") != records and paths.config.is_file():
        raise ConfigError(
            f"data: the run in this directory uses other records ({file}); choose another run.dir,"
            " or pass the path of a file as data"
        )
    paths.root.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
    write_file(file, records)
    return file, (override_text("data.path", file), override_text("run.dir", paths.root))


def find_importable_name(function: Callable[..., Any]) -> tuple[str, Path | None]:
    """Return `module:name` of a function, and the directory from which Python imports the module.

    Raises:
        ConfigError: Other processes cannot import the function. The error explains how to fix this.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not isinstance(function, FunctionType) or not module or not name:
        raise ConfigError(
            f"reward={function!r}: must be a function, a name such as gsm8k, or module:function"
        )
    obstacle = next(_import_obstacles(module, name), None)
    if obstacle is None:
        return f"{module}:{name}", _module_root(module)
    suggested_name = name if name.isidentifier() else "score"
    raise ConfigError(
        f"reward={name}: {obstacle}, so the processes of the run cannot import it. Write the"
        " function to a file. In a notebook, put the function and its imports in a cell that begins"
        " with\n    %%writefile my_reward.py\nand then run\n    from my_reward import"
        f" {suggested_name}\n    run = aligner.launch(…, reward={suggested_name})"
    )


def _import_obstacles(module: str, name: str) -> Iterator[str]:
    """Yield the reasons that prevent other processes from importing a function by module and
    name."""
    if "<lambda>" in name:
        yield "a lambda has no name"
    if module == "__main__":
        yield "the function is defined in this notebook or script"
    if "." in name:
        yield "the function is defined inside another function or a class"
    if getattr(sys.modules.get(module), name, None) is None:
        yield f"module {module} has no {name}"


def _module_root(module: str) -> Path | None:
    """Return the directory on Python's path from which this process has imported a module.

    The result is None for a built-in module.
    """
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return None
    path = Path(file).absolute()
    # One level up for each dot in the module's name, and one more for a package.
    return path.parents[module.count(".") + (path.name == "__init__.py")]
