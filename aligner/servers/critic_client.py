"""The trainer's side of the critic: values and updates in the order of the calls, each update
applied exactly once."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from aligner.placement.addresses import Access, Endpoint
from aligner.servers.connection import Connection, RemoteError, TransportError
from aligner.servers.critic_recovery import CriticRecovery, for_instance
from aligner.servers.critic_updates import INITIAL, CriticState, RunId, UpdateJournal
from aligner.servers.remote_client import RemoteClient, RemoteFuture, scores_in
from aligner.servers.wire_protocol import (
    CRITIC_INFER,
    CRITIC_INFER_WITH_REWARD,
    CRITIC_TRAIN,
    EndpointSpec,
    array_text,
)

T = TypeVar("T")


class CriticClient(RemoteClient):
    """The critic, which computes in the order of the calls: values follow the updates asked for
    before them, and come before those asked for after them.

    Updates are numbered and written to the journal before they are sent. A critic that was started
    anew is brought back first, as `CriticRecovery` does it. Whoever waits for an answer notices
    nothing but the time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        access: Access,
        timeout_s: float,
        run: RunId,
        journal: UpdateJournal,
        max_batch_size: int,
    ) -> None:
        """`run` is the trainer that speaks; `timeout_s` is a request's deadline, retries and the
        critic's restart included.

        Each step of bringing the critic back, a restore or a replayed update, has a deadline of its
        own.
        """
        super().__init__("critic", [endpoint], access, timeout_s, max_batch_size)
        self._journal = journal
        self._recovery = CriticRecovery(run, journal, timeout_s)
        self._updates = 0  # asked for
        self._before_update: list[Future[Any]] = []  # what was asked for since the last update
        self._last_update: Future[Any] | None = None
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="critic-updates")

    def start(self, bases: Sequence[CriticState] = (INITIAL,)) -> None:
        """Bring the critic to the last of these states, from an earlier one and the journal where
        it has to be.

        Raises AlignerError when that cannot be done: the critic belongs to another run, or its
        checkpoint to another step.
        """
        self._updates = bases[-1].updates
        self._recovery.start(bases)
        self._followed(lambda connection, left, instance: None)
        self.keep(bases)  # not before: what a start that failed has left there may repair it

    def values(self, tokens: Tensor, lengths: Tensor) -> RemoteFuture[Tensor]:
        """float32 [B, S] of right-padded tokens int64 [B, S] and lengths int64 [B]; 0 beyond the
        longest sequence."""
        return self._ask(CRITIC_INFER, tokens, lengths)["values"]

    def values_and_scores(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RemoteFuture[Tensor], RemoteFuture[Tensor]]:
        """As `values`, and scores as `scores_in` has them, of a critic that serves the reward too;
        one request for both."""
        answers = self._ask(CRITIC_INFER_WITH_REWARD, tokens, lengths, prompt_lengths, metadata)
        return answers["values"], answers["rewards"]

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> RemoteFuture[dict[str, float]]:
        """One optimizer step on tokens int64 [B, S] and [B, S-1] targets; the server's
        statistics."""
        arrays = {
            "tokens": tokens.contiguous().numpy(),
            "returns": returns.float().contiguous().numpy(),
            "prev_values": old_values.float().contiguous().numpy(),
            "mask": mask.float().contiguous().numpy(),
        }
        number, earlier = self._updates, self._before_update
        self._updates, self._before_update = number + 1, []
        future = self._future(self._ordered, self._train, number, arrays, earlier)
        self._last_update = future
        return future

    def begin_checkpoint(self, step: int) -> CriticState:
        """Begin to save the critic as it is after the updates asked for so far; further requests
        may follow at once."""
        if self._last_update is not None:
            wait([self._last_update])
        saving = CriticState(step, self._updates)
        self._recovery.expect_checkpoint(saving)
        self._followed(self._recovery.begin_checkpoint)
        return saving

    def finish_checkpoint(self) -> None:
        """Return when the checkpoint that was begun is complete, made again if the critic was lost
        meanwhile."""
        self._followed(self._recovery.finish_checkpoint)

    def keep(self, bases: Sequence[CriticState]) -> None:
        """Bring a lost critic back from these states from now on, newest last; forget the updates
        before them."""
        self._recovery.keep(bases, self._updates)

    def close(self) -> None:
        """See `RemoteClient`."""
        super().close()
        self._ordered.shutdown()

    def _ask(
        self, endpoint: EndpointSpec, tokens: Tensor, lengths: Tensor, *responses: Any
    ) -> dict[str, RemoteFuture[Tensor]]:
        """The endpoint's outputs for these rows, after the updates asked for so far."""
        futures: dict[str, RemoteFuture[Tensor]] = {
            spec.name: RemoteFuture(self._outstanding)
            for spec in endpoint.outputs
            if not spec.optional
        }
        requests = self._row_requests(tokens, lengths, self._updates - 1, *responses)
        after = self._last_update

        def answer() -> None:
            try:
                if after is not None:
                    wait([after])
                outputs, scores = {"values": torch.zeros(tokens.shape)}, []
                for rows, arrays in requests:
                    got, _ = self._answered(endpoint, arrays)
                    outputs["values"][rows, : got["values"].shape[1]] = torch.from_numpy(
                        got["values"].copy()
                    )
                    if "rewards" in got:
                        scores.append(scores_in(got))
                if scores:
                    outputs["rewards"] = torch.cat(scores)
            except BaseException as error:
                for future in futures.values():
                    future.set_exception(error)
            else:
                for name, future in futures.items():
                    future.set_result(outputs[name])

        self._parallel.submit(answer)
        self._before_update.append(futures["values"])
        return futures

    def _train(
        self, number: int, arrays: Mapping[str, NDArray], earlier: Sequence[Future[Any]]
    ) -> dict[str, float]:
        wait(earlier)
        self._journal.append(number, arrays)
        answer, instance = self._answered(CRITIC_TRAIN, self._recovery.numbered(number, arrays))
        self._recovery.record(number, instance)
        return json.loads(array_text(answer["stats"]))

    def _answered(
        self, endpoint: EndpointSpec, arrays: Mapping[str, NDArray]
    ) -> tuple[dict[str, NDArray], str]:
        """The answer of a critic in the right state, and which start of the server it was."""

        def attempt(
            connection: Connection, left: float, instance: str
        ) -> tuple[dict[str, NDArray], str]:
            return (
                connection.infer(endpoint, for_instance(endpoint, arrays, instance), left),
                instance,
            )

        return self._followed(attempt)

    def _followed(self, attempt: Callable[[Connection, float, str], T]) -> T:
        """`attempt`'s result, given a connection, the seconds left and the start of the critic that
        it is to name."""

        def once(connection: Connection, left: float) -> T:
            try:
                return attempt(connection, left, self._recovery.follow(connection))
            except TransportError:
                self._recovery.lose()
                raise
            except RemoteError as error:
                if error.kind != "InstanceError":
                    raise
                self._recovery.lose()
                raise TransportError(error.role, error.address, error.kind, error.message) from None

        return self._retried(once)
