"""Appended turns with the chat templates that TRL packages for many model families."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.chat_turns import Conversation, NewBranch
from aligner.data.tokenizer import ChatTemplate, Tokenizer
from aligner.data.tool_calls import ToolCall
from aligner.errors import AlignerError
from tests.data.chat_models import SPECIAL, TOKENIZERS, tokenizer_file, write_model
from tests.data.test_chat_turns import (
    ASKED,
    PLAIN,
    TOOLS,
    apart,
    check_growth,
    new_messages,
    turn_of_any,
    turns_of,
)
from tests.trl_source import needs_trl, trl_files


def packaged() -> dict[str, Path]:
    """Return TRL's copies of models' chat templates by name.

    Templates that accept only lists of content parts, such as images, are omitted.
    """
    return {
        file.stem: file
        for file in trl_files("chat_templates/*.jinja")
        if not file.stem.startswith(("idefics", "smolvlm", "llava"))
    }


TEMPLATES = packaged()
pytestmark = [
    pytest.mark.slow,
    needs_trl,
]
_MARK = re.compile(
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?[A-Z_]+\]|<end_of_utterance>"
)
_SAID, _ASKED_NEXT = "because", "and now"


@cache
def model_of(kind: str, name: str) -> tuple[Tokenizer, str]:
    """Return a tokenizer with the template's control tokens, and the assistant's end of turn."""
    text = TEMPLATES[name].read_text()
    with TemporaryDirectory() as place:
        directory = Path(place)
        own = tokenizers.Tokenizer.from_str(tokenizer_file(kind))
        own.add_special_tokens([*dict.fromkeys(_MARK.findall(text))])
        own.save(str(directory / "tokenizer.json"))
        write_model(directory, text, SPECIAL[1:3])
        asked = [
            ASKED,
            {"role": "assistant", "content": _SAID},
            {"role": "user", "content": _ASKED_NEXT},
        ]
        behind = (
            ChatTemplate(directory, "2026-01-01")
            .render(asked, add_generation_prompt=True)
            .partition(_SAID)[2]
        )
        end = next(iter(_MARK.findall(behind.partition(_ASKED_NEXT)[0])), "</s>")
        write_model(directory, text, [end])
        tokenizer = Tokenizer(directory, "2026-01-01")
        assert tokenizer.chat_template  # loaded lazily: read it before the directory is deleted
        return tokenizer, end


def test_appended_turns_equal_full_encoding() -> None:
    whole = {}
    for name in TEMPLATES:
        tokenizer, end = model_of("bytes", name)
        conversation = turns_of(tokenizer).begin([ASKED])
        found = turns_of(tokenizer).append_turn(conversation, apart(tokenizer, _SAID, end), [ASKED])
        whole[name] = isinstance(found, Conversation)
        if isinstance(found, Conversation):
            assert found.tokens.tolist() == tokenizer.encode(found.text).tolist()
    families = {re.split(r"[0-9_]", name)[0] for name, is_whole in whole.items() if is_whole}
    assert len(families) >= 5, whole


@pytest.mark.promise("packaged-templates-equal-transformers")
@settings(max_examples=600, deadline=None)
@given(data=st.data(), kind=st.sampled_from(TOKENIZERS), name=st.sampled_from([*TEMPLATES] or [""]))
def test_any_conversation_keeps_generated_tokens_or_branches(
    data: st.DataObject, kind: str, name: str
) -> None:
    tokenizer, end = model_of(kind, name)
    turns = turns_of(tokenizer)
    tools = TOOLS if data.draw(st.booleans()) else None
    try:
        conversation = turns.begin([{"role": "user", "content": data.draw(PLAIN)}], tools)
    except AlignerError:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        drawn = turn_of_any(data, tokenizer, conversation, [end])
        turn = turns.parse_turn(conversation, drawn)
        new = new_messages(
            data, [call for call in turn.calls if isinstance(call, ToolCall)], takes_tools=True
        )
        try:
            found = turns.append_turn(conversation, drawn, new)
        except AlignerError as error:
            assert "cannot render the messages" in str(error)
            return
        if isinstance(found, NewBranch):
            assert found.reason
            assert (
                found.conversation.tokens.tolist()
                == tokenizer.encode(found.conversation.text).tolist()
            )
            conversation = found.conversation
            continue
        check_growth(tokenizer, conversation, drawn, found, turn.text)
        conversation = found
