"""Turns of rendered prompts: chat templates, stored messages, and prompts without turns."""

from __future__ import annotations

import json

import pytest

from aligner.view.prompt_turns import build_sample_turns, find_question, split_prompt

SYSTEM, QUESTION = "Answer briefly.", "What is 2 + 3?\nAnd 4?"
CHATS = {
    "chatml": (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "llama3": (
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "zephyr": f"<|system|>\n{SYSTEM}</s>\n<|user|>\n{QUESTION}</s>\n<|assistant|>\n",
    "deepseek": (
        f"<\uff5cbegin\u2581of\u2581sentence\uff5c>{SYSTEM}<\uff5cUser\uff5c>{QUESTION}"
        "<\uff5cAssistant\uff5c>"
    ),
    "llama2": f"<s>[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\n{QUESTION} [/INST]",
    "mistral": f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]{QUESTION}[/INST]",
    "gpt-oss": (
        f"<|start|>system<|message|>{SYSTEM}<|end|><|start|>user<|message|>{QUESTION}<|end|>"
        "<|start|>assistant"
    ),
    "dialogue": f"System: {SYSTEM}\n\nHuman: {QUESTION}\n\nAssistant:",
}


@pytest.mark.parametrize("name", CHATS)
def test_prompt_of_chat_template_is_split_into_turns(name: str) -> None:
    turns = split_prompt(CHATS[name])
    assert turns == [("system", SYSTEM), ("user", QUESTION), ("assistant", "")]
    assert find_question(CHATS[name], None) == QUESTION


def test_gemma_model_turns_have_the_role_assistant() -> None:
    prompt = (
        "<bos><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n"
        "<start_of_turn>user\nthree<end_of_turn>\n<start_of_turn>model\n"
    )
    roles = ("user", "assistant", "user", "assistant")
    assert split_prompt(prompt) == list(zip(roles, ("one", "two", "three", ""), strict=True))
    assert find_question(prompt, None) == "three"


@pytest.mark.parametrize(
    "prompt", ["", "Count to three: ", "Explain the marker [INST] of Llama 2.", "a <|user|> b"]
)
def test_plain_prompt_has_no_turns(prompt: str) -> None:
    assert split_prompt(prompt) == []
    assert find_question(prompt, None) == prompt


def test_beginning_of_response_in_template_precedes_response() -> None:
    turns = build_sample_turns(CHATS["chatml"] + "<think>\n", "2 + 3 is 5</think>5", None)
    assert [turn.role for turn in turns] == ["system", "user", "assistant"]
    assert turns[-1].text == "<think>\n2 + 3 is 5</think>5"


def test_stored_messages_take_precedence_over_prompt() -> None:
    messages = json.dumps(
        [
            {"role": "user", "content": "first"},
            {"role": "user", "content": "last"},
            {"role": "assistant", "content": "yes"},
            {"role": "environment", "content": "done"},
        ]
    )
    assert find_question(CHATS["chatml"], messages) == "last"
    assert [turn.text for turn in build_sample_turns(CHATS["chatml"], "yes", messages)] == [
        *("first", "last", "yes", "done")
    ]
