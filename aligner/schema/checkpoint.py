"""When a run can be resumed."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class CheckpointConfig:
    """When the run can be resumed."""

    every: int = option(0, "save every N steps; 0: never by steps, but at the end", minimum=0)
    every_minutes: float = option(
        30.0,
        "also save after the first step that ends so many minutes after the last save, or the"
        " start; 0: never by time. For resuming alone: it is neither evaluated for it nor compared"
        " by best_metric",
        minimum=0,
    )
    keep: int = option(
        2,
        "newest checkpoints kept, those by steps before those by time; others are deleted",
        minimum=1,
    )
    best_metric: str | None = option(
        None,
        "also keep the best checkpoint by this metric, the highest value or the lowest of a loss:"
        " such as reward/mean, or eval/score among the steps that are evaluated",
    )
    asynchronous: bool = option(
        True, "write a checkpoint while training goes on, from a copy in host memory"
    )
