"""The queue of requests that wait for blocks of the KV cache."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from aligner.engines.embedded.decoded_response import DecodedResponse


class WaitingQueue:
    """Requests that wait for blocks, in the order of their admission.

    No method searches the queue: a step may have many more waiting requests than requests in
    flight.
    """

    def __init__(self) -> None:
        # A deque would need a search to remove a request from the middle.
        self._positions: OrderedDict[DecodedResponse, int] = OrderedDict()
        """Requests in their order, with increasing numbers."""
        self._by_sample: dict[tuple[int, int], set[DecodedResponse]] = {}
        """Requests by prompt id and sample index."""
        self._front_position = 0
        """Smallest number so far."""
        self._back_position = 0
        """Largest number so far."""

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[DecodedResponse]:
        return iter(self._positions)

    def extend(self, responses: Iterable[DecodedResponse]) -> None:
        """Add requests at the end, in this order."""
        for response in responses:
            self._back_position += 1
            self._positions[response] = self._back_position
            self._by_sample.setdefault(response.sample_key, set()).add(response)

    def extend_front(self, responses: Iterable[DecodedResponse]) -> None:
        """Add requests at the front, in this order."""
        for response in reversed([*responses]):
            self._front_position -= 1
            self._positions[response] = self._front_position
            self._positions.move_to_end(response, last=False)
            self._by_sample.setdefault(response.sample_key, set()).add(response)

    @property
    def first(self) -> DecodedResponse:
        """The first request; the queue must not be empty."""
        return next(iter(self._positions))

    def find_sample(self, prompt_id: int, sample_index: int) -> list[DecodedResponse]:
        """Return the requests of a sample, in their order."""
        responses = self._by_sample.get((prompt_id, sample_index), ())
        return sorted(responses, key=self._positions.__getitem__)

    def remove(self, response: DecodedResponse) -> None:
        """Remove a request."""
        del self._positions[response]
        responses = self._by_sample[response.sample_key]
        responses.remove(response)
        if not responses:
            del self._by_sample[response.sample_key]

    def clear(self) -> None:
        """Remove all requests."""
        self._positions.clear()
        self._by_sample.clear()
