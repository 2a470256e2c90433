"""Bytes of tokens, and masks of grammars."""

from __future__ import annotations

import json
import unittest.mock
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.grammar_matcher import GrammarVocabulary, is_allowed
from aligner.data.grammars import build_vocabulary, check_grammar, check_json_schema
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Grammar
from aligner.errors import AlignerError
from tests.data.chat_models import (
    QUESTION,
    TEMPLATES,
    TOKENIZERS,
    chat_model,
    tokenizer_file,
    write_model,
)

TEXTS = ('{"a": 1}', "naïve ▁ 日本 🙂", "  two  spaces\n\ttab", "<tool_call>{}</tool_call>")
STOP = (1, 2)
OBJECT = 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}'


def list_allowed(vocabulary: GrammarVocabulary, mask: Any) -> set[int]:
    return {token for token in range(vocabulary.size) if is_allowed(mask, token)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=12)))
@settings(max_examples=40, deadline=None)
def test_token_bytes_are_those_of_the_decoded_text(kind, text):
    tokenizer = chat_model(kind, "qwen")
    vocabulary = tokenizer.grammar_vocabulary
    context = tokenizer.encode("x")
    tokens = tokenizer.encode_observation(context, text).tolist()
    expected = tokenizer.decode_after(context, tokens, skip_special_tokens=False)
    assert b"".join(vocabulary.tokens[token] for token in tokens).decode() == expected


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_stop_tokens_are_allowed_only_after_complete_text(kind):
    tokenizer = chat_model(kind, "qwen")
    # The model's vocabulary is larger than the tokenizer's.
    vocabulary = build_vocabulary(tokenizer._tokenizer, tokenizer.vocab_size + 40)
    text = tokenizer.encode_observation(tokenizer.encode("x"), '{"a": 12}').tolist()
    masks = vocabulary.compute_masks(OBJECT, STOP, [*text, STOP[1]])
    allowed = [list_allowed(vocabulary, mask) for mask in masks]
    assert allowed[-1] == set(STOP)
    assert not any(tokens & set(STOP) for tokens in allowed[:-1])
    for tokens in allowed:
        assert max(tokens) < tokenizer.vocab_size
        assert not tokens - set(STOP) & set(vocabulary.special_token_ids)
    with pytest.raises(ValueError, match=f"does not allow token {STOP[0]} at position 1"):
        vocabulary.compute_masks(OBJECT, STOP, [text[0], STOP[0]])


def test_stop_token_with_text_cannot_end_incomplete_text():
    tokenizer = chat_model("bytes", "qwen")
    vocabulary = tokenizer.grammar_vocabulary
    quote = tokenizer.encode('"').tolist()[0]
    mask = vocabulary.start('start: %json {"type": "string"}', (quote,)).compute_mask()
    # The only token with which the text can begin would end the response.
    assert list_allowed(vocabulary, mask) == {quote}
    start = vocabulary.start(OBJECT, (quote,))
    start.accept(tokenizer.encode("{").tolist())
    assert not is_allowed(start.compute_mask(), quote)


def test_matcher_follows_tokens_as_masks_do():
    tokenizer = chat_model("bytes", "qwen")
    vocabulary = tokenizer.grammar_vocabulary
    tokens = [*tokenizer.encode('{"a": 12}').tolist(), STOP[0]]
    masks = vocabulary.compute_masks(OBJECT, STOP, tokens)
    for count in range(len(tokens)):
        matcher = vocabulary.start(OBJECT, STOP)
        matcher.accept(tokens[:count])
        assert (matcher.compute_mask() == masks[count]).all()


def test_response_without_allowed_token_is_a_dead_end():
    vocabulary = GrammarVocabulary([b"", b"a", b"b"], [0])
    incomplete = vocabulary.start('start: "a" /[0-9]/ | "b"', [0])
    incomplete.accept([1])
    # No token has the bytes of a digit.
    assert list_allowed(vocabulary, incomplete.compute_mask()) == {0}
    incomplete.accept([0])
    assert "the model's vocabulary has no tokens for such a text" in incomplete.dead_end
    complete = vocabulary.start('start: "a" /[0-9]/ | "b"', [0])
    complete.accept([2, 0])
    assert complete.dead_end == ""


def test_saved_vocabulary_computes_the_same_masks(tmp_path):
    tokenizer = chat_model("prepending", "qwen")
    vocabulary = tokenizer.grammar_vocabulary
    vocabulary.save(tmp_path / "vocabulary.json")
    loaded = GrammarVocabulary.load(tmp_path / "vocabulary.json")
    tokens = tokenizer.encode_observation(tokenizer.encode("x"), '{"a": 12}').tolist()
    for one in (vocabulary, loaded):
        assert one.mask_width == 14
    assert (
        vocabulary.compute_masks(OBJECT, STOP, tokens) == loaded.compute_masks(OBJECT, STOP, tokens)
    ).all()


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, r'Unimplemented keys: \["uniqueItems"\]'),
        ({"type": "string", "format": "zip"}, "Unknown format: zip"),
        ({"type": "text"}, "Invalid type: text"),
        ({"enum": []}, "Unsatisfiable schema: anyOf is empty"),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "required property 'a' is unsatisfiable",
        ),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .5. is greater than maximum"),
        ({"$ref": "https://example.com/schema"}, "example.com/schema' is not present"),
        ({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}, "too large"),
        ({"enum": ["x" * (1 << 20)]}, "must have at most 1048576"),
    ],
)
def test_invalid_schemas_are_refused_with_the_reason(schema, problem):
    with pytest.raises(AlignerError, match=f"^response_format: .*{problem}"):
        check_json_schema(schema, "response_format")


def test_deeply_nested_schema_is_refused():
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(AlignerError, match="nested too deeply"):
        check_json_schema(schema, "response_format")
    for _ in range(4600):
        schema = schema["items"]
    with pytest.raises(AlignerError, match="recursion limit"):
        check_json_schema(schema, "response_format")


def test_recursive_schema_is_followed():
    tokenizer = chat_model("bytes", "qwen")
    schema = {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False}
    check_json_schema(schema, "response_format")
    grammar = f"start: %json {json.dumps(schema)}"
    tokens = [*tokenizer.encode('{"c": {"c": {}}}').tolist(), STOP[0]]
    tokenizer.grammar_vocabulary.compute_masks(grammar, STOP, tokens)


def test_schema_without_finite_text_is_refused():
    vocabulary = chat_model("bytes", "qwen").grammar_vocabulary
    with pytest.raises(AlignerError, match="no text satisfies it"):
        check_grammar(vocabulary, Grammar('start: %json {"$ref": "#"}', STOP))


def test_grammar_without_stop_token_is_refused():
    vocabulary = chat_model("bytes", "qwen").grammar_vocabulary
    with pytest.raises(AlignerError, match=r"set rollout\.stop_at_eos=true"):
        check_grammar(vocabulary, Grammar(OBJECT, ()))


def test_vocabulary_without_characters_is_refused():
    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    with pytest.raises(AlignerError, match="the model's vocabulary has no tokens"):
        check_grammar(build_vocabulary(tokenizer, 4), Grammar(OBJECT, (1,)))


def test_decoder_that_joins_words_is_refused():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(AlignerError, match="decoder has the type WordPiece"):
        build_vocabulary(tokenizer, 1)


def test_chat_template_mentions_its_texts():
    template = chat_model("bytes", "reasons").chat_template
    assert template.mentions("</think>") and not template.mentions("</thought>")
    assert template.render([QUESTION], add_generation_prompt=True)


def test_equal_tokenizers_compile_a_grammar_once(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_file("bytes"))
    write_model(tmp_path, TEMPLATES["qwen"], ("<|end|>", "</s>"))
    # as the endpoint and the engine of a process
    endpoint, engine = (Tokenizer(tmp_path).grammar_vocabulary for _ in range(2))
    assert endpoint is engine
    endpoint.start(OBJECT, STOP)
    with unittest.mock.patch.object(engine, "_compile") as compile_grammar:
        engine.start(OBJECT, STOP)
        engine.start(OBJECT, (1,))
    compile_grammar.assert_not_called()
