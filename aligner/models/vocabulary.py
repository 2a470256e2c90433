"""Which token is which: the vocabulary of a model directory, and where two models' differ."""

import json
from collections.abc import Mapping
from pathlib import Path

from aligner.errors import ConfigError

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
