"""Templates: texts with fields of a record in braces, such as `Question: {question}`."""

import re
from collections.abc import Mapping

_FIELD = re.compile(r"\{(\w+)\}")
# A field that may be missing or empty, with the white space before it.
_OPTIONAL = re.compile(r"\s*\{(\w+)\?\}")


def find_required_fields(template: str) -> tuple[str, ...]:
    """Return the names of the required fields of a template, without duplicates and in order."""
    return tuple(dict.fromkeys(_FIELD.findall(template)))


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return the template with the values of its fields.

    Other braces, and braces in the values, are unchanged.

    Raises:
        KeyError: A field has no value.
    """
    # str.format would fail for other braces, such as those of JSON or LaTeX in a template.
    return _FIELD.sub(lambda field: values[field[1]], template)


def find_optional_fields(template: str) -> tuple[str, ...]:
    """Return the names of the optional fields, `{name?}`, which records may lack."""
    return tuple(dict.fromkeys(_OPTIONAL.findall(template)))


def drop_empty_fields(template: str, values: Mapping[str, str]) -> str:
    """Return the template without the optional fields that have no value.

    Other optional fields become required fields: `{name?}` becomes `{name}`. The white space before
    a removed field is removed, too.
    """

    def replace_field(match: re.Match[str]) -> str:
        return match[0].replace("?}", "}") if values.get(match[1], "").strip() else ""

    return _OPTIONAL.sub(replace_field, template)
