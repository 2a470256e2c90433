"""Templates and what every page of them is given; pages that are served and the one that is saved
share them."""

import functools
import importlib.util
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from aligner.config.compose import config_text
from aligner.errors import ConfigError
from aligner.extras import lacking
from aligner.placement.placement_table import placements
from aligner.schema import Config
from aligner.schema.keys import shown
from aligner.schema.reward_sources import describe_sources
from aligner.view.run_index import NONE, differences
from aligner.view.shown_text import printable

_NOTHING = 5e-5
STATIC = Path(__file__).with_name("static")


def require_packages(command: str) -> None:
    """Raises ConfigError where a package of the `view` extra is missing."""
    if lack := lacking("view"):
        raise ConfigError(f"{command}: {lack}")


def plotly_script() -> Path:
    """plotly.js, as its package brings it."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise AssertionError  # require_packages was called
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


def render(template: str, **values: Any) -> str:
    """A page. What it is given is text unless it is Markup."""
    return _environment().get_template(template).render(**values)


def configuration(config: Config) -> dict[str, Any]:
    """What pages show of a configuration."""
    return {
        "config": config,
        "reward": describe_sources(config.reward),
        "roles": placements(config),
        "changed": differences({"run": config, "default": Config()}),
        "configuration": printable(config_text(shown(config))),
    }


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "text": printable,
        "duration": _duration,
        "number": _number,
        "rounded": _rounded,
        "data": _data,
    }
    return environment


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _number(value: float | None, digits: int = 3) -> str:
    """Fixed digits where the number is of that size, else an exponent; a dash for none."""
    if value is None:
        return NONE
    return (
        f"{value:.{digits}f}" if value == 0 or 10**-digits <= abs(value) < 1e6 else f"{value:.2e}"
    )


def _rounded(value: float | None) -> float | None:
    """What is zero but for rounding, as advantages of equal scores are, as 0."""
    return 0.0 if value is not None and abs(value) < _NOTHING else value


def _data(value: Any) -> Markup:
    """JSON for a script element that holds data: nothing in it ends the element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
