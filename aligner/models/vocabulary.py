"""Vocabulary and EOS ids of a model directory, and comparison of two models' vocabularies.

The EOS ids are those of config.json and generation_config.json.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from aligner.errors import ConfigError
from aligner.file_limits import MAX_TOKENIZER_BYTES, read_json_object
from aligner.models.shape import ModelShape

# Number of differing tokens that a message lists.
_LISTED_TOKENS = 3


def read_vocabulary(directory: Path) -> Mapping[int, str] | None:
    """Return the tokens by id, including special tokens; None without a readable tokenizer.

    A damaged tokenizer raises its error when a role loads it.
    """
    try:
        file = directory / "tokenizer.json"
        if not file.is_file():
            words = read_json_object(directory / "vocab.json", MAX_TOKENIZER_BYTES)
            return {id: word for word, id in words.items()} | _added_tokens(directory)

        tokenizer = read_json_object(file, MAX_TOKENIZER_BYTES)
        words = tokenizer["model"]["vocab"]
        added = tokenizer["added_tokens"]
        by_id = {id: word for word, id in words.items()} if isinstance(words, dict) else {}
        # A unigram model has a list of pieces and scores.
        by_id = by_id or {id: str(word[0]) for id, word in enumerate(words)}
        tokenizer_added = {token["id"]: token["content"] for token in added}
        return by_id | _added_tokens(directory) | tokenizer_added
    except (ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _added_tokens(directory: Path) -> dict[int, str]:
    """Return the tokens by id that tokenizer_config.json or added_tokens.json adds."""
    settings = directory / "tokenizer_config.json"
    older = directory / "added_tokens.json"
    entries = read_json_object(settings) if settings.is_file() else {}
    if "added_tokens_decoder" in entries:
        added = entries["added_tokens_decoder"].items()
        return {int(id): str(token["content"]) for id, token in added}
    if older.is_file():
        return {id: text for text, id in read_json_object(older).items()}
    return {}


def vocabulary_difference(
    policy: Mapping[int, str] | None, model: Mapping[int, str] | None
) -> str | None:
    """Describe the differences between the policy's vocabulary and that of another model.

    Args:
        policy: The policy's tokens by id; None if it has no readable tokenizer.
        model: The other model's tokens by id; None if it has no readable tokenizer.

    Returns:
        A message; None if each of the policy's ids is the same token in both vocabularies, or if
        one of the vocabularies is None.
    """
    if policy is None or model is None:
        return None
    differing = [id for id, token in policy.items() if model.get(id) != token]
    if not differing:
        return None
    examples = ", ".join(
        f"{id} (policy {policy[id]!r}, this model {_token_text(model, id)})"
        for id in sorted(differing)[:_LISTED_TOKENS]
    )
    return (
        f"{len(differing)} of the policy's {len(policy)} token ids are different tokens in this"
        f" model's tokenizer, for example {examples}"
    )


def _token_text(vocabulary: Mapping[int, str], id: int) -> str:
    """Return the token of an id in quotes, or `no token` if the vocabulary lacks the id."""
    return repr(vocabulary[id]) if id in vocabulary else "no token"


def require_same_vocabulary(key: str, directory: Path, policy: Path) -> None:
    """Raise ConfigError unless another model has the same tokens at the policy's token ids.

    A role calls this function when it starts, because the policy's directory may not exist before
    the launch.

    Args:
        key: Configuration key that names the other model, for the error.
        directory: Directory of the other model.
        policy: Directory of the policy.
    """
    if (
        difference := vocabulary_difference(read_vocabulary(policy), read_vocabulary(directory))
    ) is not None:
        raise ConfigError(
            f"{key}={directory}: {difference}; set a model with the policy's tokenizer"
        )


GENERATION_CONFIG = "generation_config.json"
"""Name of the file with the generation settings of a model directory."""


def with_all_end_tokens(shape: ModelShape, directory: Path) -> ModelShape:
    """Return the shape with the EOS ids of generation_config.json after those of config.json.

    If only generation_config.json has EOS ids, the default of the transformers class is not one
    of the model's EOS ids: in another vocabulary, this id is an unrelated token.

    Args:
        shape: The shape that the model's config.json describes.
        directory: The model directory; it may lack generation_config.json.

    Raises:
        ConfigError: generation_config.json is damaged, or an EOS id is not in the vocabulary.
    """
    _check_ids(shape.eos_token_ids, shape.vocab_size, directory / "config.json")
    file = directory / GENERATION_CONFIG
    generation_ids = _read_end_tokens(file) if file.is_file() else ()
    _check_ids(generation_ids, shape.vocab_size, file)
    if generation_ids and not _has_end_tokens(directory / "config.json"):
        return dataclasses.replace(shape, eos_token_ids=generation_ids)
    return dataclasses.replace(
        shape, eos_token_ids=tuple(dict.fromkeys((*shape.eos_token_ids, *generation_ids)))
    )


def _has_end_tokens(file: Path) -> bool:
    """Return whether a config.json has the entry `eos_token_id`; True if the file is missing.

    Other functions report a missing config.json.
    """
    if not file.is_file():
        return True
    return "eos_token_id" in read_json_object(file)


def _read_end_tokens(file: Path) -> tuple[int, ...]:
    """Return the entry `eos_token_id` of a JSON file: one id, a list of ids, or none."""
    entry = read_json_object(file).get("eos_token_id")
    if entry is None:
        return ()
    ids = entry if isinstance(entry, list) else [entry]
    if not all(type(id) is int for id in ids):
        raise ConfigError(f"{file}: eos_token_id={entry!r}: must be a token id or a list of them")
    return tuple(ids)


def _check_ids(ids: tuple[int, ...], size: int, file: Path) -> None:
    """Raise ConfigError if an EOS id is outside of a vocabulary of `size` tokens."""
    for id in ids:
        if not 0 <= id < size:
            raise ConfigError(
                f"{file}: eos_token_id={id}: must be at least 0 and less than vocab_size={size}"
            )
