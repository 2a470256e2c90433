"""A metric that a key names: whether a step has measured it, and which of its values are better."""

from collections.abc import Mapping

from aligner.errors import AlignerError


def better_sign(metric: str) -> int:
    """1 where the highest value is the best one; -1 for losses, perplexities and distances from
    another distribution."""
    is_lower = metric.endswith(("loss", "perplexity", "_kl")) or metric.startswith(
        ("kl/", "mismatch/")
    )
    return -1 if is_lower else 1


def check_named(given: str, metric: str, measured: Mapping[str, float]) -> None:
    """Raise AlignerError when a step has metrics of this one's kind, such as eval/…, but not it;
    `given` is the key's text."""
    kind = metric.partition("/")[0] + "/"
    if metric not in measured and any(known.startswith(kind) for known in measured):
        raise AlignerError(
            f"{given}: unknown metric; metrics of this step: {', '.join(sorted(measured))}"
        )
