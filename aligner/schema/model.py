"""Keys of the policy's initial model: section `model`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class ModelConfig:
    """Initial weights and tokenizer of the policy."""

    source: str = option(
        "directory",
        "`directory`: a Hugging Face model directory; `gguf`: a GGUF file from a Python package,"
        " converted once and cached; `random`: random weights, initialized from `seed`.",
        choices=("directory", "gguf", "random"),
    )
    path: str | None = option(
        None,
        "Hugging Face model directory, name of a model on the Hugging Face Hub (such as"
        " `Qwen/Qwen3-0.6B`), or `experiment:NAME` for the model that the experiment NAME"
        " trained.",
        read_if=".source=directory",
    )
    package: str | None = option(
        None, "Importable Python package that contains the GGUF file.", read_if=".source=gguf"
    )
    config: dict[str, Any] = option(
        {},
        "Contents of the Hugging Face `config.json`. With `model.source=random`, these settings"
        " define the model. With `model.source=directory`, `aligner validate` uses these"
        " settings if the model directory does not exist; in this case, the data need not exist"
        " either.",
        read_if=".source=random or .path!=experiment:*",
    )
    initializer_std: float = option(
        0.02,
        "Standard deviation of random initial weights.",
        minimum=0,
        read_if=".source=random or dry_run.scale=tiny",
    )
