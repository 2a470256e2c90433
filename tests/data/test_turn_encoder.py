"""Turns that are encoded one by one have the tokens of the whole text."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from aligner.data.control_tokens import TurnEncoder
from aligner.data.tokenizer_files import read_tokenizer_files
from tests.data.chat_models import TOKENIZERS, tokenizer_file
from tests.data.tokenizer_kinds import KINDS, write_kind


@cache
def read(name: str) -> tokenizers.Tokenizer:
    if name in TOKENIZERS:
        return tokenizers.Tokenizer.from_str(tokenizer_file(name))
    with TemporaryDirectory() as directory:
        write_kind(Path(directory), KINDS[name]())
        return read_tokenizer_files(Path(directory)).tokenizer


def encoder_of(*tokens: AddedToken) -> TurnEncoder:
    """Return the encoder of a tokenizer of single characters with added tokens."""
    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.add_tokens(list(tokens))
    return TurnEncoder(tokenizer)


@pytest.mark.parametrize("name", [*TOKENIZERS, *KINDS])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_turns_have_the_tokens_of_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = read(name)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    parts = st.sampled_from(["", " ", "\n", " a", "user\n", "▁b ", "é", "1 2", "<", "|>"])
    pieces = data.draw(st.lists(st.sampled_from(added) | parts if added else parts, max_size=12))
    text = "".join(pieces)
    encoder = TurnEncoder(tokenizer)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.encode(text) == expected
    # Also if turns of other texts are remembered.
    prefix = "".join(pieces[: len(pieces) // 2])
    assert encoder.encode(prefix) == tokenizer.encode(prefix, add_special_tokens=False).ids
    assert encoder.encode(text) == expected


def test_continued_conversation_encodes_only_its_new_turns(monkeypatch) -> None:
    encoder = encoder_of(AddedToken("<turn>", special=True, normalized=False))
    encode = encoder._encode
    encoded_texts = []

    def record(text: str) -> list[int]:
        encoded_texts.append(text)
        return list(encode(text))

    monkeypatch.setattr(encoder, "_encode_turn", lru_cache(record))
    conversation = "<turn>one<turn>two"
    encoder.encode(conversation)
    encoder.encode(conversation + "<turn>three")
    assert encoded_texts == ["<turn>one", "<turn>two", "<turn>three"]


@pytest.mark.parametrize(
    "tokens",
    [
        # The longer token hides the shorter one in "a<b>".
        [AddedToken("a<", normalized=False), AddedToken("<b>", special=True, normalized=False)],
        [AddedToken("[<b>]", normalized=False), AddedToken("<b>", special=True, normalized=False)],
        [AddedToken("<b>", special=True, normalized=False, lstrip=True)],
        [AddedToken("<b>", special=True, normalized=False, rstrip=True)],
        [AddedToken("<b>", special=True, normalized=False), AddedToken("x", single_word=True)],
    ],
    ids=["overlap", "contained", "lstrip", "rstrip", "single_word"],
)
def test_tokens_that_affect_the_text_around_them_do_not_split_it(tokens) -> None:
    assert encoder_of(*tokens)._pattern is None
