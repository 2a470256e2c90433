"""Which token is which: the vocabulary of a model directory, and where two models' differ."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape

_SHOWN = 3


def read_vocabulary(directory: Path) -> Mapping[int, str] | None:
    """Return the tokens by id, special tokens included; None for a directory without a tokenizer
    that can be read.

    The error of a damaged tokenizer is raised when the tokenizer is loaded.
    """
    try:
        file = directory / "tokenizer.json"
        if not file.is_file():
            words = json.loads((directory / "vocab.json").read_bytes())
            return {id: word for word, id in words.items()} | _added_tokens(directory)

        tokenizer = json.loads(file.read_bytes())
        words, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
        by_id = {id: word for word, id in words.items()} if isinstance(words, dict) else {}
        # A unigram model has a list of pieces and scores.
        by_id = by_id or {id: str(word[0]) for id, word in enumerate(words)}
        own = {token["id"]: token["content"] for token in added}
        return by_id | _added_tokens(directory) | own
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _added_tokens(directory: Path) -> dict[int, str]:
    """Return the tokens by id that the settings or added_tokens.json add to a vocabulary."""
    settings, older = directory / "tokenizer_config.json", directory / "added_tokens.json"
    entries = json.loads(settings.read_bytes()) if settings.is_file() else {}
    if "added_tokens_decoder" in entries:
        added = entries["added_tokens_decoder"].items()
        return {int(id): str(token["content"]) for id, token in added}
    if older.is_file():
        return {id: text for text, id in json.loads(older.read_bytes()).items()}
    return {}


def vocabulary_difference(
    written: Mapping[int, str] | None, known: Mapping[int, str] | None
) -> str | None:
    """How the tokens that another model knows differ from those that the policy writes, in words.

    None where each of the policy's ids is the same token to both, and where one of them has no
    tokenizer to compare.
    """
    if written is None or known is None:
        return None
    others = [id for id, token in written.items() if known.get(id) != token]
    if not others:
        return None
    shown = ", ".join(
        f"{id} (policy {written[id]!r}, this model {_token_text(known, id)})"
        for id in sorted(others)[:_SHOWN]
    )
    return (
        f"{len(others)} of the policy's {len(written)} token ids are different tokens in this"
        f" model's tokenizer, for example {shown}"
    )


def _token_text(vocabulary: Mapping[int, str], id: int) -> str:
    """The token of an id in quotes; `no token` for an id that the vocabulary lacks."""
    return repr(vocabulary[id]) if id in vocabulary else "no token"


def require_policys_tokens(key: str, directory: Path, policy: Path) -> None:
    """Raise ConfigError, naming the key and the first differing tokens, unless a model reads the
    policy's tokens as its own.

    For a role that starts: before the launch the policy's directory may not be there.
    """
    if (
        difference := vocabulary_difference(read_vocabulary(policy), read_vocabulary(directory))
    ) is not None:
        raise ConfigError(
            f"{key}={directory}: {difference}; set a model with the policy's tokenizer"
        )


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
