"""Parts of messages that chat templates drop, and control tokens next to other added tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError
from aligner.schema import DataConfig
from tests.data.chat_models import TEMPLATES, chat_model, tokenizer_file, write_model

ASKED = {"role": "user", "content": "Is it raining in Lyon?"}
_BLOCKS = "{% for m in messages %}<|user|>{{ m.role }}\n{{ %s }}<|end|>\n{% endfor %}"


def call(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, **function}}


def called(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [*calls], **fields}


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    model = chat_model("bytes", template)
    model.chat_template._losses.clear()
    model.chat_template._logged_messages.clear()
    return model.chat_template.render([*messages], add_generation_prompt=False, **options)


@pytest.mark.parametrize("template", ["qwen", "llama", "mistral"])
@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}])
def test_call_without_arguments_renders_empty_object(
    template: str, function: dict[str, Any]
) -> None:
    without = render(template, ASKED, called(call(**function), content=""))
    assert without == render(template, ASKED, called(call(arguments={}), content=""))


def test_missing_content_is_not_rendered_as_none() -> None:
    template = _BLOCKS.replace("%s", "m.get('content')")
    text = render(template, ASKED, called(call(arguments={"city": "Lyon"}), content=None))
    assert "None" not in text


def test_word_none_in_user_message_is_kept() -> None:
    said = {"role": "user", "content": "Is None a value?"}
    text = render("qwen", said, called(call(arguments={"city": "Lyon"})))
    assert "Is None a value?" in text


@pytest.mark.promise("messages-lose-no-part")
def test_dropped_second_tool_call_is_reported(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    template = _BLOCKS.replace("%s", "m.content or m.tool_calls[0] | tojson")
    render(template, ASKED, called(call(arguments={"a": 1}), call("other", arguments={"b": 2})))
    assert "does not render the names of tool calls" in caplog.text


@pytest.mark.parametrize(
    ("learned", "is_reported"), [("last", True), ("all", True), ("none", False)]
)
def test_lost_learned_reasoning_is_reported(caplog: Any, learned: str, is_reported: bool) -> None:
    caplog.set_level(logging.WARNING)
    template = _BLOCKS.replace("%s", "m.content.split('</think>')[-1]")
    said = {"role": "assistant", "content": "<think>\nIt is dry.\n</think>\n\nNo."}
    render(template, ASKED, said, learned_turns=learned)
    assert ("does not render the reasoning" in caplog.text) == is_reported


@pytest.mark.parametrize("role", ["system", "tool"])
def test_role_rendered_like_another_is_reported(caplog: Any, role: str) -> None:
    caplog.set_level(logging.WARNING)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {% else %}BOT: {% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    render(template, {"role": role, "content": "Be brief."}, ASKED)
    assert f"does not render the role '{role}'" in caplog.text


@pytest.mark.parametrize("name", ["qwen", "llama", "mistral", "phi"])
def test_roles_that_template_renders_are_not_reported(caplog: Any, name: str) -> None:
    caplog.set_level(logging.WARNING)
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "no"}
    render(name, ASKED, called(call(arguments={"city": "Lyon"}), content=""), answer)
    assert "role" not in caplog.text


def test_tool_call_ids_cause_no_new_template_probe() -> None:
    template = chat_model("bytes", "qwen").chat_template
    template._losses.clear()
    for number in range(5):
        answer = {"role": "tool", "tool_call_id": f"call_{number}", "content": f"no {number}"}
        messages = [ASKED, called(call(arguments={"day": number}), content=""), answer]
        template.render(messages, add_generation_prompt=True)
    assert len(template._losses) == 1


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_reserved_template_variable_is_refused(name: str) -> None:
    with pytest.raises(AlignerError, match=f"chat_template_kwargs: '{name}' is set by aligner"):
        render("qwen", ASKED, variables={name: []})


@pytest.fixture
def model_with_word(tmp_path: Path) -> Tokenizer:
    """Return a tokenizer with an added token that is an ordinary word."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_file("bytes"))
    tokenizer.add_special_tokens(["<|later|>"])
    tokenizer.add_tokens([AddedToken("Lyonnais", special=False, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_model(tmp_path, TEMPLATES["chatml"], ["<|end|>"])
    return Tokenizer(tmp_path)


def test_added_word_keeps_its_id_next_to_control_token(model_with_word: Tokenizer) -> None:
    [word] = model_with_word.encode("Lyonnais").tolist()
    said = {"role": "user", "content": "What does <|later|> mean in Lyonnais?"}
    text = model_with_word.chat_template.render([said], add_generation_prompt=True)
    tokens = model_with_word.encode(text).tolist()
    assert tokens.count(word) == 1
    assert model_with_word.encode("<|later|>")[0] not in tokens
    assert "What does <|later|> mean in Lyonnais?" in model_with_word.decode(
        tokens, skip_special_tokens=False
    )


def test_prompt_text_contains_no_escape_marks(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    said = {"role": "user", "content": "What does <|end|> mean?"}
    file.write_text(json.dumps({"prompt": [said]}) + "\n")
    data = DataConfig(path=str(file), max_prompt_tokens=200)
    [prompt] = open_prompts(data, chat_model("bytes", "chatml"), 1).take(0, 1)
    assert "What does <|end|> mean?" in prompt.text
