"""Read tokenizer, special tokens and chat templates of a model directory, as AutoTokenizer does."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from aligner.errors import ConfigError


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """What the directory's `tokenizer.json` describes; ConfigError for a file that is no
    tokenizer's.

    It neither cuts nor pads: the file may carry settings for batches of its own.
    """
    file = directory / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file}: not a valid tokenizer file: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _settings(directory: Path) -> dict[str, Any]:
    """What `tokenizer_config.json` says; nothing where there is none."""
    file = directory / "tokenizer_config.json"
    return _json_object(file) if file.is_file() else {}


def read_special_tokens(directory: Path) -> dict[str, Any]:
    """Return the texts of `bos_token`, `eos_token` and the other named special tokens."""
    settings = _settings(directory)
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    return {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }


def _json_object(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(settings).__name__}")
    return settings


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates by name; raise ConfigError if none of them is `default`."""
    settings = _settings(directory)
    file = directory / "chat_template.jinja"
    given = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    named = given if isinstance(given, list) else [{"name": "default", "template": given}]
    entries = [
        (str(entry.get("name")), entry.get("template"))
        for entry in named
        if isinstance(entry, dict)
    ]
    texts = {name: text for name, text in entries if isinstance(text, str)}
    if "default" not in texts:
        raise ConfigError(
            f"{directory}: chat messages require a chat template, but the model has neither"
            " chat_template.jinja nor `chat_template` in tokenizer_config.json; add one, or use"
            " plain-text prompts"
        )
    return texts
