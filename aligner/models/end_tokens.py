"""The EOS tokens of a model directory: those of config.json and generation_config.json."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape

GENERATION_CONFIG = "generation_config.json"


def with_all_end_tokens(shape: ModelShape, directory: Path) -> ModelShape:
    """Return the shape with the EOS ids of generation_config.json after those of config.json.

    If only generation_config.json has EOS ids, the default of the transformers class is not one
    of the model's EOS ids: in another vocabulary it is any token.

    Args:
        shape: The shape that the model's config.json describes.
        directory: The model directory; it may lack generation_config.json.

    Raises:
        ConfigError: generation_config.json is damaged, or an EOS id is not in the vocabulary.
    """
    _check(shape.eos_token_ids, shape.vocab_size, directory / "config.json")
    file = directory / GENERATION_CONFIG
    generated = _read_end_tokens(file) if file.is_file() else ()
    _check(generated, shape.vocab_size, file)
    if generated and not _has_end_tokens(directory / "config.json"):
        return dataclasses.replace(shape, eos_token_ids=generated)
    return dataclasses.replace(
        shape, eos_token_ids=tuple(dict.fromkeys((*shape.eos_token_ids, *generated)))
    )


def _has_end_tokens(file: Path) -> bool:
    """Return whether a config.json has the entry; True without a file, which has other readers."""
    if not file.is_file():
        return True
    entries: Any = json.loads(file.read_bytes())
    return "eos_token_id" in entries


def _read_end_tokens(file: Path) -> tuple[int, ...]:
    """Return the entry `eos_token_id` of a JSON file: one id, a list of ids, or none."""
    try:
        entries: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(entries).__name__}")
    entry = entries.get("eos_token_id")
    if entry is None:
        return ()
    ids = entry if isinstance(entry, list) else [entry]
    if not all(type(id) is int for id in ids):
        raise ConfigError(f"{file}: eos_token_id={entry!r}: must be a token id or a list of them")
    return tuple(ids)


def _check(ids: tuple[int, ...], size: int, file: Path) -> None:
    for id in ids:
        if not 0 <= id < size:
            raise ConfigError(
                f"{file}: eos_token_id={id}: must be at least 0 and less than vocab_size={size}"
            )
