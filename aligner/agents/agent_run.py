"""Environment that runs a user's agent, a function or a command, as one call of `reset`."""

import asyncio
import functools
import inspect
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from aligner.agents.episode_identity import EpisodeIdentity
from aligner.agents.failures import INFRASTRUCTURE_EXIT_CODE, InfrastructureError
from aligner.errors import ConfigError
from aligner.user_code import import_object
from aligner.values import split_callable_name

# timeout in seconds of the request that starts an attempt
_START_TIMEOUT_S = 30.0


class AgentFailed(Exception):
    """The command of an agent exited with a code other than 0 and `INFRASTRUCTURE_EXIT_CODE`."""


class AgentRun:
    """Environment whose `reset` runs an agent, and returns when the agent has ended.

    The endpoint issues a new API key for each attempt, so that requests of a failed attempt are
    rejected. A function that is not async runs in a thread, which cannot be stopped: it may
    continue for a while after the episode has ended.
    """

    def __init__(self, agent: str | None = None, command: Sequence[str] | None = None) -> None:
        """Create an agent from exactly one of `agent`, `module:function`, and `command`."""
        self._command = command
        self._function = None if agent is None else _import_function(agent)

    @staticmethod
    def check(agent: str | None = None, command: Sequence[str] | None = None) -> None:
        """Raise ConfigError, with only the reason as message, if the function does not exist."""
        if agent is not None:
            _import_function(agent)

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Run the agent to its end.

        Args:
            task: The agent's task in the field `task`, the episode's `url`, the `key` that
                authorizes the start of an attempt, `prompt_id` and `sample_index`.
            seed: Seed of the episode.

        Raises:
            AgentFailed: The command exited with a code other than 0.
            InfrastructureError: The attempt could not start, or the command has reported an
                infrastructure failure by its exit code.
            Exception: Any exception that the agent's function raises.
        """
        base_url = f"{task['url']}/v1"
        identity = EpisodeIdentity(seed, task["prompt_id"], task["sample_index"])
        try:
            api_key = await asyncio.to_thread(_start_attempt, task["url"], task["key"])
        except OSError as error:  # includes urllib's errors
            raise InfrastructureError(f"the attempt could not start: {error}") from error
        if self._function is None:
            await self._run_command(task["task"], base_url, api_key, identity)
            return ""
        function = functools.partial(self._function, **identity.select_arguments(self._function))
        if inspect.iscoroutinefunction(self._function):
            await function(task["task"], base_url, api_key)
        else:
            # Each agent has its own thread, because agents would block the few threads of the
            # loop's pool.
            threads = ThreadPoolExecutor(1)
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(threads, function, task["task"], base_url, api_key)
            finally:
                threads.shutdown(wait=False)
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Return an answer that ends the episode; the pool never calls this method."""
        return "", 0.0, True

    async def _run_command(
        self, task: Mapping[str, Any], base_url: str, api_key: str, identity: EpisodeIdentity
    ) -> None:
        """Run the command with the task as JSON on its stdin.

        Kills the command, with its child processes, if the call is cancelled. Raises AgentFailed or
        InfrastructureError; see `reset`.
        """
        assert self._command is not None
        # the clients of OpenAI and Anthropic read their defaults from these environment variables
        environment = os.environ | {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            # Anthropic's client appends /v1 itself
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            **identity.build_environment_variables(),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, env=environment
            )
        except OSError as error:
            raise InfrastructureError(
                f"environment.agent_command: {self._command[0]} could not start: {error}"
            ) from error
        try:
            await process.communicate(json.dumps(task).encode())
        finally:
            # it still runs if the call was cancelled by a timeout or the end of the episode
            if process.returncode is None:
                _kill(process.pid)
                await process.wait()
        if process.returncode:
            reason = f"{' '.join(self._command)} exited with code {process.returncode}"
            if process.returncode in (INFRASTRUCTURE_EXIT_CODE, -signal.SIGKILL):
                raise InfrastructureError(reason)
            raise AgentFailed(reason)


def _import_function(name: str) -> Callable[..., Any]:
    """Import the agent's function. Raises ConfigError if `name` is not the name of a function."""
    location = split_callable_name(name)
    function = None
    if location is not None:
        function = import_object(*location)
    if not callable(function):
        raise ConfigError(f"environment.agent={name}: must be module:function")
    return function


def _start_attempt(url: str, key: str) -> str:
    """Report the start of an attempt to the endpoint; return the API key of the attempt."""
    request = urllib.request.Request(
        f"{url}/attempts", b"", {"Authorization": f"Bearer {key}"}, method="POST"
    )
    # the endpoint belongs to the run, so a proxy of the environment variables must not be used
    direct_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct_opener.open(request, timeout=_START_TIMEOUT_S) as response:
        return str(json.load(response)["api_key"])


def _kill(process_id: int) -> None:
    """Kill a process and all of its descendants."""
    try:
        process = psutil.Process(process_id)
        for member in [process, *process.children(recursive=True)]:
            member.kill()
    except psutil.NoSuchProcess:
        return
