"""Read tokenizer, special tokens and chat templates of a model directory, as AutoTokenizer does.

The steps follow `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` of
transformers 5, which are too slow to import where these files are read. Whatever these functions
cannot reproduce is refused with an error that names the file and the entry.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from aligner.data.tokenizer_classes import (
    PLAIN,
    TokenizerClass,
    tokenizer_class,
    with_class_defaults,
)
from aligner.errors import ConfigError

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
"""A special token as its text, or with the flags that say how it is matched."""

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a model directory."""

    tokenizer: tokenizers.Tokenizer
    """The tokenizer, without padding and truncation."""
    special_tokens: Mapping[str, str]
    """Texts of the named special tokens, such as `bos_token`; the variables of chat templates."""
    cleans_up_spaces: bool
    """Whether decoding removes the spaces before punctuation (`clean_up_tokenization_spaces`)."""


@dataclass(frozen=True)
class _Settings:
    """What the files of a directory say about its tokenizer, apart from `tokenizer.json`."""

    of_class: TokenizerClass
    entries: Mapping[str, Any]
    """The entries of tokenizer_config.json, completed by the class's defaults."""
    special_tokens: Mapping[str, Token]
    """By name; null entries are left out."""
    extra_special_tokens: tuple[Token, ...]
    added_tokens: Mapping[int, AddedToken]
    """Added tokens by id."""
    implied_tokens: frozenset[str]
    """Texts of the special tokens that no file names, only the class."""


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model directory, without padding and truncation.

    Raises ConfigError as `read_tokenizer_files`.
    """
    return read_tokenizer_files(directory).tokenizer


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Return tokenizer and special tokens of a model directory, as AutoTokenizer loads them.

    Raises ConfigError, naming file and entry, if a file is missing or damaged, or if it has an
    entry that cannot be reproduced.
    """
    if problem := tokenizer_problem(directory):
        raise ConfigError(f"{directory}: {problem}")

    content = _tokenizer_content(directory)
    settings = _settings(directory, content)
    tokenizer = _build(directory, settings, content)
    _add_tokens(tokenizer, settings, _json_file(directory / "config.json").get("vocab_size"))
    _check_token_ids(directory, tokenizer, settings)
    _set_post_processor(directory, tokenizer, settings)

    tokenizer.no_padding()
    tokenizer.no_truncation()
    _refuse_mistral_regex(directory, tokenizer, settings)

    # transformers ignores the entry for BPE, where it would remove spaces of the text.
    forced = settings.entries.get(
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    )
    cleans_up = bool(settings.entries.get("clean_up_tokenization_spaces")) and (
        bool(forced) or not isinstance(tokenizer.model, models.BPE)
    )
    texts = {name: str(token) for name, token in settings.special_tokens.items()}
    return TokenizerFiles(tokenizer, texts, cleans_up)


def without_extra_spaces(text: str) -> str:
    """Remove the spaces before punctuation that WordPiece tokenizers decode (transformers)."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


def tokenizer_problem(directory: Path) -> str | None:
    """Say which tokenizer files a directory lacks, and the remedy; None if it has a tokenizer."""
    if (directory / _TOKENIZER).is_file():
        return None
    others = [name for name in _OTHER_FORMATS if (directory / name).is_file()]
    if others:
        return (
            f"tokenizer.json is missing, and {others[0]} is not supported; convert it with"
            " `AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)` of"
            " transformers"
        )
    if (directory / _VOCABULARY).is_file() and (directory / _MERGES).is_file():
        return None
    return "tokenizer.json, or vocab.json with merges.txt, is missing"


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and the other named special tokens.

    A token that is null is left out. The directory needs no tokenizer.
    """
    content = _tokenizer_content(directory) if (directory / _TOKENIZER).is_file() else {}
    tokens = _settings(directory, content).special_tokens
    return {name: str(token) for name, token in tokens.items()}


def has_chat_template(directory: Path) -> bool:
    """Return whether a model directory has a chat template for conversations without tools."""
    return "default" in _chat_templates(directory)


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates by name; raise ConfigError if none of them is `default`."""
    texts = _chat_templates(directory)
    if "default" not in texts:
        found = f" (found only: {', '.join(texts)})" if texts else ""
        raise ConfigError(
            f"{directory}: chat messages require a chat template, but the model has neither"
            " chat_template.jinja nor `chat_template` in tokenizer_config.json"
            f"{found}; add one, or use plain-text prompts"
        )
    return texts


def _chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates by name.

    Templates in their own files replace those of tokenizer_config.json. `chat_template.json`, which
    processors of multimodal models write, counts only if there is no other.
    """
    own_file, legacy_file = directory / "chat_template.jinja", directory / "chat_template.json"
    texts = {
        file.name.removesuffix(".jinja"): _text(file)
        for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))
    }
    if own_file.is_file():
        texts.setdefault("default", _text(own_file))
    if not texts:
        texts = _template_entries(_json_file(directory / _SETTINGS))
    if not texts and legacy_file.is_file():
        texts = _template_entries(_json_file(legacy_file))
    return texts


def _template_entries(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of an entry `chat_template`: a text, or several with names."""
    given = entries.get("chat_template")
    if isinstance(given, list):
        pairs = [(e.get("name"), e.get("template")) for e in given if isinstance(e, dict)]
    elif isinstance(given, dict):
        pairs = list(given.items())
    else:
        pairs = [("default", given)]
    return {str(name): text for name, text in pairs if isinstance(text, str)}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ConfigError(f"{file}: not valid UTF-8 ({error})") from error


def _json_file(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        entries = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(entries).__name__}")
    return entries


def _tokenizer_content(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer.json, or the part of it that two older files describe."""
    file = directory / _TOKENIZER
    try:
        if file.is_file():
            content = json.loads(file.read_bytes())
            if not isinstance(content, dict):
                raise ValueError(f"expected a JSON object, got {type(content).__name__}")
            return content
        file = directory / _VOCABULARY
        vocabulary, merges = models.BPE.read_file(str(file), str(directory / _MERGES))
        return {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file}: not a valid tokenizer file: {error}") from error


def _settings(directory: Path, content: Mapping[str, Any]) -> _Settings:
    """Merge the files beside tokenizer.json in transformers' order of precedence."""
    file = directory / _SETTINGS
    entries = _json_file(file)
    of_class = tokenizer_class(directory, entries, _json_file(directory / "config.json"), content)
    _refuse_entries(file, entries)
    if (directory / _TOKENIZER).is_file():
        # The post-processor of the file says which tokens are added to a text.
        entries.pop("add_bos_token", None)
        entries.pop("add_eos_token", None)

    if "additional_special_tokens" in entries and not entries.get("extra_special_tokens"):
        entries["extra_special_tokens"] = entries.pop("additional_special_tokens")

    if "added_tokens_decoder" in entries:
        added = {
            int(id): _token(file, f"added_tokens_decoder.{id}", token)
            for id, token in _mapping(file, "added_tokens_decoder", entries).items()
        }
    else:
        entries |= _special_tokens_map(directory, entries)
        added = _older_added_tokens(directory, entries, content)
    # Added tokens that are not objects would be tokens without flags.
    flagged = {id: token for id, token in added.items() if isinstance(token, AddedToken)}
    by_text = {token.content: token for token in flagged.values()}

    stated = {str(_token(file, name, entries[name])) for name in NAMED_TOKENS if entries.get(name)}
    entries = with_class_defaults(of_class, entries)
    padding = content.get("padding")
    if isinstance(padding, dict):
        entries.setdefault("pad_token", padding.get("pad_token"))

    special = {}
    for name in NAMED_TOKENS:
        if entries.get(name) is not None:
            token = _token(file, name, entries[name])
            special[name] = by_text.get(str(token), token)
    special |= _model_specific_tokens(file, entries)

    extra = entries.get("extra_special_tokens") or []
    if isinstance(extra, dict):  # names of tokens, which are in `special`
        extra = entries.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise ConfigError(f"{file}: extra_special_tokens={extra!r}: must be a list of tokens")
    tokens = tuple(_token(file, "extra_special_tokens", token) for token in extra)
    implied = frozenset(str(token) for token in special.values()) - stated
    return _Settings(of_class, entries, special, tokens, flagged, implied)


def _model_specific_tokens(file: Path, entries: Mapping[str, Any]) -> dict[str, Token]:
    """Return the special tokens with names of the model's own, such as `image_token`."""
    named = {
        name: entry
        for name, entry in entries.items()
        if name.endswith("_token")
        and name not in NAMED_TOKENS
        and (isinstance(entry, (str, AddedToken)) or _is_token(entry))
    }
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(entries.get(key), dict):
            named |= entries[key]
    return {name: _token(file, name, entry) for name, entry in named.items()}


def _special_tokens_map(directory: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of special_tokens_map.json, which replace those of the settings."""
    file = directory / "special_tokens_map.json"
    replaced = _json_file(file)
    result: dict[str, Any] = {}
    for name, entry in replaced.items():
        is_model_specific = name.endswith("_token") and name not in NAMED_TOKENS
        if is_model_specific and isinstance(entries.get(name), str):
            continue  # the only entries of which the settings prevail
        if name == "extra_special_tokens" and isinstance(entry, list):
            known = list(entries.get("extra_special_tokens") or [])
            given = [_token(file, name, token) for token in entry]
            result[name] = known + [token for token in given if token not in known]
        elif name != "extra_special_tokens" and isinstance(entry, dict):
            result[name] = _token(file, name, {**entry, "special": True})
        else:
            result[name] = entry

    extra = result.get("additional_special_tokens")
    has_extra = "extra_special_tokens" in entries or "extra_special_tokens" in result
    if extra is not None and not has_extra:
        result["extra_special_tokens"] = extra
    return result


def _older_added_tokens(
    directory: Path, entries: Mapping[str, Any], content: Mapping[str, Any]
) -> dict[int, Token]:
    """Return the tokens of added_tokens.json and tokenizer.json by id; the latter prevail."""
    file = directory / "added_tokens.json"
    extra = entries.get("extra_special_tokens") or []
    special = {str(entries[name]) for name in NAMED_TOKENS if entries.get(name)}
    special |= {str(token) for token in extra}
    added: dict[int, Token] = {}
    for text, id in _json_file(file).items():
        if not isinstance(id, int):
            raise ConfigError(f"{file}: {text}={id!r}: must be a token id")
        is_special = text in special
        added[id] = AddedToken(text, normalized=not is_special, special=is_special)

    for entry in content.get("added_tokens") or []:
        flags = {key: value for key, value in entry.items() if key != "id"}
        added[entry["id"]] = _token(directory / _TOKENIZER, "added_tokens", flags)
    return added


def _is_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str)


def _token(file: Path, name: str, entry: Any) -> Token:
    """Return a token of a JSON file: a text, or an object with the flags of AddedToken."""
    if isinstance(entry, (str, AddedToken)):
        return entry
    flags = {k: v for k, v in entry.items() if k != "__type"} if _is_token(entry) else {}
    try:
        return AddedToken(**flags) if flags else _no_token(file, name, entry)
    except TypeError as error:
        raise ConfigError(f"{file}: {name}: not a token ({error})") from error


def _no_token(file: Path, name: str, entry: Any) -> AddedToken:
    raise ConfigError(
        f"{file}: {name}={entry!r}: must be a token, as text or as an object with `content`"
    )


def _mapping(file: Path, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    entry = entries[name]
    if not isinstance(entry, dict) or not all(key.isdecimal() for key in entry):
        raise ConfigError(f"{file}: {name}: must map token ids to tokens")
    return entry


def _refuse_entries(file: Path, entries: Mapping[str, Any]) -> None:
    """Raise ConfigError for entries of tokenizer_config.json that are not implemented."""
    if entries.get("split_special_tokens"):
        raise ConfigError(
            f"{file}: split_special_tokens=true: not supported, because the end-of-sequence tokens"
            " of a conversation would be split; remove the entry"
        )
    versioned = [name for name in entries.get("fast_tokenizer_files") or [] if name != _TOKENIZER]
    if versioned:
        raise ConfigError(
            f"{file}: fast_tokenizer_files={versioned}: files for certain versions of transformers"
            " are not supported; keep one tokenizer.json and remove the entry"
        )


def _build(
    directory: Path, settings: _Settings, content: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of tokenizer.json, or the one that its class builds from its
    vocabulary."""
    file = directory / (_TOKENIZER if (directory / _TOKENIZER).is_file() else _VOCABULARY)
    of_class = settings.of_class
    try:
        if of_class is PLAIN:
            return tokenizers.Tokenizer.from_file(str(file))
        tokenizer = of_class.build(content, settings.entries)
        tokenizer.post_processor = _post_processor(content)
        return tokenizer
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file}: not a valid tokenizer file: {error}") from error


def _post_processor(content: Mapping[str, Any]) -> Any:
    """Return the post-processor that tokenizer.json describes, None if it has none."""
    only: dict[str, Any] = {
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
    return tokenizers.Tokenizer.from_str(json.dumps(only)).post_processor


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, settings: _Settings, model_size: int | None
) -> None:
    """Add the tokens that the files name and the tokenizer lacks, as TokenizersBackend does.

    transformers also adds special tokens that only the class names. They are left out where the
    model, of `model_size` token ids, has no embedding for them.
    """
    own = tokenizer.get_added_tokens_decoder()
    # A token whose flags differ is added again: the flags of the settings replace the file's.
    known = {repr(token) for token in own.values()}
    given: list[Token] = [
        token for _, token in sorted(settings.added_tokens.items()) if repr(token) not in known
    ]
    texts = {token.content for token in own.values()} | {str(token) for token in given}
    special = [*settings.special_tokens.values(), *settings.extra_special_tokens]
    new = {text for text in (*texts, *map(str, special)) if tokenizer.token_to_id(text) is None}
    is_too_large = (
        isinstance(model_size, int) and tokenizer.get_vocab_size() + len(new) > model_size
    )
    left_out = new & settings.implied_tokens if is_too_large else set()
    # Of a text that occurs twice with different flags, the later flags prevail.
    for token in special:
        if str(token) not in texts | left_out and token not in given:
            given.append(token)

    named = {str(token) for token in settings.special_tokens.values()}
    tokens = [token if isinstance(token, AddedToken) else _special(token) for token in given]
    for token in tokens:
        token.special = token.special or token.content in named
    tokenizer.add_tokens(tokens)

    if settings.of_class.marks_special_tokens:
        tokenizer.add_tokens([_special(str(t)) for t in special if str(t) not in left_out])


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True)


def _check_token_ids(directory: Path, tokenizer: tokenizers.Tokenizer, settings: _Settings) -> None:
    """Raise ConfigError if a token has another id than the files say.

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
    """Set the tokens that are added to a text, where the class or the settings say so."""
    entries, special = settings.entries, settings.special_tokens
    template = settings.of_class.template
    if template is not None:
        before, after = template(entries)
    elif tokenizer.post_processor is None or settings.of_class.replaces_post_processor:
        before = [str(special["bos_token"])] if _adds(entries, special, "bos") else []
        after = [str(special["eos_token"])] if _adds(entries, special, "eos") else []
    else:
        return
    tokens = {text: tokenizer.token_to_id(text) for text in (*before, *after)}
    unknown = [text for text, id in tokens.items() if id is None]
    if unknown:
        raise ConfigError(
            f"{directory}: the class {settings.of_class.name} puts {unknown[0]!r} before or after"
            " each text, but the vocabulary lacks it; correct the special tokens in"
            " tokenizer_config.json"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*(f"{text}:0" for text in before), "$A:0", *(f"{t}:0" for t in after)]),
        special_tokens=list(tokens.items()),
    )


def _adds(entries: Mapping[str, Any], special: Mapping[str, Token], name: str) -> bool:
    return bool(entries.get(f"add_{name}_token")) and f"{name}_token" in special


def _refuse_mistral_regex(
    directory: Path, tokenizer: tokenizers.Tokenizer, settings: _Settings
) -> None:
    """Raise ConfigError where transformers would replace the regular expression of an older
    Mistral tokenizer."""
    config = _json_file(directory / "config.json")
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
