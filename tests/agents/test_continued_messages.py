"""Requests whose answer continues the last message: the tokens of the episode stay exact."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from aligner.agents.agent_endpoint import AgentServer, AgentSession
from aligner.agents.agent_episodes import build_episode_sample
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Prompt, Sample
from aligner.engines.engine_protocol import GenerationRequest
from tests.agents.answering_sessions import Answering, serving
from tests.agents.calling_model import saved
from tests.agents.openai_agents import TOOLS
from tests.agents.poking_agents import send_request
from tests.agents.test_agents import agent, episodes, generated_spans
from tests.data.chat_models import TEMPLATES, tokenizer_file, write_model

USER = {"role": "user", "content": "why?"}
END = "<|end|>"


class Scripted(Answering):
    """Answers each request with the next text; an answer without an end-of-turn token is
    truncated."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        super().__init__(tokenizer)
        self._tokenizer = tokenizer
        self._texts = texts

    async def generate(
        self,
        input_tokens: Tensor,
        max_tokens: int,
        stop: tuple[str, ...],
        grammar: str | None,
        repeats: int,
    ) -> Completion:
        await asyncio.sleep(0)
        text = self._texts.pop(0)
        tokens = self._tokenizer.encode_observation(input_tokens, text)
        reason: Any = "stop" if text.endswith(END) else "length"
        versions = torch.zeros(len(tokens), dtype=torch.int64)
        return Completion(tokens, torch.zeros(len(tokens)), versions, reason)


class Episode:
    """A session on a real server, and the requests of its agent."""

    def __init__(self, server: AgentServer, session: AgentSession) -> None:
        self._server = server
        self.session = session

    def send(
        self, messages: list[Any], path: str = "chat/completions", **fields: Any
    ) -> tuple[int, Any]:
        url = f"{self._server.get_session_url(self.session)}/v1/{path}"
        body = json.dumps({"messages": messages, **fields}).encode()
        return send_request(url, str(self.session.agent_key), body)

    def ask(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        status, response = self.send(messages, **fields)
        assert status == 200, response
        message: dict[str, Any] = response["choices"][0]["message"]
        return message

    def build_sample(self) -> Sample:
        prompt = Prompt(0, "", torch.tensor([1]), {})
        turns = self.session.turns
        sample = build_episode_sample(GenerationRequest(prompt, 0), turns, 1.0, is_truncated=False)
        assert sample is not None
        return sample


@pytest.fixture(scope="module", params=["qwen", "gemma"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(tokenizer_file("bytes"))
    write_model(directory, TEMPLATES[request.param], (END, "</s>"))
    return directory


@pytest.fixture
def texts() -> list[str]:
    """The answers, which a test fills."""
    return []


@pytest.fixture
def episode(model: Path, texts: list[str]) -> Iterator[Episode]:
    with serving(model, Scripted(Tokenizer(model), texts), 1, max_turn_tokens=200) as (
        server,
        (session,),
    ):
        yield Episode(server, session)


def continued(content: str) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": content}]


CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def test_truncated_turn_is_continued_with_its_tokens(episode, texts, model):
    texts += ["It ra", "ins to", f"day.{END}", f"yes{END}"]
    first = episode.ask([USER])["content"]
    second = episode.ask(continued(first), **CONTINUE)["content"]
    third = episode.ask(continued(first + second), **CONTINUE)["content"]
    assert [first, second, third] == ["It ra", "ins to", "day."]
    episode.ask([*continued("It rains today."), USER])

    turns = episode.session.turns
    for turn, following in itertools.pairwise(turns):
        tokens = torch.cat([turn.input_tokens, turn.generated_tokens])
        assert torch.equal(following.input_tokens[: len(tokens)], tokens)
    assert not episode.session.branch_counts
    sample = episode.build_sample()
    assert not sample.branches
    generated = sample.response[sample.generated_mask]
    text = Tokenizer(model).decode(generated, skip_special_tokens=False)
    assert text == f"It rains today.{END}yes{END}"


def test_prefilled_text_is_context_and_whole_message_continues_turn(episode, texts, model):
    tokenizer = Tokenizer(model)
    texts += [f"ins.{END}", f"yes{END}"]
    assert episode.ask(continued("It ra"), **CONTINUE)["content"] == "ins."
    episode.ask([*continued("It rains."), USER])

    first, _ = episode.session.turns
    rendered = tokenizer.chat_template.render([USER], add_generation_prompt=True)
    assert tokenizer.decode(first.input_tokens, skip_special_tokens=False) == rendered + "It ra"
    assert not episode.session.branch_counts
    sample = episode.build_sample()
    assert not sample.branches and sample.turn_count == 2
    generated = sample.response[sample.generated_mask]
    assert tokenizer.decode(generated, skip_special_tokens=False) == f"ins.{END}yes{END}"


def test_prefilled_answer_after_an_earlier_turn_continues_it(episode, texts):
    texts += [f"yes{END}", f"ins.{END}"]
    episode.ask([USER])
    last = {"role": "assistant", "content": "It ra"}
    episode.ask([*continued("yes"), USER, last], **CONTINUE)
    assert not episode.session.branch_counts and not episode.build_sample().branches


def test_complete_turn_is_continued_in_a_new_branch(episode, texts):
    texts += [f"yes{END}", f"terday{END}"]
    episode.ask([USER])
    assert episode.ask(continued("yes"), **CONTINUE)["content"] == "terday"
    sample = episode.build_sample()
    assert len(sample.branches) == 1


def test_call_that_begins_in_the_prefilled_text_is_parsed(episode, texts):
    if episode.session.context.get_chat().tool_format is None:
        pytest.skip("the template writes no calls")
    start = 'I look.\n<tool_call>\n{"name": "look", '
    texts += [f'"arguments": {{"at": "here"}}}}\n</tool_call>{END}', f"yes{END}"]
    message = episode.ask(continued(start), tools=TOOLS, **CONTINUE)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "here"}
    assert message["content"] is None


def test_prefilled_answer_of_anthropic_continues_the_same_turn(episode, texts):
    texts += ["It ra", f"ins.{END}", f"yes{END}"]
    fields = {"model": "m", "max_tokens": 99}
    episode.send([USER], "messages", **fields)
    status, message = episode.send(continued("It ra"), "messages", **fields)
    assert status == 200 and message["content"] == [{"type": "text", "text": "ins."}]
    episode.send([*continued("It rains."), USER], "messages", **fields)
    assert not episode.session.branch_counts and not episode.build_sample().branches


@pytest.mark.slow
def test_logprobs_of_continued_turn_equal_forward_pass(tmp_path):
    directory = saved(tmp_path, "qwen")
    settings = agent("continues")
    ((sample,), _) = episodes(directory, [{}], settings)
    reference = LlamaForCausalLM.from_pretrained(directory).eval()
    for sequence in (sample, *sample.branches):
        with torch.no_grad():
            logprobs = reference(sequence.tokens[None]).logits[0].log_softmax(-1)
        for start, tokens, recorded in generated_spans(sequence):
            expected = logprobs[start - 1 : start - 1 + len(tokens)].gather(1, tokens[:, None])
            assert torch.allclose(expected[:, 0], recorded, atol=1e-4)
    # the first two parts are truncated, and the third one continues their tokens
    assert len(generated_spans(sample)[0][1]) > 5


@pytest.mark.parametrize(
    ("messages", "fields", "problem"),
    [
        ([USER], CONTINUE, "it has role 'user'"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}],
            CONTINUE,
            "tool_calls",
        ),
        (
            continued("a"),
            {**CONTINUE, "response_format": {"type": "json_object"}},
            "cannot have a required format",
        ),
        (continued("a"), {**CONTINUE, "add_generation_prompt": True}, "must be false"),
        ([USER], {"add_generation_prompt": False}, "only with continue_final_message=true"),
    ],
)
def test_message_that_cannot_be_continued_is_refused(episode, messages, fields, problem):
    status, response = episode.send(messages, **fields)
    assert status == 400 and problem in response["error"]["message"]
    assert not episode.session.turns
