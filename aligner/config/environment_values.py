"""Environment variables in configurations.

A configuration may contain `${oc.env:NAME}`. The process that launches a run and the processes of
its roles resolve it, each from its own environment. `config.yaml` contains the interpolation, so
that the value reaches neither files nor trackers. A command that only reads a run never resolves
it: the reader's environment is not that of the run.
"""

import dataclasses
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.resolvers import oc

from aligner.errors import ConfigError
from aligner.masking import find_url_secret, is_secret_entry, register_read_variable
from aligner.schema import Config
from aligner.schema.environment_text import EnvironmentText, Reference, with_references
from aligner.schema.keys import get_schema_keys

_NO_DEFAULT = "_DEFAULT_MARKER_"
# An interpolation after an even number of backslashes; an odd number makes it literal text.
_INTERPOLATION = re.compile(r"(?<!\\)(\\\\)*\$\{")
_ESCAPED = re.compile(r"(\\+)\$\{")
# Beginning of the mark of an interpolation in resolved text. It is random, so that no text contains
# it, and consists of characters that OmegaConf's grammar allows everywhere.
_MARK = f"aligner_{secrets.token_hex(8)}_"
_MARKED = re.compile(f"{_MARK}([0-9a-f]*)_")


class _Resolutions(threading.local):
    """How the resolver of this thread treats environment variables."""

    are_marked = False
    """Whether the resolver returns a mark instead of the value."""
    names: frozenset[str] = frozenset()
    """Names of the variables that the configuration has read."""


_resolutions = _Resolutions()


def resolve_with_references(node: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Resolve the interpolations of a composed configuration.

    Returns:
        The nested values, and the same values with the interpolations of environment variables as
        `Reference`.

    Raises:
        OmegaConfBaseException: An interpolation is invalid, or a variable is not set.
    """
    # Registered for each call, because the program of a user of the API may clear all resolvers.
    OmegaConf.register_new_resolver("oc.env", _resolve_variable, replace=True)
    _resolutions.names = frozenset()
    _resolutions.are_marked = False
    values = _to_values(node)
    if not _resolutions.names:
        return values, values
    _resolutions.are_marked = True
    try:
        return values, _with_marks_as_references(_to_values(node))
    finally:
        _resolutions.are_marked = False


def _to_values(node: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return dict(values)


def _resolve_variable(name: str, default: Any = _NO_DEFAULT, *, _node_: Node | None) -> Any:
    """Return the value of an environment variable, or its mark.

    Args:
        name: Name of the variable.
        default: Value if the variable is not set.
        _node_: The key that contains the interpolation; OmegaConf passes it.
    """
    _resolutions.names |= {name}
    arguments = () if default == _NO_DEFAULT else (default,)
    if _resolutions.are_marked:
        # JSON and OmegaConf write null, numbers, booleans and quoted text in the same way.
        text = ",".join([name, *(json.dumps(default) for default in arguments)])
        return f"{_MARK}{text.encode().hex()}_"
    # The keys of `run` are in the paths of messages, which users copy.
    is_run_key = _node_ is not None and str(_node_._get_full_key("")).startswith("run.")
    if name in os.environ and not is_run_key:
        register_read_variable(name)
    return oc.env(name, *arguments)


def _with_marks_as_references(value: Any) -> Any:
    """Return nested values in which texts with marks are replaced by their `Reference`."""
    if isinstance(value, dict):
        return {key: _with_marks_as_references(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_marks_as_references(entry) for entry in value]
    if not isinstance(value, str) or _MARK not in value:
        return value
    parts = _MARKED.split(value)
    # `split` returns the text between the marks at even indices, and their content at odd ones.
    return Reference(
        "".join(
            f"${{oc.env:{bytes.fromhex(part).decode()}}}"
            if index % 2
            else escape_interpolations(part)
            for index, part in enumerate(parts)
        )
    )


def with_environment_texts(config: Config, references: Mapping[str, Any]) -> Config:
    """Return a configuration whose texts from environment variables remember their interpolations.

    Numbers, booleans and choices are stored as values: they are not secret, and commands that read
    the run need them. So are the keys of `run`, which name the run's files and processes.

    Args:
        config: The validated configuration.
        references: Nested values of the configuration with `Reference`s.

    Raises:
        ConfigError: An environment variable contains a list or a mapping.
    """
    with_texts: Config = _mark_value(config, references, "")
    return dataclasses.replace(with_texts, run=config.run)


def _mark_value(value: Any, reference: Any, key: str) -> Any:
    """Return a section, mapping, list or text with `EnvironmentText` for each reference."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not isinstance(reference, Mapping):
            return value
        names = [field.name for field in dataclasses.fields(value) if field.name in reference]
        changes = {
            name: _mark_value(getattr(value, name), reference[name], f"{key}.{name}".lstrip("."))
            for name in names
        }
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict) and isinstance(reference, Mapping):
        return {
            name: _mark_value(entry, reference.get(name), f"{key}.{name}")
            for name, entry in value.items()
        }
    if isinstance(value, list) and isinstance(reference, (list, tuple)):
        return [
            _mark_value(entry, entry_reference, f"{key}[{index}]")
            for index, (entry, entry_reference) in enumerate(zip(value, reference, strict=True))
        ]
    if not isinstance(reference, Reference):
        return value
    if isinstance(value, (dict, list)):
        raise ConfigError(
            f"{key}={reference}: an environment variable cannot contain a list or a mapping; write"
            " the entries in the configuration, each with a variable of its own"
        )
    schema_key = get_schema_keys().get(key)
    if not isinstance(value, str) or (schema_key is not None and schema_key.choices):
        return value
    if isinstance(value, Reference) or value == reference:  # read without resolvers
        return reference
    return EnvironmentText(value, reference)


def unresolve_values(value: Any) -> Any:
    """Return the nested values of a stored configuration without resolving any interpolation.

    Text with interpolations becomes a `Reference`; in other text, `\\${` is literal.
    """
    if isinstance(value, dict):
        return {key: unresolve_values(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [unresolve_values(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if _INTERPOLATION.search(value):
        return Reference(value)
    return _ESCAPED.sub(lambda match: match[1][: len(match[1]) // 2] + "${", value)


def escape_interpolations(text: str) -> str:
    """Return a text in whose place OmegaConf reads exactly this text."""
    # Backslashes before `${` are doubled, because OmegaConf would read them as escapes, too.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


# References to Kubernetes Secrets, by the names of environment variables; `checks.pod_jobs` checks
# their form.
_SECRET_REFERENCES = "cluster.kubernetes.secrets"


def find_literal_secrets(config: Config) -> Iterator[str]:
    """Yield a line for each key whose value is a secret in plain text.

    A secret on a command line is visible in the list of processes, and one in a configuration
    would be stored in the run directory.
    """
    for field in dataclasses.fields(config):
        yield from _find_secrets(getattr(config, field.name), field.name)


def _find_secrets(value: Any, key: str, name: str = "") -> Iterator[str]:
    """Yield a line for each secret in a section, mapping, list or text.

    Args:
        value: The value.
        key: Its dotted key.
        name: Name of the entry of a mapping that contains the value; empty for the schema's keys.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _find_secrets(getattr(value, field.name), f"{key}.{field.name}")
        return
    if key == _SECRET_REFERENCES:
        return
    if isinstance(value, dict):
        for entry_name, entry in value.items():
            yield from _find_secrets(entry, f"{key}.{entry_name}", str(entry_name))
        return
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _find_secrets(entry, f"{key}[{index}]", name)
        return
    if not isinstance(value, str):
        return
    text = str(with_references(value))
    problem = find_url_secret(text)
    if problem is None and is_secret_entry(name) and text and "${" not in text:
        problem = "secret"
    if problem is not None:
        variable = re.sub(r"\W+", "_", name or key.rpartition(".")[2]).upper()
        yield (
            f"{key}: contains a {problem} in plain text, which other users can read in the list of"
            " processes, and which would be stored in the run directory; set an environment"
            f" variable, and write ${{oc.env:{variable}}} in its place (docs/keys.md)"
        )
