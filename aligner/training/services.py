"""Server requests from all trainer ranks: rank 0 sends them, and every rank gets the answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.data.collectives import broadcast_json, is_distributed
from aligner.data.types import SampleBatch
from aligner.errors import AlignerError
from aligner.servers.critic_client import INITIAL, CriticClient, CriticState
from aligner.servers.generator_client import GeneratorClient
from aligner.servers.remote_client import (
    RefusedError,
    RemoteClient,
    RemoteFuture,
    RewardClient,
    TeacherClient,
    UnscoredError,
    join_scores,
    resize_width,
)

_SIGN_S = 0.25
"""Interval in seconds at which rank 0 sends a message to the ranks that wait for it; the minimum of
`cluster.collective_timeout_s` is 1 s."""


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of all futures, after reading every one of them.

    Rows that the reward server could not score become NaN, if other rows were scored: the samples
    that a step skips must not depend on the split into requests.

    Raises:
        AlignerError: A request failed. The error is the first one, unless a scoring function
            deadlocked: then it is that error, because the other requests time out waiting for that
            function.
    """
    results = []
    error = None
    unscored = []
    deadlock: str | None = None
    for future in futures:
        try:
            results.append(future.result())
        except UnscoredError as refused:
            # All futures are read even after an error, because `assert_settled` counts unread
            # answers.
            results.append(torch.full((refused.rows,), torch.nan))
            unscored.append(str(refused))
        except Exception as problem:
            error = error or str(problem)
            if isinstance(problem, RefusedError) and problem.kind == "ScorerDeadlocked":
                deadlock = str(problem)

    if unscored and len(unscored) == len(futures):
        error = unscored[0]
    # Requests behind a deadlocked function time out, and their errors would hide the cause.
    error = deadlock or error
    if error is not None:
        raise AlignerError(error)
    return results


@dataclass(frozen=True)
class PendingRows:
    """Answers in flight about the parts of a batch, in row order; only rank 0 has futures."""

    futures: tuple[Future[Tensor], ...]
    chosen: Tensor | None = None
    """Selected rows, int64 [B]; None for all."""
    added: Tensor | None = None
    """Rewards [rows] to add to the scores, on rank 0; None for none."""
    sources: int | None = None
    """Number of score columns from reward sources; the columns after them are rewards of tokens.
    None if all columns are from sources."""
    _received: dict[int | None, Tensor] = field(default_factory=dict, repr=False)
    """All rows by their width, after they were received; selections share this dict."""

    def result(self, width: int | None = None) -> Tensor:
        """Wait for the answers and return the rows on every rank. Collective.

        Args:
            width: Number of columns, to which rows are truncated or zero-padded on the right; None
                for scores.

        Returns:
            Tensor [B] without a `width`, otherwise [B, width, ...].

        Raises:
            AlignerError: The server's error; raised on every rank.
        """
        rows = self._everywhere(width)
        return rows[:, 0] if width is None and rows.ndim > 1 else rows

    def parts(self) -> Tensor | None:
        """Return the scores of each of P sources, [B, P]; None if the reward does not return them.
        Collective.

        Raises the errors of `result`.
        """
        rows = self._everywhere(None)
        sources = None if self.sources is None else 1 + self.sources
        return rows[:, 1:sources] if rows.ndim > 1 and sources != 1 else None

    def steps(self, width: int) -> Tensor:
        """Return the rewards of the tokens that end a step, float32 [B, width]. Collective.

        Entry t is the reward of token t+1; entries of other tokens are NaN. Raises the errors of
        `result`.
        """
        rows = self._everywhere(None)
        first = 1 + (self.sources or 0)
        rewards = rows[:, first : first + width] if rows.ndim > 1 else torch.zeros(len(rows), 0)
        return F.pad(rewards, (0, width - rewards.shape[1]), value=torch.nan)

    def local(self, width: int | None = None) -> Tensor:
        """Wait for the answers and return the rows on rank 0 only; not collective.

        Args:
            width: See `result`.

        Returns:
            Scores [B], or [B, 1+P] with the scores of P sources; with a `width`, [B, width].

        Raises:
            AlignerError: The server's error.
        """
        rows = self._joined(_results(self.futures), width)
        return rows if self.chosen is None else rows[self.chosen]

    def _everywhere(self, width: int | None) -> Tensor:
        if width not in self._received:
            self._received[width] = self._receive(width)
        rows = self._received[width]
        return rows if self.chosen is None else rows[self.chosen]

    def _receive(self, width: int | None) -> Tensor:
        parts: list[Tensor] = []

        def receive() -> list[int] | None:
            parts.extend(_results(self.futures))
            if not parts:
                return None
            parts[:] = [self._joined(parts, width).contiguous()]
            return list(parts[0].shape)

        # Only rank 0 has the answers; the other ranks need the shape for the broadcast.
        shape = together(receive)
        rows = parts[0] if parts else torch.empty(shape)
        if is_distributed():
            dist.broadcast(rows, 0)
        return rows

    def _joined(self, parts: Sequence[Tensor], width: int | None) -> Tensor:
        padded = None if width is None else torch.cat([resize_width(part, width) for part in parts])
        return self._with_added(join_scores(parts) if padded is None else padded)

    def _with_added(self, rows: Tensor) -> Tensor:
        if self.added is None or rows.ndim == 1:
            return rows if self.added is None else rows + self.added
        # Column 0 is the total score; the columns after it belong to single sources.
        return torch.cat([rows[:, :1] + self.added[:, None], rows[:, 1:]], 1)

    def select(self, rows: Tensor) -> "PendingRows":
        """Return only these rows (int64 [N]), in this order."""
        return replace(self, chosen=rows if self.chosen is None else self.chosen[rows])


@dataclass(frozen=True)
class PendingUpdates:
    """Critic updates in flight, in order; only rank 0 has futures."""

    futures: tuple[RemoteFuture[dict[str, float]], ...]

    def result(self) -> list[dict[str, float]]:
        """Wait for the updates and return the statistics of each on every rank. Collective.

        Raises:
            AlignerError: The server's error; raised on every rank.
        """
        return together(lambda: _results(self.futures))


class Services:
    """Access of all trainer ranks to the servers.

    Rank 0 has a client for each server of the run, and the other ranks have none. Without a reward
    client, the critic also serves the reward.
    """

    def __init__(
        self,
        critic: CriticClient | None,
        reward: RewardClient | None,
        generator: GeneratorClient | None = None,
        teacher: TeacherClient | None = None,
    ) -> None:
        self._critic = critic
        self._reward = reward
        self.generator = generator
        self._teacher = teacher

    @property
    def _clients(self) -> Iterator[RemoteClient]:
        clients = (self.generator, self._critic, self._reward, self._teacher)
        yield from (client for client in clients if client is not None)

    def start(self, timeout_s: float, critic: Sequence[CriticState] = (INITIAL,)) -> None:
        """Wait until all servers answer, and restore the critic to the last of these states.
        Collective."""

        def start() -> None:
            for client in self._clients:
                client.wait_ready(timeout_s)
            if self._critic is not None:
                self._critic.start(critic)

        together(start)

    def ask(
        self,
        batch: SampleBatch,
        metadata: Sequence[Mapping[str, Any]],
        retry_batch_rows: int | None = None,
    ) -> tuple[tuple[RemoteFuture[Tensor], ...], tuple[RemoteFuture[Tensor], ...]]:
        """Request the scores [B] of samples and, if there is a critic, their values [B, S];
        float32.

        The response that is scored is the last turn of the model; all tokens before it are the
        prompt.

        Args:
            batch: Samples.
            metadata: Fields of each sample's prompt record.
            retry_batch_rows: See `RewardClient.score`. A critic that serves the reward ignores it
                and answers all rows or none.

        Returns:
            Pending scores and pending values.
        """
        if self._reward is None and self._critic is not None:
            answers = self._critic.values_and_scores(
                batch.tokens, batch.lengths, batch.last_turn_starts, metadata
            )
            return answers[1:], answers[:1]
        return self.ask_scores(batch, metadata, retry_batch_rows), self.ask_values(batch)

    def ask_scores(
        self,
        batch: SampleBatch,
        metadata: Sequence[Mapping[str, Any]],
        retry_batch_rows: int | None = None,
    ) -> tuple[RemoteFuture[Tensor], ...]:
        """Request the scores [B] of samples from the reward server; float32.

        See `RewardClient.score` for `retry_batch_rows`.
        """
        if self._reward is None:
            return ()
        return (
            self._reward.score(
                batch.tokens, batch.lengths, batch.last_turn_starts, metadata, retry_batch_rows
            ),
        )

    def ask_values(self, batch: SampleBatch) -> tuple[RemoteFuture[Tensor], ...]:
        """Request the values [B, S] of samples if there is a critic; float32."""
        return () if self._critic is None else (self._critic.values(batch.tokens, batch.lengths),)

    def ask_teacher(
        self, batch: SampleBatch, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[RemoteFuture[Tensor], ...]:
        """Request the teacher's log-probs of samples if there is a teacher; see
        `TeacherClient.logprobs`; float32."""
        if self._teacher is None:
            return ()
        return (
            self._teacher.logprobs(batch.tokens, batch.lengths, batch.prompt_lengths, metadata),
        )

    def score(self, batch: SampleBatch, metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the scores of samples, float32 [B], on every rank. Collective."""
        scores, values = self.ask(batch, metadata)
        with suppress(AlignerError):  # only marks them as read; the scores have the same error
            _results(values)
        return PendingRows(scores).result()

    def train_critic(
        self, batches: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    ) -> PendingUpdates:
        """Request one critic update for each (tokens, returns, old values, mask), in order."""
        if self._critic is None:
            return PendingUpdates(())
        return PendingUpdates(tuple(self._critic.train(*batch) for batch in batches))

    def begin_critic_checkpoint(self, step: int) -> CriticState | None:
        """Start to save the critic, if there is one, in the run's checkpoint `step`. Collective."""
        critic = self._critic
        state = together(lambda: None if critic is None else asdict(critic.begin_checkpoint(step)))
        return None if state is None else CriticState(**state)

    def finish_critic_checkpoint(self) -> None:
        """Wait until the critic's part of the checkpoint is complete. Collective."""
        together(lambda: None if self._critic is None else self._critic.finish_checkpoint())

    def keep_critic(self, states: Sequence[CriticState]) -> None:
        """Set the checkpoints from which a lost critic is restored."""
        if self._critic is not None:
            self._critic.set_recovery_points(states)

    def assert_settled(self, *, is_ahead: bool = False) -> None:
        """Raise an error if an answer was never read.

        Args:
            is_ahead: Whether samples are generated ahead of training; then only the critic's
                answers are checked, because the other answers for these samples are still pending.
        """
        for client in self._clients:
            if client is self._critic or not is_ahead:
                client.assert_settled()

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            client.close()


def together(action: Callable[[], Any]) -> Any:
    """Run `action` on every rank and return rank 0's JSON result on every rank. Collective.

    Rank 0 may wait long for a server that starts, restarts or replays updates. It therefore runs
    the action in a thread and meanwhile sends heartbeats to the other ranks, so that the timeout of
    a collective does not have to cover the server's timeout.

    Raises:
        AlignerError: Rank 0's error; raised on every rank.
    """
    acting: RemoteFuture[Any] = RemoteFuture(set())
    if is_distributed() and dist.get_rank() == 0:
        Thread(target=acting.fulfil, args=(action,), name="together", daemon=True).start()
        while not wait([acting], _SIGN_S).done:
            broadcast_json(None)
    else:
        acting.fulfil(action)

    result = None
    error = None
    try:
        result = acting.result()
    except AlignerError as problem:
        error = str(problem)

    # None is a heartbeat; a result is a dict.
    while (shared := broadcast_json({"error": error, "result": result})) is None:
        pass
    if shared["error"] is not None:
        raise AlignerError(shared["error"])
    return shared["result"]
