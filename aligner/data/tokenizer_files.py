"""Read the tokenizer, special tokens and chat templates of a model directory like AutoTokenizer.

The steps follow `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` of
transformers 5; the import of transformers itself takes too long for the callers. Entries that these
functions cannot reproduce raise an error that names the file and the entry.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from aligner.data.tokenizer_classes import (
    PLAIN,
    TokenizerClass,
    apply_class_defaults,
    select_tokenizer_class,
)
from aligner.errors import ConfigError
from aligner.file_limits import (
    MAX_CONFIG_BYTES,
    MAX_TOKENIZER_BYTES,
    parse_json,
    read_json_object,
    read_limited_bytes,
)

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that every transformers tokenizer has as attributes."""

Token = str | AddedToken
"""A special token as its text, or with the flags that determine how it is matched."""

_TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_VOCABULARY = "vocab.json"
_MERGES = "merges.txt"
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a model directory, and the settings that it does not contain."""

    tokenizer: tokenizers.Tokenizer
    """Tokenizer without padding and truncation."""
    special_tokens: Mapping[str, str]
    """Texts of the named special tokens, such as `bos_token`. Chat templates have them as
    variables."""
    cleans_up_spaces: bool
    """Whether decoding removes the spaces before punctuation (`clean_up_tokenization_spaces`)."""


@dataclass(frozen=True)
class _Settings:
    """Settings of a tokenizer in the files other than `tokenizer.json`."""

    selected_class: TokenizerClass
    entries: Mapping[str, Any]
    """Entries of tokenizer_config.json, completed with the class's defaults."""
    special_tokens: Mapping[str, Token]
    """Special tokens by name, without null entries."""
    extra_special_tokens: tuple[Token, ...]
    added_tokens: Mapping[int, AddedToken]
    """Added tokens by id."""
    implied_tokens: frozenset[str]
    """Texts of the special tokens that no file names, only the class."""


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model directory, without padding and truncation.

    Raises:
        ConfigError: See `read_tokenizer_files`.
    """
    return read_tokenizer_files(directory).tokenizer


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Return the tokenizer and the special tokens of a model directory, as AutoTokenizer does.

    Raises:
        ConfigError: A file is missing or damaged, or has an entry that cannot be reproduced. The
            message names the file and the entry.
    """
    if problem := find_tokenizer_problem(directory):
        raise ConfigError(f"{directory}: {problem}")
    # The entries of the files may have any type.
    with _name_tokenizer_errors(directory):
        return _read_tokenizer_files(directory)


def _read_tokenizer_files(directory: Path) -> TokenizerFiles:
    content = _read_tokenizer(directory)
    settings = _read_settings(directory, content)
    tokenizer = _build(directory, settings, content)
    _add_tokens(tokenizer, settings, _read_json(directory / "config.json").get("vocab_size"))
    _check_token_ids(directory, tokenizer, settings)
    _set_post_processor(directory, tokenizer, settings)

    tokenizer.no_padding()
    tokenizer.no_truncation()
    _reject_mistral_regex(directory, tokenizer, settings)

    # transformers ignores the entry for BPE, because it would remove spaces of the original text.
    is_forced = settings.entries.get(
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    )
    cleans_up = bool(settings.entries.get("clean_up_tokenization_spaces")) and (
        bool(is_forced) or not isinstance(tokenizer.model, models.BPE)
    )
    texts = {name: str(token) for name, token in settings.special_tokens.items()}
    return TokenizerFiles(tokenizer, texts, cleans_up)


def clean_up_spaces(text: str) -> str:
    """Remove the spaces before punctuation that WordPiece decoders insert.

    This is `clean_up_tokenization` of transformers.
    """
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


def find_tokenizer_problem(directory: Path) -> str | None:
    """Describe the tokenizer files that a directory lacks, and the remedy; None if it has a
    tokenizer."""
    if (directory / _TOKENIZER).is_file():
        return None
    other_files = [name for name in _OTHER_FORMATS if (directory / name).is_file()]
    if other_files:
        return (
            f"tokenizer.json is missing, and {other_files[0]} is not supported; convert it with"
            " `AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)` of"
            " transformers"
        )
    if (directory / _VOCABULARY).is_file() and (directory / _MERGES).is_file():
        return None
    return "tokenizer.json, or vocab.json with merges.txt, is missing"


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and the other named special tokens.

    Tokens that are null are not in the result. The directory does not need a tokenizer.
    """
    with _name_tokenizer_errors(directory):
        content = _read_tokenizer(directory) if (directory / _TOKENIZER).is_file() else {}
        tokens = _read_settings(directory, content).special_tokens
    return {name: str(token) for name, token in tokens.items()}


def has_chat_template(directory: Path) -> bool:
    """Return whether a model directory has a chat template for conversations without tools."""
    return "default" in _read_templates(directory)


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates of a model directory by name.

    Raises:
        ConfigError: There is no template with the name `default`.
    """
    texts = _read_templates(directory)
    if "default" not in texts:
        other_names = f" (found only: {', '.join(texts)})" if texts else ""
        raise ConfigError(
            f"{directory}: chat messages require a chat template, but the model has neither"
            " chat_template.jinja nor `chat_template` in tokenizer_config.json"
            f"{other_names}; add one, or use plain-text prompts"
        )
    return texts


def _read_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates by name.

    Templates in their own files replace those of tokenizer_config.json. `chat_template.json`, which
    processors of multimodal models write, counts only if there is no other.
    """
    own_file = directory / "chat_template.jinja"
    legacy_file = directory / "chat_template.json"
    texts = {
        file.name.removesuffix(".jinja"): _read_text(file)
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if own_file.is_file():
        texts.setdefault("default", _read_text(own_file))
    if not texts:
        texts = _parse_templates(_read_json(directory / _SETTINGS))
    if not texts and legacy_file.is_file():
        texts = _parse_templates(_read_json(legacy_file))
    return texts


def _parse_templates(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of an entry `chat_template`: one text, or several texts with names."""
    template = entries.get("chat_template")
    if isinstance(template, list):
        pairs = [
            (entry.get("name"), entry.get("template"))
            for entry in template
            if isinstance(entry, dict)
        ]
    elif isinstance(template, dict):
        pairs = list(template.items())
    else:
        pairs = [("default", template)]
    return {str(name): text for name, text in pairs if isinstance(text, str)}


def _read_text(file: Path) -> str:
    try:
        return read_limited_bytes(file, MAX_CONFIG_BYTES).decode()
    except ValueError as error:
        raise ConfigError(f"{file}: not valid UTF-8 ({error})") from error


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no such file."""
    return read_json_object(file) if file.is_file() else {}


def _read_tokenizer(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer.json, or the same content of vocab.json and merges.txt."""
    file = directory / _TOKENIZER
    with _name_tokenizer_errors(file):
        if file.is_file():
            content = parse_json(read_limited_bytes(file, MAX_TOKENIZER_BYTES))
            if not isinstance(content, dict):
                raise ValueError(f"expected a JSON object, got {type(content).__name__}")
            return content
    file = directory / _VOCABULARY
    with _name_tokenizer_errors(file):
        # The tokenizers package has the same reader without limits.
        parse_json(read_limited_bytes(file, MAX_TOKENIZER_BYTES))
        read_limited_bytes(directory / _MERGES, MAX_TOKENIZER_BYTES)
        vocabulary, merges = models.BPE.read_file(str(file), str(directory / _MERGES))
        return {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}


@contextlib.contextmanager
def _name_tokenizer_errors(path: Path) -> Iterator[None]:
    """Raise ConfigError with the path of a file or directory for all errors of a block."""
    try:
        yield
    except ConfigError:
        raise
    # tokenizers raises nothing more specific than Exception, and a panic of its Rust code is not
    # even that.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: not a valid tokenizer file: {problem}") from error


def _read_settings(directory: Path, content: Mapping[str, Any]) -> _Settings:
    """Return the settings of the files beside tokenizer.json.

    The files are merged in transformers' order of precedence.
    """
    file = directory / _SETTINGS
    entries = _read_json(file)
    selected_class = select_tokenizer_class(
        directory, entries, _read_json(directory / "config.json"), content
    )
    _reject_entries(file, entries)
    if (directory / _TOKENIZER).is_file():
        # The post-processor of tokenizer.json determines the tokens that are added to a text.
        entries.pop("add_bos_token", None)
        entries.pop("add_eos_token", None)

    # transformers 5 has renamed `additional_special_tokens` to `extra_special_tokens`.
    if "additional_special_tokens" in entries and not entries.get("extra_special_tokens"):
        entries["extra_special_tokens"] = entries.pop("additional_special_tokens")

    # Older directories store the added tokens in separate files.
    if "added_tokens_decoder" in entries:
        added = {
            int(id): _parse_token(file, f"added_tokens_decoder.{id}", token)
            for id, token in _get_token_mapping(file, "added_tokens_decoder", entries).items()
        }
    else:
        entries |= _read_special_tokens_map(directory, entries)
        added = _read_legacy_added_tokens(directory, entries, content)
    # Entries that are plain texts have no flags, and are not added tokens.
    added_tokens = {id: token for id, token in added.items() if isinstance(token, AddedToken)}
    by_text = {token.content: token for token in added_tokens.values()}

    named_in_files = {
        str(_parse_token(file, name, entries[name])) for name in NAMED_TOKENS if entries.get(name)
    }
    entries = apply_class_defaults(selected_class, entries)
    # The padding section of tokenizer.json may name the padding token.
    padding = content.get("padding")
    if isinstance(padding, dict):
        entries.setdefault("pad_token", padding.get("pad_token"))

    special = {}
    for name in NAMED_TOKENS:
        if entries.get(name) is not None:
            token = _parse_token(file, name, entries[name])
            special[name] = by_text.get(str(token), token)
    special |= _find_model_specific_tokens(file, entries)

    extra = entries.get("extra_special_tokens") or []
    if isinstance(extra, dict):  # tokens with names, which are already in `special`
        extra = entries.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise ConfigError(f"{file}: extra_special_tokens={extra!r}: must be a list of tokens")
    tokens = tuple(_parse_token(file, "extra_special_tokens", token) for token in extra)
    implied = frozenset(str(token) for token in special.values()) - named_in_files
    return _Settings(selected_class, entries, special, tokens, added_tokens, implied)


def _find_model_specific_tokens(file: Path, entries: Mapping[str, Any]) -> dict[str, Token]:
    """Return the special tokens with model-specific names, such as `image_token`."""
    named_entries = {
        name: entry
        for name, entry in entries.items()
        if name.endswith("_token")
        and name not in NAMED_TOKENS
        and (isinstance(entry, (str, AddedToken)) or _is_token(entry))
    }
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(entries.get(key), dict):
            named_entries |= entries[key]
    return {name: _parse_token(file, name, entry) for name, entry in named_entries.items()}


def _read_special_tokens_map(directory: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of special_tokens_map.json, which replace those of the settings."""
    file = directory / "special_tokens_map.json"
    replacements = _read_json(file)
    result: dict[str, Any] = {}
    for name, entry in replacements.items():
        is_model_specific = name.endswith("_token") and name not in NAMED_TOKENS
        if is_model_specific and isinstance(entries.get(name), str):
            continue  # only for these entries, the settings take precedence
        if name == "extra_special_tokens" and isinstance(entry, list):
            known_tokens = list(entries.get("extra_special_tokens") or [])
            tokens = [_parse_token(file, name, token) for token in entry]
            result[name] = known_tokens + [token for token in tokens if token not in known_tokens]
        elif name != "extra_special_tokens" and isinstance(entry, dict):
            result[name] = _parse_token(file, name, {**entry, "special": True})
        else:
            result[name] = entry

    extra = result.get("additional_special_tokens")
    has_extra = "extra_special_tokens" in entries or "extra_special_tokens" in result
    if extra is not None and not has_extra:
        result["extra_special_tokens"] = extra
    return result


def _read_legacy_added_tokens(
    directory: Path, entries: Mapping[str, Any], content: Mapping[str, Any]
) -> dict[int, Token]:
    """Return the tokens of added_tokens.json and tokenizer.json by id.

    If both files have a token with the same id, the token of tokenizer.json is used.
    """
    file = directory / "added_tokens.json"
    extra = entries.get("extra_special_tokens") or []
    special = {str(entries[name]) for name in NAMED_TOKENS if entries.get(name)}
    special |= {str(token) for token in extra}
    added: dict[int, Token] = {}
    for text, id in _read_json(file).items():
        if not isinstance(id, int):
            raise ConfigError(f"{file}: {text}={id!r}: must be a token id")
        is_special = text in special
        added[id] = AddedToken(text, normalized=not is_special, special=is_special)

    for entry in content.get("added_tokens") or []:
        flags = {key: value for key, value in entry.items() if key != "id"}
        added[entry["id"]] = _parse_token(directory / _TOKENIZER, "added_tokens", flags)
    return added


def _is_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str)


def _parse_token(file: Path, name: str, entry: Any) -> Token:
    """Return a token of a JSON file: a text, or an object with the flags of AddedToken.

    Args:
        file: The file, for error messages.
        name: The name of the entry, for error messages.
        entry: The value of the entry.

    Raises:
        ConfigError: The entry is not a token.
    """
    if isinstance(entry, (str, AddedToken)):
        return entry
    flags = (
        {key: value for key, value in entry.items() if key != "__type"} if _is_token(entry) else {}
    )
    try:
        return AddedToken(**flags) if flags else _raise_no_token(file, name, entry)
    except TypeError as error:
        raise ConfigError(f"{file}: {name}: not a token ({error})") from error


def _raise_no_token(file: Path, name: str, entry: Any) -> AddedToken:
    raise ConfigError(
        f"{file}: {name}={entry!r}: must be a token, as text or as an object with `content`"
    )


def _get_token_mapping(file: Path, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry that maps token ids to tokens; raise ConfigError if it does not."""
    entry = entries[name]
    if not isinstance(entry, dict) or not all(key.isdecimal() for key in entry):
        raise ConfigError(f"{file}: {name}: must map token ids to tokens")
    return entry


def _reject_entries(file: Path, entries: Mapping[str, Any]) -> None:
    """Raise ConfigError for entries of tokenizer_config.json that are not implemented."""
    if entries.get("split_special_tokens"):
        raise ConfigError(
            f"{file}: split_special_tokens=true: not supported, because the end-of-sequence tokens"
            " of a conversation would be split; remove the entry"
        )
    versioned_files = [
        name for name in entries.get("fast_tokenizer_files") or [] if name != _TOKENIZER
    ]
    if versioned_files:
        raise ConfigError(
            f"{file}: fast_tokenizer_files={versioned_files}: files for certain versions of"
            " transformers are not supported; keep one tokenizer.json and remove the entry"
        )


def _build(
    directory: Path, settings: _Settings, content: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of tokenizer.json, or the tokenizer that its class builds from the
    vocabulary."""
    file = directory / (_TOKENIZER if (directory / _TOKENIZER).is_file() else _VOCABULARY)
    selected_class = settings.selected_class
    with _name_tokenizer_errors(file):
        if selected_class is PLAIN:
            return tokenizers.Tokenizer.from_file(str(file))
        tokenizer = selected_class.build(content, settings.entries)
        tokenizer.post_processor = _parse_post_processor(content)
        return tokenizer


def _parse_post_processor(content: Mapping[str, Any]) -> Any:
    """Return the post-processor that tokenizer.json describes; None if it has none."""
    # The tokenizers package parses a post-processor only as a part of a whole tokenizer.
    minimal_content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": content.get("post_processor"),
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(minimal_content)).post_processor


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, settings: _Settings, model_size: int | None
) -> None:
    """Add the tokens that the files name and the tokenizer lacks, as TokenizersBackend does.

    transformers also adds special tokens that only the class names. They are not added if the
    model has no embeddings for them.

    Args:
        tokenizer: The tokenizer, which is changed.
        settings: The settings of the tokenizer.
        model_size: The number of token ids of the model (`vocab_size`); None if it is unknown.
    """
    existing_tokens = tokenizer.get_added_tokens_decoder()
    # A token whose flags differ is added again: the flags of the settings replace the file's.
    known_tokens = {repr(token) for token in existing_tokens.values()}
    new_tokens: list[Token] = [
        token
        for _, token in sorted(settings.added_tokens.items())
        if repr(token) not in known_tokens
    ]
    texts = {token.content for token in existing_tokens.values()} | {
        str(token) for token in new_tokens
    }
    special = [*settings.special_tokens.values(), *settings.extra_special_tokens]
    missing_texts = {
        text for text in (*texts, *map(str, special)) if tokenizer.token_to_id(text) is None
    }
    is_too_large = (
        isinstance(model_size, int) and tokenizer.get_vocab_size() + len(missing_texts) > model_size
    )
    omitted = missing_texts & settings.implied_tokens if is_too_large else set()
    # If a text occurs twice with different flags, the later flags take effect.
    for token in special:
        if str(token) not in texts | omitted and token not in new_tokens:
            new_tokens.append(token)

    named_texts = {str(token) for token in settings.special_tokens.values()}
    tokens = [
        token if isinstance(token, AddedToken) else _special_token(token) for token in new_tokens
    ]
    for token in tokens:
        token.special = token.special or token.content in named_texts
    tokenizer.add_tokens(tokens)

    if settings.selected_class.marks_special_tokens:
        tokenizer.add_tokens(
            [_special_token(str(token)) for token in special if str(token) not in omitted]
        )


def _special_token(text: str) -> AddedToken:
    return AddedToken(text, special=True)


def _check_token_ids(directory: Path, tokenizer: tokenizers.Tokenizer, settings: _Settings) -> None:
    """Raise ConfigError if the id of a token differs from its id in the files.

    transformers numbers added tokens in order and ignores their ids.
    """
    for id, token in settings.added_tokens.items():
        actual = tokenizer.token_to_id(token.content)
        if actual != id:
            raise ConfigError(
                f"{directory / _SETTINGS}: added token {token.content!r} has id {id}, but"
                f" AutoTokenizer gives it {actual}; save the tokenizer again with transformers"
            )


def _set_post_processor(
    directory: Path, tokenizer: tokenizers.Tokenizer, settings: _Settings
) -> None:
    """Set the post-processor that adds tokens to a text, if the class or the settings define it.

    Raises:
        ConfigError: The vocabulary lacks one of these tokens.
    """
    entries = settings.entries
    special = settings.special_tokens
    template = settings.selected_class.template
    if template is not None:
        before, after = template(entries)
    elif tokenizer.post_processor is None or settings.selected_class.replaces_post_processor:
        before = [str(special["bos_token"])] if _is_added(entries, special, "bos") else []
        after = [str(special["eos_token"])] if _is_added(entries, special, "eos") else []
    else:
        return
    tokens = {text: tokenizer.token_to_id(text) for text in (*before, *after)}
    unknown = [text for text, id in tokens.items() if id is None]
    if unknown:
        raise ConfigError(
            f"{directory}: the class {settings.selected_class.name} puts {unknown[0]!r} before or"
            " after each text, but the vocabulary lacks it; correct the special tokens in"
            " tokenizer_config.json"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(
            [*(f"{text}:0" for text in before), "$A:0", *(f"{text}:0" for text in after)]
        ),
        special_tokens=list(tokens.items()),
    )


def _is_added(entries: Mapping[str, Any], special: Mapping[str, Token], name: str) -> bool:
    return bool(entries.get(f"add_{name}_token")) and f"{name}_token" in special


def _reject_mistral_regex(
    directory: Path, tokenizer: tokenizers.Tokenizer, settings: _Settings
) -> None:
    """Raise ConfigError if transformers would replace the regular expression of an older Mistral
    tokenizer."""
    config = _read_json(directory / "config.json")
    version = str(config.get("transformers_version") or "0").split(".")[0]
    family = config.get("model_type")
    is_older_mistral = (
        tokenizer.get_vocab_size() > 100_000
        and tokenizer.pre_tokenizer is not None
        and (not version.isdecimal() or int(version) < 5)
        and family in (None, "mistral", "mistral3", "voxtral", "ministral", "pixtral")
    )
    if is_older_mistral and settings.entries.get("fix_mistral_regex"):
        raise ConfigError(
            f"{directory / _SETTINGS}: fix_mistral_regex=true: not supported; apply it with"
            " `AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)` of transformers"
        )
