"""Synchronous client of an external engine, whose own client is asynchronous.

The asynchronous client runs on an event loop in a thread of its own. Every method of `Client`
submits a coroutine to this event loop and waits for the result.
"""

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

# Timeout for cancelling the tasks of an event loop that is being closed, in seconds.
_CLOSE_S = 10.0


@contextlib.contextmanager
def ending_on_failure(name: str, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` if the block raises, and re-raise the error.

    If `end` fails too, the context manager raises AlignerError with both messages instead.

    Args:
        name: Name of the engine, for the error message.
        end: Function that shuts the engine down.
    """
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
    """Event loop that runs in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread, which gets the name `name`."""
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the event loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, what: str, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the event loop, and return its result.

        Args:
            what: Description of the work, for the error message.
            work: Coroutine to run.
            timeout_s: Timeout in seconds; None means no timeout.

        Raises:
            AlignerError: The timeout has passed; the coroutine is cancelled.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            # The coroutine itself raised a timeout error.
            if future.done():
                raise
            future.cancel()
            raise AlignerError(f"{self._name} timed out after {timeout_s:g} s: {what}") from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks of the event loop, and end its thread.

        A blocked event loop cannot be closed. Its thread then ends with the process.
        """
        stopping = self.submit(_cancel_others())
        if stopping not in concurrent.futures.wait([stopping], _CLOSE_S).done:
            return
        stopping.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """Cancel all tasks of the running event loop except the current one."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Client(ABC):
    """Client of one engine instance and its workers.

    The workers end with this process at the latest. Subclasses start the engine in their
    constructor and set `_responder`.
    """

    _responder: Responder

    def __init__(self, name: str, timeout_s: float) -> None:
        """Start the event loop, and register `shutdown` for the exit of this process.

        Args:
            name: Name of the engine, for messages.
            timeout_s: Timeout of a call to the engine, in seconds.
        """
        self._name = name
        self._timeout_s = timeout_s
        # An ExitStack calls all of its callbacks, even if some of them raise.
        self._end = contextlib.ExitStack()
        self._loop = EventLoop(name)
        self._end.callback(self._loop.close)
        atexit.register(self.shutdown)

    def start(self, responses: Sequence[Response]) -> list[Any]:
        """Start the generation of responses.

        Returns:
            One task per response, which is done when the response is complete.
        """
        return self._loop.run(
            "submitting requests", self._responder.start(responses), self._timeout_s
        )

    def cancel(self, responses: Mapping[Any, Response]) -> None:
        """Cancel the generation of responses, which are given by their tasks."""
        self._loop.run("canceling requests", self._responder.cancel(responses), self._timeout_s)

    def wait(self, tasks: Sequence[Any]) -> None:
        """Wait until at least one task is done.

        The method also returns if no task can complete before the next call of `admit`, or after a
        short time, so that the caller can check for new weights.
        """
        self._loop.run("generating", self._responder.wait(tasks))

    def hold(self, *, interrupts: bool) -> None:
        """Pause generation until the next call of `admit`.

        Args:
            interrupts: Whether responses in flight are interrupted; they keep their tokens and
                continue later. Otherwise the method waits until they are complete.
        """
        self._loop.run("pausing generation", self._responder.hold(interrupts=interrupts))

    def interrupt(self) -> None:
        """Interrupt all responses in flight, and let them continue from their tokens.

        After the call, the tokens generated so far are known.
        """
        self._loop.run("interrupting responses", self._responder.interrupt(), self._timeout_s)

    def admit(self, version: int) -> None:
        """Resume generation.

        Args:
            version: Version of the weights, which is recorded for each token generated from now on.
        """
        self._loop.run("resuming generation", self._responder.admit(version), self._timeout_s)

    @abstractmethod
    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load the tensors that the ranks share, or finish a weight update.

        Args:
            handles: Handles of the shared memory; None finishes the update and clears the KV cache.
        """

    @abstractmethod
    def release(self) -> None:
        """Free the memory of the model and of the KV cache, whose contents are lost."""

    @abstractmethod
    def resume(self, *, cache: bool) -> None:
        """Allocate memory again after `release`.

        Args:
            cache: Whether to allocate the memory of the KV cache; otherwise that of the model.
        """

    def shutdown(self) -> None:
        """End the workers and the event loop; further calls have no effect."""
        atexit.unregister(self.shutdown)
        self._end.close()
