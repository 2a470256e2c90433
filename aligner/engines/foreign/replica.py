"""The ranks of a replica, of which one drives another program's engine, and the responses under way
on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from aligner.data.collectives import broadcast_json, gather_json
from aligner.data.types import Sample
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.foreign.client import Client
from aligner.engines.foreign.responses import Response
from aligner.errors import AlignerError

T = TypeVar("T")


class Replica:
    """This rank's place among a replica's: the first drives the engine's program, the others'
    devices take part in it."""

    def __init__(self, name: str, rank: int, size: int, group: ProcessGroup | None) -> None:
        """`rank` of `size`; `group` holds them in order (None: there is one); `name` is the
        program's, for messages."""
        self.name, self.rank, self.size, self._group = name, rank, size, group
        self.client: Client | None = None
        """The driving rank's, once the program has been started."""

    def drive(self, what: str, action: Callable[[Client], T]) -> T:
        """`lead` with what the driving rank asks of the program. Collective."""

        def act() -> T:
            assert self.client is not None
            return action(self.client)

        return self.lead(what, act)

    def lead(self, what: str, action: Callable[[], T]) -> T:
        """What the driving rank's action returns, a JSON value, on every rank. Collective.

        Raises AlignerError on every rank when it fails, and what it raised on the driving rank.
        """
        if self.rank > 0:
            answer = broadcast_json(None, group=self._group)
            if "error" in answer:
                raise AlignerError(
                    f"{what} failed on rank 0 of the replica, which controls {self.name}:"
                    f" {answer['error']}"
                )
            result: T = answer["value"]
            return result
        try:
            value = action()
        except BaseException as error:
            if self.size > 1:
                broadcast_json({"error": f"{type(error).__name__}: {error}"}, group=self._group)
            raise
        if self.size > 1:
            broadcast_json({"value": value}, group=self._group)
        return value

    def gather(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. Collective.

        Raises AlignerError on every rank, naming the ranks that failed, when any does.
        """
        if self.size == 1:
            return [action()]
        failure: BaseException | None = None
        try:
            mine: dict[str, Any] = {"value": action()}
        except Exception as error:
            failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
        answers = gather_json(mine, group=self._group)
        if failed := [
            f"rank {rank} of the replica: {answer['error']}"
            for rank, answer in enumerate(answers)
            if "error" in answer
        ]:
            raise AlignerError(f"{what} failed on " + "; ".join(failed)) from failure
        return [answer["value"] for answer in answers]


class ReplicaGeneration:
    """A `Generation`: the same on every rank of the replica."""

    def __init__(
        self,
        replica: Replica,
        check_weights: Callable[[], None],
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
    ) -> None:
        """`check_weights` raises when there are none. Collective over the replica."""
        self._replica, self._check_weights = replica, check_weights
        responses = {
            place: Response(request, request.limit(options))
            for place, request in enumerate(requests)
        }
        for response in responses.values():
            response.take_begun(options)
        self._between_turns = {
            place: response for place, response in responses.items() if response.request.waits
        }
        self._open = {
            place: response for place, response in responses.items() if not response.request.waits
        }
        self._tasks: dict[int, Any] = {}
        self._options = options
        self._start(self._open)

    def _start(self, responses: Mapping[int, Response]) -> None:
        def start(client: Client) -> None:
            tasks = client.start(list(responses.values()), self._options)
            self._tasks |= dict(zip(responses, tasks, strict=True))

        self._replica.drive("starting responses", start)

    @property
    def done(self) -> bool:
        """Whether every response is complete, and given out."""
        return not self._open

    def step(self) -> list[tuple[int, Sample]]:
        """Wait a moment for responses; may return none.

        Raises AlignerError when none is complete and the engine has no weights to go on with.
        """
        if self.done:
            return []
        samples = []
        for place, *drawn in self._replica.drive("generating", self._wait):
            response = self._open.pop(place)
            response.tokens, response.logprobs, response.versions, response.finish_reason = drawn
            samples.append((place, response.sample()))
            if response.request.turn_tokens is not None:
                self._between_turns[place] = response
        return samples

    def go_on(self, place: int, tokens: Sequence[int]) -> None:
        """Have a complete response take a further turn; the engine's own reuse finds what it has
        run of it.

        Raises AlignerError where no room is left for a token to be drawn.
        """
        response = self._between_turns[place]
        response.give(tokens)
        self._open[place] = self._between_turns.pop(place)
        self._start({place: response})

    def add(self, request: GenerationRequest) -> int:
        """Refused: its random numbers could not be an episode's own."""
        raise AlignerError(
            f"{self._replica.name}: episode branches are not supported (prompt"
            f" {request.prompt.id}); set engine.kind=embedded"
        )

    def leave(self, place: int) -> None:
        """A complete response will not be told to go on."""
        del self._between_turns[place]

    def unfinished(self) -> list[tuple[int, Sample]]:
        """The responses that are not complete, with what was drawn of them so far; they can go on
        from there."""

        def interrupt(client: Client) -> list[list[Any]]:
            client.interrupt()
            return [
                [place, each.tokens, each.logprobs, each.versions]
                for place, each in self._open.items()
            ]

        found = []
        for place, *drawn in self._replica.drive("interrupting responses", interrupt):
            response = self._open[place]
            response.tokens, response.logprobs, response.versions = drawn
            found.append((place, response.sample()))
        return found

    def cancel(self) -> None:
        """Drop what is not complete."""

        def cancel(client: Client) -> None:
            client.cancel({task: self._open[place] for place, task in self._tasks.items()})

        if not self.done:
            self._replica.drive("canceling responses", cancel)
        self._tasks.clear()
        self._open.clear()
        self._between_turns.clear()

    def _wait(self, client: Client) -> list[list[Any]]:
        if not any(task.done() for task in self._tasks.values()):
            self._check_weights()
            client.wait(list(self._tasks.values()))
        answers = []
        for place in [place for place, task in self._tasks.items() if task.done()]:
            self._tasks.pop(place).result()
            response = self._open[place]
            answers.append(
                [
                    place,
                    response.tokens,
                    response.logprobs,
                    response.versions,
                    response.finish_reason,
                ]
            )
        return answers
