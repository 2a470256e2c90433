"""Chat messages in the forms of published data sets and OpenAI clients."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from aligner.data.chat_template import ChatTemplate, normalize_messages, remove_nulls
from aligner.data.chat_turns import ChatTurns, Conversation
from aligner.data.control_tokens import PlainEncoder, escape
from aligner.data.conversations import render_exchange, render_prompt
from aligner.data.records import BadRecord, Record
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError
from tests.data.chat_models import (
    QUESTION,
    TEMPLATES,
    TOKENIZERS,
    WEATHER,
    tokenizer_file,
    write_model,
)

ANSWER = {"role": "assistant", "content": "No."}
# Reads the content of every message, like Llama 3's template, and fails if a message has no
# content, like Qwen3's template.
CONCATENATES = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content + '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
)
PRINTS = CONCATENATES.replace("m.content + ''", "m.content | trim")
ALL = {"prints": PRINTS, "concatenates": CONCATENATES, "qwen": TEMPLATES["qwen"]}


def called(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "function": function}
    answer = {"role": "tool", "content": "no"}
    return [QUESTION, {"role": "assistant", "tool_calls": [call], **fields}, answer, QUESTION]


@pytest.fixture
def tokenizer_of(tmp_path):
    def build(template: str, **settings: Any) -> Tokenizer:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        own = tokenizers.Tokenizer.from_str(tokenizer_file("bytes"))
        own.save(str(directory / "tokenizer.json"))
        write_model(directory, template, ["<|end|>"])
        return Tokenizer(directory, **settings)

    return build


@pytest.fixture
def template_of(tokenizer_of):
    return lambda text, **settings: tokenizer_of(text, **settings).chat_template


def rendered(template: ChatTemplate, messages, tools=None, **options) -> str:
    return template.render(messages, tools, add_generation_prompt=True, **options)


@pytest.mark.promise("null-fields-are-absent")
@pytest.mark.parametrize("text", ALL.values(), ids=ALL)
def test_null_content_next_to_tool_calls_is_absent(template_of, text):
    template = template_of(text)
    expected = rendered(template, called({"city": "Lyon"}, content=""))
    found = rendered(template, called({"city": "Lyon"}, content=None))
    assert found == expected and "None" not in found


@pytest.mark.parametrize("text", ALL.values(), ids=ALL)
def test_arguments_as_json_text_render_as_an_object(template_of, text):
    template = template_of(text)
    found = rendered(template, called('{"city": "Lyon"}', content=None))
    assert found == rendered(template, called({"city": "Lyon"}))


@pytest.mark.promise("null-fields-are-absent")
@pytest.mark.parametrize("text", ALL.values(), ids=ALL)
def test_null_arguments_of_unified_schemas_are_absent(template_of, text):
    template = template_of(text)
    unified = called({"city": "Lyon", "zone": None, "area": {"unit": None}}, content=None)
    unified[1]["tool_calls"][0]["id"] = None
    unified[2] |= {"name": None, "tool_calls": None}
    found = rendered(template, unified)
    assert found == rendered(template, called({"city": "Lyon", "area": {}}))


def test_null_in_json_text_arguments_is_kept(template_of):
    found = rendered(template_of(PRINTS), called('{"city": "Lyon", "unit": null}'))
    assert '{"city": "Lyon", "unit": null}' in found


@pytest.mark.parametrize("arguments", ["{", "[1]", "3"])
def test_non_object_tool_call_arguments_are_refused(arguments):
    with pytest.raises(AlignerError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        normalize_messages(called(arguments))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=12,
    )
)
def test_nulls_are_removed_from_objects_at_any_depth(value):
    def has_null_entry(found: Any) -> bool:
        if isinstance(found, dict):
            return any(each is None or has_null_entry(each) for each in found.values())
        return isinstance(found, list) and any(map(has_null_entry, found))

    assert not has_null_entry(remove_nulls(value))


REASONS = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_learned_under_every_field_name(tokenizer_of, name):
    record = Record({"messages": [QUESTION, {**ANSWER, name: "Lyon is dry."}]}, "data.jsonl:1")
    _, response = render_exchange(record, "response", tokenizer_of(REASONS))
    assert response == "<think>Lyon is dry.</think>No.<|end|>"


def test_template_with_thinking_field_renders_reasoning(template_of):
    template = template_of(REASONS.replace("reasoning_content", "thinking"))
    assert "<think>dry</think>" in rendered(template, [QUESTION, {**ANSWER, "reasoning": "dry"}])


def test_lost_learned_reasoning_is_warned_about_once(tokenizer_of, caplog):
    tokenizer = tokenizer_of(TEMPLATES["chatml"])
    record = Record({"messages": [QUESTION, {**ANSWER, "reasoning": "dry"}]}, "data.jsonl:1")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            render_exchange(record, "response", tokenizer)
    (warning,) = caplog.messages
    assert "does not render the reasoning" in warning


KNOWS_THREE = (
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def test_developer_role_is_rendered_as_system(template_of, caplog):
    template = template_of(KNOWS_THREE)
    messages = [{"role": "developer", "content": "Be brief."}, QUESTION]
    with caplog.at_level(logging.INFO, "aligner"):
        found = [rendered(template, messages) for _ in range(2)]
    assert found == [rendered(template, [{**messages[0], "role": "system"}, QUESTION])] * 2
    assert len([each for each in caplog.messages if "'developer'" in each]) == 1


def test_supported_developer_role_is_kept(template_of):
    text = KNOWS_THREE.replace("'system'", "'developer'")
    messages = [{"role": "developer", "content": "Be brief."}, QUESTION]
    assert "<|system|>Be brief." in rendered(template_of(text), messages)


@pytest.mark.promise("messages-lose-no-part")
@pytest.mark.parametrize("role", ["critic", "function", "ipython2"])
def test_dropped_unknown_role_is_refused(tokenizer_of, role):
    record = Record({"messages": [{"role": role, "content": "no"}, QUESTION]}, "data.jsonl:1")
    with pytest.raises(BadRecord, match=rf"chat template of .* does not render the role '{role}'"):
        render_prompt(record, tokenizer_of(KNOWS_THREE))


def test_rendered_unknown_role_is_accepted(template_of):
    messages = [{"role": "critic", "content": "no"}, QUESTION]
    assert "critic\nno" in rendered(template_of(TEMPLATES["chatml"]), messages)


def warnings_of(template, caplog, messages, tools=None):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        rendered(template, messages, tools)
        rendered(template, messages, tools)
    return [each.partition("does not render the ")[2] for each in caplog.messages]


@pytest.mark.promise("messages-lose-no-part")
def test_dropped_parts_are_warned_about_once(template_of, caplog):
    template = template_of(KNOWS_THREE)
    assert warnings_of(template, caplog, [QUESTION], [WEATHER]) == ["tools"]
    lost = warnings_of(template, caplog, called({"city": "Lyon"}))
    assert lost == [
        "names of tool calls",
        "arguments of tool calls",
        "content of messages with role 'tool'",
    ]


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama", "mistral"])
def test_complete_rendering_is_not_warned_about(template_of, caplog, name):
    tools = [WEATHER] if "tools" in TEMPLATES[name] else None
    assert warnings_of(template_of(TEMPLATES[name]), caplog, [QUESTION, ANSWER], tools) == []


def test_tools_as_json_text_equal_tools_as_list(template_of):
    template = template_of(TEMPLATES["qwen"])
    found = rendered(template, [QUESTION], json.dumps([WEATHER]))
    assert found == rendered(template, [QUESTION], [WEATHER]) and "Weather of a city" in found


SWITCH = TEMPLATES["chatml"] + "{% if enable_thinking is false %}<think></think>{% endif %}"


def test_template_variable_per_record_overrides_global(tokenizer_of):
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    values: dict[str, Any] = {"messages": [QUESTION]}

    def ends_thinking(tokenizer, **more):
        record = Record({**values, **more}, "data.jsonl:1")
        return render_prompt(record, tokenizer).text.endswith("<think></think>")

    plain, switched = tokenizer_of(SWITCH), tokenizer_of(SWITCH, chat_template_kwargs=off)
    assert not ends_thinking(plain)
    assert ends_thinking(plain, chat_template_kwargs=off)
    assert ends_thinking(plain, chat_template_kwargs=json.dumps(off))
    assert ends_thinking(switched)
    assert ends_thinking(switched, chat_template_kwargs={"enable_thinking": None})
    assert not ends_thinking(switched, chat_template_kwargs=on)


def test_template_variable_stays_for_later_turns(tokenizer_of):
    tokenizer = tokenizer_of(SWITCH)
    turns = ChatTurns(tokenizer, None)
    begun = turns.begin([QUESTION], None, {"enable_thinking": False})
    drawn = tokenizer.encode("No.<|end|>")
    found = turns.append_turn(begun, drawn, [QUESTION])
    anew = found if isinstance(found, Conversation) else found.conversation
    assert anew.text.endswith("<think></think>")


def test_unused_template_variable_is_warned_about(template_of, caplog):
    template = template_of(TEMPLATES["chatml"])
    with caplog.at_level(logging.WARNING):
        rendered(template, [QUESTION], variables={"enable_thinking": False})
    assert "does not read the variable 'enable_thinking'" in caplog.text


@pytest.mark.promise("control-tokens-in-texts-are-plain")
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_control_token_in_message_is_encoded_as_text(tokenizer_of, role):
    tokenizer = tokenizer_of(TEMPLATES["chatml"])
    asked = [{"role": role, "content": "What does <|end|> mean?"}, QUESTION]
    tokens = tokenizer.encode(rendered(tokenizer.chat_template, asked))
    end = int(tokenizer.encode("<|end|>"))
    assert (tokens == end).sum() == 2  # the control tokens that the template writes
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert "What does <|end|> mean?" in text and "\ufdd2" not in text


def test_ordinary_message_equals_tokenizer_encoding(tokenizer_of):
    tokenizer = tokenizer_of(TEMPLATES["chatml"])
    text = rendered(tokenizer.chat_template, [QUESTION])
    expected = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == expected


def test_control_tokens_stay_if_sanitize_is_off(tokenizer_of, caplog):
    tokenizer = tokenizer_of(TEMPLATES["chatml"], sanitize=False)
    asked = [{"role": "user", "content": "<|end|>"}]
    with caplog.at_level(logging.WARNING):
        texts = [rendered(tokenizer.chat_template, asked) for _ in range(2)]
    end = int(tokenizer.encode("<|end|>"))
    assert (tokenizer.encode(texts[0]) == end).sum() == 2
    assert len([each for each in caplog.messages if "control tokens" in each]) == 1


def test_control_token_in_answer_or_plain_prompt_is_kept(tokenizer_of):
    tokenizer = tokenizer_of(TEMPLATES["chatml"])
    end = int(tokenizer.encode("<|end|>"))
    said = [QUESTION, {"role": "assistant", "content": "a<|end|>b"}, QUESTION]
    tokens = tokenizer.encode(rendered(tokenizer.chat_template, said))
    assert (tokens == end).sum() == 4
    prompt = render_prompt(Record({"prompt": "a<|end|>b"}, "data.jsonl:1"), tokenizer)
    assert (tokenizer.encode(prompt.text, add_bos=True) == end).sum() == 1


def test_control_token_in_new_message_does_not_end_turn(tokenizer_of):
    tokenizer = tokenizer_of(TEMPLATES["chatml"])
    turns = ChatTurns(tokenizer, None)
    begun = turns.begin([QUESTION])
    drawn = tokenizer.encode("No.<|end|>")
    found = turns.append_turn(begun, drawn, [{"role": "user", "content": "a <|end|> b"}])
    assert isinstance(found, Conversation)
    end = int(tokenizer.encode("<|end|>"))
    assert (found.tokens == end).sum() == 3
    assert torch.equal(found.tokens[: len(begun.tokens)], begun.tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab <|end>[]/INST\n"), max_size=20))
def test_plain_encoder_equals_tokenizer_without_marks(kind, text):
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_file(kind))
    whole = f"<|user|>{text}<|end|> a"
    expected = tokenizer.encode(whole, add_special_tokens=False)
    assert PlainEncoder(tokenizer).encode(whole)[0] == expected.ids


def test_plain_encoder_returns_token_ends_in_marked_text():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.model = models.BPE({each: id for id, each in enumerate(alphabet)}, [])
    tokenizer.add_special_tokens(["<e>"])
    encoder = PlainEncoder(tokenizer)
    assert encoder._pattern is not None
    text = "a" + escape("<e>", encoder._pattern) + "<e>"
    ids, ends = encoder.encode(text)
    assert ends == [1, 2, 4, 5, 8]  # the escape mark is the third character
    assert ids[-1] == tokenizer.token_to_id("<e>") and ids[-1] not in ids[:-1]


@pytest.mark.parametrize("name", ["response", "messages"])
def test_prompt_repeated_in_response_is_rendered_once(tokenizer_of, name):
    tokenizer = tokenizer_of(TEMPLATES["chatml"])
    record = Record({"prompt": [QUESTION], name: [QUESTION, ANSWER]}, "data.jsonl:1")
    prompt, response = render_exchange(record, "response", tokenizer)
    assert prompt.text.count(QUESTION["content"]) == 1
    assert response.startswith("No.")
