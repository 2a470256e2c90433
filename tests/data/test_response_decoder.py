"""Response text and observation tokens after a prompt, for all kinds of tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aligner.data.conversations import build_transcript, decode_response
from aligner.data.prompts import read_token_ids
from aligner.data.records import BadRecord
from aligner.data.tokenizer import ResponseDecoder, Tokenizer
from aligner.data.tokenizer_files import read_tokenizer
from aligner.data.types import Sample
from tests.data.test_tokenizer_kinds import LLAMA
from tests.data.tokenizer_kinds import KINDS, TEXTS, write_kind

SENTENCEPIECE = ("llama2", "llama2 legacy", "mistral", "phi3")
BYTE_LEVEL = ("gpt2", "gpt2 with prefix space", "qwen", "llama3", "deepseek")
PROMPTS = ("2+2=", "The quick ", "naïve 日本語🙂", "line\n", "")


def model(directory: Path, kind: str) -> Tokenizer:
    write_kind(directory, KINDS[kind]())
    (directory / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 600}))
    return Tokenizer(directory)


def splits(kind: str, directory: Path) -> Iterator[tuple[ResponseDecoder, list[int], int]]:
    """Yield a decoder, a token sequence, and each position at which a response can begin."""
    write_kind(directory, KINDS[kind]())
    tokenizer = read_tokenizer(directory)
    special = [id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    for text in TEXTS:
        for prompt in PROMPTS:
            joint = tokenizer.encode(prompt + text).ids
            apart = [
                tokenizer.encode(part, add_special_tokens=False).ids for part in (prompt, text)
            ]
            for ids in (joint, [*special[:1], *apart[0], *special[1:3], *apart[1]]):
                for place in range(len(ids) + 1):
                    yield ResponseDecoder(tokenizer), ids, place


@pytest.mark.parametrize("kind", KINDS)
def test_response_text_equals_text_after_prompt(tmp_path: Path, kind: str) -> None:
    """Positions at which the boundary splits a character are skipped."""
    checked = 0
    decoder = None
    for new, ids, place in splits(kind, tmp_path):
        decoder = decoder or new
        for skips in (True, False):
            decode = decoder._tokenizer.decode
            before = decode(ids[:place], skip_special_tokens=skips)
            whole = decode(ids, skip_special_tokens=skips)
            if not whole.startswith(before):
                continue
            found = decoder.decode_after(ids[:place], ids[place:], skip_special_tokens=skips)
            assert found == whole[len(before) :], (ids, place)
            checked += 1
    assert checked > 300


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_byte_level_text_does_not_depend_on_prompt(tmp_path: Path, kind: str) -> None:
    """This includes boundaries that split a character."""
    for decoder, ids, place in splits(kind, tmp_path):
        alone = decoder._tokenizer.decode(ids[place:], skip_special_tokens=True)
        assert decoder.decode_after(ids[:place], ids[place:]) == alone


def test_response_inside_character_is_decoded_alone(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, "llama2")
    tokens = tokenizer.encode("€ four").tolist()
    place = next(at for at, each in enumerate(tokens) if tokenizer.decode([each]) == "�") + 1
    found = tokenizer.decode_after(tokens[:place], tokens[place:])
    assert found == tokenizer.decode(tokens[place:]) == "�� four"


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_response_text_keeps_its_leading_space(tmp_path: Path, kind: str) -> None:
    tokenizer = model(tmp_path, kind)
    prompt, response = tokenizer.encode("question"), tokenizer.encode("answer me")
    sample = _sample(prompt, response)

    assert tokenizer.decode(sample.tokens) == "question answer me"
    assert decode_response(sample, tokenizer) == " answer me"
    assert tokenizer.decode_after(prompt[:0], response) == "answer me"
    assert tokenizer.decode_token(int(response[0])).startswith(" ")


@pytest.mark.parametrize("kind", (*SENTENCEPIECE, *BYTE_LEVEL))
def test_episode_turns_concatenate_to_its_text(tmp_path: Path, kind: str) -> None:
    tokenizer = model(tmp_path, kind)
    prompt, action = tokenizer.encode("question"), tokenizer.encode(" answer")
    observation = tokenizer.encode_observation(torch.cat([prompt, action]), "tool said")
    drawn = torch.tensor([True] * len(action) + [False] * len(observation))
    sample = _sample(prompt, torch.cat([action, observation]), drawn)

    texts = [text for turn in build_transcript(sample, tokenizer) for text in turn.values()]
    assert texts[1] == "tool said"
    assert tokenizer.decode(prompt) + "".join(texts) == tokenizer.decode(sample.tokens)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_byte_level_observations_equal_plain_encoding(tmp_path: Path, kind: str) -> None:
    tokenizer = model(tmp_path, kind)
    for text in TEXTS:
        found = tokenizer.encode_observation(torch.tensor([40]), text)
        if kind == "gpt2 with prefix space":
            assert tokenizer.decode(found) == text
        else:
            assert found.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_first_observation_equals_start_of_text(tmp_path: Path, kind: str) -> None:
    """SentencePiece tokenizers add a space before text that follows nothing or special tokens."""
    tokenizer = model(tmp_path, kind)
    for before in ([], [1]):
        found = tokenizer.encode_observation(torch.tensor(before, dtype=torch.int64), "answer")
        assert found.tolist() == tokenizer.encode("answer").tolist()
    found = tokenizer.encode_observation(tokenizer.encode("a</s>"), "answer")
    assert found.tolist() != tokenizer.encode("answer").tolist()


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_single_token_equals_token_inside_text(tmp_path: Path, kind: str) -> None:
    tokenizer = model(tmp_path, kind)
    token = tokenizer.get_single_token(")", "environment.turn_end")
    assert token is not None and token == int(tokenizer.encode("b)")[-1])
    assert tokenizer.get_single_token("</s>", "environment.turn_end") == 2
    assert tokenizer.get_single_token("\n", "environment.turn_end") is not None


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("text", ("answer", " answer", "日本 answer", "\nanswer"))
def test_stored_response_text_must_match_its_tokens(tmp_path: Path, kind: str, text: str) -> None:
    """Stored text may be decoded after the prompt, or alone as in files of earlier versions."""
    tokenizer = model(tmp_path, kind)
    prompt = tokenizer.encode("question")
    tokens = tokenizer.encode_after("question", prompt, text)
    for stored in (tokenizer.decode_after(prompt, tokens), tokenizer.decode(tokens)):
        values = {"response": stored, "response_tokens": tokens.tolist()}
        found = read_token_ids(values, "response", "file:1", tokenizer)
        assert found is not None and torch.equal(found, tokens)

    joined = tokenizer.encode("question" + tokenizer.decode_after(prompt, tokens))
    assert torch.equal(joined, torch.cat([prompt, tokens]))
    with pytest.raises(BadRecord, match="`response_tokens` and `response` differ"):
        read_token_ids(values | {"response": "  " + text}, "response", "file:1", tokenizer)


def _sample(
    prompt: torch.Tensor, response: torch.Tensor, drawn: torch.Tensor | None = None
) -> Sample:
    return Sample(
        prompt_id=0,
        sample_index=0,
        tokens=torch.cat([prompt, response]),
        prompt_length=len(prompt),
        engine_logprobs=torch.zeros(len(response)),
        weight_versions=torch.zeros(len(response), dtype=torch.int64),
        finish_reason="length",
        generated_mask=drawn,
    )
