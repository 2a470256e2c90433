"""A program's engine, seen from one that is not asynchronous: every call here waits for its
answer."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from aligner.engines.foreign.responses import Responder, Response
from aligner.errors import AlignerError

T = TypeVar("T")

_CLOSE_S = 10.0
"""How long a loop that is closed has for cancelling what runs there."""


@contextlib.contextmanager
def ending_on_failure(name: str, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` when the block raises; when that fails too, the error tells both."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as failure:
            raise AlignerError(
                f"{error}; the shutdown of {name} failed as well: {failure}"
            ) from error
        raise


class EventLoop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, what: str, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `work` there and wait for its result. Raises AlignerError naming `what` when that
        takes longer."""
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise AlignerError(f"{self._name} timed out after {timeout_s:g} s: {what}") from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs there and end the thread. A loop that is blocked can not be ended: it
        goes with the process."""
        stopping = self.submit(_cancel_others())
        if stopping not in concurrent.futures.wait([stopping], _CLOSE_S).done:
            return
        stopping.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Client(ABC):
    """One instance of the engine and its workers, which end with this process if not before."""

    _responder: Responder

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name` is the engine's, for messages; an answer may take `timeout_s`."""
        self._name, self._timeout_s = name, timeout_s
        self._end = contextlib.ExitStack()  # all of it is tried, whatever fails of it
        self._loop = EventLoop(name)
        self._end.callback(self._loop.close)
        atexit.register(self.shutdown)

    def start(self, responses: Sequence[Response]) -> list[Any]:
        """One task for each response, done when it is complete."""
        return self._loop.run(
            "submitting requests", self._responder.start(responses), self._timeout_s
        )

    def cancel(self, responses: Mapping[Any, Response]) -> None:
        """Drop responses, by their tasks."""
        self._loop.run("canceling requests", self._responder.cancel(responses), self._timeout_s)

    def wait(self, tasks: Sequence[Any]) -> None:
        """Return when a task is done, when none can be, or after a moment, in which weights may
        come."""
        self._loop.run("generating", self._responder.wait(tasks))

    def hold(self, *, interrupts: bool) -> None:
        """Let responses be finished or interrupted; none goes on until `admit`."""
        self._loop.run("pausing generation", self._responder.hold(interrupts=interrupts))

    def interrupt(self) -> None:
        """Have responses under way stop where they are and go on from there, so that what was drawn
        of them is known."""
        self._loop.run("interrupting responses", self._responder.interrupt(), self._timeout_s)

    def admit(self, version: int) -> None:
        """Responses go on; `version` stamps the tokens that they draw."""
        self._loop.run("resuming generation", self._responder.admit(version), self._timeout_s)

    @abstractmethod
    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load the tensors that the ranks share by these handles; None ends an update and forgets
        keys and values."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory of the model and of keys and values, which are forgotten."""

    @abstractmethod
    def resume(self, *, cache: bool) -> None:
        """Take back the memory of keys and values, or the model's."""

    def shutdown(self) -> None:
        """End the workers; once is enough."""
        atexit.unregister(self.shutdown)
        self._end.close()
