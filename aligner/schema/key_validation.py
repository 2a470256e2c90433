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
from aligner.schema.conditions import format_value
from aligner.schema.entries import describe_value_error, make_section_field
from aligner.schema.keys import check_key, get_schema_keys, is_read
from aligner.schema.options import CALLABLE
from aligner.values import split_callable_name


@dataclass(frozen=True)
class KeyProblem:
    """A problem of the value of a key."""

    key: str
    """Dotted key as in the configuration; the schema need not have it."""
    message: str
    """Error message of one line, which begins with the key."""


class InvalidKeys(ConfigError):
    """A configuration has invalid keys; the message has one line for each of them."""

    def __init__(self, problems: tuple[KeyProblem, ...]) -> None:
        super().__init__("\n".join(problem.message for problem in problems))
        self.problems = problems


class _Section(BaseModel):
    """Base of the models of all sections."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


def validate_config(values: Mapping[str, Any]) -> Config:
    """Validate the values of nested sections, and return them as a configuration.

    Values are converted to the types of their keys. A key that the run does not read may always be
    null; it then has its default.

    Raises:
        InvalidKeys: A key is unknown, or its value has a wrong type or is not allowed.
    """
    # A null of a key that does not allow it is removed before the validation, so that the key gets
    # its default. Whether this is an error depends on whether the run reads the key.
    null_keys = [
        name
        for name, key in get_schema_keys().items()
        if not key.allows_null and _has_null_at(values, name)
    ]
    values_without_nulls = values
    for name in null_keys:
        values_without_nulls = _remove_key(values_without_nulls, name.split("."))
    try:
        model = _make_section_model(Config).model_validate(values_without_nulls)
    except ValidationError as error:
        # Several errors of pydantic may concern the same key, such as those of a union's types.
        problems = {_to_key_problem(problem, values): None for problem in error.errors()}
        raise InvalidKeys(tuple(problems)) from error
    config: Config = _to_dataclass(Config, model)

    # Whether a run reads a key is known only now, after the other keys have been validated.
    if read_null_keys := [name for name in null_keys if is_read(config, name)]:
        raise InvalidKeys(
            tuple(KeyProblem(name, format_type_error(name, None)) for name in read_null_keys)
        )
    return config


def find_value_problems(config: Config) -> Iterator[str]:
    """Yield one line for each key whose value has a wrong type or is not allowed."""
    try:
        validate_config(dataclasses.asdict(config))
    except InvalidKeys as error:
        yield str(error)


def _has_null_at(values: Any, key: str) -> bool:
    """Return whether nested values have null at a dotted key."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return values is None


def _remove_key(values: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """Return nested values without the key at a path."""
    name, *rest = path
    if rest:
        return {**values, name: _remove_key(values[name], rest)}
    return {key: value for key, value in values.items() if key != name}


@functools.cache
def _make_section_model(section: type) -> type[BaseModel]:
    """Return the pydantic model of a section, which contains models of its subsections."""
    hints = typing.get_type_hints(section)
    definitions: dict[str, Any] = {}
    for key in dataclasses.fields(section):
        hint = hints[key.name]
        if dataclasses.is_dataclass(hint):
            model = _make_section_model(typing.cast(type, hint))
            definitions[key.name] = (model, Field(default_factory=model))
        else:
            value_type = _get_value_type(hint, key.metadata["choices"])
            definitions[key.name] = (value_type, make_section_field(section, key.name))
    return create_model(section.__name__, __base__=_Section, **definitions)


def _to_dataclass(section: type, model: BaseModel) -> Any:
    """Return the validated values of a model as the dataclass of its section."""
    values = {}
    for key in dataclasses.fields(section):
        value = getattr(model, key.name)
        is_section = isinstance(value, _Section)
        factory = typing.cast(type, key.default_factory)
        values[key.name] = _to_dataclass(factory, value) if is_section else value
    return section(**values)


def _get_value_type(hint: Any, choices: tuple[str, ...] = ()) -> Any:
    """Return the type of a key for pydantic, with the conversions that values from YAML need.

    Args:
        hint: Type annotation of the dataclass field.
        choices: Allowed values; empty if all values of the type are allowed.
    """
    if isinstance(hint, types.UnionType):
        # The only unions of the schema are those of one type and None.
        (inner_type,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
        return _get_value_type(inner_type, choices) | None
    if typing.get_origin(hint) is list:
        (entry,) = typing.get_args(hint)
        return list[_get_value_type(entry)]  # type: ignore[misc]
    if hint is int:
        return Annotated[int, BeforeValidator(_require_integer)]
    if hint is float:
        return Annotated[float, BeforeValidator(_require_number)]
    if hint is str:
        # YAML parses a name such as 2024 or true as a number or a boolean.
        text = Annotated[str, BeforeValidator(_to_text)]
        return Annotated[text, AfterValidator(_make_choice_validator(choices))] if choices else text
    return hint


def _require_integer(value: Any) -> Any:
    """Return the value; raise an error for 2.0 and true, which pydantic would convert."""
    if isinstance(value, (bool, float)):
        raise PydanticCustomError("wrong_type", "not an integer")
    return value


def _require_number(value: Any) -> Any:
    """Return the value; raise an error for true, which pydantic would convert."""
    if isinstance(value, bool):
        raise PydanticCustomError("wrong_type", "not a number")
    return value


def _to_text(value: Any) -> Any:
    """Return a number or a boolean as its YAML text; other values are unchanged."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def _make_choice_validator(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return a validator that accepts only the choices.

    If the choices contain `module:callable`, it also accepts the names of user functions.
    """

    def check(value: str) -> str:
        is_user_function = CALLABLE in choices and split_callable_name(value) is not None
        if value not in choices and not is_user_function:
            raise ValueError(f"allowed: {', '.join(choices)}")
        return value

    return check


def _to_key_problem(error: ErrorDetails, values: Mapping[str, Any]) -> KeyProblem:
    """Translate a pydantic error into a problem with a message in aligner's form.

    Args:
        error: Error of pydantic.
        values: Values of nested sections before the validation.
    """
    # pydantic gives the location as names of fields and indices of list entries.
    dotted_key = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return KeyProblem(dotted_key, _format_unknown_key(dotted_key))

    # The location of an error may continue below the key, for example with the index of a list.
    key = next(
        (name for name in _iterate_prefixes(dotted_key) if name in get_schema_keys()), dotted_key
    )
    if key not in get_schema_keys():
        # pydantic refuses some names before it compares them with the keys.
        if not any(name.startswith(f"{key}.") for name in get_schema_keys()):
            return KeyProblem(key, f"{key!a}: {error['msg']}")
        return KeyProblem(key, format_section_error(key, error["input"]))

    # These errors have a value of the right type, but outside the bounds or the choices.
    if "ctx" in error or error["type"] == "finite_number":
        value = error["input"]
        is_float = get_schema_keys()[key].type_name.startswith("float")
        converted_value = float(value) if is_float else value
        return KeyProblem(key, f"{key}={converted_value}: {describe_value_error(error)}")

    value = _get_nested_value(values, key)
    location = error["loc"][key.count(".") + 1 :]
    if isinstance(value, list) and location:
        entry_type = get_schema_keys()[key].type_name.removeprefix("list[").removesuffix("]")
        entry = format_value(error["input"])
        return KeyProblem(key, f"{key}[{location[0]}]={entry}: expected {entry_type}")
    return KeyProblem(key, format_type_error(key, value))


def _iterate_prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key, then the sections around it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _get_nested_value(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings."""
    for part in key.split("."):
        values = values[part]
    return values


def _format_unknown_key(key: str) -> str:
    """Return the message about an unknown key, with a suggestion."""
    try:
        check_key(key)
    except ConfigError as error:
        return str(error)
    return f"{key}: unknown key"


def format_section_error(section: str, value: Any) -> str:
    """Return the message about a single value that is set for a whole section."""
    example_key = next(name for name in get_schema_keys() if name.startswith(f"{section}."))
    return (
        f"{section}={format_value(value)}: is a section; set a key of this section, such as"
        f" {example_key}=…"
    )


def format_type_error(key: str, value: Any) -> str:
    """Return the message about a value of the wrong type.

    Args:
        key: Dotted key of the schema.
        value: Value of the wrong type.
    """
    schema_key = get_schema_keys()[key]
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
