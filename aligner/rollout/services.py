"""The critic and reward servers as the whole trainer sees them: rank 0 asks, every rank gets the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.data.collectives import broadcast_json, is_distributed
from aligner.errors import AlignerError
from aligner.servers.client import CriticClient, RemoteFuture, RewardClient


def _outcome(futures: Sequence[RemoteFuture[Any]]) -> tuple[list[Any], str | None]:
    """Every future's result, or the first error; none is left unread."""
    results, error = [], None
    for future in futures:
        try:
            results.append(future.result())
        except Exception as problem:
            error = error or str(problem)
    return results, error


@dataclass(frozen=True)
class PendingRows:
    """Answers under way about parts of a batch, in row order; only rank 0 holds futures."""

    futures: tuple[RemoteFuture[Tensor], ...]

    def result(self, width: int | None = None) -> Tensor:
        """Wait, and give every rank the rows: [B], or [B, width] zero-padded on the right. Collective.

        Raises the server's error on every rank.
        """
        parts, error = _outcome(self.futures)
        rows = None
        if self.futures and error is None:
            rows = torch.cat([part if width is None else F.pad(part, (0, width - part.shape[1])) for part in parts])
        header = broadcast_json({"error": error, "shape": None if rows is None else list(rows.shape)})
        if header["error"] is not None:
            raise AlignerError(header["error"])
        rows = torch.empty(header["shape"]) if rows is None else rows.contiguous()
        if is_distributed():
            dist.broadcast(rows, 0)
        return rows


@dataclass(frozen=True)
class PendingUpdates:
    """Critic updates under way, in order; only rank 0 holds futures."""

    futures: tuple[RemoteFuture[dict[str, float]], ...]

    def result(self) -> list[dict[str, float]]:
        """Wait, and give every rank each update's statistics. Collective; raises the server's error on every rank."""
        stats, error = _outcome(self.futures)
        shared = broadcast_json({"error": error, "stats": stats})
        if shared["error"] is not None:
            raise AlignerError(shared["error"])
        return shared["stats"]


class Services:
    """The two servers. Rank 0 is given clients, the others None."""

    def __init__(self, critic: CriticClient | None, reward: RewardClient | None) -> None:
        self._critic, self._reward = critic, reward

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until both answer; every rank returns, or raises, together."""
        error = None
        try:
            for client in (self._critic, self._reward):
                if client is not None:
                    client.wait_ready(timeout_s)
        except AlignerError as problem:
            error = str(problem)
        if error := broadcast_json(error):
            raise AlignerError(error)

    def ask_score(self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> tuple[RemoteFuture[Tensor], ...]:
        """Ask for the scores of some rows; the answer is float32 [B]."""
        return () if self._reward is None else (self._reward.score(tokens, lengths, prompt_lengths),)

    def ask_values(self, tokens: Tensor, lengths: Tensor) -> tuple[RemoteFuture[Tensor], ...]:
        """Ask for the values of some rows; the answer is float32 [B, S]."""
        return () if self._critic is None else (self._critic.values(tokens, lengths),)

    def train_critic(self, batches: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> PendingUpdates:
        """Ask for one optimizer step on each (tokens, returns, old values, mask), in order."""
        if self._critic is None:
            return PendingUpdates(())
        return PendingUpdates(tuple(self._critic.train(*batch) for batch in batches))

    def control_critic(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Have the critic save or restore; every rank gets its answer, or its error."""
        answer, error = {}, None
        if self._critic is not None:
            try:
                answer = self._critic.control(operation, **arguments)
            except AlignerError as problem:
                error = str(problem)
        shared = broadcast_json({"error": error, "answer": answer})
        if shared["error"] is not None:
            raise AlignerError(shared["error"])
        return shared["answer"]

    def assert_settled(self) -> None:
        """Raise if an answer was never read."""
        if self._critic is not None:
            self._critic.assert_settled()
        if self._reward is not None:
            self._reward.assert_settled()

    def close(self) -> None:
        """Hang up."""
        for client in (self._critic, self._reward):
            if client is not None:
                client.close()
