"""`aligner serve-model` with tools and text completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI

from aligner.data.tokenizer import Tokenizer
from tests.agents.calling_model import saved
from tests.agents.openai_agents import TOOLS
from tests.agents.serving_model import served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "qwen")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[OpenAI]:
    with served(model) as url, OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_served_model_calls_tool_and_reads_result(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "why 0?"}]
    settings = {"model": "any", "tools": TOOLS, "temperature": 0}
    (choice,) = client.chat.completions.create(messages=messages, **settings).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "here"})

    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": 'saw {"at": "here"}'})
    (choice,) = client.chat.completions.create(messages=messages, **settings).choices
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"

    (choice,) = client.chat.completions.create(
        messages=messages[:1], tool_choice="none", **settings
    ).choices
    assert choice.message.tool_calls is None and "<tool_call>" in choice.message.content


def test_continued_message_is_completed_as_without_the_cut(client: OpenAI) -> None:
    user = {"role": "user", "content": "why 0?"}
    settings = {"model": "any", "tools": TOOLS, "temperature": 0, "tool_choice": "none"}

    def ask(messages: list[dict[str, str]], **fields: object) -> str:
        completion = client.chat.completions.create(
            messages=messages, extra_body=fields, **settings
        )
        return completion.choices[0].message.content

    whole = ask([user])
    start = {"role": "assistant", "content": whole[:20]}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert "<tool_call>" in whole and ask([user, start], **fields) == whole[20:]


def test_text_completion_equals_rendered_chat(client: OpenAI) -> None:
    settings = {"model": "any", "temperature": 0, "max_tokens": 8}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "why 0?"}], **settings
    )
    prompt = "<|user|>user\nwhy 0?<|end|>\n<|user|>assistant\n"
    text = client.completions.create(prompt=prompt, logprobs=0, **settings)
    assert text.usage == chat.usage
    assert text.choices[0].text == chat.choices[0].message.content
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens


def test_seed_repeats_sampled_answer(client: OpenAI) -> None:
    def sample(seed: int | None) -> list[str]:
        completion = client.completions.create(
            model="any", prompt="yes", temperature=2.0, max_tokens=8, n=2, seed=seed
        )
        return [choice.text for choice in completion.choices]

    first = sample(5)
    assert first == sample(5) and first[0] != first[1]
    assert first != sample(6) and sample(None) != sample(None)


def test_answer_of_one_token_with_alternatives_ends_before_stop_string(client: OpenAI) -> None:
    settings = {"model": "any", "temperature": 0, "max_tokens": 1, "logprobs": 2, "prompt": "yes"}
    (whole,) = client.completions.create(**settings).choices
    (cut,) = client.completions.create(stop=whole.text, **settings).choices
    assert (whole.finish_reason, cut.finish_reason, cut.text) == ("length", "stop", "")
    assert [len(top) for top in cut.logprobs.top_logprobs] == [2]


def test_token_limits_and_end_tokens_of_request_apply(client: OpenAI, model: Path) -> None:
    settings = {"model": "any", "temperature": 0, "prompt": "yes", "max_tokens": 30}

    def count(**fields: object) -> int:
        usage = client.completions.create(**settings, extra_body=fields).usage
        return usage.completion_tokens

    # one token remains for the minimum length
    tokens = list(range(1, Tokenizer(model).vocab_size))
    assert count(ignore_eos=True) == 30
    assert count(stop_token_ids=tokens) == 1
    assert count(stop_token_ids=tokens, min_tokens=4) == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"suffix": "b"}, "suffix"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"continue_final_message": True}, "messages"),
        ({"min_tokens": "many"}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_unsupported_field_is_refused_by_name(client: OpenAI, fields, param) -> None:
    with pytest.raises(BadRequestError, match=param) as raised:
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "a"}], extra_body=fields
        )
    assert raised.value.param == param


def test_null_and_neutral_fields_are_accepted(client: OpenAI) -> None:
    nullable = [
        *("model", "n", "max_tokens", "max_completion_tokens", "min_tokens", "stop"),
        *("stop_token_ids", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
        *("seed", "presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice"),
        *("parallel_tool_calls", "response_format", "chat_template_kwargs", "logprobs"),
        *("top_logprobs", "functions", "user", "metadata", "echo"),
    ]
    neutral = {"frequency_penalty": 0, "response_format": {"type": "text"}, "functions": []}
    for fields in (dict.fromkeys(nullable), neutral):
        completion = client.post(
            "/chat/completions",
            body={"max_tokens": 2, "messages": [{"role": "user", "content": "a"}], **fields},
            cast_to=object,
        )
        assert completion["choices"]
