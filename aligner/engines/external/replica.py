"""`Replica`: the ranks of a replica, of which the first controls an external program."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from aligner.data import collectives
from aligner.data.collectives import broadcast_json, gather_json
from aligner.engines.external.client import Client
from aligner.errors import AlignerError, EngineExited

T = TypeVar("T")

_MAX_RESTARTS = 3
"""Number of restarts of the program in the life of this process. A program that exits more often
ends the process, so that the launcher's limits and reports apply."""


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
        self._client: Client | None = None
        self._create_client: Callable[[], Client]
        """Starts the program; set by `start_client`."""
        self._restart: Future[Client] | None = None
        """A restart of the program in the background; None if none is in progress."""
        self._restart_count = 0

    @property
    def client(self) -> Client | None:
        """Client of the program, on rank 0 after the program was started; None on other ranks.

        Waits for a restart of the program. Raises AlignerError if the restart has failed.
        """
        if self._restart is not None:
            restart = self._restart
            self._restart = None
            self._client = None
            self._client = restart.result()
        return self._client

    def start_client(
        self,
        create_client: Callable[[], Client],
        start_on_others: Callable[[], None] | None = None,
    ) -> None:
        """Start the program. Collective.

        Args:
            create_client: Starts the program on rank 0, and returns its client.
            start_on_others: Function that the other ranks call at the same time; None: nothing.

        Raises:
            AlignerError: A function failed; raised on every rank.
        """
        self._create_client = create_client

        def start() -> None:
            if self.rank == 0:
                self._client = create_client()
            elif start_on_others is not None:
                start_on_others()

        description = f"starting {self.name}"
        if start_on_others is None:
            self.run_on_rank0(description, start)
        else:
            self.run_on_all_ranks(description, start)

    def restart_client(self) -> None:
        """Start the program again in the background, after it has exited. Every rank calls this.

        Raises EngineExited if it has exited too often.
        """
        self._restart_count += 1
        if self._restart_count > _MAX_RESTARTS:
            raise EngineExited(f"{self.name} has exited {self._restart_count} times")
        if self.rank != 0:
            return
        exited_client = self.client
        assert exited_client is not None, "a program that has exited was started before"

        def restart() -> Client:
            # Some processes of the program may still run.
            exited_client.shutdown()
            return self._create_client()

        executor = ThreadPoolExecutor(1, thread_name_prefix=f"restart of {self.name}")
        self._restart = executor.submit(restart)
        executor.shutdown(wait=False)

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
