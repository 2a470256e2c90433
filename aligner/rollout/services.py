"""The servers as the whole trainer sees them: rank 0 asks, every rank gets the answer."""

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
"""Between rank 0's words to ranks that wait for it; the shortest `cluster.collective_timeout_s` is
1 s."""


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Every future's result; none is left unread. Raises the first error as AlignerError, or that
    of a deadlocked scoring function, because other requests time out behind its calls.

    What could not be scored is NaN where anything could: what a step leaves out does not hang on
    how it was cut into requests.
    """
    results, error, unscored = [], None, []
    deadlock: str | None = None
    for future in futures:
        try:
            results.append(future.result())
        except UnscoredError as refused:
            results.append(torch.full((refused.rows,), torch.nan))
            unscored.append(str(refused))
        except Exception as problem:
            error = error or str(problem)
            if isinstance(problem, RefusedError) and problem.kind == "ScorerDeadlocked":
                deadlock = str(problem)
    if unscored and len(unscored) == len(futures):
        error = unscored[0]
    error = deadlock or error
    if error is not None:
        raise AlignerError(error)
    return results


@dataclass(frozen=True)
class PendingRows:
    """Answers under way about parts of a batch, in row order; only rank 0 holds futures."""

    futures: tuple[Future[Tensor], ...]
    chosen: Tensor | None = None
    """int64 [B]: which of the rows are wanted, all where None"""
    added: Tensor | None = None
    """[rows]: what is added to the scores that they are, on rank 0"""
    sources: int | None = None
    """How many columns of scores are what a source has given, those behind them being rewards of
    tokens; all where None"""
    _received: dict[int | None, Tensor] = field(default_factory=dict, repr=False)
    """All rows by their width, once they are here; selections share it."""

    def result(self, width: int | None = None) -> Tensor:
        """Wait, and give every rank the rows: [B], or [B, width, ...], cut or zero-padded on the
        right. Collective.

        Raises the server's error on every rank.
        """
        rows = self._everywhere(width)
        return rows[:, 0] if width is None and rows.ndim > 1 else rows

    def parts(self) -> Tensor | None:
        """Of scores what each of P sources has given, [B, P]; None where the reward has not told.
        As `result`."""
        rows = self._everywhere(None)
        sources = None if self.sources is None else 1 + self.sources
        return rows[:, 1:sources] if rows.ndim > 1 and sources != 1 else None

    def steps(self, width: int) -> Tensor:
        """Of scores what tokens get that end steps, float32 [B, width], not a number for others:
        entry t speaks of token t+1.

        As `result`.
        """
        rows, first = self._everywhere(None), 1 + (self.sources or 0)
        rewards = rows[:, first : first + width] if rows.ndim > 1 else torch.zeros(len(rows), 0)
        return F.pad(rewards, (0, width - rewards.shape[1]), value=torch.nan)

    def local(self, width: int | None = None) -> Tensor:
        """Wait, and give the scores [B], or [B, 1+P] with parts behind them, to this rank, rank 0,
        alone.

        With a `width` they are [B, width], as `result` has them. Raises the server's error.
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
        return torch.cat([rows[:, :1] + self.added[:, None], rows[:, 1:]], 1)

    def select(self, rows: Tensor) -> "PendingRows":
        """Some of these rows (int64 [N]), in that order."""
        return replace(self, chosen=rows if self.chosen is None else self.chosen[rows])


@dataclass(frozen=True)
class PendingUpdates:
    """Critic updates under way, in order; only rank 0 holds futures."""

    futures: tuple[RemoteFuture[dict[str, float]], ...]

    def result(self) -> list[dict[str, float]]:
        """Wait, and give every rank each update's statistics. Collective; raises the server's error
        on every rank."""
        return together(lambda: _results(self.futures))


class Services:
    """The servers. Rank 0 is given clients, of those that the run has, and the other ranks None.

    Without a reward client the critic serves the reward too.
    """

    def __init__(
        self,
        critic: CriticClient | None,
        reward: RewardClient | None,
        generator: GeneratorClient | None = None,
        teacher: TeacherClient | None = None,
    ) -> None:
        self._critic, self._reward, self.generator, self._teacher = (
            critic,
            reward,
            generator,
            teacher,
        )

    @property
    def _clients(self) -> Iterator[RemoteClient]:
        clients = (self.generator, self._critic, self._reward, self._teacher)
        yield from (client for client in clients if client is not None)

    def start(self, timeout_s: float, critic: Sequence[CriticState] = (INITIAL,)) -> None:
        """Wait until all servers answer, and bring the critic to the last of these states.
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
        """Ask for the scores [B] and, where there is a critic, the values [B, S] of some samples;
        float32.

        A score is of what the model said last, to all that came before it. `retry_batch_rows` as
        `RewardClient.score` has it; a critic that serves the reward answers all or nothing.
        """
        if self._reward is None and self._critic is not None:
            asked = self._critic.values_and_scores(
                batch.tokens, batch.lengths, batch.last_turn_starts, metadata
            )
            return asked[1:], asked[:1]
        return self.ask_scores(batch, metadata, retry_batch_rows), self.ask_values(batch)

    def ask_scores(
        self,
        batch: SampleBatch,
        metadata: Sequence[Mapping[str, Any]],
        retry_batch_rows: int | None = None,
    ) -> tuple[RemoteFuture[Tensor], ...]:
        """Ask the reward server for the scores [B] of some samples; float32. `retry_batch_rows` as
        `RewardClient.score` has it."""
        if self._reward is None:
            return ()
        return (
            self._reward.score(
                batch.tokens, batch.lengths, batch.last_turn_starts, metadata, retry_batch_rows
            ),
        )

    def ask_values(self, batch: SampleBatch) -> tuple[RemoteFuture[Tensor], ...]:
        """Ask for the values [B, S] of some samples where there is a critic; float32."""
        return () if self._critic is None else (self._critic.values(batch.tokens, batch.lengths),)

    def ask_teacher(
        self, batch: SampleBatch, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[RemoteFuture[Tensor], ...]:
        """Ask for what the teacher says of some samples' tokens, where there is one, as
        `TeacherClient.logprobs`; float32."""
        if self._teacher is None:
            return ()
        return (
            self._teacher.logprobs(batch.tokens, batch.lengths, batch.prompt_lengths, metadata),
        )

    def score(self, batch: SampleBatch, metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """The scores float32 [B] of some samples, on every rank. Collective."""
        scores, values = self.ask(batch, metadata)
        with suppress(AlignerError):  # a critic that serves the reward gives both, or neither
            _results(values)
        return PendingRows(scores).result()

    def train_critic(
        self, batches: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    ) -> PendingUpdates:
        """Ask for one optimizer step on each (tokens, returns, old values, mask), in order."""
        if self._critic is None:
            return PendingUpdates(())
        return PendingUpdates(tuple(self._critic.train(*batch) for batch in batches))

    def begin_critic_checkpoint(self, step: int) -> CriticState | None:
        """Have the critic, if there is one, begin to save itself as part of the run's checkpoint
        `step`. Collective."""
        critic = self._critic
        state = together(lambda: None if critic is None else asdict(critic.begin_checkpoint(step)))
        return None if state is None else CriticState(**state)

    def finish_critic_checkpoint(self) -> None:
        """Return when the critic's part of the checkpoint is complete. Collective."""
        together(lambda: None if self._critic is None else self._critic.finish_checkpoint())

    def keep_critic(self, states: Sequence[CriticState]) -> None:
        """Bring a lost critic back from these checkpoints from now on."""
        if self._critic is not None:
            self._critic.set_recovery_points(states)

    def assert_settled(self, *, is_ahead: bool = False) -> None:
        """Raise if an answer was never read; where the run is ahead with samples, theirs are still
        to be."""
        for client in self._clients:
            if client is self._critic or not is_ahead:
                client.assert_settled()

    def close(self) -> None:
        """Hang up."""
        for client in self._clients:
            client.close()


def together(action: Callable[[], Any]) -> Any:
    """Every rank acts, and gets rank 0's JSON result or error. Collective.

    Rank 0 may wait for a server that starts, is started again or replays updates, for as long as
    that may take: it does so in a thread, and tells the others meanwhile that it lives, so that no
    collective's timeout has to cover a server's.
    """
    acting: RemoteFuture[Any] = RemoteFuture(set())
    if is_distributed() and dist.get_rank() == 0:
        Thread(target=acting.fulfil, args=(action,), name="together", daemon=True).start()
        while not wait([acting], _SIGN_S).done:
            broadcast_json(None)
    else:
        acting.fulfil(action)
    result, error = None, None
    try:
        result = acting.result()
    except AlignerError as problem:
        error = str(problem)
    while (shared := broadcast_json({"error": error, "result": result})) is None:
        pass
    if shared["error"] is not None:
        raise AlignerError(shared["error"])
    return shared["result"]
