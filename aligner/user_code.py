"""Import of user code that a configuration names; user code may raise any exception."""

import importlib
from typing import Any

from aligner.errors import ConfigError


def import_object(module: str, name: str) -> Any:
    """Import a module, and return its attribute of a name.

    Raises:
        ConfigError: If the import fails or the attribute is missing. The message contains only the
            reason; the caller adds the configuration key.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        ) from error
    # A module that is a script may call sys.exit during its import.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"importing {module} failed with {type(error).__name__}: {error}"
        ) from error
