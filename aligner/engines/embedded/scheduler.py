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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aligner.engines.embedded.decoded_response import DecodedResponse, sort_by_row
from aligner.engines.embedded.decoder_step import Prompts, Step
from aligner.engines.embedded.engine_state import EngineState
from aligner.engines.embedded.row_table import RowTable
from aligner.engines.embedded.speculation import PromptLookup
from aligner.engines.embedded.token_sampler import TokenSampler
from aligner.engines.embedded.waiting_queue import WaitingQueue
from aligner.engines.engine_protocol import EngineRequest, SamplingOptions
from aligner.errors import AlignerError

# Maximum number of tokens that one step prefills. Attention pads the prompts to the longest one, so
# the padding counts, too. A single prompt may be longer.
_MAX_PREFILL_TOKENS = 8192


@dataclass(eq=False)
class _ResidentSequence:
    """A completed sequence whose KV cache is resident for a later request."""

    sample_key: tuple[int, int]
    """Prompt id and sample index."""
    tokens: list[int]
    """All tokens of the sequence. The last one is not in the KV cache."""


class Scheduler:
    """Continuous batching: schedules requests in the rows of the KV cache.

    Requests that continue a resident sequence are prefilled in a forward pass of their own. Then
    one forward pass runs the newest token of every row, and prefills the requests that get a free
    row. Equal inputs are prefilled once: requests that are admitted together share the prefill. A
    request that is admitted later copies the prompt's KV cache from the row of a sibling, which is
    a request with the same prompt that is still in flight.

    With few rows, draft tokens (`engine.speculation`) are verified in the same pass. Each position
    is sampled with its own random number. A sampled token is accepted if all draft tokens before it
    were accepted, which means that they equal the tokens sampled at their positions.

    If no request is admitted, `engine.steps_per_sync` steps may run on the device without host
    synchronization; the tokens after a completion's end are dropped.

    The row of a completed request that may be continued (`EngineRequest.is_continued`) stays
    resident as long as no other request needs the row. The request that continues it prefills only
    the new tokens. On CPUs a resident row does not move, because a move would take longer with
    every turn. On GPUs it may be swapped with a row in flight, because a CUDA graph runs only on
    the first rows of the KV cache.

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
        """Requests of the batch that have no row yet."""
        self._running: list[DecodedResponse] = []
        """Requests in flight, in the order of their rows."""
        self._completed_responses: list[DecodedResponse] = []
        """Completed requests that `step` has not returned yet."""
        self._resident_sequences: dict[tuple[int, int], list[_ResidentSequence]] = {}
        """Sequences that later requests may continue, by prompt id and sample index."""
        self._row_table = RowTable[_ResidentSequence](state.cache.size.rows)

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
        """Whether no request has a row or waits for one."""
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

        Requests with other sampling parameters, or with more tokens than a row of the KV cache
        holds, wait for the next batch.
        """
        if self.is_idle and self._unbatched_requests:
            self._start_batch(self._unbatched_requests[0].sampling)
            self._rejected_count = 0
        options = self._options
        if options is None:
            return

        columns = self._state.cache.size.columns
        joining: list[EngineRequest] = []
        # The parameters and the columns change only between two batches, so a rejected request is
        # not checked again at every step of the batch.
        unchecked = self._unbatched_requests[self._rejected_count :]
        del self._unbatched_requests[self._rejected_count :]
        for request in unchecked:
            # The last token of a sequence is never run, so it needs no column.
            fits = request.total_tokens - 1 <= columns
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
                self._advance(admit=True)
        complete = self._completed_responses
        self._completed_responses = []
        return complete

    def interrupt(self) -> list[DecodedResponse]:
        """Return all requests, complete or not, and forget them and every resident sequence."""
        stopped = [*self._completed_responses, *self._running, *self._waiting_responses]
        stopped += [
            DecodedResponse.from_request(request, self._seed)
            for request in self._unbatched_requests
        ]
        self.clear()
        return stopped

    def clear(self) -> None:
        """Forget every request and every resident sequence."""
        self._waiting_responses.clear()
        self._unbatched_requests.clear()
        self._rejected_count = 0
        self._running = []
        self._completed_responses = []
        self.clear_rows()

    def clear_rows(self) -> None:
        """Mark all rows of the KV cache as free, and forget the resident sequences."""
        self._resident_sequences.clear()
        self._row_table = RowTable[_ResidentSequence](self._state.cache.size.rows)

    def release_resident(self, prompt_id: int, sample_index: int) -> None:
        """Free the resident rows of a sample."""
        for sequence in self._resident_sequences.pop((prompt_id, sample_index), []):
            self._row_table.evict(sequence)

    def finish_running(self) -> None:
        """Complete every request in flight, and admit no waiting request."""
        while self._running:
            self._advance(admit=False)
        # The caller changes the weights next: later requests must not continue the old KV cache.
        self._evict_resident()

    def restart_running(self) -> None:
        """Forget the KV cache.

        The requests in flight move to the front of the waiting ones, and are prefilled again.
        """
        self._waiting_responses.extend_front(self._running)
        self._running = []
        self.clear_rows()

    def _evict_resident(self) -> None:
        """Free all resident rows."""
        self._resident_sequences.clear()
        self._row_table.evict_all()

    def _find_resident_prefix(self, response: DecodedResponse) -> _ResidentSequence | None:
        """Return the longest resident sequence of the same sample that is a prefix of the request's
        tokens; None if there is none."""
        sequences = self._resident_sequences.get(response.sample_key, [])
        # A waiting request that has generated tokens was restarted by `restart_running`, which also
        # forgot its KV cache. It is prefilled as a whole.
        if not sequences or len(response.tokens) > response.input_tokens:
            return None

        context = [*response.prompt, *response.tokens]
        prefixes = [
            sequence
            for sequence in sequences
            if sequence in self._row_table
            and len(sequence.tokens) < len(context)
            and context[: len(sequence.tokens)] == sequence.tokens
        ]
        return max(prefixes, key=lambda sequence: len(sequence.tokens), default=None)

    @property
    def _batch_options(self) -> SamplingOptions:
        """Sampling parameters of the current batch."""
        assert self._options is not None, "a batch has sampling parameters"
        return self._options

    def _advance(self, *, admit: bool) -> None:
        """Run one step: decode the rows in flight, and prefill the requests that get a free row.

        Requests that continue a resident sequence are prefilled first, in a forward pass of their
        own. If no other request gets a row, several decode steps may run without host
        synchronization between them.

        Args:
            admit: Whether waiting requests may get a row.
        """
        start = time.perf_counter()
        if admit:
            self._resume_resident()
        self._compact_rows()

        prefix_copies, prefills = self._admit() if admit else ([], [])
        decoding = sort_by_row([*self._running, *prefix_copies])
        # A step that prefills has one token per decoding row, so it has no draft tokens to verify.
        drafts: list[Sequence[int]] = [()] * len(decoding) if prefills else self._draft(decoding)
        step = self._build_step(decoding, drafts, prefills)
        # The step's logits have the same order: first the decoding rows, then the prompts.
        self._running = decoding + prefills
        step_count = 1
        if not prefills and step.tokens_per_row == 1:
            step_count = self._compute_step_count()

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

    def _resume_resident(self) -> None:
        """Give each waiting request that continues a resident sequence the row of that sequence.

        One forward pass prefills the new tokens of all these requests, except the last token of
        each.
        """
        continuations = []
        # There are at most as many resident sequences as rows, but any number of waiting requests.
        sample_keys = dict.fromkeys(sequence.sample_key for sequence in self._row_table.owners)
        for sample_key in sample_keys:
            for response in self._waiting_responses.find_sample(*sample_key):
                sequence = self._find_resident_prefix(response)
                if sequence is not None:
                    self._resident_sequences[sample_key].remove(sequence)
                    self._waiting_responses.remove(response)
                    response.row, response.cached_tokens = self._row_table.resume(sequence)
                    continuations.append(response)
        if not continuations:
            return
        continuations = sort_by_row(continuations)
        self._running = sort_by_row([*self._running, *continuations])

        columns = self._state.cache.size.columns
        device = self._state.device
        # The newest token is the input of the next decode step, so it is not prefilled here.
        tokens_per_row = max(
            response.length - 1 - response.cached_tokens for response in continuations
        )
        tokens = []
        positions = []
        for response in continuations:
            new_tokens = [*response.prompt, *response.tokens][response.cached_tokens : -1]
            tokens += new_tokens + [0] * (tokens_per_row - len(new_tokens))
            # All rows of a step have equally many tokens. The padding is written after the end of
            # the sequence, where later tokens overwrite it before any token attends to it.
            positions += [
                min(response.cached_tokens + offset, columns - 1)
                for offset in range(tokens_per_row)
            ]
        # Without new tokens, the rows only decode.
        if not tokens_per_row:
            return

        inputs = torch.tensor([tokens, positions], device=device)
        step = Step(
            inputs[0],
            inputs[1],
            columns=max(positions) + 1,
            tokens_per_row=tokens_per_row,
            rows=[response.row for response in continuations],
            needs_logits=False,
        )
        try:
            with torch.inference_mode():
                self._state.forward(step, self._state.cache)
        except BaseException:
            self.restart_running()
            raise

    def _check_finite(self, logprobs: Sequence[float]) -> None:
        """Raise AlignerError if a log-prob is NaN or infinite."""
        if not all(map(math.isfinite, logprobs)):
            # Attention multiplies masked entries of the cache by zero, and 0 * NaN is NaN.
            self._state.cache.clear()
            raise AlignerError(
                "the engine computed a log-prob that is not finite: check the weights of version"
                f" {self._state.version} for NaN and infinite values"
            )

    def _admit(self) -> tuple[list[DecodedResponse], list[DecodedResponse]]:
        """Give rows to waiting requests, in their order, while rows are free.

        Returns:
            The requests whose prompt was copied from the row of a sibling in flight, and the
            requests whose tokens have to be prefilled.
        """
        cache = self._state.cache
        prefix_copies = list[DecodedResponse]()
        prefills = list[DecodedResponse]()
        # The states of delta nets in a sibling's row have advanced beyond the prompt already.
        siblings: dict[tuple[int, ...], DecodedResponse] = {}
        if cache.delta_nets is None:
            siblings = {response.prompt: response for response in self._running}
        contexts = set[tuple[int, ...]]()
        max_length = 0
        while self._waiting_responses:
            if len(self._running) + len(prefix_copies) + len(prefills) >= cache.size.rows:
                break
            response = self._waiting_responses.first
            # Only the prompt can be copied; tokens after it have to be prefilled.
            sibling = None if response.tokens else siblings.get(response.prompt)
            if sibling is not None:
                response.prefill_routing = sibling.prefill_routing
                self._waiting_responses.remove(response)
                prefix_copies.append(response)
                continue

            # Equal contexts are prefilled once, so only a new context adds tokens to the step.
            context = (*response.prompt, *response.tokens)
            if context not in contexts:
                padded_length = max(max_length, len(context))
                if contexts and (len(contexts) + 1) * padded_length > _MAX_PREFILL_TOKENS:
                    break
                contexts.add(context)
                max_length = padded_length
            self._waiting_responses.remove(response)
            prefills.append(response)

        for response in (*prefix_copies, *prefills):
            response.row = self._row_table.allocate()
        # The last token of the prompt is not copied: the row decodes it in this step.
        for response in prefix_copies:
            sibling_row = siblings[response.prompt].row
            cache.copy_rows([sibling_row], [response.row], len(response.prompt) - 1)
        return prefix_copies, prefills

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
        if not any(drafts):
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
        prompts = None
        if prefills:
            # Equal contexts share an index, so each is prefilled once.
            context_indices: dict[tuple[int, ...], int] = {}
            prompt_indices = []
            for response in prefills:
                context = (*response.prompt, *response.tokens)
                index = context_indices.setdefault(context, len(context_indices))
                prompt_indices.append(index)
            lengths = [len(context) for context in context_indices]
            packed_tokens = [token for context in context_indices for token in context]
            prompts = Prompts(
                tokens=torch.tensor(packed_tokens, device=device),
                lengths=torch.tensor(lengths, device=device),
                max_length=max(lengths),
                prompt_indices=torch.tensor(prompt_indices, device=device),
                rows=[response.row for response in prefills],
            )

        tokens: list[int] = []
        positions: list[int] = []
        for response, draft in zip(decoding, drafts, strict=True):
            row_tokens = [response.last_token, *draft]
            tokens += row_tokens
            # The newest token is not in the cache yet: this step writes it at its position.
            positions += [response.length - 1 + offset for offset in range(len(row_tokens))]
        tokens_per_row = len(tokens) // len(decoding) if decoding else 1
        rows = [response.row for response in decoding]
        # One copy to the device instead of two.
        inputs = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(device)
        return Step(
            tokens=inputs[0],
            positions=inputs[1],
            columns=max(positions, default=0) + 1,
            prompts=prompts,
            expert_routing=[] if self._batch_options.routes else None,
            tokens_per_row=tokens_per_row,
            # None means rows 0 to n-1 of the KV cache, the only rows for which CUDA graphs exist.
            rows=None if rows == list(range(len(rows))) else rows,
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
        return min(self._state.steps_per_sync, *remaining)

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
            # The row has copied the prompt from a sibling, and takes over its routing too.
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
        """Release the rows of completed requests; the row of a request that may be continued stays
        resident."""
        completed = []
        running = []
        for response in self._running:
            if response.finish_reason is None:
                running.append(response)
            else:
                completed.append(response)
        self._running = sort_by_row(running)

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
                sequence = _ResidentSequence(
                    response.sample_key, [*response.prompt, *response.tokens]
                )
                self._resident_sequences.setdefault(response.sample_key, []).append(sequence)
                # The last token was sampled but never run, so it is not in the cache.
                self._row_table.make_resident(sequence, response.row, response.length - 1)
            else:
                self._row_table.release(response.row)

    def _compact_rows(self) -> None:
        """Move the last rows in flight to free rows before them.

        On GPUs they are also swapped with resident rows, because CUDA graphs exist only for the
        first rows of the KV cache.
        """
        rows = [response.row for response in self._running]
        moves = self._row_table.find_moves(rows, include_resident=self._state.device.type != "cpu")
        if not moves:
            return

        # Collect all copies, so that `copy_rows` reads every source before it writes a target.
        sources = list[int]()
        targets = list[int]()
        width = 0
        for response, target in zip(self._running[-len(moves) :], moves, strict=True):
            # Number of tokens of the resident sequence in the target row; 0 if the row is free.
            resident_tokens = self._row_table.swap(response.row, target)
            sources.append(response.row)
            targets.append(target)
            if resident_tokens:
                sources.append(target)
                targets.append(response.row)
            width = max(width, resident_tokens, response.length)
            response.row = target
        self._state.cache.copy_rows(sources, targets, width)
        self._running = sort_by_row(self._running)


def _has_grammar(responses: Sequence[DecodedResponse]) -> bool:
    """Return whether a response follows a grammar, whose mask depends on the token before it."""
    return any(response.request.sampling.grammar is not None for response in responses)
