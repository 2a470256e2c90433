"""Published configurations of the model families, with their sources.

`published_configs.json` contains the entries of config.json that matter for a model's computation,
written down by hand; token ids and sizes are the published ones. `refused` is a text of the error
for a model that is not supported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aligner.models.architectures import ARCHITECTURES_BY_CLASS

PUBLISHED: dict[str, dict[str, Any]] = {
    row["name"]: row
    for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
}


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries without those about the files of the weights."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _is_supported(row: dict[str, Any]) -> bool:
    """Return whether aligner has the architecture of a model, which then must be accepted."""
    return "refused" not in row and row["config"]["architectures"][0] in ARCHITECTURES_BY_CLASS


SUPPORTED = {
    name: without_quantization(row["config"])
    for name, row in PUBLISHED.items()
    if _is_supported(row)
}
"""Entries of the supported models, by the name of the model."""
