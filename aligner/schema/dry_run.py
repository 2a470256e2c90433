"""A dry run: two steps of a configuration with a tiny model on this machine's CPU."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class DryRunConfig:
    """Dry run of `aligner launch` or `aligner validate` on this machine's CPU: the roles and
    layouts of the run with a tiny random model."""

    scale: str = option(
        "none",
        "`none`: no dry run; `tiny`: a dry run with the smallest model that the layouts can split.",
        choices=("none", "tiny"),
    )
    steps: int = option(2, "Training steps of the dry run.", minimum=1)
    max_ranks: int = option(
        16,
        "Maximum number of ranks of all roles together; larger layouts are made smaller.",
        minimum=1,
    )
    models: dict[str, Any] = option(
        {}, "Hugging Face `config.json` of each random reward model; set at launch."
    )
