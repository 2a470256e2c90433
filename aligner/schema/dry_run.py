"""Keys of dry runs with a tiny model on this machine's CPU: section `dry_run`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class DryRunConfig:
    """Dry run of `aligner launch` or `aligner validate` on this machine's CPU: the run
    keeps its roles and layouts, but uses a tiny random model."""

    scale: str = option(
        "none",
        "`none`: no dry run; `tiny`: a dry run with the smallest model that the layouts can split.",
        choices=("none", "tiny"),
    )
    steps: int = option(2, "Number of training steps of the dry run.", minimum=1)
    max_ranks: int = option(
        16,
        "Maximum total number of ranks of all roles; larger layouts are reduced.",
        minimum=1,
    )
    models: dict[str, Any] = option(
        {}, "Hugging Face `config.json` of each random reward model; set at launch."
    )
