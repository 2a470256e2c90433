"""When a run can be resumed."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class CheckpointConfig:
    """Checkpoints, from which a run resumes."""

    every: int = option(
        0,
        "Steps between checkpoints; 0 means only one at the end, besides time-based ones.",
        minimum=0,
    )
    every_minutes: float = option(
        30.0,
        "Minutes between time-based checkpoints: the first step that ends at least this long"
        " after the last checkpoint (or after the start of the run) also saves a checkpoint. 0"
        " means no time-based checkpoints. They are used only to resume: they are not evaluated,"
        " and `checkpoint.best_metric` ignores them.",
        minimum=0,
    )
    keep: int = option(
        2,
        "Number of newest checkpoints that are kept; older ones are deleted. Step-based"
        " checkpoints take precedence over time-based ones.",
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
