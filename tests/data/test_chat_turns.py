"""Appended turns give the tokens of the full rendering, or a reason why they do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligner.config.compose import compose_config
from aligner.data.chat_turns import ChatTurns, Conversation, NewBranch
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import ToolCall, detect_tool_format
from aligner.errors import AlignerError, ConfigError
from aligner.models.model_source import gguf_file
from tests.data.chat_models import (
    SPECIAL,
    TEMPLATES,
    TOKENIZERS,
    chat_model,
    tokenizer_file,
    write_model,
)

pytestmark = pytest.mark.promise("appended-messages-equal-template")

ASKED = {"role": "user", "content": "why\n yes?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
WITHOUT_TOOLS = ("gemma", "phi", "glm", "chatml", "smollm2")
REASONING = ("reasons", "begins_to_reason")
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "yes  no"}}\n</tool_call>'


def turns_of(tokenizer: Tokenizer) -> ChatTurns:
    return ChatTurns(tokenizer, detect_tool_format(tokenizer))


def end_of(template: str) -> str:
    return {"mistral": "</s>", "glm": "<|user|>", "smollm2": "<|im_end|>"}.get(template, "<|end|>")


def in_place(tokenizer: Tokenizer, before: Conversation, text: str) -> Tensor | None:
    """Return the tokens of a turn's text, with its end token, in the tokens of the conversation.

    Returns None if the first tokens merge with the text before the turn.
    """
    whole, size = tokenizer.encode(before.text + text), len(before.tokens)
    return whole[size:] if torch.equal(whole[:size], before.tokens) else None


def rendered(tokenizer: Tokenizer, conversation: Conversation) -> str:
    return tokenizer.chat_template.render(
        conversation.messages, conversation.tools, add_generation_prompt=True
    )


def apart(tokenizer: Tokenizer, said: str, end: str = "<|end|>") -> Tensor:
    return torch.cat([tokenizer.encode(said), tokenizer.encode(end)])


def grown(
    tokenizer: Tokenizer, before: Conversation, said: str, new: list[dict[str, Any]]
) -> Conversation | NewBranch:
    """Append a turn whose generated tokens equal the encoding of its text alone."""
    drawn = apart(tokenizer, said)
    found = turns_of(tokenizer).append_turn(before, drawn, new)
    if isinstance(found, Conversation):
        check_growth(tokenizer, before, drawn, found, said)
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_appended_plain_turn_equals_full_encoding(kind: str, template: str) -> None:
    tokenizer = chat_model(kind, template)
    turns = turns_of(tokenizer)
    if kind in ("stripping", "prepending") and template == "mistral":
        # "stripping" removes the space before an answer and "prepending" adds one, so the encoding
        # of a turn never equals its generated tokens.
        return
    conversation = turns.begin([ASKED])
    for said in ("because", "no\n\nyes", "é ü"):
        said = (
            f"why\n</think>\n\n{said}"
            if template in ("begins_to_reason", "reasons_apart")
            else said
        )
        said = f" {said}" if template == "mistral" else said
        drawn = in_place(tokenizer, conversation, said + end_of(template))
        assert drawn is not None
        found = turns.append_turn(conversation, drawn, [{"role": "user", "content": "and?\n"}])
        if template == "begins_to_reason":
            assert isinstance(found, NewBranch)
            return
        assert isinstance(found, Conversation), found.reason
        assert found.tokens.tolist() == tokenizer.encode(rendered(tokenizer, found)).tolist()
        conversation = found


# Texts that templates trim, cut or write themselves, and that tokenizers merge.
PIECES = [
    "  ",
    "\n",
    "\n\n",
    "yes",
    " no.",
    "é",
    "▁",
    "<think>",
    "</think>",
    "<think>\nwhy\n</think>\n\n",
    CALL,
    CALL.replace(" ", ""),
]
PIECES += [
    '{"name": "look", "parameters": {"at":1}}',
    '[TOOL_CALLS][{"name": "look", "arguments": {}}]',
    "<tool_call>{",
    "{}",
]
PIECES += [
    "<|python_tag|>",
    "<|user|>assistant\n",
    '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}',
]
CALLS = [piece for piece in PIECES if "look" in piece]
TEXTS = st.sampled_from([*CALLS, *(f"why\n</think>\n\n{call}" for call in CALLS)])
TEXTS |= st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
PLAIN = st.lists(st.sampled_from([*PIECES[:8], CALL]), min_size=1, max_size=3).map("".join)


def drawn_turn(
    data: st.DataObject, tokenizer: Tokenizer, before: Conversation, template: str
) -> Tensor:
    """Choose a turn that a model with this template may generate."""
    others = [] if template == "smollm2" else ["</s>", "<|tool|>"]
    return turn_of_any(data, tokenizer, before, [end_of(template)] * 8 + others)


def turn_of_any(
    data: st.DataObject, tokenizer: Tokenizer, before: Conversation, ends: list[str]
) -> Tensor:
    """Choose a turn that a model may generate.

    The turn is a text encoded in place, a text encoded in two parts, or arbitrary tokens.
    """
    end = data.draw(st.sampled_from(ends))
    kind = data.draw(st.sampled_from(["in place", "in place", "apart", "any"]))
    if kind == "any":
        is_end = tokenizer.is_eos(torch.arange(tokenizer.vocab_size)).tolist()
        tokens = data.draw(
            st.lists(
                st.integers(0, tokenizer.vocab_size - 1).filter(lambda token: not is_end[token]),
                max_size=6,
            )
        )
        return torch.cat([torch.tensor(tokens, dtype=torch.int64), tokenizer.encode(end)])
    text = data.draw(TEXTS)
    placed = in_place(tokenizer, before, text + end) if kind == "in place" else None
    if placed is not None:
        return placed
    halves = data.draw(st.integers(0, len(text)))
    return torch.cat([tokenizer.encode(part) for part in (text[:halves], text[halves:], end)])


def new_messages(
    data: st.DataObject, calls: list[ToolCall], *, takes_tools: bool
) -> list[dict[str, Any]]:
    content = data.draw(PLAIN)
    if takes_tools and data.draw(st.booleans()):
        return [call.to_message(content) for call in calls or [ToolCall("000000000", "none", {})]]
    return [{"role": "user", "content": content}]


def check_growth(
    tokenizer: Tokenizer, before: Conversation, drawn: Tensor, found: Conversation, said: str
) -> None:
    """Check that earlier tokens are unchanged and new tokens equal those of the full rendering."""
    size, end = len(before.tokens), len(before.tokens) + len(drawn)
    assert (
        found.tokens[:size].tolist() == before.tokens.tolist()
        and found.tokens[size:end].tolist() == drawn.tolist()
    )
    ending = tokenizer.decode(drawn[-1:], skip_special_tokens=False)
    assert found.text.startswith(before.text) and found.text == rendered(tokenizer, found)
    whole = tokenizer.encode(found.text).tolist()
    assert found.tokens[end - 1 :].tolist() == whole[len(whole) - (len(found.tokens) - end + 1) :]
    is_as_drawn = (
        tokenizer.encode(before.text + said + ending).tolist() == found.tokens[:end].tolist()
    )
    if is_as_drawn and found.text.startswith(before.text + said + ending):
        assert found.tokens.tolist() == whole


@settings(max_examples=400, deadline=None)
@given(data=st.data(), kind=st.sampled_from(TOKENIZERS), template=st.sampled_from([*TEMPLATES]))
def test_any_conversation_keeps_generated_tokens_or_branches(
    data: st.DataObject, kind: str, template: str
) -> None:
    tokenizer = chat_model(kind, template)
    turns = turns_of(tokenizer)
    tools = TOOLS if template not in WITHOUT_TOOLS and data.draw(st.booleans()) else None
    conversation = turns.begin([{"role": "user", "content": data.draw(PLAIN)}], tools)
    for _ in range(data.draw(st.integers(1, 3))):
        drawn = drawn_turn(data, tokenizer, conversation, template)
        turn = turns.parse_turn(conversation, drawn)
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        new = new_messages(data, calls, takes_tools=template not in WITHOUT_TOOLS)
        try:
            found = turns.append_turn(conversation, drawn, new)
        except AlignerError as error:
            assert template == "mistral" and "alternate" in str(error)
            return
        plain = tokenizer.chat_template.render(
            [*conversation.messages, {"role": "assistant", "content": turn.text}, *new],
            tools,
            add_generation_prompt=True,
        )
        ending = tokenizer.decode(drawn[-1:], skip_special_tokens=False)
        if isinstance(found, Conversation):
            check_growth(tokenizer, conversation, drawn, found, turn.text)
            assert turn.calls or found.text.startswith(conversation.text + turn.text + ending)
        else:
            # For a turn of plain text, the template must indeed render the turn differently.
            assert found.reason and not plain.startswith(conversation.text + turn.text + ending)
            assert (
                found.conversation.tokens.tolist()
                == tokenizer.encode(rendered(tokenizer, found.conversation)).tolist()
            )
        if template in REASONING and "</think>" in turn.text and new[0]["role"] == "user":
            assert isinstance(found, NewBranch)
        conversation = found if isinstance(found, Conversation) else found.conversation


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_user_message_removes_reasoning_of_earlier_turns(
    kind: str,
) -> None:
    tokenizer = chat_model(kind, "reasons")
    first = turns_of(tokenizer).begin([ASKED], TOOLS)
    thought = f"<think>\nwhy\n</think>\n\n{CALL}"
    second = grown(
        tokenizer,
        first,
        thought,
        [{"role": "tool", "content": "nothing", "tool_call_id": "000010000"}],
    )
    assert (
        isinstance(second, Conversation)
        and second.messages[1]["tool_calls"][0]["function"]["name"] == "look"
    )
    third = grown(tokenizer, second, "<think>\nstill\n</think>\n\nno", [ASKED])
    assert isinstance(third, NewBranch)
    assert (
        "renders earlier turns differently" in third.reason
        and "<think>" not in third.conversation.text
    )
    plain = grown(tokenizer, first, "<think>\nwhy\n</think>\n\nno", [ASKED])
    assert isinstance(plain, NewBranch)
    called = grown(tokenizer, first, thought, [ASKED])
    # The turn is stored as tool calls, with its text unchanged.
    assert isinstance(called, NewBranch) and called.conversation.messages[1] == second.messages[1]
    assert (
        "renders the turn differently from the model's output: " in plain.reason
        and "became 'no<|end|>" in plain.reason
    )


def test_template_reads_the_call_ids_that_the_client_got() -> None:
    tokenizer = chat_model("bytes", "mistral")
    turns = turns_of(tokenizer)
    first = replace(turns.begin([ASKED], TOOLS), call_id_key="this branch")
    drawn = tokenizer.encode('[TOOL_CALLS] [{"name": "look", "arguments": {}}]</s>')
    (call,) = turns.parse_turn(first, drawn).calls
    assert isinstance(call, ToolCall) and call.id != "000010000"
    second = turns.append_turn(first, drawn, [call.to_message("4")])
    assert isinstance(second, Conversation)
    assert second.text.count(call.id) == 2  # in the call and in its answer
    assert second.tokens[len(first.tokens) :][: len(drawn)].tolist() == drawn.tolist()


def test_tool_calls_inside_reasoning_are_ignored() -> None:
    tokenizer = chat_model("bytes", "begins_to_reason")
    turns = turns_of(tokenizer)
    first = turns.begin([ASKED], TOOLS)
    assert not turns.parse_turn(first, apart(tokenizer, f"hm {CALL}")).calls
    drawn = apart(tokenizer, f"hm {CALL}\n</think>\n\n{CALL}")
    (call,) = turns.parse_turn(first, drawn).calls
    assert isinstance(call, ToolCall)
    found = turns.append_turn(first, drawn, [call.to_message("4")])
    assert (
        isinstance(found, Conversation)
        and found.tokens[len(first.tokens) :][: len(drawn)].tolist() == drawn.tolist()
    )


def test_trimmed_turn_is_reported_only_if_text_changes() -> None:
    tokenizer = chat_model("bytes", "llama")
    first = turns_of(tokenizer).begin([ASKED])
    assert isinstance(grown(tokenizer, first, "yes", [ASKED]), Conversation)
    trimmed = grown(tokenizer, first, "yes \n", [ASKED])
    assert isinstance(trimmed, NewBranch) and "renders the turn differently" in trimmed.reason
    assert trimmed.conversation.messages[1] == {"role": "assistant", "content": "yes \n"}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("qwen", '<tool_call>{"arguments":{"at": "<|end|>\\u00e9"},"name":"look"}</tool_call>'),
        ("qwen", f"yes:\n\n{CALL}{CALL}"),
        ("llama", '<|python_tag|>{"name":"look","parameters":{"at":1}}'),
        ("llama", '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name":"look","arguments":{}}]'),
    ],
)
def test_reformatted_tool_calls_keep_generated_tokens(template: str, said: str) -> None:
    tokenizer = chat_model("bytes", template)
    turns, end = turns_of(tokenizer), end_of(template)
    first = turns.begin([ASKED], TOOLS)
    drawn = apart(tokenizer, said, end)
    calls = [call for call in turns.parse_turn(first, drawn).calls if isinstance(call, ToolCall)]
    new = [call.to_message("4") for call in calls]
    found = turns.append_turn(first, drawn, new)
    assert isinstance(found, Conversation) and calls
    check_growth(tokenizer, first, drawn, found, said)
    # The conversation can be extended after the tool calls.
    again = turns.append_turn(
        found, apart(tokenizer, " yes" if template == "mistral" else "yes", end), [ASKED]
    )
    assert (
        isinstance(again, Conversation)
        and again.tokens[: len(found.tokens)].tolist() == found.tokens.tolist()
    )


def test_unsupported_tool_calls_stay_text() -> None:
    tokenizer = chat_model("bytes", "llama")
    first = turns_of(tokenizer).begin([ASKED])
    two = '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}'
    found = grown(tokenizer, first, two, [{"role": "tool", "content": "4"}])
    assert isinstance(found, Conversation) and found.messages[1] == {
        "role": "assistant",
        "content": two,
    }
    malformed = grown(
        tokenizer, first, '{"name": "look", "parameters": 3}', [{"role": "tool", "content": "no"}]
    )
    assert isinstance(malformed, Conversation) and "tool_calls" not in malformed.messages[1]


@pytest.mark.parametrize(
    ("before", "argument", "is_called"),
    [("", 1, True), ("", 2, False), ("so: ", 1, False)],
    ids=["other spaces", "another argument", "without what was said"],
)
def test_tool_calls_that_template_changes_stay_text(
    before: str, argument: int, is_called: bool
) -> None:
    written = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    worded = "{% if m.tool_calls %}" + written + "{% else %}{{ m.content }}{% endif %}<|end|>"
    template = "{% for m in messages %}{{ m.role }} " + worded + "{% endfor %}assistant "
    tokenizer = chat_model("bytes", template)
    turns = ChatTurns(tokenizer, "hermes")
    said = f'{before}<tool_call>{{"name": "look", "arguments": {{"at":{argument}}}}}</tool_call>'
    found = turns.append_turn(turns.begin([ASKED]), apart(tokenizer, said), [ASKED])
    assert isinstance(found, Conversation) and ("tool_calls" in found.messages[1]) is is_called


def test_turn_without_end_token_is_refused() -> None:
    tokenizer = chat_model("bytes", "chatml")
    turns = turns_of(tokenizer)
    first = turns.begin([ASKED])
    for tokens in (tokenizer.encode("yes"), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(
            AlignerError,
            match="not an end-of-turn token; a truncated turn must be the last turn of its episode",
        ):
            turns.append_turn(first, tokens, [ASKED])


def test_unexpected_or_non_special_end_token_is_reported() -> None:
    tokenizer = chat_model("bytes", "chatml")
    first = turns_of(tokenizer).begin([ASKED])
    other = turns_of(tokenizer).append_turn(first, apart(tokenizer, "yes", "</s>"), [ASKED])
    assert isinstance(other, NewBranch)
    assert (
        "the model ended its turn with '</s>', but the chat template continues after the turn with"
        " '<|end|>" in other.reason
    )
    plain = chat_model("bytes", "{% for m in messages %}{{ m.content }}!{% endfor %}", ends=("!",))
    found = turns_of(plain).append_turn(
        turns_of(plain).begin([ASKED]), plain.encode("yes!"), [ASKED]
    )
    assert isinstance(found, NewBranch) and "'!', which is not a special token" in found.reason


def test_end_token_merged_with_turn_text_is_reported(tmp_path) -> None:
    greedy = tokenizers.Tokenizer.from_str(tokenizer_file("bytes"))
    greedy.add_special_tokens(["yes<|end|>"])
    greedy.save(str(tmp_path / "tokenizer.json"))
    write_model(tmp_path, TEMPLATES["chatml"], SPECIAL[1:3])
    tokenizer = Tokenizer(tmp_path)
    turns = ChatTurns(tokenizer, None)
    drawn = apart(tokenizer, "yes")
    found = turns.append_turn(turns.begin([ASKED]), drawn, [ASKED])
    assert (
        isinstance(found, NewBranch)
        and found.reason
        == "the tokens after the end-of-turn token '<|end|>' depend on the text of the turn"
    )


def test_rejected_messages_and_missing_template_raise(tmp_path) -> None:
    tokenizer = chat_model("bytes", "mistral")
    turns = turns_of(tokenizer)
    with pytest.raises(AlignerError, match="turns must alternate"):
        turns.begin([ASKED, ASKED])
    drawn = apart(tokenizer, " yes", "</s>")
    with pytest.raises(AlignerError, match="turns must alternate"):
        turns.append_turn(turns.begin([ASKED]), drawn, [ASKED, ASKED])
    (tmp_path / "tokenizer.json").write_text(tokenizer_file("bytes"))
    write_model(tmp_path, "", SPECIAL[1:3])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat messages require a chat template"):
        ChatTurns(Tokenizer(tmp_path), None)


@cache
def smollm2() -> Tokenizer:
    """Return SmolLM2's tokenizer with its own chat template, without the model's weights."""
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    file = gguf_file(compose_config(["experiment=smollm2_sentiment"]).model)
    with TemporaryDirectory() as name:
        directory = Path(name)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
        settings = (directory / "tokenizer_config.json").read_text()
        write_model(directory, (directory / "chat_template.jinja").read_text(), ["<|im_end|>"])
        (directory / "tokenizer_config.json").write_text(settings)
        tokenizer = Tokenizer(directory)
        assert tokenizer.chat_template  # loaded lazily: read it before the directory is deleted
        return tokenizer


@pytest.mark.slow
def test_smollm2_appended_turns_equal_full_encoding() -> None:
    tokenizer = smollm2()
    conversation = turns_of(tokenizer).begin([ASKED])
    for said in ("Because.", "\n\nYes,  it is:\n\t1\n", "naïve 😀 ", ""):
        drawn = apart(tokenizer, said, "<|im_end|>")
        found = turns_of(tokenizer).append_turn(
            conversation, drawn, [{"role": "user", "content": "\nAnd?"}]
        )
        assert isinstance(found, Conversation), found.reason
        check_growth(tokenizer, conversation, drawn, found, said)
        conversation = found
    assert len(conversation.messages) == 9
