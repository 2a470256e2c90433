"""`Replica`: the ranks of a replica, of which the first controls an external program."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from aligner.data import collectives
from aligner.data.collectives import broadcast_json, gather_json
from aligner.engines.external.client import Client
from aligner.errors import AlignerError

T = TypeVar("T")


class Replica:
    """One rank's view of its replica.

    Rank 0 of the replica controls the external program. The program's workers run on the devices of
    all ranks.
    """

    def __init__(self, name: str, rank: int, size: int, group: ProcessGroup | None) -> None:
        """
        Args:
            name: Name of the program, for messages.
            rank: This rank's index in the replica.
            size: Number of ranks in the replica.
            group: The ranks of the replica, in order; None if there is only one.
        """
        self.name = name
        self.rank = rank
        self.size = size
        self._group = group
        self.client: Client | None = None
        """Client of the program, on rank 0 after the program was started; None on other ranks."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank. Collective."""
        if self.size == 1:
            return value
        return broadcast_json(value if self.rank == 0 else None, group=self._group)

    def run_on_client(self, description: str, action: Callable[[Client], T]) -> T:
        """Run `action` with the client on rank 0, and return its result on every rank. Collective.

        See `run_on_rank0` for the arguments and errors.
        """

        def run_with_client() -> T:
            assert self.client is not None
            return action(self.client)

        return self.run_on_rank0(description, run_with_client)

    def run_on_rank0(self, description: str, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, and return its result on every rank. Collective.

        Args:
            description: Description of the action, for the error message.
            action: Function that returns a JSON value.

        Raises:
            AlignerError: The action failed; raised on the ranks other than 0. Rank 0 raises the
                action's own error.
        """
        if self.size == 1:
            return action()
        try:
            result: T = collectives.run_on_rank0(action, self._group)
        except AlignerError as error:
            if self.rank == 0:
                raise
            raise AlignerError(
                f"{description} failed on rank 0 of the replica, which controls {self.name}:"
                f" {error}"
            ) from error
        return result

    def run_on_all_ranks(self, description: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank, and return the results of all ranks on every rank.
        Collective.

        Args:
            description: Description of the action, for the error message.
            action: Function that returns a JSON value.

        Returns:
            The results in rank order.

        Raises:
            AlignerError: The action failed on some ranks, which the message names; raised on every
                rank. A replica of one rank raises the action's own error.
        """
        if self.size == 1:
            return [action()]

        failure: BaseException | None = None
        try:
            local_answer: dict[str, Any] = {"value": action()}
        except Exception as error:
            # This rank must still take part in the collective, where the other ranks wait.
            failure = error
            local_answer = {"error": f"{type(error).__name__}: {error}"}
        answers = gather_json(local_answer, group=self._group)

        failures = [
            f"rank {rank} of the replica: {answer['error']}"
            for rank, answer in enumerate(answers)
            if "error" in answer
        ]
        if failures:
            raise AlignerError(f"{description} failed on " + "; ".join(failures)) from failure
        return [answer["value"] for answer in answers]
