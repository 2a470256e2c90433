"""Grammars of guided decoding: which tokens of a model's vocabulary a response may have.

`build_vocabulary` determines the bytes of a tokenizer's tokens, and `check_grammar` reports what is
wrong with a grammar. `aligner.data.grammar_matcher` computes the masks.
"""

import functools
import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import tokenizers

from aligner.data.grammar_matcher import GrammarVocabulary, shorten_error
from aligner.data.types import Grammar
from aligner.errors import AlignerError

MAX_GRAMMAR_CHARACTERS = 1 << 20
"""Maximum length of a serialized grammar, in characters."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Decoder steps that change only the start or the end of a text, or nothing.
_NEUTRAL_STEPS = frozenset({"Fuse", "Strip"})


# Vocabularies in use, by the content of their tokenizer and their size.
_vocabularies: weakref.WeakValueDictionary[tuple[str, int], GrammarVocabulary] = (
    weakref.WeakValueDictionary()
)
_vocabularies_lock = threading.Lock()


def build_vocabulary(tokenizer: tokenizers.Tokenizer, size: int) -> GrammarVocabulary:
    """Return the bytes of a tokenizer's tokens, for a model with `size` tokens.

    A model's vocabulary may be larger than that of its tokenizer; no grammar allows the additional
    ids. Equal tokenizers of a process share one vocabulary, so that the endpoint of agents and the
    engine compile a grammar only once.

    Raises:
        AlignerError: The tokenizer's decoder does not determine the bytes of single tokens.
    """
    key = hashlib.sha256(tokenizer.to_str().encode()).hexdigest(), size
    with _vocabularies_lock:
        vocabulary = _vocabularies.get(key)
        if vocabulary is None:
            vocabulary = _build_vocabulary(tokenizer, size)
            _vocabularies[key] = vocabulary
        return vocabulary


def _build_vocabulary(tokenizer: tokenizers.Tokenizer, size: int) -> GrammarVocabulary:
    """Return a new vocabulary; see `build_vocabulary`."""
    description = tokenizer.decoder and json.loads(tokenizer.decoder.__getstate__())
    to_bytes = _build_token_decoder(description)
    added_tokens = tokenizer.get_added_tokens_decoder()
    special_token_ids = [
        token for token, added in added_tokens.items() if added.special and token < size
    ]
    texts = [tokenizer.id_to_token(token) for token in range(size)]
    return GrammarVocabulary([to_bytes(text) if text else b"" for text in texts], special_token_ids)


def check_grammar(vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
    """Raise AlignerError if a response cannot follow the grammar."""
    if not grammar.stop_token_ids:
        raise AlignerError(
            "grammar: a response that follows a grammar ends with a stop token, but the request has"
            " none; set rollout.stop_at_eos=true"
        )
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise AlignerError(
            f"grammar: has {len(grammar.text)} characters, must have at most"
            f" {MAX_GRAMMAR_CHARACTERS}; use a smaller JSON schema"
        )
    try:
        vocabulary.start(grammar.text, grammar.stop_token_ids)
    except ValueError as error:
        raise AlignerError(f"grammar: {error}") from error


def check_json_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raise AlignerError if a JSON schema is invalid, has unsupported keywords, or cannot be
    satisfied.

    Args:
        schema: The schema.
        field: The field of the request that contains the schema, for the message.
    """
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise AlignerError(f"{field}: the schema is nested too deeply") from None
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise AlignerError(
            f"{field}: the schema has {len(text)} characters, must have at most"
            f" {MAX_GRAMMAR_CHARACTERS}"
        )
    if problem := _find_schema_problem(text):
        raise AlignerError(f"{field}: {problem}")


@functools.lru_cache(maxsize=256)
def _find_schema_problem(schema: str) -> str:
    """Return what is wrong with a JSON schema; empty if nothing is."""
    grammar = f"start: %json {schema}"
    error: str = llguidance.LLMatcher.validate_grammar(
        llguidance.LLMatcher.grammar_from_lark(grammar)
    )
    return "" if error.startswith("WARNING") else shorten_error(error)


def _build_token_decoder(description: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return a function that converts a token of the vocabulary to its bytes in a text.

    Args:
        description: The tokenizer's decoder in the form of tokenizer.json.

    Raises:
        AlignerError: The text of a token depends on its neighbors.
    """
    steps = _flatten_steps(description)
    types = {step["type"] for step in steps}
    unsupported = sorted(
        types - _NEUTRAL_STEPS - {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}
    )
    if description is None or unsupported:
        raise AlignerError(
            "grammar: the tokenizer's decoder"
            f" {'is missing' if description is None else f'has the type {unsupported[0]}'}; guided"
            " decoding supports ByteLevel, ByteFallback, Metaspace, Replace, Fuse and Strip"
        )
    if "ByteLevel" in types:
        byte_values = _build_byte_level_table()

        def decode_byte_level(text: str) -> bytes:
            # A token with other characters, such as an added token, is its own text.
            if all(character in byte_values for character in text):
                return bytes(byte_values[character] for character in text)
            return text.encode()

        return decode_byte_level

    has_byte_tokens = "ByteFallback" in types
    replacements = []
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise AlignerError(
                    "grammar: the tokenizer's decoder replaces a regular expression; guided"
                    " decoding supports only the replacement of strings"
                )
            replacements.append((step["pattern"]["String"], step["content"]))

    def decode_text(text: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            text = text.replace(old, new)
        return text.encode()

    return decode_text


def _flatten_steps(description: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder, which may be a sequence of decoders."""
    if description is None:
        return []
    if description["type"] != "Sequence":
        return [description]
    return [step for part in description["decoders"] for step in _flatten_steps(part)]


def _build_byte_level_table() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable characters of Latin-1 stand for themselves, and the other bytes, in their order, are
    the characters from U+0100 on (Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners", `bytes_to_unicode` of their code).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
