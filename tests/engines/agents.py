"""Agents that only know OpenAI's client, as users have them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def client(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)


def log(task: dict[str, Any], entry: dict[str, Any]) -> None:
    """Note what the agent got, where its test wants to know."""
    if "log" in task:
        with open(task["log"], "a") as file:  # noqa: PTH123  (an agent as users write them)
            file.write(json.dumps({"task": task["at"], **entry}) + "\n")


async def reward(base_url: str, api_key: str, value: float) -> None:
    own = client(base_url, api_key)
    await own.post("/reward", body={"reward": value}, cast_to=object)


async def looks(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Answers calls of its tool, three times at most."""
    own = client(base_url, api_key)
    messages: list[Any] = [{"role": "user", "content": task["asked"]}]
    for turn in range(3):
        found = await own.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, logprobs=True, temperature=0.3
        )
        choice = found.choices[0]
        log(
            task,
            {
                "text": choice.message.content,
                "logprobs": [each.logprob for each in choice.logprobs.content],
            },
        )
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or []:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": f"saw {call.function.arguments}",
                }
            )
        if not choice.message.tool_calls:
            messages.append({"role": "user", "content": f"and {turn}?"})
    await reward(base_url, api_key, 0.5)


async def branches(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Asks in parallel, in an order that `task` says, and goes on from both."""
    own = client(base_url, api_key)
    first = [{"role": "user", "content": task["asked"]}]

    async def one(at: int, messages: list[Any], n: int = 1) -> Any:
        await asyncio.sleep(0.15 * (at if task.get("forwards", True) else 2 - at))
        return await own.chat.completions.create(model="any", messages=messages, n=n)

    said = (await one(0, first)).choices[0].message
    behind = [*first, {"role": "assistant", "content": said.content}]
    asked = [[*behind, {"role": "user", "content": f"so {at}?"}] for at in range(3)]
    found = await asyncio.gather(*(one(at, asked[at], n=1 + (at == 1)) for at in range(3)))
    last = found[2].choices[0].message.content
    await one(
        0, [*asked[2], {"role": "assistant", "content": last}, {"role": "user", "content": "end"}]
    )


def steps(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """One request after another, of which each is a list of messages or a text; not async."""
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)
    for asked in task["requests"]:
        if isinstance(asked, str):
            own.completions.create(model="any", prompt=asked, **task.get("with", {}))
        else:
            own.chat.completions.create(model="any", messages=asked, **task.get("with", {}))


async def misbehaves(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """In the way that its task says."""
    own, asked = client(base_url, api_key), [{"role": "user", "content": task["asked"]}]
    if task["how"] == "silent":
        return
    await own.chat.completions.create(model="any", messages=asked)
    if task["how"] == "raises":
        raise RuntimeError("the lights are out")
    if task["how"] == "dies":
        os._exit(3)
    if task["how"] == "hangs":
        await asyncio.sleep(1000)
    if task["how"] == "computes":
        time.sleep(1000)  # it keeps the loop to itself
    if task["how"] == "recovers":
        if not os.path.exists(task["mark"]):  # noqa: PTH110
            open(task["mark"], "w").close()  # noqa: PTH123
            raise RuntimeError("the first time alone")
        return
    if task["how"] == "endless":
        while True:
            await own.chat.completions.create(model="any", messages=asked)
    if task["how"] == "overflows":
        for _ in range(3):
            asked += [{"role": "user", "content": "x" * 500}]
            found = await own.chat.completions.create(model="any", messages=asked)
            log(
                task,
                {
                    "text": found.choices[0].message.content,
                    "finish": found.choices[0].finish_reason,
                },
            )


async def rewrites(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Sends what it got back with the arguments of calls in another form."""
    own, messages = client(base_url, api_key), [{"role": "user", "content": task["asked"]}]
    found = await own.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    said = found.choices[0].message.model_dump(exclude_none=True)
    for call in said.get("tool_calls", []):
        call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "saw"}]
    await own.chat.completions.create(model="any", messages=messages, tools=TOOLS)


async def calculates(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Works out what the policy asks for in brackets, and rewards the right answer."""
    own, text = AsyncOpenAI(base_url=base_url, api_key=api_key), task["prompt"]
    for _ in range(2):
        said = (await own.completions.create(model="policy", prompt=text, stop="]")).choices[0].text
        if "[" not in said:
            break
        asked = re.fullmatch(r"\[(\d{1,4})\*(\d{1,4})", said)
        text += said + (f"]{int(asked[1]) * int(asked[2])};" if asked else "]?;")
    await own.post("/reward", body={"reward": float(said == task["answer"])}, cast_to=object)


async def calculates_slowly(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """The same, so that whatever is killed has episodes under way."""
    await asyncio.sleep(0.1)
    await calculates(task, base_url, api_key)


def main() -> None:
    """The command: a loop with a tool, of the plain client."""
    task, own = json.load(sys.stdin), OpenAI(max_retries=0)
    messages: list[Any] = [{"role": "user", "content": task["asked"]}]
    for _ in range(2):
        message = (
            own.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            .choices[0]
            .message
        )
        messages.append(message.model_dump())
        for call in message.tool_calls or []:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": f"saw {call.function.arguments}",
                }
            )
        if not message.tool_calls:
            messages.append({"role": "user", "content": "and?"})


if __name__ == "__main__":
    main()
