"""Python of the user's own that a configuration names: it is theirs, and fails in its own ways."""

import importlib
import logging
from typing import Any

from aligner.errors import ConfigError

_log = logging.getLogger(__name__)
_MOVED_MODULES = {
    f"aligner.environments.{name}": f"aligner.agents.{name}"
    for name in ("gymnasium_environment", "tool_environment")
}
"""Modules that configurations name, and their new places; the old ones work for one release."""


def imported(module: str, name: str) -> Any:
    """What a module has under a name. Raises ConfigError with the reason alone, for the caller to
    say where it was named."""
    if module in _MOVED_MODULES:
        _log.warning(
            "%s has moved to %s; the old name will be removed", module, _MOVED_MODULES[module]
        )
        module = _MOVED_MODULES[module]
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
        ) from error
    # A module that is a script ends the process that imports it, unless it is kept from that.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"importing {module} failed with {type(error).__name__}: {error}"
        ) from error
