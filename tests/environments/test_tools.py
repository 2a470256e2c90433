"""The environment that runs tools: what the model is told of its calls, whatever they do."""

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

from aligner.environments import environment_worker
from aligner.environments.environment_pool import EnvironmentPool
from aligner.environments.tool_catalogue import (
    describe_tools,
    list_tools,
    tool_schemas,
    with_tool_arguments,
)
from aligner.environments.tool_environment import ToolEnvironment
from aligner.errors import ConfigError
from aligner.schema.environment import EnvironmentConfig
from tests.data.chat_models import chat_model
from tests.rounds import bounds_seconds

SAMPLES = "tests.environments.tool_samples"
SERVER = shlex.join(["env", f"PYTHONPATH={Path.cwd()}", sys.executable, "-m", SAMPLES])
FUNCTIONS = [
    f"{SAMPLES}:{name}" for name in ("multiply", "wait", "hang", "fail", "flood", "broken")
]


def settings(**given: Any) -> EnvironmentConfig:
    return EnvironmentConfig(
        **{"target": "tools", "tools": FUNCTIONS, "tool_timeout_s": 5.0} | given
    )


def with_listed(settings: EnvironmentConfig, template: str) -> EnvironmentConfig:
    """With its tools, for a model with such a template."""
    return with_tool_arguments(settings, list_tools(settings), chat_model("bytes", template))


def arguments(**given: Any) -> dict[str, Any]:
    """What the environment is made with."""
    return json.loads(json.dumps(with_listed(settings(**given), "qwen").arguments))


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


async def told(made: ToolEnvironment, *calls: str) -> list[str]:
    """What the model is told of each call."""
    messages, reward, done = await made.step("I ask.\n" + "\n".join(calls))
    assert (reward, done) == (0.0, False) and {message["role"] for message in messages} == {"tool"}
    return [message["content"] for message in messages]


def asked(*calls: str, **given: Any) -> list[str]:
    return run(asked_of(arguments(**given), *calls))


async def asked_of(arguments: dict[str, Any], *calls: str) -> list[str]:
    async with environment(arguments) as made:
        return await told(made, *calls)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 100))


@bounds_seconds
def test_calls_of_a_turn_run_side_by_side_and_each_has_its_message():
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
            # the messages before it: one asked, one said, five told
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
        (call("fail", how="exit"), "Error: SystemExit: 3"),
        (call("broken"), "half of a character: ?"),
        (call("wait", seconds=60), "Error: it gave no answer within 0.5 s"),
        (call("hang", seconds=3), "Error: it gave no answer within 0.5 s"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(wrong, expected):
    first, second = asked(wrong, call("multiply", a=2, b=3), tool_timeout_s=0.5)
    assert first.startswith(expected) and second == "6"


def test_a_call_that_cannot_be_read_is_told_of_and_none_of_its_turn_is_carried_out():
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


def test_megabytes_are_cut_and_further_calls_refused():
    long = asked(call("flood", characters=5_000_000), tool_characters=1000)[0]
    assert (
        len(long) <= 1000
        and long.startswith("xxx")
        and long.endswith("xxx")
        and "characters left out" in long
    )
    many = asked(*[call("multiply", a=2, b=2)] * 500, tool_calls=2, most_characters=40_000)
    assert many[:2] == ["4", "4"] and set(many[2:]) == {
        "Error: the call was not carried out, a turn may have 2"
    }
    shared = asked(
        *[call("flood", characters=90_000)] * 4, tool_characters=90_000, most_characters=2_000
    )
    assert all(200 < len(each) < 500 for each in shared)


@pytest.mark.slow
def test_an_episode_has_its_own_server_which_is_started_again_when_it_dies_or_stalls():
    async def episodes(given: dict[str, Any]) -> None:
        async with environment(given) as one, environment(given) as other:
            assert await told(one, call("count", by=2)) == ["2"] and await told(
                one, call("count", by=3)
            ) == ["5"]
            assert await told(other, call("count", by=1)) == ["1"]
            first, refused = await told(one, call("process"), call("refuse", why="the moon"))
            assert refused.startswith("Error: ") and "the moon" in refused
            assert "is started again for the next call" in (await told(one, call("die")))[0]
            assert await told(one, call("count", by=1)) == ["1"]
            second = (await told(one, call("process")))[0]
            assert first != second and await told(other, call("count", by=1)) == ["2"]
            assert "Error: " in (await told(other, call("count", by="many")))[0]
            (stalled,) = await told(other, call("stall"))
            assert stalled.startswith(
                "Error: it gave no answer within 5 s; the server is started again"
            )
            assert await told(other, call("count", by=1)) == ["1"]
            long = (await told(one, call("megabytes", count=3)))[0]
            assert len(long) <= 8000 and long.startswith("yyy")
        for process in (first, second):
            assert not Path("/proc", process).exists()

    run(episodes(arguments(mcp=[SERVER])))


@pytest.mark.slow
def test_an_episode_goes_on_with_its_servers_state_after_its_process_is_lost():
    given = with_listed(settings(mcp=[SERVER]), "qwen")
    pool = EnvironmentPool.of(given)
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
def test_a_server_that_hangs_ends_with_the_process_that_has_started_it():
    runs = f"""
import asyncio
from aligner.environments.mcp_servers import McpServer

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


def test_a_server_may_be_a_url(url):
    assert [tool.name for tool in list_tools(settings(tools=[], mcp=[url]))][:2] == [
        "count",
        "process",
    ]
    answers = asked(call("count", by=2), call("refuse", why="no"), tools=[], mcp=[url])
    assert answers[0] == "2" and answers[1].startswith("Error: ")


def test_a_server_that_cannot_be_started_again_is_a_failure_of_the_environment(tmp_path):
    command = tmp_path / "serve"
    command.write_text(f"#!/bin/sh\nexec {SERVER}\n")
    command.chmod(0o755)

    async def episode(given: dict[str, Any]) -> None:
        async with environment(given) as made:
            assert await told(made, call("count", by=2)) == ["2"]
            command.write_text("#!/bin/sh\nexit 3\n")
            await told(made, call("die"))
            with pytest.raises(Exception, match="did not start"):
                await made.step(call("count", by=1))

    run(episode(arguments(tools=[], mcp=[str(command)])))


def test_tools_are_told_of_as_the_template_takes_them():
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
def test_a_tool_that_is_not_there_is_refused_by_name(given, expected):
    with pytest.raises(ConfigError, match=expected):
        list_tools(settings(**given))


def test_a_model_whose_template_writes_no_calls_has_no_tools():
    with pytest.raises(
        ConfigError, match="chat template does not write tool calls in a supported format"
    ):
        with_listed(settings(), "chatml")
