"""The policy that a run starts from."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class ModelConfig:
    """Where the policy's initial weights and tokenizer come from."""

    source: str = option(
        "directory",
        "directory: a Hugging Face model directory; gguf: a GGUF file shipped by a Python package,"
        " converted once and cached; random: initialised from the seed",
        choices=("directory", "gguf", "random"),
    )
    path: str | None = option(None, "model directory", read=".source=directory")
    package: str | None = option(
        None, "importable package that ships the GGUF file", read=".source=gguf"
    )
    config: dict[str, Any] = option(
        {},
        "Hugging Face config.json as YAML (source=random); with source=directory what `aligner"
        " validate` goes by while there is no such directory; the data need not be there then"
        " either",
        read=".source=random or .path!=experiment:*",
    )
    initializer_std: float = option(
        0.02,
        "standard deviation of the random weights",
        minimum=0,
        read=".source=random or dry_run.scale=tiny",
    )
