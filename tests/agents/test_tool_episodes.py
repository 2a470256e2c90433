"""Episodes with tools: calls in the model's own format are executed, and answered in messages."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.agents.tool_catalogue import list_tools, tool_schemas, with_tool_arguments
from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.engine_loop import run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import ConfigError
from aligner.schema import DataConfig
from aligner.schema.environment import EnvironmentConfig
from tests.agents.scripted import Scripted
from tests.data.chat_models import chat_model
from tests.rounds import typical

SAMPLES = "tests.agents.tool_samples"
SERVER = shlex.join(["env", f"PYTHONPATH={Path.cwd()}", sys.executable, "-m", SAMPLES])


def hermes(*calls: tuple[str, dict[str, object]]) -> str:
    call_texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in call_texts)


def llama3(call: tuple[str, dict[str, object]], *_: object) -> str:
    return json.dumps({"name": call[0], "parameters": call[1]})


def mistral(*calls: tuple[str, dict[str, object]]) -> str:
    return (
        "[TOOL_CALLS]"
        f" {json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}"
    )


FORMS = {"qwen": (hermes, "<|end|>"), "llama": (llama3, "<|end|>"), "mistral": (mistral, "</s>")}
sandboxed = pytest.mark.skipif(
    bool(Bubblewrap.detect(EnvironmentConfig().python).find_gaps()),
    reason="this machine does not enforce the sandbox",
)
python = pytest.param("python", marks=sandboxed)


def episodes(
    tmp_path: Path,
    template: str,
    turns: Sequence[str],
    fields: Mapping[str, object] | None = None,
    **given: object,
) -> tuple[list[Sample], Tokenizer, Prompt]:
    """Run two episodes with scripted turns for a prompt that is read from a file.

    Args:
        tmp_path: Directory for the file.
        template: Chat template, a key of `FORMS`.
        turns: Turns of the policy.
        fields: Further fields of the record.
        given: Keys of the section `environment`.
    """
    tokenizer = chat_model("bytes", template)
    settings = EnvironmentConfig(**{"target": "tools", "max_turn_tokens": 2000, **given})  # type: ignore[arg-type]
    (tmp_path / "data.jsonl").write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "What is 6 times 7?"}], **(fields or {})}
        )
        + "\n"
    )
    data, listed = (
        DataConfig(path=str(tmp_path / "data.jsonl"), max_prompt_tokens=8000),
        list_tools(settings),
    )
    (prompt,) = open_prompts(
        data, tokenizer, 0, include_messages=True, tools=tool_schemas(listed)
    ).take(0, 1)
    pool = EnvironmentPool.from_config(with_tool_arguments(settings, listed, tokenizer))
    try:
        pool.start()
        end = tokenizer.get_single_token(FORMS[template][1], "the end of a turn")
        assert end is not None
        says = [[*tokenizer.encode(turn).tolist(), end] for turn in turns]
        policy = Scripted(lambda turn, read: says[turn])
        engine = EnvironmentEpisodes(policy, pool, tokenizer, settings, seed=3)  # type: ignore[arg-type]
        requests = [GenerationRequest(prompt, index) for index in range(2)]
        found = run_steps(engine.start(requests, SamplingOptions(max_new_tokens=20_000)))
    finally:
        pool.close()
    return [found[0], found[1]], tokenizer, prompt


def read(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(turn, skip_special_tokens=False) for turn in sample.split_turns()]


TOOLS = {
    "function": ({"tools": [f"{SAMPLES}:multiply"]}, ("multiply", {"a": 6, "b": 7})),
    "server": ({"mcp": [SERVER]}, ("count", {"by": 42})),
    "python": ({"tools": ["python"]}, ("python", {"code": "print(6 * 7)"})),
}


@pytest.mark.parametrize("template", typical(FORMS, ["qwen"]))
@pytest.mark.parametrize("kind", ["function", "server", python])
def test_tool_call_and_result_use_chat_template_format(tmp_path, template, kind):
    given, call = TOOLS[kind]
    write: Callable[..., str] = FORMS[template][0]
    turns = [write(call), "It is 42."]
    samples, tokenizer, prompt = episodes(tmp_path, template, turns, **given)
    for sample in samples:
        texts = read(sample, tokenizer)
        assert sample.finish_reason == "stop" and len(texts) == 3, texts
        assert (
            texts[0] == turns[0] + FORMS[template][1] and texts[2] == turns[1] + FORMS[template][1]
        )
        assert "42" in texts[1]
        assert sample.rewards is not None and float(sample.rewards.abs().sum()) == 0
        assert torch.equal(sample.tokens[: sample.prompt_length], prompt.tokens)
    if template == "qwen":
        assert call[0] in prompt.text, "the template words the tools"


@pytest.mark.parametrize("template", FORMS)
def test_invalid_tool_call_is_reported_to_policy(tmp_path, template):
    write: Callable[..., str] = FORMS[template][0]
    wrong = write(("multiply", {"a": 6}))
    broken = wrong.replace('"a": 6', '"a": ')
    turns = [wrong, broken, write(("divide", {})), "I give up."]
    (sample, _), tokenizer, _ = episodes(tmp_path, template, turns, tools=[f"{SAMPLES}:multiply"])
    texts = read(sample, tokenizer)
    assert sample.finish_reason == "stop" and len(texts) == 7, texts
    results = texts[1::2]
    assert (
        "missing a required argument" in results[0]
        and "cannot be read" in results[1]
        and "there is no tool" in results[2]
    )


@pytest.mark.parametrize("template", ["qwen", "mistral"])
def test_tool_calls_of_turn_are_answered_in_order(tmp_path, template):
    calls = [
        ("multiply", {"a": 1, "b": 1}),
        ("wait", {"seconds": 0.3}),
        ("multiply", {"a": 2, "b": 2}),
    ]
    turns = [FORMS[template][0](*calls), "So."]
    (sample, _), tokenizer, _ = episodes(
        tmp_path, template, turns, tools=[f"{SAMPLES}:multiply", f"{SAMPLES}:wait"]
    )
    result = read(sample, tokenizer)[1]
    parts = ["<tool_response>\n1\n", "waited 0.3 s", "<tool_response>\n4\n"]
    if template == "mistral":
        parts = [f'"call_id": "00001000{place}"' for place in range(3)]
    assert sample.finish_reason == "stop"
    assert sorted(result.index(part) for part in parts) == [result.index(part) for part in parts]


def test_user_class_can_run_tools_and_give_rewards(tmp_path):
    turns = [hermes(("multiply", {"a": 6, "b": 7})), "It is 42."]
    given = {"target": f"{SAMPLES}:Rewarding", "tools": [f"{SAMPLES}:multiply"]}
    (sample, _), _, _ = episodes(tmp_path, "qwen", turns, **given)
    assert (
        sample.rewards is not None
        and float(sample.rewards.sum()) == 0.25
        and sample.finish_reason == "stop"
    )


@sandboxed
def test_bash_commands_of_episode_share_files(tmp_path):
    commands = ["cat numbers; echo 42 > result", "cat result; ls no-file"]
    turns = [*(hermes(("bash", {"command": command})) for command in commands), "So."]
    samples, tokenizer, prompt = episodes(
        tmp_path,
        "qwen",
        turns,
        {"sandbox_files": {"numbers": "6 7"}},
        tools=["bash"],
    )
    assert "Files of earlier commands are kept" in prompt.text
    for sample in samples:
        results = read(sample, tokenizer)[1::2]
        assert sample.finish_reason == "stop" and len(results) == 2
        assert "6 7" in results[0]
        assert "42\nls: cannot access 'no-file'" in results[1] and "[exit code 2]" in results[1]


@sandboxed
def test_bash_calls_of_turn_run_in_order(tmp_path):
    calls = [("bash", {"command": f"echo {number} >> n; cat n"}) for number in range(3)]
    (sample, _), tokenizer, _ = episodes(tmp_path, "qwen", [hermes(*calls), "So."], tools=["bash"])
    assert "0\n1\n2" in read(sample, tokenizer)[1]


@sandboxed
def test_reward_can_come_from_a_test_in_the_sandbox(tmp_path):
    for command, reward in (("echo 42 > result", 1.0), ("echo 41 > result", 0.0)):
        turns = [hermes(("bash", {"command": command})), "Done."]
        given = {"target": f"{SAMPLES}:Tested", "tools": ["bash"]}
        (sample, _), _, _ = episodes(tmp_path, "qwen", turns, **given)
        assert sample.rewards is not None and float(sample.rewards.sum()) == reward


def test_record_tools_override_configured_tools(tmp_path):
    tokenizer, file = chat_model("bytes", "qwen"), tmp_path / "data.jsonl"
    tools = tool_schemas(list_tools(EnvironmentConfig(target="tools", tools=["python"])))
    record = {"messages": [{"role": "user", "content": "?"}]}
    own = [{"type": "function", "function": {"name": "own"}}]
    file.write_text(json.dumps(record) + "\n" + json.dumps(record | {"tools": own}) + "\n")
    data = DataConfig(path=str(file), max_prompt_tokens=8000, shuffle=False)
    first, second = open_prompts(data, tokenizer, 0, include_messages=True, tools=tools).take(0, 2)
    assert first.metadata["tools"] == tools and "Runs a Python program" in first.text
    assert second.metadata["tools"] == own and "Runs a Python program" not in second.text
    file.write_text(json.dumps({"prompt": "What?"}) + "\n")
    with pytest.raises(ConfigError, match="tools require a prompt of chat messages"):
        open_prompts(data, tokenizer, 0, include_messages=True, tools=tools)
