"""Arguments of Python as the command line has them: options of groups, sections, files of records
and functions by name."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from aligner.config.compose import AUTOMATIC, default_name
from aligner.config.conf_files import flat_keys, group_directories, group_options
from aligner.config.overrides import parse_override
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.paths import PRIVATE, RunPaths
from aligner.schema.keys import known_key
from aligner.schema.scoring_functions import function_problem

if TYPE_CHECKING:
    import pandas as pd

Records = Sequence[Mapping[str, Any]]
_PLAIN = re.compile(r"[A-Za-z_./][\w./:-]*")
_WORDS = ("null", "true", "false", "nan", "inf")
"""Texts that the command line takes for something else, unless they are quoted."""


@dataclass(frozen=True)
class LaunchArguments:
    """What `aligner launch` is to be given."""

    overrides: tuple[str, ...]
    records: str | None = None
    """JSON lines for a file in the run's directory."""
    python_path: Path | None = None
    """Where the module of the reward function is."""


def launch_arguments(
    model: str | os.PathLike[str] | None,
    algorithm: str | None,
    reward: "str | Callable[..., Any] | None",
    data: "str | os.PathLike[str] | Records | pd.DataFrame | None",
    keys: Mapping[str, Any],
    options: Mapping[str, Sequence[str]],
) -> LaunchArguments:
    """From what `aligner.launch` takes; `options` are those of each group. Raises ConfigError for
    what cannot be told so."""
    texts, records, python_path = [], None, None
    if model is not None:
        texts.append(_named("model", model, options))
    if algorithm is not None:
        texts.append(override_text("algorithm", algorithm))
    if isinstance(reward, str):
        texts.append(
            override_text(
                "reward.function" if function_problem(reward) is None else "reward", reward
            )
        )
    elif reward is not None:
        function, python_path = importable(reward)
        texts.append(override_text("reward.function", function))
    if isinstance(data, (str, os.PathLike)):
        texts.append(_named("data", data, options))
    elif data is not None:
        records = json_lines(data)
    for key, value in keys.items():
        is_section = isinstance(value, Mapping) and known_key(key) is None
        entries = flat_keys(f"{key}.", value) if is_section else {key: value}
        texts += [override_text(name, entry) for name, entry in entries.items()]
    return LaunchArguments(tuple(texts), records, python_path)


def _named(group: str, value: str | os.PathLike[str], options: Mapping[str, Sequence[str]]) -> str:
    """An option of the group, where there is one of that name, else a path."""
    is_option = isinstance(value, str) and value in options[group]
    return override_text(group if is_option else f"{group}.path", os.fspath(value))


def override_text(key: str, value: Any) -> str:
    """A key's value as an override of the command line: what is parsed from it is the value
    again."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_text(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # A backslash counts as itself but before a quotation mark.
    quoted = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + (found[2] and '\\"'), text)
    return '"' + quoted.replace("${", "\\${") + '"'


def json_lines(data: "Records | pd.DataFrame") -> str:
    """Records as a JSONL file has them. Raises ConfigError for what are none."""
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


def place_records(
    records: str, overrides: Sequence[str], config_directory: Path | None
) -> tuple[Path, tuple[str, ...]]:
    """Write records into the directory of the run that overrides describe; returns the file and
    overrides that name it.

    Raises ConfigError where a run is there already that has others.
    """
    options = group_options(group_directories(config_directory))
    parsed = [parse_override(text, options) for text in overrides]
    given = {override.key_or_group: str(override.value()) for override in parsed}
    name = given.get("run.name") or default_name(given.get("experiment", AUTOMATIC))
    paths = RunPaths(Path(given.get("run.dir") or f"runs/{name}").absolute())
    file = paths.records
    if file.is_file() and file.read_text(encoding="utf-8") != records and paths.config.is_file():
        raise ConfigError(
            f"data: the run in this directory uses other records ({file}); choose another run.dir,"
            " or pass the path of a file as data"
        )
    paths.root.mkdir(PRIVATE, parents=True, exist_ok=True)
    write_file(file, records)
    return file, (override_text("data.path", file), override_text("run.dir", paths.root))


def importable(function: Callable[..., Any]) -> tuple[str, Path | None]:
    """`module:name` of a function, and the directory where Python finds that module.

    Raises ConfigError, with the way out, for one that other processes cannot import.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(function, FunctionType) or not module or not name:
        raise ConfigError(
            f"reward={function!r}: must be a function, a name such as gsm8k, or module:function"
        )
    why = next(_obstacles(module, name), None)
    if why is None:
        return f"{module}:{name}", _root(module)
    plain = name if name.isidentifier() else "score"
    raise ConfigError(
        f"reward={name}: {why}, so the processes of the run cannot import it. Write the function to"
        " a file. In a notebook, put the function and its imports in a cell that begins with\n"
        "    %%writefile my_reward.py\nand then run\n"
        f"    from my_reward import {plain}\n    run = aligner.launch(…, reward={plain})"
    )


def _obstacles(module: str, name: str) -> Iterator[str]:
    """Why a function of this module and name cannot be imported."""
    if "<lambda>" in name:
        yield "a lambda has no name"
    if module == "__main__":
        yield "the function is defined in this notebook or script"
    if "." in name:
        yield "the function is defined inside another function or a class"
    if getattr(sys.modules.get(module), name, None) is None:
        yield f"module {module} has no {name}"


def _root(module: str) -> Path | None:
    """The directory that is to be on Python's path for a module that is imported here; None for one
    that is built in."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return None
    place = Path(file).absolute()
    return place.parents[module.count(".") + (place.name == "__init__.py")]
