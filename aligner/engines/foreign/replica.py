"""The ranks of a replica, of which one drives another program's engine, and the responses under way
on them."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from aligner.data.collectives import broadcast_json, gather_json
from aligner.engines.foreign.client import Client
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

    def share(self, value: Any) -> Any:
        """Return the driving rank's JSON value on every rank. Collective."""
        if self.size == 1:
            return value
        return broadcast_json(value if self.rank == 0 else None, group=self._group)

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
