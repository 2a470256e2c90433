"""Import of user code that a configuration names; user code may raise any exception."""

import importlib
import logging
from typing import Any

from aligner.errors import ConfigError

_log = logging.getLogger(__name__)

# New names of moved modules that configurations may name. The old names work for one release.
_MOVED_MODULES = {
    f"aligner.environments.{name}": f"aligner.agents.{name}"
    for name in ("gymnasium_environment", "tool_environment")
}


def import_object(module: str, name: str) -> Any:
    """Import a module, and return its attribute `name`.

    Raises:
        ConfigError: If the import fails or the attribute is missing. The message contains only the
            reason; the caller adds the configuration key.
    """
    if module in _MOVED_MODULES:
        new_module = _MOVED_MODULES[module]
        _log.warning("%s has moved to %s; the old name will be removed", module, new_module)
        module = new_module
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
