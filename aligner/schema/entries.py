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
from aligner.schema.options import format_key_hint

_MESSAGE_KEY = "problem"
# Messages by pydantic's error type.
_TYPE_MESSAGES: Mapping[str, str] = {
    "finite_number": "must be a finite number",
    "float_type": "must be a finite number",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "list_type": "must be a list of strings",
    "string_too_short": "must not be empty",
}
# Name of the bound in pydantic's error context, and the beginning of the message, by error type.
_BOUND_MESSAGES: Mapping[str, tuple[str, str]] = {
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


def make_field_with_message(message: str, **constraints: Any) -> Any:
    """Return a field all of whose problems are reported with the same text.

    Args:
        message: Text that replaces pydantic's messages.
        constraints: Arguments of `pydantic.Field`, such as bounds and the default.
    """
    return Field(json_schema_extra={_MESSAGE_KEY: message}, **constraints)


def make_validator(find_problem: Callable[[str], str | None]) -> AfterValidator:
    """Return a validator that rejects the values for which a function returns a problem."""

    def check(value: str) -> str:
        if problem := find_problem(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def make_section_field(section: type, name: str) -> Any:
    """Return a field with the default, the bounds and the help of a key of a schema section."""
    (key,) = (key for key in fields(section) if key.name == name)
    # pydantic's names of the bounds.
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
    make_field_with_message(
        "must be a finite number above 0; remove the whole entry if it should not be used", gt=0
    ),
]
"""A relative weight above 0."""


def parse_entries(
    model_type: Any,
    key: str,
    entries: Any,
    expected: str,
    identity: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Validate the entries of a mapping, and return them as a model.

    Args:
        model_type: Subclass of `Entries`, or a union of several that is discriminated by `kind`.
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

    translator = _ErrorTranslator(key, entries, _get_models(model_type), frozenset(identity))
    problems = []
    # A user's entry would otherwise be overwritten by the value in `identity` without an error.
    if translator.selected_model is not None:
        problems += [
            translator.describe_unknown_entry(entry) for entry in entries if entry in identity
        ]
    try:
        model = _get_adapter(model_type).validate_python({**entries, **identity})
    except ValidationError as error:
        problems += [translator.translate(problem) for problem in error.errors()]
    if problems:
        # Several errors of a field with a fixed message have the same line.
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return model


def list_allowed_entries(model: type[Entries], identity: Collection[str] = ()) -> list[str]:
    """Return the names of the entries of a model, `kind` first."""
    names = [name for name in model.model_fields if name not in identity]
    return sorted(names, key=lambda name: name != "kind")


@functools.cache
def _get_adapter(model_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model_type)


@functools.cache
def _get_models(model_type: Any) -> Mapping[str | None, type[Entries]]:
    """Return the models of a discriminated union by their `kind`, or a single model by None."""
    if isinstance(model_type, type):
        return {None: model_type}
    # `model_type` is Annotated[A | B, Field(discriminator="kind")].
    union, _ = typing.get_args(model_type)
    return {model.model_fields["kind"].default: model for model in typing.get_args(union)}


@dataclass(frozen=True)
class _ErrorTranslator:
    """Translation of pydantic's errors about one mapping into lines of aligner's form."""

    key: str
    """Dotted key of the mapping."""
    entries: Mapping[str, Any]
    """Entries of the mapping."""
    models: Mapping[str | None, type[Entries]]
    """Models by `kind`, see `_get_models`."""
    identity: frozenset[str]
    """Names of model fields that the user cannot write as entries."""

    def translate(self, error: ErrorDetails) -> str:
        """Return the line that begins with the key of the entry that an error is about."""
        if error["type"] == "union_tag_not_found":
            return f"{self.key}.kind: missing; allowed: {self._kinds_text}"
        if error["type"] == "union_tag_invalid":
            return f"{self.key}.kind={self._kind}: unknown kind; allowed: {self._kinds_text}"

        # The location of an error in a discriminated union begins with the kind.
        location = error["loc"] if None in self.models else error["loc"][1:]
        if not location:  # the message of a model's validator begins with the key
            return _get_message(error)
        entry = str(location[0])
        if error["type"] in ("extra_forbidden", "invalid_key"):
            return self.describe_unknown_entry(entry)
        if error["type"] == "missing" and len(location) == 1:
            return f"{self.key}.{entry}: missing" + (
                "" if None in self.models else f"; required with kind={self._kind}"
            )

        assert self.selected_model is not None
        field = self.selected_model.model_fields[entry]
        explanation = field.json_schema_extra
        if isinstance(explanation, dict):
            return f"{self.key}.{entry}={self.entries[entry]}: {explanation[_MESSAGE_KEY]}"
        path = ".".join(str(part) for part in location)
        return f"{self.key}.{path}={error['input']}: {describe_value_error(error)}"

    def describe_unknown_entry(self, entry: str) -> str:
        """Return the line about an entry that the model does not have."""
        assert self.selected_model is not None
        allowed = list_allowed_entries(self.selected_model, self.identity)
        hint = format_key_hint(
            self.key,
            entry,
            allowed,
            self.selected_model.unknown_hint or f"allowed in {self.key}: {', '.join(allowed)}",
        )
        kind = "" if None in self.models else f" with kind={self._kind}"
        return f"{self.key}.{entry}: unknown key{kind}; {hint}"

    @property
    def _kind(self) -> Any:
        """Value of the entry `kind`."""
        return self.entries.get("kind")

    @property
    def _kinds_text(self) -> str:
        """Allowed kinds, for messages."""
        return ", ".join(str(kind) for kind in self.models)

    @property
    def selected_model(self) -> type[Entries] | None:
        """The model that the entries select; None for an unknown kind."""
        models = (model for kind, model in self.models.items() if kind in (None, self._kind))
        return next(models, None)


def describe_value_error(error: ErrorDetails) -> str:
    """Return the description of a pydantic error about a value, without the key."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _TYPE_MESSAGES:
        return _TYPE_MESSAGES[kind]
    if kind in _BOUND_MESSAGES:
        constraint, comparison = _BOUND_MESSAGES[kind]
        return f"{comparison} {context[constraint]:.10g}"
    if kind == "literal_error":
        # pydantic has the choices only as a text: "'score', 'yes_no' or 'pairwise'".
        choices = re.findall("'([^']*)'", context["expected"])
        return f"allowed: {', '.join(choices)}"
    if kind == "string_type":
        return f"expected a string, got {type(error['input']).__name__}"
    if kind == "dict_type":
        return f"expected a mapping, got {type(error['input']).__name__}"
    return _get_message(error)


def _get_message(error: ErrorDetails) -> str:
    """Return pydantic's message, or the message of the ValueError of a validator."""
    # pydantic puts "Value error, " before the message of a ValueError.
    cause = error.get("ctx", {}).get("error")
    return error["msg"] if cause is None else str(cause)
