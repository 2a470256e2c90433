"""Agents that request structured output: the answers follow the request, and the samples contain
the grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from aligner.data.types import Sample
from tests.agents.calling_model import saved
from tests.agents.openai_agents import TOOLS
from tests.agents.serving_model import served
from tests.agents.test_agents import agent, episodes
from tests.agents.test_vllm_episodes import run_agents
from tests.engines.engines import engine_of, publish

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


def tool(name: str) -> dict[str, Any]:
    """Return a tool with one argument that has two possible values."""
    parameters = {
        "type": "object",
        "properties": {"mass": {"enum": [1, 2]}},
        "required": ["mass"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEIGHING_TOOLS = [tool("lift"), tool("weigh")]
NAMED = {"type": "function", "function": {"name": "weigh"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("qwen"), "qwen")


def run(
    model: Path, directory: Path, arguments: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[Sample]]:
    """Run an episode for each request; return what the agents logged, and the samples."""
    file = directory / "log.jsonl"
    tasks = [{"log": str(file), "arguments": each} for each in arguments]
    settings = agent("structures") | {"max_turn_tokens": 200}
    samples, _ = episodes(model, tasks, settings)
    entries = sorted(
        map(json.loads, file.read_text().splitlines()), key=lambda entry: entry["task"]
    )
    return entries, samples


def test_answers_follow_requested_schema(model: Path, tmp_path: Path) -> None:
    entries, samples = run(
        model, tmp_path, [{"response_format": JSON_SCHEMA}, {"extra_body": {"guided_json": SCHEMA}}]
    )
    for entry, sample in zip(entries, samples, strict=True):
        jsonschema.validate(json.loads(entry["content"]), SCHEMA)
        (span,) = sample.grammar_spans
        assert (span.start, span.end) == (0, len(sample.response))


def test_required_tool_choice_gives_valid_calls(model: Path, tmp_path: Path) -> None:
    requests = [
        {"tools": WEIGHING_TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        for choice in ("required", NAMED)
    ]
    entries, samples = run(model, tmp_path, requests)
    calls = [entry["tool_calls"] for entry in entries]
    assert [len(each) for each in calls] == [1, 1]
    assert calls[1][0]["function"]["name"] == "weigh"
    parameters = WEIGHING_TOOLS[0]["function"]["parameters"]
    for (call,) in calls:
        assert call["function"]["name"] in ("lift", "weigh")
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
    assert all(sample.grammar_spans for sample in samples)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"extra_body": {"guided_json": {"allOf": [{"type": "string"}, {"type": "null"}]}}},
            "response_format",
        ),
        ({"extra_body": {"guided_json": {"type": "wrong"}}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice: names the tool 'weigh'"),
        ({"tool_choice": "required"}, "tool_choice=required: the request has no tools"),
    ],
    ids=["unsatisfiable", "invalid", "unknown tool", "no tools"],
)
def test_unsatisfiable_request_is_refused_with_status_400(
    model: Path, tmp_path: Path, arguments: dict[str, Any], problem: str
) -> None:
    ((entry,), (sample,)) = run(model, tmp_path, [arguments])
    assert problem in entry["error"]
    # the episode continues with the agent's next request
    assert len(sample.response) and not sample.grammar_spans


def test_engine_without_guided_decoding_refuses_with_status_400(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "log.jsonl"
    task = {"log": str(file), "arguments": {"response_format": JSON_SCHEMA}}
    with engine_of("tensorrt_llm", model) as engine:
        publish(engine, model, 0)
        settings = agent("structures") | {"max_turn_tokens": 3}
        (sample,) = run_agents(engine, model, [task], settings)
    logged = json.loads(file.read_text())
    assert logged["code"] == "unsupported" and "Error code: 400" in logged["error"]
    assert "TensorRT-LLM: guided decoding is not supported" in logged["error"]
    # the episode continues with the agent's next request, and the refused one does not count
    assert len(sample.response) and not sample.grammar_spans and sample.report is None


def test_structured_output_without_stop_token_is_refused_with_status_400(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "log.jsonl"
    task = {"log": str(file), "arguments": {"response_format": JSON_SCHEMA}}
    with engine_of("embedded-in_place", model) as engine:
        publish(engine, model, 0)
        settings = agent("structures") | {"max_turn_tokens": 3}
        (sample,) = run_agents(engine, model, [task], settings, stop_at_eos=False)
    error = json.loads(file.read_text())["error"]
    assert "Error code: 400" in error and "set rollout.stop_at_eos=true" in error
    assert len(sample.response) == 3 and sample.report is None


@pytest.mark.slow
def test_stored_model_answers_with_requested_structure(model: Path) -> None:
    with served(model) as url:
        own = OpenAI(base_url=url, api_key="any")
        messages: Any = [{"role": "user", "content": "why 0?"}]
        content = own.chat.completions.create(
            model="any", messages=messages, response_format=JSON_SCHEMA, temperature=0
        )
        jsonschema.validate(json.loads(content.choices[0].message.content), SCHEMA)
        # the log-probs of alternatives would be those without the schema
        with pytest.raises(openai.BadRequestError, match="top_logprobs=2: must be 0"):
            own.chat.completions.create(
                model="any",
                messages=messages,
                response_format=JSON_SCHEMA,
                logprobs=True,
                top_logprobs=2,
            )
        call = own.chat.completions.create(
            model="any", messages=messages, tools=WEIGHING_TOOLS, tool_choice=NAMED
        )
        assert call.choices[0].message.tool_calls[0].function.name == "weigh"
