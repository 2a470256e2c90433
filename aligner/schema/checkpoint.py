"""Keys of checkpoints: section `checkpoint`."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class CheckpointConfig:
    """Checkpoints, from which a run resumes."""

    every: int = option(
        0,
        "Number of steps between checkpoints. 0 means one checkpoint at the end of the run, in"
        " addition to time-based checkpoints.",
        minimum=0,
    )
    every_minutes: float = option(
        10.0,
        "Interval of time-based checkpoints in minutes. A time-based checkpoint is saved at the"
        " end of a step if the interval has passed since the last checkpoint or the start of the"
        " run. 0 means no time-based checkpoints. Time-based checkpoints are used only to"
        " resume: they are not evaluated, and `checkpoint.best_metric` ignores them.",
        minimum=0,
    )
    keep: int = option(
        2,
        "Number of newest checkpoints that are kept; older checkpoints are deleted. Step-based"
        " checkpoints take precedence over time-based checkpoints.",
        minimum=1,
    )
    best_metric: str | None = option(
        None,
        "Metric, such as `reward/mean` or `eval/score`, whose best checkpoint is also kept. The"
        " best value is the highest value; for a loss, perplexity, KL or `mismatch/…`, the lowest"
        " value. Checkpoints without a value of the metric are ignored. Null means no best"
        " checkpoint.",
    )
    asynchronous: bool = option(
        True, "Whether to write checkpoints from a copy in host memory while training continues."
    )
