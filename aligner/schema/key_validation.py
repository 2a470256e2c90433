"""Validation of whole configurations with pydantic models.

The models are generated from the schema's dataclasses. The dataclasses themselves do not import
pydantic, so that processes that only read a configuration start faster.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.conditions import value_text
from aligner.schema.entries import section_field, value_problem
from aligner.schema.keys import check_key, is_read, schema_keys
from aligner.schema.options import CALLABLE
from aligner.values import callable_place


@dataclass(frozen=True)
class KeyProblem:
    """A problem of the value of a key."""

    key: str
    """Dotted key as in the configuration; the schema need not have it."""
    line: str
    """Error message of one line, which begins with the key."""


class InvalidKeys(ConfigError):
    """A configuration has invalid keys; the message has one line for each of them."""

    def __init__(self, problems: tuple[KeyProblem, ...]) -> None:
        super().__init__("\n".join(problem.line for problem in problems))
        self.problems = problems


class _Section(BaseModel):
    """Base of the models of all sections."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


def validated(values: Mapping[str, Any]) -> Config:
    """Validate the values of nested sections, and return them as a configuration.

    Values are converted to the types of their keys. A key that the run does not read may always be
    null; it then has its default.

    Raises:
        InvalidKeys: A key is unknown, or its value has a wrong type or is not allowed.
    """
    nulls = [
        name
        for name, key in schema_keys().items()
        if not key.allows_null and _is_null(values, name)
    ]
    values_without_nulls = values
    for name in nulls:
        values_without_nulls = _without(values_without_nulls, name.split("."))
    try:
        model = _section_model(Config).model_validate(values_without_nulls)
    except ValidationError as error:
        # Several errors of pydantic may concern the same key, such as those of a union's types.
        problems = {_key_problem(problem, values): None for problem in error.errors()}
        raise InvalidKeys(tuple(problems)) from error
    config: Config = _as_dataclass(Config, model)

    # Whether a run reads a key is known only now, after the other keys have been validated.
    if read_nulls := [name for name in nulls if is_read(config, name)]:
        raise InvalidKeys(tuple(KeyProblem(name, type_line(name, None)) for name in read_nulls))
    return config


def value_problems(config: Config) -> Iterator[str]:
    """Yield one line for each key whose value has a wrong type or is not allowed."""
    try:
        validated(dataclasses.asdict(config))
    except InvalidKeys as error:
        yield str(error)


def _is_null(values: Any, key: str) -> bool:
    """Return whether nested values have null at a dotted key."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return values is None


def _without(values: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """Return nested values without the key at a path."""
    name, *rest = path
    if rest:
        return {**values, name: _without(values[name], rest)}
    return {key: value for key, value in values.items() if key != name}


@functools.cache
def _section_model(section: type) -> type[BaseModel]:
    """Return the pydantic model of a section, which contains models of its subsections."""
    hints = typing.get_type_hints(section)
    definitions: dict[str, Any] = {}
    for key in dataclasses.fields(section):
        hint = hints[key.name]
        if dataclasses.is_dataclass(hint):
            model = _section_model(typing.cast(type, hint))
            definitions[key.name] = (model, Field(default_factory=model))
        else:
            value_type = _value_type(hint, key.metadata["choices"])
            definitions[key.name] = (value_type, section_field(section, key.name))
    return create_model(section.__name__, __base__=_Section, **definitions)


def _as_dataclass(section: type, model: BaseModel) -> Any:
    """Return the validated values of a model as the dataclass of its section."""
    values = {}
    for key in dataclasses.fields(section):
        value = getattr(model, key.name)
        is_section = isinstance(value, _Section)
        factory = typing.cast(type, key.default_factory)
        values[key.name] = _as_dataclass(factory, value) if is_section else value
    return section(**values)


def _value_type(hint: Any, choices: tuple[str, ...] = ()) -> Any:
    """Return the type of a key for pydantic, with the conversions that values from YAML need.

    Args:
        hint: Type annotation of the dataclass field.
        choices: Allowed values; empty if all values of the type are allowed.
    """
    if isinstance(hint, types.UnionType):
        (inner,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
        return _value_type(inner, choices) | None
    if typing.get_origin(hint) is list:
        (entry,) = typing.get_args(hint)
        return list[_value_type(entry)]  # type: ignore[misc]
    if hint is int:
        return Annotated[int, BeforeValidator(_as_integer)]
    if hint is float:
        return Annotated[float, BeforeValidator(_as_float)]
    if hint is str:
        text = Annotated[str, BeforeValidator(_as_text)]
        return Annotated[text, AfterValidator(_one_of(choices))] if choices else text
    return hint


def _as_integer(value: Any) -> Any:
    """Return the value; raise an error for 2.0 and true, which pydantic would convert."""
    if isinstance(value, (bool, float)):
        raise PydanticCustomError("wrong_type", "not an integer")
    return value


def _as_float(value: Any) -> Any:
    """Return the value; raise an error for true, which pydantic would convert."""
    if isinstance(value, bool):
        raise PydanticCustomError("wrong_type", "not a number")
    return value


def _as_text(value: Any) -> Any:
    """Return a number or a boolean as its YAML text; other values are unchanged."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return a validator that accepts only the choices.

    If the choices contain `module:callable`, it also accepts the names of user functions.
    """

    def check(value: str) -> str:
        is_user_function = CALLABLE in choices and callable_place(value) is not None
        if value not in choices and not is_user_function:
            raise ValueError(f"allowed: {', '.join(choices)}")
        return value

    return check


def _key_problem(error: ErrorDetails, values: Mapping[str, Any]) -> KeyProblem:
    """Translate a pydantic error into a problem with a message in aligner's form.

    Args:
        error: Error of pydantic.
        values: Values of nested sections before the validation.
    """
    dotted = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return KeyProblem(dotted, _unknown_line(dotted))

    # The location of an error may continue below the key, for example with the index of a list.
    key = next((name for name in _prefixes(dotted) if name in schema_keys()), dotted)
    if key not in schema_keys():
        return KeyProblem(key, section_line(key, error["input"]))

    if "ctx" in error or error["type"] == "finite_number":
        value = error["input"]
        is_float = schema_keys()[key].type_name.startswith("float")
        converted_value = float(value) if is_float else value
        return KeyProblem(key, f"{key}={converted_value}: {value_problem(error)}")

    value = _value_at(values, key)
    location = error["loc"][key.count(".") + 1 :]
    if isinstance(value, list) and location:
        entry_type = schema_keys()[key].type_name.removeprefix("list[").removesuffix("]")
        entry = value_text(error["input"])
        return KeyProblem(key, f"{key}[{location[0]}]={entry}: expected {entry_type}")
    return KeyProblem(key, type_line(key, value))


def _prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key, then the sections around it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings."""
    for part in key.split("."):
        values = values[part]
    return values


def _unknown_line(key: str) -> str:
    """Return the message about an unknown key, with a suggestion."""
    try:
        check_key(key)
    except ConfigError as error:
        return str(error)
    return f"{key}: unknown key"


def section_line(section: str, value: Any) -> str:
    """Return the message about a single value that is set for a whole section."""
    example_key = next(name for name in schema_keys() if name.startswith(f"{section}."))
    return (
        f"{section}={value_text(value)}: is a section; set a key of this section, such as"
        f" {example_key}=…"
    )


def type_line(key: str, value: Any) -> str:
    """Return the message about a value of the wrong type.

    Args:
        key: Dotted key of the schema.
        value: Value of the wrong type.
    """
    schema_key = schema_keys()[key]
    expected = schema_key.type_name.replace(" | None", " or null")
    if value is None:
        return f"{key}=null: expected {expected}, got null"
    if schema_key.is_mapping and not isinstance(value, Mapping):
        return (
            f"{key}={value}: expected a mapping; write {key}={{NAME: VALUE}}, or add one entry"
            f" with +{key}.NAME=VALUE"
        )
    if schema_key.is_mapping:
        return f"{key}={value}: the names of all entries must be strings"
    if schema_key.type_name.startswith("list") and not isinstance(value, (dict, list)):
        return f"{key}={value}: expected {expected}, got a single value; write {key}=[{value}]"
    text = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={text}: expected {expected}, got {type(value).__name__}"
