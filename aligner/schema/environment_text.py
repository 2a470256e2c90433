"""Text of a configuration that comes from environment variables.

A configuration in memory has the values, because the code that opens a URL or a file needs them.
Everything that is stored or displayed has the interpolation `${oc.env:NAME}` instead.
"""

from typing import Any


class EnvironmentText(str):
    """Value of a key that contains environment variables, with the text that the user wrote."""

    reference: str
    """The text with interpolations, such as `https://user:${oc.env:KEY}@host`, in the syntax of
    a configuration file."""

    def __new__(cls, value: str, reference: str) -> "EnvironmentText":
        """Create the text.

        Args:
            value: The text with the values of the environment variables.
            reference: See the attribute.
        """
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # for pickle and copy
        return str(self), self.reference


class Reference(str):
    """Text with interpolations that is not resolved, in the syntax of a configuration file.

    The configuration of a run contains such texts when a command only reads it.
    """


def with_references(value: Any) -> Any:
    """Return nested mappings and lists whose `EnvironmentText` is replaced by its `Reference`."""
    if isinstance(value, EnvironmentText):
        return Reference(value.reference)
    if isinstance(value, dict):
        return {key: with_references(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_references(entry) for entry in value]
    return value


def has_references(value: Any) -> bool:
    """Return whether nested mappings and lists contain a text with interpolations."""
    if isinstance(value, dict):
        return any(map(has_references, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_references, value))
    return isinstance(value, (EnvironmentText, Reference))
