"""Texts about keys, for the reference page and `aligner keys`."""

from aligner.schema.keys import Key

_TYPE_NAMES = {
    "dict[str, Any]": "mapping",
    "list[Any]": "list",
    "list[str]": "list of strings",
    "list[float]": "list of numbers",
    "str": "string",
    "bool": "true or false",
}


def format_default(value: object) -> str:
    """Return a default value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def format_type(key: Key) -> str:
    """Return the type and the bounds of a key's values, or the choices."""
    name = key.type_name.removesuffix(" | None")
    or_null = "" if name == key.type_name else " or null"
    if key.choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in key.choices) + or_null

    signs = (("≥", key.minimum), (">", key.above), ("≤", key.maximum), ("<", key.below))
    bounds = " and ".join(f"{sign} {bound:.10g}" for sign, bound in signs if bound is not None)
    return " ".join(part for part in (_TYPE_NAMES.get(name, name), bounds) if part) + or_null
