"""Python functions as tools, executed in the process of the environment.

`async` functions run on the environment's loop; each call of a non-async function has its own
thread.
"""

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from aligner.agents.tool_protocol import ToolFailed
from aligner.errors import ConfigError
from aligner.user_code import import_object, report_user_error
from aligner.values import split_callable_name


@dataclass(frozen=True)
class FunctionTool:
    """Tool that calls a function of the user; a result other than a string is returned as JSON."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call the function; see `Tool.call`.

        After the timeout, an `async` function is cancelled; the thread of a non-async function
        continues, and its result is ignored.
        """
        _check_arguments(arguments, self.parameters, self.function)
        answer: str = await run_with_timeout(self._call_function(arguments), timeout_s)
        return answer

    async def _call_function(self, arguments: dict[str, Any]) -> str:
        """Call the function, and return its result as text. Raises ToolFailed if it fails."""
        try:
            if inspect.iscoroutinefunction(self.function):
                answer = await self.function(**arguments)
            else:
                answer = await _run_in_thread(lambda: self.function(**arguments))
            if isinstance(answer, str):
                return answer
            return json.dumps(answer, ensure_ascii=False, default=str)
        # the user's code may raise anything; SystemExit must not end the worker process
        except (Exception, SystemExit) as error:
            # The model gets the exception as the tool's answer; the user sees it on the terminal.
            report_user_error(error)
            raise ToolFailed(f"{type(error).__name__}: {error}") from error


def import_tool_function(name: str) -> Callable[..., Any]:
    """Import the function with the name `module:function`.

    Raises ConfigError, with a message that contains only the reason, if there is no such function
    or the package jsonschema is not installed.
    """
    location = split_callable_name(name)
    if location is None:
        raise ConfigError("must be python or module:function")
    if find_spec("jsonschema") is None:
        raise ConfigError(
            "a function as a tool requires the jsonschema package; install it with"
            " pip install 'aligner[tools]'"
        )
    function = import_object(*location)
    if not inspect.isroutine(function):
        raise ConfigError(
            f"{location[1]!r} is of type {type(function).__name__}; must be a function"
        )
    return function


async def run_with_timeout(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Return the result of a coroutine.

    Raises ToolFailed after the timeout; the coroutine is cancelled, but not awaited.
    """
    # `asyncio.wait_for` would wait until the cancelled coroutine ends, which user code may delay.
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise ToolFailed(f"it gave no answer within {timeout_s:g} s")
        return task.result()
    finally:
        task.cancel()


async def _run_in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a daemon thread, which does not delay the process's exit."""
    loop = asyncio.get_running_loop()
    answer = asyncio.get_running_loop().create_future()
    context = contextvars.copy_context()

    # the loop may have cancelled the future after the timeout
    def set_answer(result: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((result, error))

    def run() -> None:
        """Run the call in this thread, and pass its result or exception to the event loop."""
        result = None
        error = None
        try:
            result = context.run(call)
        except BaseException as raised:  # the awaiting coroutine raises the exception
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_answer, result, error)

    # not an asyncio executor: the interpreter joins its threads at exit
    threading.Thread(target=run, daemon=True).start()
    result, error = await answer
    if error is not None:
        raise error
    return result


def _check_arguments(
    arguments: dict[str, Any], parameters: Mapping[str, Any], function: Callable[..., Any]
) -> None:
    """Raise ToolFailed if the function does not accept the arguments."""
    from jsonschema import Draft202012Validator

    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ToolFailed(f"wrong arguments: {error}") from error
    problems = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(parameters).iter_errors(arguments)
    ]
    if problems:
        raise ToolFailed(f"wrong arguments: {'; '.join(problems)}")
