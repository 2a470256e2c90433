"""The lenient character tokenizer compared with the strict one."""

from __future__ import annotations

import dataclasses

import pytest

from aligner.data.tokenizer import build_character_tokenizer, build_lenient_tokenizer
from aligner.models.hugging_face import read_config
from tests.models.test_families import SIZES

SHAPE = dataclasses.replace(
    read_config({"architectures": ["LlamaForCausalLM"], **SIZES}, "test"),
    vocab_size=64,
    eos_token_ids=(1,),
    pad_token_id=0,
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("hello", "hello"), ("said: hello", "d: hello"), ("Große\nÄpfel 🍏", "\n?pfel ?"), ("", "")],
    ids=["short", "long", "unknown", "empty"],
)
def test_lenient_tokenizer_keeps_end_of_any_text(text: str, kept: str) -> None:
    tokenizer = build_lenient_tokenizer(SHAPE, 8)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokens) == kept.replace("\n", "?")
    assert tokenizer.get_vocab_size() == SHAPE.vocab_size


def test_lenient_tokenizer_equals_strict_on_known_characters() -> None:
    text = "abc 123"
    assert (
        build_lenient_tokenizer(SHAPE, 8).encode(text).ids
        == build_character_tokenizer(SHAPE).encode(text).ids
    )
