"""A dry run: two steps of a configuration with a tiny model on this machine's CPU."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class DryRunConfig:
    """A rehearsal of `launch` or `validate` on this machine's CPU: the run's roles and layouts with
    a tiny random model."""

    scale: str = option(
        "none",
        "none: no dry run, the run itself; tiny: the smallest model that the layouts can cut",
        choices=("none", "tiny"),
    )
    steps: int = option(2, "training steps", minimum=1)
    max_ranks: int = option(
        16, "layouts whose ranks together are more are made smaller until they are not", minimum=1
    )
    models: dict[str, Any] = option(
        {}, "set at launch: the random reward models, each a Hugging Face config.json"
    )
