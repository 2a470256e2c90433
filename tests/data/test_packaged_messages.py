"""Messages of other forms render like their usual form in transformers, with TRL's templates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers

from aligner.data.chat_template import ChatTemplate
from aligner.errors import AlignerError
from tests.data.chat_models import QUESTION, SPECIAL, WEATHER, tokenizer_file, write_model
from tests.data.test_packaged_templates import TEMPLATES
from tests.data.test_packaged_templates import pytestmark as pytestmark


def called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function"}
    call["function"] = {"name": "weather", "arguments": arguments}
    answer = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "no"}
    return [QUESTION, {"role": "assistant", "tool_calls": [call], **fields}, answer]


LYON = {"city": "Lyon"}
CASES: dict[str, tuple[list[dict[str, Any]], Any, list[dict[str, Any]]]] = {
    "plain": ([QUESTION], None, [QUESTION]),
    "nulls": (
        [{**QUESTION, "tool_calls": None, "name": None}, {"role": "assistant", "content": "No."}],
        None,
        [QUESTION, {"role": "assistant", "content": "No."}],
    ),
    "null content": (called(LYON, content=None), [WEATHER], called(LYON)),
    "json arguments": (called(json.dumps(LYON), content=None), [WEATHER], called(LYON)),
    "unified": (called({**LYON, "unit": None}, content=None), [WEATHER], called(LYON)),
}


@cache
def template_of(name: str) -> ChatTemplate:
    with TemporaryDirectory() as place:
        directory = Path(place)
        own = tokenizers.Tokenizer.from_str(tokenizer_file("bytes"))
        own.save(str(directory / "tokenizer.json"))
        write_model(directory, TEMPLATES[name].read_text(), SPECIAL[1:3])
        return ChatTemplate(directory)  # uses the current date, like transformers


def by_transformers(template: ChatTemplate, name: str, messages: Any, tools: Any) -> str | None:
    """Render messages with transformers.

    Returns None if the template refuses the messages, with and without an empty content.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    forms = [messages, [{"content": "", **each} for each in messages]]
    for form in forms:
        try:
            texts, _ = render_jinja_template(
                [form],
                tools=tools,
                chat_template=TEMPLATES[name].read_text(),
                add_generation_prompt=True,
                **template._special_tokens,
            )
        except Exception:
            continue
        return texts[0]
    return None


@pytest.mark.promise("packaged-templates-equal-transformers")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_message_rendering_equals_transformers(name, case):
    given, tools, usual = CASES[case]
    template = template_of(name)
    expected = by_transformers(template, name, usual, tools)
    try:
        found = template.render(given, tools, add_generation_prompt=True)
    except AlignerError:
        found = None
    assert found == expected
    assert found is None or "None" not in found
