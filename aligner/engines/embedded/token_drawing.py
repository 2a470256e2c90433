"""Run steps of the decoder, and sample the next tokens of a batch's rows."""

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
"""Sampled tokens, their log-probs in float32 precision, and their sampling supports.

The tokens of a row are adjacent. A support is int32 on the host, and empty if the token was sampled
from the full vocabulary.
"""


class Drawing:
    """Runs steps of the decoder and samples the next tokens, the same on every rank of a replica.

    The scheduler creates one object per batch, because the rows of a batch share the sampling
    parameters.
    """

    def __init__(self, machine: Machine, options: SamplingOptions) -> None:
        self._machine = machine
        self._options = options

    def draw(self, rows: Sequence[DecodedResponse], step: Step, count: int = 1) -> Drawn:
        """Run one step or several consecutive steps, and sample the next tokens of all rows.
        Collective.

        Args:
            rows: Requests in flight, in the order of the step's logits.
            step: The first step. If `count` is greater than 1, it has one token per row and no
                prompts.
            count: Number of steps that run without host synchronization.

        Returns:
            `step.width` tokens per row, or `count` tokens if `count` is greater than 1.
        """
        return self._at_once(rows, step) if count == 1 else self._ahead(rows, step, count)

    def _at_once(self, rows: Sequence[DecodedResponse], step: Step) -> Drawn:
        """Run one step, and sample `step.width` tokens per row."""
        logits_share = self._machine.forward(step, self._machine.cache)
        results, kept = self._choose(
            logits_share, self._numbers(rows, step.width), self._may_stop(rows, step.width)
        )
        tokens, logprobs, counts = results

        supports = [FULL_VOCABULARY] * len(logits_share)
        if self._options.tells_kept:
            buffer = torch.empty(int(counts.sum()), dtype=torch.int32, device=self._machine.device)
            ids = self._machine.decoder.broadcast(buffer if kept is None else kept.ids)
            parts = ids.cpu().split(counts.long().tolist())
            # Without a copy, a long response would keep the memory of all other supports alive.
            supports = [part.clone() for part in parts]
        return tokens.long().tolist(), logprobs.float().tolist(), supports

    def _ahead(self, rows: Sequence[DecodedResponse], step: Step, count: int) -> Drawn:
        """Run `count` steps, each on the tokens that the step before sampled.

        The tokens stay on the device; the host synchronizes after the last step only.
        """
        numbers = self._numbers(rows, count)
        may_stop = self._may_stop(rows, count)
        step_results = []
        for ahead in range(count):
            logits_share = self._machine.forward(step, self._machine.cache)
            step_inputs = [
                None if values is None else values.view(-1, count)[:, ahead]
                for values in (numbers, may_stop)
            ]
            results, _ = self._choose(logits_share, *step_inputs)
            step_results.append(results)
            step = step.followed_by(results[0].long())

        # [3, R, count] -> [3, R * count]: the tokens of a row become adjacent.
        tokens, logprobs, _ = torch.stack(step_results, -1).flatten(1)
        return tokens.long().tolist(), logprobs.float().tolist(), [FULL_VOCABULARY] * len(tokens)

    def _numbers(self, rows: Sequence[DecodedResponse], count: int) -> Tensor | None:
        """Return the random numbers of each row's next `count` tokens, float64 [R * count]; None
        for greedy decoding."""
        if self._options.greedy:
            return None
        streams = [(row.numbers, len(row.tokens)) for row in rows]
        next_numbers = [
            numbers[begin : begin + count] for numbers, begin in streams if numbers is not None
        ]
        return torch.from_numpy(np.concatenate(next_numbers)).to(self._machine.device)

    def _may_stop(self, rows: Sequence[DecodedResponse], count: int) -> Tensor | None:
        """Return whether each row's next `count` tokens may be stop tokens, bool [R * count]; None
        if all may."""
        if all(len(row.tokens) >= row.min_tokens for row in rows):
            return None
        allowed = [
            len(row.tokens) + ahead >= row.min_tokens for row in rows for ahead in range(count)
        ]
        return torch.tensor(allowed, device=self._machine.device)

    def _choose(
        self, share: Tensor, numbers: Tensor | None, may_stop: Tensor | None
    ) -> tuple[Tensor, KeptTokens | None]:
        """Sample one token per row on the replica's first rank, and broadcast it. Collective.

        Only the first rank samples, so that all ranks agree to the last bit.

        Args:
            share: This rank's share of the logits, [R, V / TP'].
            numbers: Random numbers, float64 [R]; None for greedy decoding.
            may_stop: bool [R], False if a stop token is not allowed yet; None if all may stop.

        Returns:
            The tokens, log-probs and sizes of the sampling supports, as the rows of one float64
            tensor [3, R] on the device; and the supports, which only the first rank has.
        """
        options = self._options
        logits = self._machine.decoder.gather_logits(share)
        # float64 represents every token id exactly, so that one message suffices.
        results = torch.zeros(3, len(share), dtype=torch.float64, device=self._machine.device)
        kept = None
        if logits is not None:
            # `choose` overwrites the logits, and its log-probs are not batch-invariant.
            scores = logits * (1 / options.temperature) if self._machine.decoder.exact else None
            results[0], results[1], kept = choose(logits, options, numbers, may_stop)
            if kept is not None:
                results[2] = kept.counts
            if scores is not None:
                if kept is not None:
                    scores.masked_fill_(~kept.to_mask(scores.shape[1]), float("-inf"))
                results[1] = batch_invariant.logprobs(scores, results[0].long())
        return self._machine.decoder.broadcast(results), kept
