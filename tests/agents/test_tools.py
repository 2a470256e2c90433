"""The tool environment: messages to the model for its tool calls, and MCP servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aligner.agents import environment_worker as environment_worker
from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.tool_catalogue import (
    describe_tools,
    list_tools,
    tool_schemas,
    with_tool_arguments,
)
from aligner.agents.tool_environment import ToolEnvironment
from aligner.errors import ConfigError
from aligner.schema.environment import EnvironmentConfig
from tests.data.chat_models import chat_model
from tests.rounds import bounds_seconds

SAMPLES = "tests.agents.tool_samples"
SERVER = shlex.join(["env", f"PYTHONPATH={Path.cwd()}", sys.executable, "-m", SAMPLES])
FUNCTIONS = [
    f"{SAMPLES}:{name}" for name in ("multiply", "wait", "hang", "fail", "flood", "broken")
]


def settings(**given: Any) -> EnvironmentConfig:
    return EnvironmentConfig(
        **{"target": "tools", "tools": FUNCTIONS, "tool_timeout_s": 5.0} | given
    )


def with_listed_tools(settings: EnvironmentConfig, template: str) -> EnvironmentConfig:
    """Return the settings with the listed tools, for a model with this chat template."""
    return with_tool_arguments(settings, list_tools(settings), chat_model("bytes", template))


def arguments(**given: Any) -> dict[str, Any]:
    """Return the arguments of the tool environment."""
    return json.loads(json.dumps(with_listed_tools(settings(**given), "qwen").arguments))


@contextlib.asynccontextmanager
async def environment(arguments: dict[str, Any]):
    made = ToolEnvironment(**arguments)
    try:
        assert (
            await made.reset({"messages": [{"role": "user", "content": "?"}], "prompt": "?"}, 0)
            == []
        )
        yield made
    finally:
        await made.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def tool_results(made: ToolEnvironment, *calls: str) -> list[str]:
    """Make tool calls in one turn, and return the content of each result message."""
    messages, reward, done = await made.step("I ask.\n" + "\n".join(calls))
    assert (reward, done) == (0.0, False) and {message["role"] for message in messages} == {"tool"}
    return [message["content"] for message in messages]


def run_calls(*calls: str, **given: Any) -> list[str]:
    return run(run_calls_async(arguments(**given), *calls))


async def run_calls_async(arguments: dict[str, Any], *calls: str) -> list[str]:
    async with environment(arguments) as made:
        return await tool_results(made, *calls)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 100))


@bounds_seconds
def test_tool_calls_of_a_turn_run_concurrently():
    async def episode(given: dict[str, Any]) -> None:
        async with environment(given) as made:
            begin = time.monotonic()
            first = await made.step(
                "\n".join([call("wait", seconds=0.7)] * 4 + [call("multiply", a=6, b=7)])
            )
            assert time.monotonic() - begin < 2.0
            assert [message["content"] for message in first[0]] == ["waited 0.7 s"] * 4 + ["42"]
            assert first[0][-1] == {
                "role": "tool",
                "name": "multiply",
                "tool_call_id": "000010004",
                "content": "42",
            }
            again = await made.step(call("multiply", a=1, b=2))
            # Seven messages precede the call: one prompt, one response, five tool results.
            assert again[0][0]["tool_call_id"] == "000070000"
            assert await made.step("It is 42.") == ([], 0.0, True)

    run(episode(arguments()))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (call("divide", a=1), "Error: there is no tool 'divide'; there are multiply, wait,"),
        (call("multiply", a=1), "Error: wrong arguments: missing a required argument: 'b'"),
        (
            call("multiply", a=1, b=2, c=3),
            "Error: wrong arguments: got an unexpected keyword argument 'c'",
        ),
        (call("multiply", a="1", b=2), "Error: wrong arguments: a: '1' is not of type 'integer'"),
        (call("fail", how="so"), "Error: ValueError: so"),
        # The model trains on exactly the text that the tool returned.
        (call("fail", how="api_key=abcdef12"), "Error: ValueError: api_key=abcdef12"),
        (call("fail", how="exit"), "Error: SystemExit: 3"),
        (call("broken"), "half of a character: ?"),
        (call("wait", seconds=60), "Error: it gave no answer within 0.5 s"),
        (call("hang", seconds=3), "Error: it gave no answer within 0.5 s"),
    ],
)
def test_failed_tool_call_returns_error_to_the_model(wrong, expected):
    first, second = run_calls(wrong, call("multiply", a=2, b=3), tool_timeout_s=0.5)
    assert first.startswith(expected) and second == "6"


def test_unparsable_call_cancels_calls_of_its_turn():
    async def episode(given: dict[str, Any]) -> list[dict[str, str]]:
        async with environment(given) as made:
            messages, _, done = await made.step(
                f"<tool_call>{{'name': 3</tool_call>{call('multiply', a=1, b=2)}"
            )
            assert not done
            return messages

    (message,) = run(episode(arguments()))
    assert message["role"] == "user" and "This tool call cannot be read" in message["content"]
    assert "<tool_call>" in message["content"] and message["content"].endswith(
        "No call of the turn was carried out."
    )


def test_long_results_are_truncated_and_extra_calls_refused():
    long = run_calls(call("flood", characters=5_000_000), tool_characters=1000)[0]
    assert (
        len(long) <= 1000
        and long.startswith("xxx")
        and long.endswith("xxx")
        and "characters left out" in long
    )
    many = run_calls(*[call("multiply", a=2, b=2)] * 500, tool_calls=2, max_characters=40_000)
    assert many[:2] == ["4", "4"] and set(many[2:]) == {
        "Error: the call was not carried out, a turn may have 2"
    }
    shared = run_calls(
        *[call("flood", characters=90_000)] * 4, tool_characters=90_000, max_characters=2_000
    )
    assert all(200 < len(each) < 500 for each in shared)


@pytest.mark.slow
def test_failed_mcp_server_of_episode_is_restarted():
    async def episodes(given: dict[str, Any]) -> None:
        async with environment(given) as one, environment(given) as other:
            assert await tool_results(one, call("count", by=2)) == ["2"] and await tool_results(
                one, call("count", by=3)
            ) == ["5"]
            assert await tool_results(other, call("count", by=1)) == ["1"]
            first, refused = await tool_results(
                one, call("process"), call("refuse", why="the moon")
            )
            assert refused.startswith("Error: ") and "the moon" in refused
            assert "is started again for the next call" in (await tool_results(one, call("die")))[0]
            assert await tool_results(one, call("count", by=1)) == ["1"]
            second = (await tool_results(one, call("process")))[0]
            assert first != second and await tool_results(other, call("count", by=1)) == ["2"]
            assert "Error: " in (await tool_results(other, call("count", by="many")))[0]
            (stalled,) = await tool_results(other, call("stall"))
            assert stalled.startswith(
                "Error: it gave no answer within 5 s; the server is started again"
            )
            assert await tool_results(other, call("count", by=1)) == ["1"]
            long = (await tool_results(one, call("megabytes", count=3)))[0]
            assert len(long) <= 8000 and long.startswith("yyy")
        for process in (first, second):
            assert not Path("/proc", process).exists()

    run(episodes(arguments(mcp=[SERVER])))


@pytest.mark.slow
def test_mcp_server_state_survives_loss_of_worker():
    given = with_listed_tools(settings(mcp=[SERVER]), "qwen")
    pool = EnvironmentPool.from_config(given)
    try:
        pool.start()
        assert (
            pool.reset("0", {"messages": [{"role": "user", "content": "?"}]}, 0)
            .result(60)
            .observation
            == []
        )
        assert "2" in str(pool.step("0", call("count", by=2)).result(60).observation)
        workers = [
            each
            for each in psutil.Process().children()
            if environment_worker.__name__ in each.cmdline()
        ]
        for worker in workers:
            worker.kill()
        assert (
            workers
            and pool.step("0", call("count", by=3)).result(60).observation[0]["content"] == "5"
        )
        assert pool.step("0", "It is 5.").result(60).done
    finally:
        pool.close()
    assert not [
        each for each in psutil.Process().children(recursive=True) if SAMPLES in each.cmdline()
    ]


@pytest.mark.slow
def test_hanging_mcp_server_exits_with_its_parent():
    runs = f"""
import asyncio
from aligner.agents.mcp_servers import McpServer

async def hang():
    server = McpServer({SERVER!r})
    print(await server.call("process", {{}}, 60), flush=True)
    await server.call("stall", {{}}, 60)

asyncio.run(hang())
"""
    process = subprocess.Popen([sys.executable, "-c", runs], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", SAMPLES], env={**os.environ, "PORT": str(port)}
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_mcp_server_is_reached_by_url(url):
    assert [tool.name for tool in list_tools(settings(tools=[], mcp=[url]))][:2] == [
        "count",
        "process",
    ]
    answers = run_calls(call("count", by=2), call("refuse", why="no"), tools=[], mcp=[url])
    assert answers[0] == "2" and answers[1].startswith("Error: ")


def test_failed_restart_of_mcp_server_raises(tmp_path):
    command = tmp_path / "serve"
    command.write_text(f"#!/bin/sh\nexec {SERVER}\n")
    command.chmod(0o755)

    async def episode(given: dict[str, Any]) -> None:
        async with environment(given) as made:
            assert await tool_results(made, call("count", by=2)) == ["2"]
            command.write_text("#!/bin/sh\nexit 3\n")
            await tool_results(made, call("die"))
            with pytest.raises(Exception, match="did not start"):
                await made.step(call("count", by=1))

    run(episode(arguments(tools=[], mcp=[str(command)])))


def test_schemas_describe_functions_and_mcp_tools():
    schemas = tool_schemas(list_tools(settings(mcp=[SERVER])))
    assert schemas is not None and schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    (count,) = (schema["function"] for schema in schemas if schema["function"]["name"] == "count")
    assert (
        count["description"] == "Counts on, by so many."
        and count["parameters"]["properties"]["by"]["type"] == "integer"
    )
    assert tool_schemas(list_tools(EnvironmentConfig())) is None
    assert describe_tools(settings())[0] == f"tool multiply: {SAMPLES}:multiply"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"tools": [f"{SAMPLES}:nothing"]},
            f"environment.tools: {SAMPLES}:nothing: module .* has no attribute 'nothing'",
        ),
        (
            {"tools": [f"{SAMPLES}:undocumented"]},
            "undocumented: cannot derive a tool schema from the function",
        ),
        ({"tools": ["nowhere:f"]}, "No module named 'nowhere'"),
        ({"tools": [f"{SAMPLES}:SAMPLES"]}, "environment.tools"),
        (
            {"mcp": ["no-such-server --now"]},
            "environment.mcp: no-such-server --now: .*command 'no-such-server' not found",
        ),
        ({"mcp": ["false"]}, "environment.mcp: false: listing the server's tools failed"),
        ({"mcp": ["http://127.0.0.1:9/mcp"]}, "listing the server's tools failed"),
        ({"mcp": [SERVER, SERVER]}, "several tools are named"),
    ],
    ids=lambda each: "" if isinstance(each, str) else str(each)[:40],
)
def test_unusable_tool_or_mcp_server_is_refused(given, expected):
    with pytest.raises(ConfigError, match=expected):
        list_tools(settings(**given))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("endless", "list of tools has more than 100 pages; the last nextCursor is '100'"),
        ("same cursor", "list of tools does not end: nextCursor is '1' twice"),
        ("same tool", "the server lists the tool 'look' twice"),
        (
            "list as schema",
            "its answer is invalid: tools.0.inputSchema: Input should be a valid dictionary.*; got"
            " \\['a', 'b'\\]",
        ),
        ("schema of a string", "tools.0.inputSchema.type: Input should be 'object'; got string"),
        (
            "list of properties",
            "tools.0.inputSchema.properties: Input should be a valid dictionary",
        ),
    ],
)
def test_faulty_list_of_mcp_server_is_refused_with_its_name(fault, expected):
    server = f"{sys.executable} -m tests.agents.faulty_mcp_server '{fault}'"
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"environment.mcp: {server}: .*{expected}"):
        list_tools(settings(tools=[], mcp=[server]))
    assert time.monotonic() - started_s < 30


def test_tools_require_chat_template_with_tool_calls():
    with pytest.raises(
        ConfigError, match="chat template does not write tool calls in a supported format"
    ):
        with_listed_tools(settings(), "chatml")
