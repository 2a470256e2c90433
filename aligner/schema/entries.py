"""Validation of mappings that a user writes into one key, such as `reward.sources.NAME`.

Pydantic validates the entries of a mapping. This module converts pydantic's errors into lines that
begin with the key.
"""

import functools
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from aligner.errors import ConfigError
from aligner.schema.options import key_hint

_PROBLEM = "problem"
# Messages by pydantic's error type.
_TYPE_PROBLEMS: Mapping[str, str] = {
    "finite_number": "must be a finite number",
    "float_type": "must be a finite number",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "list_type": "must be a list of strings",
    "string_too_short": "must not be empty",
}
# Name of the bound in pydantic's error context, and the beginning of the message, by error type.
_BOUND_PROBLEMS: Mapping[str, tuple[str, str]] = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be above"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be below"),
}


class Entries(BaseModel):
    """Base of all mappings of entries; it rejects unknown entries and converts no values."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,  # a process that validates nothing starts faster
    )
    unknown_hint: ClassVar[str] = ""
    """Hint for an unknown entry, in place of the list of all entries."""


def explained(problem: str, **constraints: Any) -> Any:
    """Return a field all of whose problems are reported with the same text.

    Args:
        problem: Text that replaces pydantic's messages.
        constraints: Arguments of `pydantic.Field`, such as bounds and the default.
    """
    return Field(json_schema_extra={_PROBLEM: problem}, **constraints)


def checked_by(find_problem: Callable[[str], str | None]) -> AfterValidator:
    """Return a validator that rejects the values for which a function returns a problem."""

    def check(value: str) -> str:
        if problem := find_problem(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def section_field(section: type, name: str) -> Any:
    """Return a field with the default, the bounds and the help of a key of a schema section."""
    (key,) = (key for key in fields(section) if key.name == name)
    bounds = {
        "ge": key.metadata["minimum"],
        "gt": key.metadata["above"],
        "le": key.metadata["maximum"],
        "lt": key.metadata["below"],
    }
    constraints = {constraint: bound for constraint, bound in bounds.items() if bound is not None}
    if key.default_factory is MISSING:
        return Field(default=key.default, description=key.metadata["help"], **constraints)
    return Field(
        default_factory=key.default_factory, description=key.metadata["help"], **constraints
    )


Text = Annotated[str, Field(min_length=1)]
"""A string that is not empty."""
Weight = Annotated[
    float,
    explained(
        "must be a finite number above 0; remove the whole entry if it should not be used", gt=0
    ),
]
"""A relative weight above 0."""


def parse_entries(
    kind: Any,
    key: str,
    entries: Any,
    expected: str,
    identity: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Validate the entries of a mapping, and return them as a model.

    Args:
        kind: Subclass of `Entries`, or a union of several that is discriminated by `kind`.
        key: Dotted key of the mapping, with which every problem begins.
        entries: Value of the key.
        expected: Entries of a valid mapping, in words, for the message about another type.
        identity: Values of model fields that the user cannot write as entries.

    Raises:
        ConfigError: The entries are invalid; one line for each problem.
    """
    if not isinstance(entries, Mapping):
        raise ConfigError(
            f"{key}={entries}: expected a mapping with {expected}, got {type(entries).__name__}"
        )

    translation = _Translation(key, entries, _models(kind), frozenset(identity))
    problems = []
    if translation.model is not None:
        problems += [translation.unknown(entry) for entry in entries if entry in identity]
    try:
        model = _adapter(kind).validate_python({**entries, **identity})
    except ValidationError as error:
        problems += [translation.line(problem) for problem in error.errors()]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return model


def allowed_entries(model: type[Entries], identity: Collection[str] = ()) -> list[str]:
    """Return the names of the entries of a model, `kind` first."""
    names = [name for name in model.model_fields if name not in identity]
    return sorted(names, key=lambda name: name != "kind")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@functools.cache
def _models(kind: Any) -> Mapping[str | None, type[Entries]]:
    """Return the models of a discriminated union by their `kind`, or a single model by None."""
    if isinstance(kind, type):
        return {None: kind}
    union, _ = typing.get_args(kind)
    return {model.model_fields["kind"].default: model for model in typing.get_args(union)}


@dataclass(frozen=True)
class _Translation:
    """Translation of pydantic's errors about one mapping into lines of aligner's form."""

    key: str
    """Dotted key of the mapping."""
    entries: Mapping[str, Any]
    """Entries of the mapping."""
    models: Mapping[str | None, type[Entries]]
    """Models by `kind`, see `_models`."""
    identity: frozenset[str]
    """Names of model fields that the user cannot write as entries."""

    def line(self, error: ErrorDetails) -> str:
        """Return the line that begins with the key of the entry that an error is about."""
        if error["type"] == "union_tag_not_found":
            return f"{self.key}.kind: missing; allowed: {self._kinds}"
        if error["type"] == "union_tag_invalid":
            return f"{self.key}.kind={self._kind}: unknown kind; allowed: {self._kinds}"

        # The location of an error in a discriminated union begins with the kind.
        location = error["loc"] if None in self.models else error["loc"][1:]
        if not location:  # the message of a model's validator begins with the key
            return _message(error)
        entry = str(location[0])
        if error["type"] in ("extra_forbidden", "invalid_key"):
            return self.unknown(entry)
        if error["type"] == "missing" and len(location) == 1:
            return f"{self.key}.{entry}: missing" + (
                "" if None in self.models else f"; required with kind={self._kind}"
            )

        assert self.model is not None
        field = self.model.model_fields[entry]
        explanation = field.json_schema_extra
        if isinstance(explanation, dict):
            return f"{self.key}.{entry}={self.entries[entry]}: {explanation[_PROBLEM]}"
        path = ".".join(str(part) for part in location)
        return f"{self.key}.{path}={error['input']}: {value_problem(error)}"

    def unknown(self, entry: str) -> str:
        """Return the line about an entry that the model does not have."""
        assert self.model is not None
        allowed = allowed_entries(self.model, self.identity)
        hint = key_hint(
            self.key,
            entry,
            allowed,
            self.model.unknown_hint or f"allowed in {self.key}: {', '.join(allowed)}",
        )
        kind = "" if None in self.models else f" with kind={self._kind}"
        return f"{self.key}.{entry}: unknown key{kind}; {hint}"

    @property
    def _kind(self) -> Any:
        """Value of the entry `kind`."""
        return self.entries.get("kind")

    @property
    def _kinds(self) -> str:
        """Allowed kinds, for messages."""
        return ", ".join(str(kind) for kind in self.models)

    @property
    def model(self) -> type[Entries] | None:
        """The model that the entries select; None for an unknown kind."""
        models = (model for kind, model in self.models.items() if kind in (None, self._kind))
        return next(models, None)


def value_problem(error: ErrorDetails) -> str:
    """Return the description of a pydantic error about a value, without the key."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _TYPE_PROBLEMS:
        return _TYPE_PROBLEMS[kind]
    if kind in _BOUND_PROBLEMS:
        constraint, comparison = _BOUND_PROBLEMS[kind]
        return f"{comparison} {context[constraint]:.10g}"
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        return f"allowed: {', '.join(choices)}"
    if kind == "string_type":
        return f"expected a string, got {type(error['input']).__name__}"
    if kind == "dict_type":
        return f"expected a mapping, got {type(error['input']).__name__}"
    return _message(error)


def _message(error: ErrorDetails) -> str:
    """Return pydantic's message, or the message of the ValueError of a validator."""
    cause = error.get("ctx", {}).get("error")
    return error["msg"] if cause is None else str(cause)
