"""When a run can be resumed."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class CheckpointConfig:
    """Checkpoints, from which a run resumes."""

    every: int = option(
        0, "Steps between checkpoints; 0 means none by steps, except one at the end.", minimum=0
    )
    every_minutes: float = option(
        30.0,
        "Minutes after the last checkpoint, or the start, after which the next step also saves"
        " one; 0 means none by time. These checkpoints only serve resuming: they are not"
        " evaluated, and `checkpoint.best_metric` ignores them.",
        minimum=0,
    )
    keep: int = option(
        2,
        "Number of newest checkpoints that are kept; older ones are deleted. Checkpoints by"
        " steps take precedence over those by time.",
        minimum=1,
    )
    best_metric: str | None = option(
        None,
        "Metric, such as `reward/mean` or `eval/score`, whose best checkpoint is also kept: the"
        " highest value, or the lowest of a loss, perplexity or KL. Checkpoints without a value"
        " of the metric do not count. Null means none.",
    )
    asynchronous: bool = option(
        True, "Whether to write checkpoints while training continues, from a copy in host memory."
    )
