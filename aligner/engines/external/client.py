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

from aligner.engines.engine_protocol import ScoringRequest
from aligner.engines.external.responses import Response, ResponseGenerator
from aligner.errors import AlignerError

T = TypeVar("T")

# Timeout for cancelling the tasks of an event loop that is being closed, in seconds.
_CLOSE_TIMEOUT_S = 10.0


@contextlib.contextmanager
def shut_down_on_failure(name: str, shut_down: Callable[[], None]) -> Iterator[None]:
    """Call `shut_down` if the block raises, and re-raise the error.

    If `shut_down` fails too, the context manager raises AlignerError with both messages instead.

    Args:
        name: Name of the engine, for the error message.
        shut_down: Function that shuts the engine down.
    """
    try:
        yield
    # Also on KeyboardInterrupt: a start takes minutes, and workers that nobody stops would keep
    # their GPUs.
    except BaseException as error:
        try:
            shut_down()
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
        # A daemon thread: a blocked event loop must not keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the event loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self, description: str, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None
    ) -> T:
        """Run a coroutine on the event loop, and return its result.

        Args:
            description: Description of the work, for the error message.
            coroutine: Coroutine to run.
            timeout_s: Timeout in seconds; None means no timeout.

        Raises:
            AlignerError: The timeout has passed; the coroutine is cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            # The coroutine itself raised a timeout error.
            if future.done():
                raise

            future.cancel()
            raise AlignerError(
                f"{self._name} timed out after {timeout_s:g} s: {description}"
            ) from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks of the event loop, and end its thread.

        A blocked event loop cannot be closed. Its thread then ends with the process.
        """
        cancellation = self.submit(_cancel_other_tasks())
        # `wait` instead of `result(timeout)`: only a blocked event loop returns here, while an
        # error of the cancellation is raised below.
        if cancellation not in concurrent.futures.wait([cancellation], _CLOSE_TIMEOUT_S).done:
            return
        cancellation.result()

        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_other_tasks() -> None:
    """Cancel all tasks of the running event loop except the current one."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Client(ABC):
    """Client of one engine instance and its workers.

    The workers end with this process at the latest. Subclasses start the engine in their
    constructor and set `_response_generator`.
    """

    _response_generator: ResponseGenerator

    def __init__(self, name: str, timeout_s: float) -> None:
        """Start the event loop, and register `shutdown` for the exit of this process.

        Args:
            name: Name of the engine, for messages.
            timeout_s: Timeout of a call to the engine, in seconds.
        """
        self._name = name
        self._timeout_s = timeout_s
        # An ExitStack calls all of its callbacks, even if some of them raise, and the last one
        # first: the event loop closes after the engine whose calls run on it.
        self._exit_stack = contextlib.ExitStack()
        self._loop = EventLoop(name)
        self._exit_stack.callback(self._loop.close)
        atexit.register(self.shutdown)

    def start(self, responses: Sequence[Response], on_done: Callable[[], None]) -> list[Any]:
        """Start the generation of responses.

        Args:
            responses: The responses.
            on_done: Called in another thread each time that a response is complete.

        Returns:
            One task per response, which is done when the response is complete.
        """
        return self._loop.run(
            "submitting requests",
            self._response_generator.start(responses, on_done),
            self._timeout_s,
        )

    def start_scoring(
        self, requests: Sequence[ScoringRequest], on_done: Callable[[], None]
    ) -> list[Any]:
        """Start to score sequences.

        Args:
            requests: The requests.
            on_done: Called in another thread each time that scores are complete.

        Returns:
            One task per request, whose result is the scores.
        """
        return self._loop.run(
            "submitting requests",
            self._response_generator.start_scoring(requests, on_done),
            self._timeout_s,
        )

    def cancel(self, responses: Mapping[Any, Response]) -> None:
        """Cancel the generation of responses, which are given by their tasks."""
        self._loop.run(
            "canceling requests", self._response_generator.cancel(responses), self._timeout_s
        )

    def check_progress(self) -> None:
        """Raise AlignerError if no response has gained a token within the engine's timeout."""
        self._response_generator.check_progress()

    def pause_generation(self, *, interrupt_responses: bool) -> None:
        """Pause generation until the next call of `resume_generation`.

        Args:
            interrupt_responses: Whether responses in flight are interrupted; they keep their
                tokens and continue later. Otherwise the method waits until they are complete.
        """
        # No timeout here: the responses may take any time to complete, as long as tokens arrive.
        self._loop.run(
            "pausing generation",
            self._response_generator.pause_generation(interrupt_responses=interrupt_responses),
        )

    def interrupt(self) -> None:
        """Interrupt all responses in flight, and let them continue from their tokens.

        After the call, the tokens generated so far are known.
        """
        self._loop.run(
            "interrupting responses", self._response_generator.interrupt(), self._timeout_s
        )

    def resume_generation(self, version: int) -> None:
        """Resume generation.

        Args:
            version: Version of the weights, which is recorded for each token generated from now on.
        """
        self._loop.run(
            "resuming generation",
            self._response_generator.resume_generation(version),
            self._timeout_s,
        )

    @abstractmethod
    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load the tensors that the ranks share, or finish a weight update.

        Args:
            handles: Handles of the shared memory; None finishes the update and clears the KV cache.
        """

    def find_wrong_weights(self) -> list[str]:
        """Return the tensors of the last update that the workers' parameters do not contain.

        Empty for a program whose parameters cannot be read back.
        """
        return []

    def find_changed_weights(self) -> list[str]:
        """Return the workers' parameters that have changed since `find_wrong_weights`; empty for a
        program whose parameters cannot be read back."""
        return []

    @abstractmethod
    def release_memory(self) -> None:
        """Free the memory of the model and of the KV cache, whose contents are lost."""

    @abstractmethod
    def resume_memory(self, *, cache: bool) -> None:
        """Allocate memory again after `release_memory`.

        Args:
            cache: Whether to allocate the memory of the KV cache; otherwise that of the model.
        """

    def shutdown(self) -> None:
        """End the workers and the event loop; further calls have no effect."""
        atexit.unregister(self.shutdown)
        self._exit_stack.close()
