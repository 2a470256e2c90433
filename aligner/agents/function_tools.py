"""Python functions as tools, in the process that asks: `async` ones on its loop, others each in a
thread."""

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
from aligner.user_code import import_object
from aligner.values import callable_place


@dataclass(frozen=True)
class FunctionTool:
    """A function of the user's; what it returns is told as it is if it is a text, and as JSON
    else."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """As `Tool.call`. An `async` function that is late is cancelled; the thread of another one
        goes on, unheard."""
        _check(arguments, self.parameters, self.function)
        answer: str = await within(self._answer(arguments), timeout_s)
        return answer

    async def _answer(self, arguments: dict[str, Any]) -> str:
        try:
            if inspect.iscoroutinefunction(self.function):
                answer = await self.function(**arguments)
            else:
                answer = await _in_thread(lambda: self.function(**arguments))
            return (
                answer
                if isinstance(answer, str)
                else json.dumps(answer, ensure_ascii=False, default=str)
            )
        # the function is the user's, and fails in its own ways
        except (Exception, SystemExit) as error:
            raise ToolFailed(f"{type(error).__name__}: {error}") from error


def tool_function(place: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises ConfigError, with the reason alone, where
    there is none."""
    named = callable_place(place)
    if named is None:
        raise ConfigError("must be python or module:function")
    if find_spec("jsonschema") is None:
        raise ConfigError(
            "a function as a tool requires the jsonschema package; install it with"
            " pip install 'aligner[tools]'"
        )
    found = import_object(*named)
    if not inspect.isroutine(found):
        raise ConfigError(f"{named[1]!r} is of type {type(found).__name__}; must be a function")
    return found


async def within(work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """What a coroutine returns. Raises ToolFailed once it is late: it is cancelled, and not waited
    for."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise ToolFailed(f"it gave no answer within {timeout_s:g} s")
        return task.result()
    finally:
        task.cancel()


async def _in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns, in a thread that the process does not wait for when it ends."""
    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    context = contextvars.copy_context()

    def told(result: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except BaseException as raised:  # for who waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told, result, error)

    threading.Thread(target=work, daemon=True).start()
    result, error = await answer
    if error is not None:
        raise error
    return result


def _check(
    arguments: dict[str, Any], parameters: Mapping[str, Any], function: Callable[..., Any]
) -> None:
    """Raises ToolFailed for arguments that the function does not take."""
    from jsonschema import Draft202012Validator

    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ToolFailed(f"wrong arguments: {error}") from error
    wrong = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(parameters).iter_errors(arguments)
    ]
    if wrong:
        raise ToolFailed(f"wrong arguments: {'; '.join(wrong)}")
