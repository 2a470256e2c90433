"""When a run can be resumed."""

from dataclasses import dataclass

from aligner.schema.options import option


@dataclass
class CheckpointConfig:
    """When the run can be resumed."""

    every: int = option(0, "save every N steps; 0: at the end only", minimum=0)
    keep: int = option(2, "newest checkpoints kept; older ones are deleted", minimum=1)
    best_metric: str | None = option(
        None,
        "also keep the best checkpoint by this metric, the highest value or the lowest of a loss: such as reward/mean, or"
        " eval/score among the steps that are evaluated",
    )
    asynchronous: bool = option(True, "write a checkpoint while training goes on, from a copy in host memory")
