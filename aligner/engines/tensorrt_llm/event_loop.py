"""An event loop for a program that has none: TensorRT-LLM's client is asynchronous, the trainer is not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from aligner.errors import AlignerError

T = TypeVar("T")

_CLOSE_S = 10.0
"""How long a loop that is closed has for cancelling what runs there."""


class EventLoop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, what: str, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `work` there and wait for its result. Raises AlignerError naming `what` when that takes longer."""
        return self.result(what, self.submit(work), timeout_s)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, what: str, future: concurrent.futures.Future[T], timeout_s: float | None) -> T:
        """Wait for work that was started."""
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise AlignerError(f"TensorRT-LLM did not answer within {timeout_s:g} s: {what}") from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs there and end the thread. A loop that is blocked can not be ended: it goes with the process."""
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
