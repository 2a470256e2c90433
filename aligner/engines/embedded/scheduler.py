"""Continuous batching: a request joins the batch as soon as another one leaves it.

Dimensions of the shapes:

- R: tokens of the decoding rows; each row has one token, or more with draft tokens.
- N: prefilled tokens, of all prompts of a forward pass together.
- L: layers with expert routing.
- K: experts per token.
"""

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aligner.engines.embedded.block_pool import BlockPool
from aligner.engines.embedded.decoded_response import DecodedResponse
from aligner.engines.embedded.decoder_step import Prompts, Step
from aligner.engines.embedded.engine_state import EngineState
from aligner.engines.embedded.prefix_cache import CachedSequence, PrefixCache
from aligner.engines.embedded.speculation import PromptLookup
from aligner.engines.embedded.token_sampler import TokenSampler
from aligner.engines.embedded.waiting_queue import WaitingQueue
from aligner.engines.engine_protocol import EngineRequest, SamplingOptions
from aligner.errors import AlignerError
from aligner.models.layouts import count_blocks

# Maximum number of tokens that one step prefills. Attention pads the prompts to the longest one, so
# the padding counts, too. A single prompt may be longer.
_MAX_PREFILL_TOKENS = 8192


class Scheduler:
    """Continuous batching: schedules requests over the blocks of the KV cache.

    Requests that continue a cached sequence are prefilled in a forward pass of their own. Then one
    forward pass runs the newest token of every request in flight, and prefills the requests that
    are admitted. Equal inputs are prefilled once: requests that are admitted together share the
    prefill and its full blocks. A request that is admitted later shares the full blocks of the
    prompt with a sibling, which is a request with the same prompt that is still in flight, and
    copies the block that the prompt fills in part (copy on write).

    A request in flight has the blocks of its tokens, and gets another block when its last one is
    full. If no block is free, the request that was admitted last is preempted: it loses its blocks,
    and is prefilled again when blocks are free (Kwon et al. 2023, "PagedAttention", section 4.5).

    With few rows, draft tokens (`engine.speculation`) are verified in the same pass. Each position
    is sampled with its own random number. A sampled token is accepted if all draft tokens before it
    were accepted, which means that they equal the tokens sampled at their positions.

    If no request is admitted, `engine.steps_per_sync` steps may run on the device without host
    synchronization; the tokens after a completion's end are dropped.

    The blocks of a completed request that may be continued (`EngineRequest.is_continued`) stay in
    the prefix cache as long as no other request needs them. The request that continues it prefills
    only the new tokens.

    All ranks of a replica have a scheduler, and make the same calls in the same order.
    """

    def __init__(self, state: EngineState, seed: int) -> None:
        self._state = state
        self._seed = seed
        self._options: SamplingOptions | None = None
        """Sampling parameters of the batch, except token limits."""
        self._sampler: TokenSampler
        """Sampler with the batch's parameters; set when the first batch starts."""
        self._stop_token_ids: frozenset[int] = frozenset()
        """Stop tokens of the batch."""
        self._unbatched_requests: list[EngineRequest] = []
        """Queued requests, which are in no batch yet; `join_batch` adds them to one."""
        self._rejected_count = 0
        """Number of requests at the front of `_unbatched_requests` that do not fit the batch."""
        self._waiting_responses = WaitingQueue()
        """Requests of the batch that have no blocks, in the order of their admission."""
        self._running: list[DecodedResponse] = []
        """Requests in flight, in the order of their admission."""
        self._completed_responses: list[DecodedResponse] = []
        """Completed requests that `step` has not returned yet."""
        self._reset_blocks()

    @property
    def has_work(self) -> bool:
        """Whether a request is queued, waiting or in flight, or completed but not returned."""
        return bool(
            self._waiting_responses
            or self._running
            or self._completed_responses
            or self._unbatched_requests
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight or waits for its admission."""
        return not (self._waiting_responses or self._running)

    def queue(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests for `join_batch`, in this order."""
        self._unbatched_requests.extend(requests)

    def get_next_batch(self) -> list[EngineRequest]:
        """Return the queued requests that a new batch may hold; none unless `is_idle`."""
        if not self.is_idle or not self._unbatched_requests:
            return []
        options = self._unbatched_requests[0].sampling
        return [
            request
            for request in self._unbatched_requests
            if request.sampling.is_batchable_with(options)
        ]

    def remove(self, request: EngineRequest) -> None:
        """Remove a queued request."""
        self._unbatched_requests.remove(request)

    def join_batch(self) -> None:
        """Add the queued requests that fit the batch; requests with the same prompt are grouped.

        Requests with other sampling parameters, or with more tokens than the KV cache holds of one
        sequence, wait for the next batch.
        """
        if self.is_idle and self._unbatched_requests:
            self._start_batch(self._unbatched_requests[0].sampling)
            self._rejected_count = 0
        options = self._options
        if options is None:
            return

        max_tokens = self._state.cache.size.tokens
        joining: list[EngineRequest] = []
        # The parameters and the size change only between two batches, so a rejected request is
        # not checked again at every step of the batch.
        unchecked = self._unbatched_requests[self._rejected_count :]
        del self._unbatched_requests[self._rejected_count :]
        for request in unchecked:
            # The last token of a sequence is never run, so it is not in the cache.
            fits = request.total_tokens - 1 <= max_tokens
            is_batchable = request.sampling.is_batchable_with(options)
            if fits and is_batchable:
                joining.append(request)
            else:
                self._unbatched_requests.append(request)
        self._rejected_count = len(self._unbatched_requests)

        # Requests with the same prompt are admitted together, so that one prefill serves all.
        responses = [DecodedResponse.from_request(request, self._seed) for request in joining]
        first_index: dict[tuple[int, ...], int] = {}
        for index, response in enumerate(responses):
            first_index.setdefault(response.prompt, index)
        self._waiting_responses.extend(
            sorted(responses, key=lambda response: first_index[response.prompt])
        )

    def _start_batch(self, options: SamplingOptions) -> None:
        """Set the sampling parameters of the next batch."""
        if self._options is None or not options.is_batchable_with(self._options):
            self._options = options
            self._sampler = TokenSampler(self._state, options)
            self._stop_token_ids = frozenset(options.stop_token_ids)

    def step(self) -> list[DecodedResponse]:
        """Run one step: one more token for every row, or several with draft tokens or several steps
        per synchronization.

        Returns the completed requests. Raises AlignerError if the engine has no weights.
        """
        if self._waiting_responses or self._running:
            # Without weights no forward pass can run. Requests that are complete already are
            # returned first; the next step raises the error.
            if self._state.version is None and not self._completed_responses:
                raise AlignerError(
                    "the engine has no weights; its responses in flight resume after the next"
                    " weight sync"
                )
            if self._state.version is not None:
                self._advance(admit_new=True)
        complete = self._completed_responses
        self._completed_responses = []
        return complete

    def interrupt(self) -> list[DecodedResponse]:
        """Return all requests, complete or not, and forget them and every cached sequence."""
        stopped = [*self._completed_responses, *self._running, *self._waiting_responses]
        stopped += [
            DecodedResponse.from_request(request, self._seed)
            for request in self._unbatched_requests
        ]
        self.clear()
        return stopped

    def clear(self) -> None:
        """Forget every request and every cached sequence."""
        self._waiting_responses.clear()
        self._unbatched_requests.clear()
        self._rejected_count = 0
        self._running = []
        self._completed_responses = []
        self.clear_blocks()

    def clear_blocks(self) -> None:
        """Mark all blocks of the KV cache as free, and forget the cached sequences."""
        self._reset_blocks()

    def _reset_blocks(self) -> None:
        """Create an empty pool and an empty prefix cache for the current size of the KV cache."""
        size = self._state.cache.size
        self._pool = BlockPool(size.blocks)
        """Blocks of the KV cache."""
        self._prefix_cache = PrefixCache(self._pool)
        """Sequences that later requests may continue."""
        has_states = self._state.cache.delta_nets is not None
        self._free_state_rows = [*range(size.sequences)] if has_states else []
        """Free rows of the states of delta nets."""

    def release_cached(self, prompt_id: int, sample_index: int) -> None:
        """Evict the cached sequences of a sample."""
        self._prefix_cache.evict_sample((prompt_id, sample_index))

    def finish_running(self) -> None:
        """Complete every request in flight and every preempted request, and admit no new one."""
        while self._running or (
            self._waiting_responses and self._waiting_responses.first.was_preempted
        ):
            self._advance(admit_new=False)
        # The caller changes the weights next: later requests must not continue the old KV cache.
        self._prefix_cache.evict_all()

    def restart_running(self) -> None:
        """Forget the KV cache.

        The requests in flight move to the front of the waiting ones, and are prefilled again.
        """
        for response in self._running:
            response.blocks = []
            response.state_row = -1
        self._waiting_responses.extend_front(self._running)
        self._running = []
        self.clear_blocks()

    def _find_cached_prefix(self, response: DecodedResponse) -> CachedSequence | None:
        """Return the longest cached sequence of the same sample that is a prefix of the request's
        tokens; None if there is none."""
        # A preempted request was in flight, and has left no sequence of its own.
        if response.was_preempted:
            return None
        context = [*response.prompt, *response.tokens]
        return self._prefix_cache.find_prefix(response.sample_key, context)

    @property
    def _batch_options(self) -> SamplingOptions:
        """Sampling parameters of the current batch."""
        assert self._options is not None, "a batch has sampling parameters"
        return self._options

    def _advance(self, *, admit_new: bool) -> None:
        """Run one step: decode the requests in flight, and prefill the requests that are admitted.

        Requests that continue a cached sequence are prefilled first, in a forward pass of their
        own. If no other request is admitted, several decode steps may run without host
        synchronization between them.

        Args:
            admit_new: Whether to admit waiting requests that were not preempted.
        """
        start = time.perf_counter()
        if admit_new:
            self._resume_cached()
        self._grow_block_tables()

        prefix_copies, prefills = self._admit(admit_new=admit_new)
        decoding = [*self._running, *prefix_copies]
        # A step that prefills has one token per decoding row, so it has no draft tokens to verify.
        drafts: list[Sequence[int]] = [()] * len(decoding) if prefills else self._draft(decoding)
        # The step's logits have the same order: first the decoding rows, then the prompts.
        self._running = decoding + prefills
        step_count = 1
        if not prefills and not drafts[0]:
            step_count = self._compute_step_count()
        step = self._build_step(decoding, drafts, prefills)

        try:
            with torch.inference_mode():
                tokens, logprobs, supports = self._sampler.sample(self._running, step, step_count)
            self._check_finite(logprobs)
            if step.expert_routing is not None:
                # L tensors [R + N, K] -> [R + N, L, K]
                self._record_routing(step, torch.stack(step.expert_routing, 1).cpu())
        except BaseException:
            # The failed step may have left the KV cache incomplete. If the caller continues after
            # the error, the next step must not use it.
            self.restart_running()
            raise

        tokens_per_row = max(step_count, step.tokens_per_row)
        for index, response in enumerate(self._running):
            span = slice(index * tokens_per_row, (index + 1) * tokens_per_row)
            draft: Sequence[int] | None = None
            if step_count == 1:
                draft = drafts[index] if index < len(drafts) else ()
            self._append_tokens(response, tokens[span], logprobs[span], supports[span], draft)
        self._release_completed()

        if prefills and self._state.listener is not None:
            self._state.listener("prefill", start, time.perf_counter())

    def _count_missing_blocks(self, response: DecodedResponse, tokens: int) -> int:
        """Return how many more blocks a request needs for its first `tokens` tokens."""
        blocks = count_blocks(tokens, self._state.cache.size.block_tokens)
        return max(0, blocks - len(response.blocks))

    def _can_grow(self, response: DecodedResponse) -> bool:
        """Return whether a request in flight may need more blocks than it has."""
        # The last token of a sequence is never run, so it is not in the cache.
        return self._count_missing_blocks(response, response.max_length - 1) > 0

    def _free_blocks(self, count: int) -> bool:
        """Evict cached sequences until `count` blocks are free; return whether that suffices."""
        while self._pool.num_free < count:
            if not self._prefix_cache.evict_oldest():
                return False
        return True

    def _grow_block_tables(self) -> None:
        """Give each request in flight the block of its newest token.

        If no block is free, the requests that were admitted last are preempted. The first request
        always gets its blocks, because the KV cache holds at least one sequence of the maximum
        length.
        """
        for response in [*self._running]:
            missing = self._count_missing_blocks(response, response.length)
            # A request without blocks was preempted by a request before it.
            if not missing or not response.blocks:
                continue
            while not self._free_blocks(missing):
                preempted = self._running[-1]
                self._preempt(preempted)
                if preempted is response:
                    break
            else:
                response.blocks += self._pool.allocate(missing)

    def _preempt(self, response: DecodedResponse) -> None:
        """Take the blocks of a request in flight, and move it to the front of the waiting ones."""
        self._running.remove(response)
        self._release_blocks(response)
        self._waiting_responses.extend_front([response])
        self._state.num_preemptions += 1

    def _release_blocks(self, response: DecodedResponse) -> None:
        """Release the blocks and the row of states of a request."""
        self._pool.release(response.blocks)
        response.blocks = []
        if response.state_row >= 0:
            self._free_state_rows.append(response.state_row)
            response.state_row = -1

    def _reserve_tokens(self, responses: Sequence[DecodedResponse], count: int) -> bool:
        """Give each request the blocks of `count` tokens after its newest one.

        Returns:
            Whether all requests have these blocks. No request is preempted for them.
        """
        missing = [
            self._count_missing_blocks(response, response.length + count) for response in responses
        ]
        if not self._free_blocks(sum(missing)):
            return False
        for response, blocks in zip(responses, missing, strict=True):
            response.blocks += self._pool.allocate(blocks)
        return True

    def _resume_cached(self) -> None:
        """Give each waiting request that continues a cached sequence the blocks of that sequence.

        One forward pass prefills the new tokens of all these requests, except the last token of
        each.
        """
        continuations = list[DecodedResponse]()
        # There are few cached sequences, but any number of waiting requests.
        for sample_key in self._prefix_cache.sample_keys:
            for response in self._waiting_responses.find_sample(*sample_key):
                if len(self._running) + len(continuations) == self._state.cache.size.sequences:
                    break
                sequence = self._find_cached_prefix(response)
                if sequence is not None and self._continue_sequence(response, sequence):
                    continuations.append(response)
        if not continuations:
            return
        self._running += continuations

        # The newest token is the input of the next decode step, so it is not prefilled here.
        tokens_per_row = max(
            response.length - 1 - response.cached_tokens for response in continuations
        )
        tokens = []
        positions = []
        for response in continuations:
            new_tokens = [*response.prompt, *response.tokens][response.cached_tokens : -1]
            tokens += new_tokens + [0] * (tokens_per_row - len(new_tokens))
            # All rows of a step have equally many tokens. The padding is written at the position of
            # the newest token, which the decode step overwrites before any token attends to it.
            positions += [
                min(response.cached_tokens + offset, response.length - 1)
                for offset in range(tokens_per_row)
            ]
        # Without new tokens, the rows only decode.
        if not tokens_per_row:
            return

        inputs = torch.tensor([tokens, positions], device=self._state.device)
        step = Step(
            inputs[0],
            inputs[1],
            self._build_block_tables(continuations),
            tokens_per_row=tokens_per_row,
            needs_logits=False,
        )
        try:
            with torch.inference_mode():
                self._state.forward(step, self._state.cache)
        except BaseException:
            self.restart_running()
            raise

    def _continue_sequence(self, response: DecodedResponse, sequence: CachedSequence) -> bool:
        """Move the blocks of a cached sequence to the waiting request that continues it.

        Returns:
            Whether the blocks for the new tokens were free; otherwise nothing changes.
        """
        self._prefix_cache.take(sequence)
        response.blocks = sequence.blocks
        missing = self._count_missing_blocks(response, response.length)
        if not self._free_blocks(missing):
            response.blocks = []
            self._prefix_cache.add(sequence)
            return False
        response.blocks += self._pool.allocate(missing)
        response.cached_tokens = len(sequence.tokens) - 1
        self._waiting_responses.remove(response)
        return True

    def _check_finite(self, logprobs: Sequence[float]) -> None:
        """Raise AlignerError if a log-prob is NaN or infinite."""
        if not all(map(math.isfinite, logprobs)):
            # Attention multiplies masked entries of the cache by zero, and 0 * NaN is NaN.
            self._state.cache.clear(self._pool.num_touched)
            raise AlignerError(
                "the engine computed a log-prob that is not finite: check the weights of version"
                f" {self._state.version} for NaN and infinite values"
            )

    def _admit(self, *, admit_new: bool) -> tuple[list[DecodedResponse], list[DecodedResponse]]:
        """Admit waiting requests, in their order, while blocks are free.

        A request is admitted only if every request in flight can then get another block, so that
        requests are seldom preempted.

        Args:
            admit_new: Whether to admit requests that were not preempted.

        Returns:
            The requests that share the prompt of a sibling in flight, and the requests whose tokens
            have to be prefilled.
        """
        prefix_copies = list[DecodedResponse]()
        prefills = list[DecodedResponse]()
        if not self._waiting_responses:
            return prefix_copies, prefills
        size = self._state.cache.size
        # The states of delta nets of a sibling have advanced beyond the prompt already.
        siblings: dict[tuple[int, ...], DecodedResponse] = {}
        if self._state.cache.delta_nets is None:
            siblings = {response.prompt: response for response in self._running}
        # Full blocks of prompts and of contexts that are in the cache after this step.
        prompt_blocks = {
            response.prompt: response.blocks[: len(response.prompt) // size.block_tokens]
            for response in self._running
            if response.tokens
        }
        context_blocks: dict[tuple[int, ...], list[int]] = {}
        max_length = 0
        num_in_flight = len(self._running)
        num_growing = sum(map(self._can_grow, self._running))
        while self._waiting_responses and num_in_flight < size.sequences:
            response = self._waiting_responses.first
            if not admit_new and not response.was_preempted:
                break
            context = (*response.prompt, *response.tokens)
            # Only the prompt can be copied; tokens after it have to be prefilled.
            sibling = None if response.tokens else siblings.get(response.prompt)
            if sibling is not None:
                # The row decodes the last token of the prompt in this step, in a block of its own.
                shared_blocks = sibling.blocks[: (len(context) - 1) // size.block_tokens]
            else:
                shared_blocks = context_blocks.get(context, prompt_blocks.get(response.prompt, []))
                # Equal contexts are prefilled once, so only a new context adds tokens to the step.
                if context not in context_blocks:
                    padded_length = max(max_length, len(context))
                    padded_tokens = (len(context_blocks) + 1) * padded_length
                    if context_blocks and padded_tokens > _MAX_PREFILL_TOKENS:
                        break
                    max_length = padded_length

            context_size = count_blocks(len(context), size.block_tokens)
            can_grow = count_blocks(response.max_length - 1, size.block_tokens) > context_size
            num_blocks = context_size - len(shared_blocks)
            margin = num_growing + can_grow if num_in_flight else 0
            if not self._free_blocks(num_blocks + margin):
                break
            self._pool.share(shared_blocks)
            response.blocks = shared_blocks + self._pool.allocate(num_blocks)
            response.cached_tokens = len(shared_blocks) * size.block_tokens
            if self._state.cache.delta_nets is not None:
                response.state_row = self._free_state_rows.pop()
            self._waiting_responses.remove(response)
            num_in_flight += 1
            num_growing += can_grow
            if sibling is not None:
                self._copy_prompt(sibling, response)
                prefix_copies.append(response)
                continue
            prefills.append(response)
            full_blocks = response.blocks[: len(context) // size.block_tokens]
            context_blocks.setdefault(context, full_blocks)
            num_prompt_blocks = len(response.prompt) // size.block_tokens
            prompt_blocks.setdefault(response.prompt, full_blocks[:num_prompt_blocks])
        return prefix_copies, prefills

    def _copy_prompt(self, sibling: DecodedResponse, response: DecodedResponse) -> None:
        """Copy the part of a sibling's prompt that is not in shared blocks, except its last token.

        The expert routing of the prompt is copied, too.
        """
        shared_blocks = response.cached_tokens // self._state.cache.size.block_tokens
        if response.cached_tokens < len(response.prompt) - 1:
            self._state.cache.copy_block(
                sibling.blocks[shared_blocks], response.blocks[shared_blocks]
            )
        response.prefill_routing = sibling.prefill_routing

    def _draft(self, decoding: Sequence[DecodedResponse]) -> list[Sequence[int]]:
        """Return the draft tokens of each decoding row.

        All rows have the same number of draft tokens. It is 0 if no row has a draft, if there are
        more rows than `engine.speculation.rows`, if the batch records expert routing, or if a row
        follows a grammar.
        """
        settings = self._state.speculation
        no_drafts: list[Sequence[int]] = [()] * len(decoding)
        is_enabled = settings.tokens and 0 < len(decoding) <= settings.rows
        if not is_enabled or self._batch_options.routes or _has_grammar(decoding):
            return no_drafts

        # A step also samples the token after the last draft token.
        room = (response.limit - len(response.tokens) - 1 for response in decoding)
        draft_length = min(settings.tokens, *room)
        if not draft_length:
            return no_drafts

        drafts = []
        for response in decoding:
            if response.prompt_lookup is None:
                response.prompt_lookup = PromptLookup(settings.ngram)
            context = (*response.prompt, *response.tokens)
            drafts.append(response.prompt_lookup.draft(context, draft_length))
        if not any(drafts) or not self._reserve_tokens(decoding, draft_length):
            return no_drafts

        self._state.num_draft_tokens += sum(map(len, drafts))
        # A row without a draft gets placeholders, because all rows of a step have equally many
        # tokens.
        return [
            draft or [response.last_token] * draft_length
            for response, draft in zip(decoding, drafts, strict=True)
        ]

    def _build_step(
        self,
        decoding: Sequence[DecodedResponse],
        drafts: Sequence[Sequence[int]],
        prefills: Sequence[DecodedResponse],
    ) -> Step:
        """Return the input of the next forward pass.

        Args:
            decoding: Requests with a decoding row.
            drafts: Draft tokens of each decoding row, the same number for all rows.
            prefills: Requests to prefill.
        """
        device = self._state.device
        tokens: list[int] = []
        positions: list[int] = []
        for response, draft in zip(decoding, drafts, strict=True):
            row_tokens = [response.last_token, *draft]
            tokens += row_tokens
            # The newest token is not in the cache yet: this step writes it at its position.
            positions += [response.length - 1 + offset for offset in range(len(row_tokens))]
        # One copy to the device instead of two.
        inputs = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(device)
        return Step(
            tokens=inputs[0],
            positions=inputs[1],
            block_tables=self._build_block_tables(decoding),
            prompts=self._build_prompts(prefills) if prefills else None,
            tokens_per_row=len(tokens) // len(decoding) if decoding else 1,
            state_rows=self._get_state_rows(decoding),
            expert_routing=[] if self._batch_options.routes else None,
        )

    def _build_block_tables(self, responses: Sequence[DecodedResponse]) -> Tensor:
        """Return the block tables of requests, padded to the longest one, int64 [rows, M]."""
        width = max((len(response.blocks) for response in responses), default=1)
        tables = np.zeros((len(responses), width), dtype=np.int64)
        for row, response in enumerate(responses):
            tables[row, : len(response.blocks)] = response.blocks
        return torch.from_numpy(tables).to(self._state.device)

    def _get_state_rows(self, responses: Sequence[DecodedResponse]) -> Tensor | None:
        """Return the rows of the states of delta nets, int64 [rows]; None without delta nets."""
        if self._state.cache.delta_nets is None:
            return None
        rows = [response.state_row for response in responses]
        return torch.tensor(rows, dtype=torch.int64, device=self._state.device)

    def _build_prompts(self, prefills: Sequence[DecodedResponse]) -> Prompts:
        """Return the prompts that a step prefills, for at least one request."""
        device = self._state.device
        block_tokens = self._state.cache.size.block_tokens
        # Equal contexts share an index, so each is prefilled once.
        context_indices: dict[tuple[int, ...], int] = {}
        prompt_indices = []
        for response in prefills:
            context = (*response.prompt, *response.tokens)
            prompt_indices.append(context_indices.setdefault(context, len(context_indices)))
        lengths = np.array([len(context) for context in context_indices])
        starts = np.cumsum(lengths) - lengths

        stored_tokens = []
        stored_blocks = []
        stored_offsets = []
        for response, index in zip(prefills, prompt_indices, strict=True):
            # The blocks of the tokens before are shared with another request.
            positions = np.arange(response.cached_tokens, response.length)
            stored_tokens.append(starts[index] + positions)
            stored_blocks.append(np.array(response.blocks)[positions // block_tokens])
            stored_offsets.append(positions % block_tokens)
        state_rows = self._get_state_rows(prefills)
        return Prompts(
            tokens=torch.tensor(
                [token for context in context_indices for token in context], device=device
            ),
            lengths=torch.from_numpy(lengths).to(device),
            max_length=int(lengths.max()),
            prompt_indices=torch.tensor(prompt_indices, device=device),
            stored_tokens=torch.from_numpy(np.concatenate(stored_tokens)).to(device),
            stored_blocks=torch.from_numpy(np.concatenate(stored_blocks)).to(device),
            stored_offsets=torch.from_numpy(np.concatenate(stored_offsets)).to(device),
            state_rows=torch.zeros(0, dtype=torch.int64) if state_rows is None else state_rows,
        )

    def _compute_step_count(self) -> int:
        """Return the number of decode steps that may run without host synchronization.

        No row reaches its limit before the last of these steps. The number is 1 if the host needs
        the results of each step: the sampling support, the expert routing, the tokens for the next
        draft, or the tokens for the next mask of a grammar.
        """
        options = self._batch_options
        speculation = self._state.speculation
        if (
            options.returns_support
            or options.routes
            or _has_grammar(self._running)
            or (speculation.tokens and len(self._running) <= speculation.rows)
        ):
            return 1
        remaining = (response.limit - len(response.tokens) for response in self._running)
        count = min(self._state.steps_per_sync, *remaining)
        is_reserved = count > 1 and self._reserve_tokens(self._running, count - 1)
        return count if is_reserved else 1

    def _record_routing(self, step: Step, routing: Tensor) -> None:
        """Append the expert routing of a step to its rows.

        If a token is prefilled again, its first record stays, because the next token was sampled
        with that routing.

        Args:
            step: The step; its decoding rows have one token each.
            routing: Expert routing of each token, [R + N, L, K], with the decoding rows first.
        """
        row_count = len(step.tokens)
        # strict=False: the requests that this step prefills follow the decoding rows.
        decoded_routing = routing[:row_count].unbind()
        for response, token_routing in zip(self._running, decoded_routing, strict=False):
            # The request shares the prompt of a sibling, and takes over its routing too.
            if not response.tokens and response.prefill_routing is not None:
                copied_tokens = len(response.prompt) - 1
                response.expert_routing = [response.prefill_routing[:copied_tokens]]
            response.expert_routing.append(token_routing[None])
        if step.prompts is None:
            return

        prompt_routing = routing[row_count:].split(step.prompts.lengths.tolist())
        prompt_indices = step.prompts.prompt_indices.tolist()
        for response, index in zip(self._running[row_count:], prompt_indices, strict=True):
            response.prefill_routing = prompt_routing[index]
            recorded_tokens = sum(map(len, response.expert_routing))
            response.expert_routing.append(response.prefill_routing[recorded_tokens:])

    def _append_tokens(
        self,
        response: DecodedResponse,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        supports: Sequence[Tensor],
        draft: Sequence[int] | None,
    ) -> None:
        """Append the sampled tokens of a row up to its end, or up to the first rejected draft
        token.

        Args:
            response: Request in flight.
            tokens: Sampled tokens of the row's next positions.
            logprobs: Log-prob of each token.
            supports: Sampling support of each token, int32.
            draft: Draft tokens that were the inputs after the first position; empty if there were
                none. None for several decode steps, whose input is always the token sampled before.
        """
        assert self._state.version is not None
        count = len(tokens)
        if draft is not None:
            # tokens[i + 1] was sampled as if tokens[i] were draft[i]. At the first mismatch,
            # tokens[i] itself is still valid, because all draft tokens before it were accepted.
            mismatches = (
                index for index, draft_token in enumerate(draft) if draft_token != tokens[index]
            )
            count = 1 + next(mismatches, len(draft))
        if self._stop_token_ids:
            # Steps without host synchronization may have sampled tokens after a stop token.
            stop_ends = (
                end for end, token in enumerate(tokens[:count], 1) if token in self._stop_token_ids
            )
            count = next(stop_ends, count)
        stop_string_end = response.request.find_stop_end(tokens[:count])
        if stop_string_end is not None:
            count = stop_string_end
        if draft is not None:
            self._state.num_accepted_tokens += count - 1

        if response.request.grammar_matcher is not None:
            response.request.grammar_matcher.accept(tokens[:count])
        response.tokens += tokens[:count]
        response.logprobs += logprobs[:count]
        response.versions += [self._state.version] * count
        if self._batch_options.returns_support or response.supports:
            response.supports += supports[:count]
        if stop_string_end is not None or response.tokens[-1] in self._stop_token_ids:
            response.finish_reason = "stop"
        elif len(response.tokens) == response.limit:
            response.finish_reason = "length"

    def _release_completed(self) -> None:
        """Release the blocks of completed requests; a sequence that may be continued is cached."""
        completed = [response for response in self._running if response.finish_reason is not None]
        self._running = [response for response in self._running if response.finish_reason is None]
        for response in completed:
            self._completed_responses.append(response)
            # With expert routing, the next turn prefills the whole sequence again, because its
            # completion reports the routing of all tokens. With delta nets, the state may already
            # include tokens after the end of the sequence.
            if (
                response.request.is_continued
                and not self._batch_options.routes
                and self._state.cache.delta_nets is None
            ):
                self._cache_sequence(response)
            self._release_blocks(response)

    def _cache_sequence(self, response: DecodedResponse) -> None:
        """Move the blocks of a completed request to the prefix cache."""
        # The last token was sampled but never run, so it is not in the cache.
        used = count_blocks(response.length - 1, self._state.cache.size.block_tokens)
        blocks = response.blocks[:used]
        response.blocks = response.blocks[used:]
        tokens = [*response.prompt, *response.tokens]
        self._prefix_cache.add(CachedSequence(response.sample_key, tokens, blocks))


def _has_grammar(responses: Sequence[DecodedResponse]) -> bool:
    """Return whether a response follows a grammar, whose mask depends on the token before it."""
    return any(response.request.sampling.grammar is not None for response in responses)
