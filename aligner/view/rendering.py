"""HTML templates and their filters, for the served pages and for the saved page."""

import functools
import importlib.util
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from aligner.config.compose import format_config
from aligner.errors import ConfigError
from aligner.extras import describe_missing_modules
from aligner.placement.placement_table import build_placements
from aligner.schema import Config
from aligner.schema.keys import get_masked_values
from aligner.schema.reward_sources import describe_sources
from aligner.view.run_index import MISSING, compare_configurations
from aligner.view.shown_text import printable

# Absolute values below this are displayed as 0.
_ROUNDED_TO_ZERO = 5e-5
STATIC = Path(__file__).with_name("static")


def require_packages(command: str) -> None:
    """Raise ConfigError if a package of the `view` extra is missing."""
    if lack := describe_missing_modules("view"):
        raise ConfigError(f"{command}: {lack}")


def find_plotly_script() -> Path:
    """Return the path of plotly.js in the installed package `plotly`."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise AssertionError  # the caller has called require_packages
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def render(template: str, **values: Any) -> str:
    """Return a page. Values are escaped unless they are Markup."""
    return _environment().get_template(template).render(**values)


def summarize_configuration(config: Config) -> dict[str, Any]:
    """Return the template values of a configuration's tables."""
    return {
        "config": config,
        "reward": describe_sources(config.reward),
        "roles": build_placements(config),
        "changed": compare_configurations({"run": config, "default": Config()}),
        "configuration": printable(format_config(get_masked_values(config))),
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
        "duration": _format_duration,
        "number": _format_number,
        "rounded": _round_to_zero,
        "marked": _mark_matches,
        "data": _to_script_data,
    }
    return environment


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _format_number(value: float | None, digits: int = 3) -> str:
    """Return a number with a fixed number of decimals; a dash for None.

    Numbers that are too small or too large for the decimals have an exponent.
    """
    if value is None:
        return MISSING
    return (
        f"{value:.{digits}f}" if value == 0 or 10**-digits <= abs(value) < 1e6 else f"{value:.2e}"
    )


def _round_to_zero(value: float | None) -> float | None:
    """Return 0 for a value that differs from 0 only by a rounding error, such as the advantages of
    samples with equal scores."""
    return 0.0 if value is not None and abs(value) < _ROUNDED_TO_ZERO else value


def _mark_matches(text: str, searched: str) -> Markup:
    """Return a text with `mark` elements around the parts that a search found, in upper or lower
    case."""
    if not searched:
        return escape(text)
    parts = re.split(f"({re.escape(printable(searched))})", text, flags=re.IGNORECASE)
    # Parts with odd indices are the matches.
    return Markup("").join(
        Markup("<mark>{}</mark>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


def _to_script_data(value: Any) -> Markup:
    """Return JSON for a script element that holds data, with escaped `<`, so that the data cannot
    close the element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
