"""Text pieces of tokens, and the messages of an episode, as stored with samples."""

from __future__ import annotations

import pytest
import torch

from aligner.data.conversations import build_messages
from aligner.data.tool_calls import detect_tool_format
from aligner.data.types import Prompt, Sample
from tests.data.chat_models import TOKENIZERS, chat_model

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "yes  no"}}\n</tool_call>'


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_token_pieces_concatenate_to_text(kind: str) -> None:
    tokenizer = chat_model(kind, "qwen")
    tokens = tokenizer.encode("why  yes no\n{} <|end|>")
    pieces = [tokenizer.decode_token(token) for token in tokens.tolist()]
    assert "".join(pieces).lstrip() == tokenizer.decode(tokens, skip_special_tokens=False).lstrip()
    assert pieces[-1] == "<|end|>"


def test_episode_messages_have_tool_calls_and_observations() -> None:
    tokenizer = chat_model("bytes", "qwen")
    asked = tokenizer.encode("why?")
    parts = [f"look:\n{CALL}<|end|>", "\n<|user|>yes<|end|>\n", "no"]
    turns = [tokenizer.encode(part) for part in parts]
    drawn = torch.cat([torch.full((len(turn),), place != 1) for place, turn in enumerate(turns)])
    tokens, zeros = torch.cat([asked, *turns]), torch.zeros(len(drawn))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    prompt = Prompt(0, "why?", asked, {"messages": messages})
    sample = Sample(
        0,
        0,
        tokens,
        len(asked),
        zeros,
        zeros.long(),
        "length",
        prompt.metadata,
        generated_mask=drawn,
    )
    said = build_messages(sample, prompt, detect_tool_format(tokenizer), tokenizer)
    assert said[:2] == messages
    called, given, last = said[2:]
    assert (called["role"], called["content"]) == ("assistant", "look:")
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "yes  no"}}
    assert given == {"role": "environment", "content": "\nyes\n"}
    assert last == {"role": "assistant", "content": "no"}
