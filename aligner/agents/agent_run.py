"""An agent of the user's own, run to its end as one call of an environment: a function, or a
command with its own process."""

import asyncio
import inspect
import json
import os
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from aligner.errors import ConfigError
from aligner.user_code import import_object
from aligner.values import callable_place

_BEGIN_S = 30.0


class AgentFailed(Exception):
    """A command ended with another code than 0."""


class AgentRun:
    """An environment whose `reset` is all that an agent does: where it returns, the agent has come
    to its end.

    The agent begins with a key that the endpoint gives for this one attempt, so that what is left
    of one that has failed is answered no more. A function that is not async runs in a thread, which
    nothing can end: it may go on for a while.
    """

    def __init__(self, agent: str | None = None, command: Sequence[str] | None = None) -> None:
        """One of both: `module:function`, or what is executed."""
        self._command = command
        self._function = None if agent is None else _function(agent)

    @staticmethod
    def check(agent: str | None = None, command: Sequence[str] | None = None) -> None:
        """Raise ConfigError, with the reason alone, where there is no such function."""
        if agent is not None:
            _function(agent)

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Run the agent. `task`: the agent's own as `task`, the episode's `url` and its `key`."""
        base_url = f"{task['url']}/v1"
        api_key = await asyncio.to_thread(_begun, task["url"], task["key"])
        if self._function is None:
            await self._commanded(task["task"], base_url, api_key)
        elif inspect.iscoroutinefunction(self._function):
            await self._function(task["task"], base_url, api_key)
        else:
            # A thread of its own: the loop's would be few, and agents wait.
            threads = ThreadPoolExecutor(1)
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(threads, self._function, task["task"], base_url, api_key)
            finally:
                threads.shutdown(wait=False)
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Nothing is asked after the end."""
        return "", 0.0, True

    async def _commanded(self, task: Mapping[str, Any], base_url: str, api_key: str) -> None:
        assert self._command is not None
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        )
        try:
            await process.communicate(json.dumps(task).encode())
        finally:
            if process.returncode is None:
                _kill(process.pid)
                await process.wait()
        if process.returncode:
            raise AgentFailed(f"{' '.join(self._command)} exited with code {process.returncode}")


def _function(name: str) -> Callable[..., Any]:
    place = callable_place(name)
    found = None if place is None else import_object(*place)
    if not callable(found):
        raise ConfigError(f"environment.agent={name}: must be module:function")
    return found


def _begun(url: str, key: str) -> str:
    """Tell the endpoint that the agent begins; the key that it has."""
    request = urllib.request.Request(
        f"{url}/attempts", b"", {"Authorization": f"Bearer {key}"}, method="POST"
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=_BEGIN_S) as answer:
        return str(json.load(answer)["api_key"])


def _kill(process_id: int) -> None:
    """End a process and all that it has started."""
    try:
        process = psutil.Process(process_id)
        for each in [process, *process.children(recursive=True)]:
            each.kill()
    except psutil.NoSuchProcess:
        return
