"""The tokens that a step draws for the rows of a batch, or several steps one after another."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aligner.data.types import KeptTokens
from aligner.engines.embedded.decoded_response import FULL_VOCABULARY, DecodedResponse
from aligner.engines.embedded.decoder import Step
from aligner.engines.embedded.engine_machine import Machine
from aligner.engines.embedded.sampling import choose
from aligner.engines.engine_protocol import SamplingOptions
from aligner.models import batch_invariant

Drawn = tuple[list[int], list[float], list[Tensor]]
"""Tokens, log-probs of float32 and the ids that each was drawn among, int32 on the host, none where
among all; those of a row come one after another."""


class Drawing:
    """Runs steps and draws from what they compute, the same tokens on every rank of a replica."""

    def __init__(self, machine: Machine, options: SamplingOptions) -> None:
        self._machine, self._options = machine, options

    def draw(self, rows: Sequence[DecodedResponse], step: Step, count: int = 1) -> Drawn:
        """What the rows' next places draw, `step.width` of them a row, or `count` where so many
        steps follow each other."""
        return self._at_once(rows, step) if count == 1 else self._ahead(rows, step, count)

    def _at_once(self, rows: Sequence[DecodedResponse], step: Step) -> Drawn:
        share = self._machine.forward(step, self._machine.cache)
        drawn, kept = self._choose(
            share, self._numbers(rows, step.width), self._may_stop(rows, step.width)
        )
        tokens, logprobs, counts = drawn
        each = [FULL_VOCABULARY] * len(share)
        if self._options.tells_kept:
            empty = torch.empty(int(counts.sum()), dtype=torch.int32, device=self._machine.device)
            ids = self._machine.decoder.broadcast(empty if kept is None else kept.ids)
            parts = ids.cpu().split(counts.long().tolist())
            each = [part.clone() for part in parts]  # a response that goes on holds no other's
        return tokens.long().tolist(), logprobs.float().tolist(), each

    def _ahead(self, rows: Sequence[DecodedResponse], step: Step, count: int) -> Drawn:
        """Of steps that each run the tokens that the one before has drawn; the host looks at none
        before the last."""
        numbers, may_stop, found = self._numbers(rows, count), self._may_stop(rows, count), []
        for ahead in range(count):
            share = self._machine.forward(step, self._machine.cache)
            its = [
                None if each is None else each.view(-1, count)[:, ahead]
                for each in (numbers, may_stop)
            ]
            drawn, _ = self._choose(share, *its)
            found.append(drawn)
            step = step.followed_by(drawn[0].long())
        tokens, logprobs, _ = torch.stack(found, -1).flatten(1)
        return tokens.long().tolist(), logprobs.float().tolist(), [FULL_VOCABULARY] * len(tokens)

    def _numbers(self, rows: Sequence[DecodedResponse], count: int) -> Tensor | None:
        """The random numbers of each row's next `count` tokens, float64 [R * count]; None where
        none are needed."""
        if self._options.greedy:
            return None
        begun = [(row.numbers, len(row.tokens)) for row in rows]
        next_ones = [
            numbers[begin : begin + count] for numbers, begin in begun if numbers is not None
        ]
        return torch.from_numpy(np.concatenate(next_ones)).to(self._machine.device)

    def _may_stop(self, rows: Sequence[DecodedResponse], count: int) -> Tensor | None:
        """Whether each of these tokens may be a stop token, bool [R * count]; None where all
        may."""
        if all(len(row.tokens) >= row.min_tokens for row in rows):
            return None
        allowed = [
            len(row.tokens) + ahead >= row.min_tokens for row in rows for ahead in range(count)
        ]
        return torch.tensor(allowed, device=self._machine.device)

    def _choose(
        self, share: Tensor, numbers: Tensor | None, may_stop: Tensor | None
    ) -> tuple[Tensor, KeptTokens | None]:
        """Tokens, log-probs and how many ids each was drawn among, float64 [3, R] where `share` is,
        and these ids.

        The first rank draws, so that all ranks agree to the last bit; it alone has the ids.
        """
        options = self._options
        logits = self._machine.decoder.gather_logits(share)
        drawn = torch.zeros(3, len(share), dtype=torch.float64, device=self._machine.device)
        kept = None
        if logits is not None:
            scores = logits * (1 / options.temperature) if self._machine.decoder.exact else None
            drawn[0], drawn[1], kept = choose(logits, options, numbers, may_stop)
            if kept is not None:
                drawn[2] = kept.counts
            if scores is not None:
                if kept is not None:
                    scores.masked_fill_(~kept.to_mask(scores.shape[1]), float("-inf"))
                drawn[1] = batch_invariant.logprobs(scores, drawn[0].long())
        return self._machine.decoder.broadcast(drawn), kept
