"""A reward model's own normalization: a file beside its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError

NORMALIZATION = "normalization.json"


def read_normalization(directory: Path) -> tuple[float, float]:
    """What a reward model's rewards are multiplied by, and what is added then: its gain and bias; 1 and 0 without a file.

    Raises ConfigError, which names the file and what it must hold, for anything else in it.
    """
    file = directory / NORMALIZATION
    if not file.exists():
        return 1.0, 0.0
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.keys() != {"gain", "bias"} or not all(map(_is_finite, content.values())):
        shown = json.dumps(content)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ConfigError(f'{file}: must hold {{"gain": NUMBER, "bias": NUMBER}}, both finite, got {shown}')
    if content["gain"] <= 0:
        raise ConfigError(f"{file}: gain is {content['gain']}, must be above 0")
    return float(content["gain"]), float(content["bias"])


def _is_finite(value: Any) -> bool:
    # Compared, not converted: an integer may be too large for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
