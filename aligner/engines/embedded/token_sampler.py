"""Run steps of the decoder, and sample the next tokens of a batch's rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aligner.data.types import SamplingSupport, unpack_token_masks
from aligner.engines.embedded.decoded_response import FULL_VOCABULARY, DecodedResponse
from aligner.engines.embedded.decoder_step import Step
from aligner.engines.embedded.engine_state import EngineState
from aligner.engines.embedded.sampling import sample_tokens
from aligner.engines.engine_protocol import SamplingOptions
from aligner.models import batch_invariant

SampledTokens = tuple[list[int], list[float], list[Tensor]]
"""Sampled tokens, their log-probs in float32 precision, and their sampling supports.

The tokens of a row are adjacent. A support is int32 on the host, and empty if the token was sampled
from the full vocabulary.
"""


class TokenSampler:
    """Runs steps of the decoder and samples the next tokens, the same on every rank of a replica.

    The scheduler creates one object per batch, because the rows of a batch share the sampling
    parameters.
    """

    def __init__(self, state: EngineState, options: SamplingOptions) -> None:
        self._state = state
        self._options = options

    def sample(
        self, responses: Sequence[DecodedResponse], step: Step, count: int = 1
    ) -> SampledTokens:
        """Run one step or several consecutive steps, and sample the next tokens of all rows.
        Collective.

        Args:
            responses: Requests in flight, in the order of the step's logits.
            step: The first step. If `count` is greater than 1, it has one token per row and no
                prompts.
            count: Number of steps that run without host synchronization.

        Returns:
            `step.tokens_per_row` tokens per row, or `count` tokens if `count` is greater than 1.
        """
        if count == 1:
            return self._run_step(responses, step)
        return self._run_steps(responses, step, count)

    def _run_step(self, responses: Sequence[DecodedResponse], step: Step) -> SampledTokens:
        """Run one step, and sample `step.tokens_per_row` tokens per row."""
        logits_shard = self._state.forward(step, self._state.cache)
        random_numbers = self._get_random_numbers(responses, step.tokens_per_row)
        is_stop_allowed = self._build_stop_mask(responses, step.tokens_per_row)
        grammar_masks = _compute_grammar_masks(responses)
        results, support = self._sample_and_broadcast(
            logits_shard, random_numbers, is_stop_allowed, grammar_masks
        )
        tokens, logprobs, counts = results

        supports = [FULL_VOCABULARY] * len(logits_shard)
        if self._options.returns_support:
            # The other ranks know the size of the message from the counts.
            buffer = torch.empty(int(counts.sum()), dtype=torch.int32, device=self._state.device)
            ids = self._state.decoder.broadcast(buffer if support is None else support.ids)
            parts = ids.cpu().split(counts.long().tolist())
            # Without a copy, a long response would keep the memory of all other supports alive.
            supports = [part.clone() for part in parts]
        return tokens.long().tolist(), logprobs.float().tolist(), supports

    def _run_steps(
        self, responses: Sequence[DecodedResponse], step: Step, count: int
    ) -> SampledTokens:
        """Run `count` steps, each on the tokens that the step before sampled.

        The tokens stay on the device; the host synchronizes after the last step only.
        """
        random_numbers = self._get_random_numbers(responses, count)
        is_stop_allowed = self._build_stop_mask(responses, count)
        step_results = []
        for index in range(count):
            logits_shard = self._state.forward(step, self._state.cache)
            # [R * count] -> [R]: the entries of the current step.
            step_numbers, step_is_stop_allowed = (
                None if values is None else values.view(-1, count)[:, index]
                for values in (random_numbers, is_stop_allowed)
            )
            results, _ = self._sample_and_broadcast(
                logits_shard, step_numbers, step_is_stop_allowed
            )
            step_results.append(results)
            step = step.build_next_step(results[0].long())

        # [3, R, count] -> [3, R * count]: the tokens of a row become adjacent.
        tokens, logprobs, _ = torch.stack(step_results, -1).flatten(1)
        return tokens.long().tolist(), logprobs.float().tolist(), [FULL_VOCABULARY] * len(tokens)

    def _get_random_numbers(
        self, responses: Sequence[DecodedResponse], count: int
    ) -> Tensor | None:
        """Return the random numbers of each row's next `count` tokens, float64 [R * count]; None
        for greedy decoding."""
        if self._options.greedy:
            return None
        # Entry t of a stream belongs to token t of its response, so the number of tokens so far is
        # the position in the stream, also after an interruption.
        streams = [(response.random_numbers, len(response.tokens)) for response in responses]
        next_numbers = [
            stream[begin : begin + count] for stream, begin in streams if stream is not None
        ]
        return torch.from_numpy(np.concatenate(next_numbers)).to(self._state.device)

    def _build_stop_mask(self, responses: Sequence[DecodedResponse], count: int) -> Tensor | None:
        """Return whether each row's next `count` tokens may be stop tokens, bool [R * count]; None
        if all may."""
        if all(len(response.tokens) >= response.min_tokens for response in responses):
            return None
        is_stop_allowed = [
            len(response.tokens) + index >= response.min_tokens
            for response in responses
            for index in range(count)
        ]
        return torch.tensor(is_stop_allowed, device=self._state.device)

    def _sample_and_broadcast(
        self,
        logits_shard: Tensor,
        random_numbers: Tensor | None,
        is_stop_allowed: Tensor | None,
        grammar_masks: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, SamplingSupport | None]:
        """Sample one token per row on the replica's first rank, and broadcast it. Collective.

        Only the first rank samples, so that all ranks agree to the last bit.

        Args:
            logits_shard: This rank's shard of the logits, [R, V / TP'].
            random_numbers: Random numbers, float64 [R]; None for greedy decoding.
            is_stop_allowed: bool [R], False if a stop token is not allowed yet; None if it is
                allowed in all rows.
            grammar_masks: Indices of the rows that follow a grammar, int64 [G], and their masks,
                int32 [G, V / 32]; None if there are none. Only the first rank has them.

        Returns:
            The tokens, log-probs and sizes of the sampling supports, as the rows of one float64
            tensor [3, R] on the device; and the supports, which only the first rank has.
        """
        options = self._options
        logits = self._state.decoder.gather_logits(logits_shard)
        # float64 represents every token id exactly, so that one message suffices.
        results = torch.zeros(3, len(logits_shard), dtype=torch.float64, device=self._state.device)
        support = None
        if logits is not None:
            if grammar_masks is not None:
                rows, masks = (tensor.to(logits.device) for tensor in grammar_masks)
                logits[rows] = logits[rows].masked_fill(
                    ~unpack_token_masks(masks, 0, logits.shape[1]), float("-inf")
                )
            # `sample_tokens` overwrites the logits, and its log-probs are not batch-invariant.
            exact_logits = None
            if self._state.decoder.is_exact:
                exact_logits = logits * (1 / options.temperature)
            results[0], results[1], support = sample_tokens(
                logits, options, random_numbers, is_stop_allowed
            )
            if support is not None:
                results[2] = support.counts

            if exact_logits is not None:
                if support is not None:
                    support_mask = support.to_mask(exact_logits.shape[1])
                    exact_logits.masked_fill_(~support_mask, float("-inf"))
                results[1] = batch_invariant.logprobs(exact_logits, results[0].long())
        return self._state.decoder.broadcast(results), support


def _compute_grammar_masks(
    responses: Sequence[DecodedResponse],
) -> tuple[Tensor, Tensor] | None:
    """Return the indices of the rows that follow a grammar, int64 [G], and the masks of their next
    tokens, int32 [G, V / 32]; None if there are none."""
    matchers = [
        (row, response.request.grammar_matcher)
        for row, response in enumerate(responses)
        if response.request.grammar_matcher is not None
    ]
    if not matchers:
        return None
    rows = torch.tensor([row for row, _ in matchers])
    masks = np.stack([matcher.compute_mask() for _, matcher in matchers])
    return rows, torch.from_numpy(masks)
