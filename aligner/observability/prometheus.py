"""Prometheus' text format for the metrics of a run."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Value of the HTTP header `Content-Type` of the text format, version 0.0.4."""
_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")


@dataclass
class MetricFamily:
    """One metric with a value for each combination of labels."""

    name: str
    """Name of the metric, with letters, digits and underscores only."""
    help: str
    """Description in one line."""
    kind: str = "gauge"
    """`gauge` or `counter`."""
    values: list[tuple[Mapping[str, str], float]] = field(default_factory=list)
    """Labels and value of each sample."""

    def add(self, value: float, **labels: str) -> "MetricFamily":
        """Add a value, and return this metric."""
        self.values.append((labels, value))
        return self

    def format(self) -> str:
        """Return the lines of the metric in the text format; empty without values."""
        if not self.values:
            return ""
        lines = [f"# HELP {self.name} {_escape(self.help)}", f"# TYPE {self.name} {self.kind}"]
        for labels, value in self.values:
            pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
            lines.append(f"{self.name}{f'{{{pairs}}}' if pairs else ''} {_format_number(value)}")
        return "\n".join(lines) + "\n"


def to_metric_name(name: str) -> str:
    """Return the Prometheus name of a metric of `metrics.jsonl`: `reward/score` becomes
    `aligner_reward_score`."""
    return f"aligner_{_INVALID_CHARACTERS.sub('_', name)}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
