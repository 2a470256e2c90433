"""Server requests from all trainer ranks: rank 0 sends them, and every rank gets the answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.data.collectives import is_distributed, run_on_rank0
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

_HEARTBEAT_S = 0.25
"""Interval in seconds at which rank 0 sends a message to the ranks that wait for it; the minimum of
`cluster.collective_timeout_s` is 1 s."""


def _collect_results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of all futures, after reading every one of them.

    Rows that the reward server could not score become NaN, if other rows were scored: the samples
    that a step skips must not depend on the split into requests.

    Raises:
        AlignerError: A request failed. The error is the first one, unless a scoring function
            deadlocked: then it is that error, because the other requests time out waiting for that
            function.
    """
    results = []
    first_error = None
    unscored_errors = []
    deadlock_error: str | None = None
    # All futures are read even after an error, because `assert_settled` counts unread answers.
    for future in futures:
        try:
            results.append(future.result())
        except UnscoredError as error:
            results.append(torch.full((error.rows,), torch.nan))
            unscored_errors.append(str(error))
        except Exception as error:
            first_error = first_error or str(error)
            if isinstance(error, RefusedError) and error.kind == "ScorerDeadlocked":
                deadlock_error = str(error)

    if unscored_errors and len(unscored_errors) == len(futures):
        first_error = unscored_errors[0]
    # Requests behind a deadlocked function time out, and their errors would hide the cause.
    message = deadlock_error or first_error
    if message is not None:
        raise AlignerError(message)
    return results


@dataclass(frozen=True)
class PendingRows:
    """Answers in flight about the parts of a batch, in row order; only rank 0 has futures."""

    futures: tuple[Future[Tensor], ...]
    selected_rows: Tensor | None = None
    """Selected rows, int64 [B]; None for all."""
    added_rewards: Tensor | None = None
    """Rewards [rows] to add to the scores, on rank 0; None for none."""
    source_count: int | None = None
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
        rows = self._get_rows_on_all_ranks(width)
        # Scores are [B], or [B, 1+P+T] with the scores of sources and of tokens after the total.
        return rows[:, 0] if width is None and rows.ndim > 1 else rows

    def get_source_scores(self) -> Tensor | None:
        """Return the scores of each of P sources, [B, P]; None if the reward does not return them.
        Collective.

        Raises the errors of `result`.
        """
        rows = self._get_rows_on_all_ranks(None)
        # Column 0 is the total score.
        end = None if self.source_count is None else 1 + self.source_count
        return rows[:, 1:end] if rows.ndim > 1 and end != 1 else None

    def get_step_rewards(self, width: int) -> Tensor:
        """Return the rewards of the tokens that end a step, float32 [B, width]. Collective.

        Entry t is the reward of token t+1; entries of other tokens are NaN. Raises the errors of
        `result`.
        """
        rows = self._get_rows_on_all_ranks(None)
        # Columns: total score, scores of sources, rewards of tokens.
        start = 1 + (self.source_count or 0)
        rewards = rows[:, start : start + width] if rows.ndim > 1 else torch.zeros(len(rows), 0)
        # The answers are as wide as the longest sample of a request; the batch can be wider.
        return F.pad(rewards, (0, width - rewards.shape[1]), value=torch.nan)

    def result_on_rank0(self, width: int | None = None) -> Tensor:
        """Wait for the answers and return the rows on rank 0 only; not collective.

        Args:
            width: See `result`.

        Returns:
            Scores [B], or [B, 1+P] with the scores of P sources; with a `width`, [B, width].

        Raises:
            AlignerError: The server's error.
        """
        rows = self._join(_collect_results(self.futures), width)
        return rows if self.selected_rows is None else rows[self.selected_rows]

    def _get_rows_on_all_ranks(self, width: int | None) -> Tensor:
        """Return the selected rows on every rank. Collective at the first call with this width."""
        if width not in self._received:
            self._received[width] = self._receive(width)
        rows = self._received[width]
        return rows if self.selected_rows is None else rows[self.selected_rows]

    def _receive(self, width: int | None) -> Tensor:
        """Wait for the answers on rank 0, and broadcast all rows. Collective."""
        joined_rows: Tensor | None = None

        def receive() -> list[int] | None:
            nonlocal joined_rows
            answers = _collect_results(self.futures)
            if not answers:
                return None
            joined_rows = self._join(answers, width).contiguous()
            return list(joined_rows.shape)

        # Only rank 0 has the answers; the other ranks need the shape for the broadcast.
        shape = run_and_broadcast_result(receive)
        rows = torch.empty(shape) if joined_rows is None else joined_rows
        if is_distributed():
            dist.broadcast(rows, 0)
        return rows

    def _join(self, answers: Sequence[Tensor], width: int | None) -> Tensor:
        """Return the rows of all answers, with the rewards added."""
        if width is None:
            return self._add_rewards(join_scores(answers))
        # The answers are as wide as the longest row of their requests.
        resized = [resize_width(answer, width) for answer in answers]
        return self._add_rewards(torch.cat(resized))

    def _add_rewards(self, rows: Tensor) -> Tensor:
        if self.added_rewards is None:
            return rows
        if rows.ndim == 1:
            return rows + self.added_rewards
        # Column 0 is the total score; the columns after it belong to single sources.
        return torch.cat([rows[:, :1] + self.added_rewards[:, None], rows[:, 1:]], 1)

    def select(self, rows: Tensor) -> "PendingRows":
        """Return only these rows (int64 [N]), in this order."""
        # `_received` is shared with the selection, so that the rows are received only once.
        return replace(
            self, selected_rows=rows if self.selected_rows is None else self.selected_rows[rows]
        )


@dataclass(frozen=True)
class PendingUpdates:
    """Critic updates in flight, in order; only rank 0 has futures."""

    futures: tuple[RemoteFuture[dict[str, float]], ...]

    def result(self) -> list[dict[str, float]]:
        """Wait for the updates and return the statistics of each on every rank. Collective.

        Raises:
            AlignerError: The server's error; raised on every rank.
        """
        return run_and_broadcast_result(lambda: _collect_results(self.futures))


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

    def start(self, timeout_s: float, critic_states: Sequence[CriticState] = (INITIAL,)) -> None:
        """Wait until all servers answer, and restore the critic to the last of these states.
        Collective."""

        def start_clients() -> None:
            for client in self._clients:
                client.wait_ready(timeout_s)
            if self._critic is not None:
                self._critic.start(critic_states)

        run_and_broadcast_result(start_clients)

    def request_scores_and_values(
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
            values, scores = self._critic.values_and_scores(
                batch.tokens, batch.lengths, batch.last_turn_starts, metadata
            )
            return (scores,), (values,)

        scores_answer = self.request_scores(batch, metadata, retry_batch_rows)
        values_answer = self.request_values(batch)
        return scores_answer, values_answer

    def request_scores(
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

    def request_values(self, batch: SampleBatch) -> tuple[RemoteFuture[Tensor], ...]:
        """Request the values [B, S] of samples if there is a critic; float32."""
        return () if self._critic is None else (self._critic.values(batch.tokens, batch.lengths),)

    def request_teacher_logprobs(
        self, batch: SampleBatch, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[RemoteFuture[Tensor], ...]:
        """Request the teacher's log-probs of samples if there is a teacher; see
        `TeacherClient.logprobs`; float32."""
        if self._teacher is None:
            return ()
        return (
            self._teacher.logprobs(
                batch.tokens, batch.lengths, batch.prompt_lengths, metadata, batch.guided_tokens
            ),
        )

    def score(self, batch: SampleBatch, metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the scores of samples, float32 [B], on every rank. Collective."""
        scores, values = self.request_scores_and_values(batch, metadata)
        # The values are not used, but `assert_settled` requires that every answer is read. If they
        # have an error, the scores have the same one.
        with suppress(AlignerError):
            _collect_results(values)
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
        # The result crosses the ranks as JSON.
        fields = run_and_broadcast_result(
            lambda: None if critic is None else asdict(critic.begin_checkpoint(step))
        )
        return None if fields is None else CriticState(**fields)

    def finish_critic_checkpoint(self) -> None:
        """Wait until the critic's part of the checkpoint is complete. Collective."""
        run_and_broadcast_result(
            lambda: None if self._critic is None else self._critic.finish_checkpoint()
        )

    def set_critic_recovery_points(self, states: Sequence[CriticState]) -> None:
        """Set the checkpoints from which a lost critic is restored."""
        if self._critic is not None:
            self._critic.set_recovery_points(states)

    def assert_settled(self, *, is_asynchronous: bool = False) -> None:
        """Raise an error if an answer was never read.

        Args:
            is_asynchronous: Whether samples are generated ahead of training; then only the critic's
                answers are checked, because the other answers for these samples are still pending.
        """
        for client in self._clients:
            if client is self._critic or not is_asynchronous:
                client.assert_settled()

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            client.close()


def run_and_broadcast_result(action: Callable[[], Any]) -> Any:
    """Run `action` on every rank and return rank 0's JSON result on every rank. Collective.

    Rank 0 may wait long for a server that starts, restarts or replays updates. It therefore sends
    heartbeats, so that the timeout of a collective does not have to cover the server's timeout.

    Raises:
        AlignerError: Rank 0's error; raised on every rank.
    """
    if is_distributed() and dist.get_rank() > 0:
        # Only rank 0's result is used, so only rank 0's error is raised.
        with suppress(AlignerError):
            action()
    try:
        return run_on_rank0(action, heartbeat_s=_HEARTBEAT_S)
    except AlignerError as error:
        # Every rank raises the same type; callers do not distinguish more.
        raise AlignerError(str(error)) from error
