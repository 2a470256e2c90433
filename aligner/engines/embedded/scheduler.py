"""Continuous batching: a request joins the batch as soon as another one leaves it."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aligner.engines.embedded.decoded_response import DecodedResponse, in_order
from aligner.engines.embedded.decoder import Prompts, Step
from aligner.engines.embedded.engine_machine import Machine
from aligner.engines.embedded.row_table import RowTable
from aligner.engines.embedded.speculation import Lookup
from aligner.engines.embedded.token_drawing import Drawing
from aligner.engines.engine_protocol import EngineRequest, SamplingOptions
from aligner.errors import AlignerError

# Maximum number of tokens that one step prefills, counted with the padding to the longest prompt
# that attention needs. A single prompt may be longer.
_PROMPT_TOKENS = 8192


@dataclass(eq=False)
class _ResidentSequence:
    """A completed sequence whose KV cache is resident for a later request."""

    tokens: list[int]


class Scheduler:
    """Continuous batching: schedules requests in the rows of the KV cache.

    A step runs the newest token of every row, and prefills the requests that get a free row, in one
    forward pass. Equal inputs are prefilled once: requests that are admitted together share the
    prefill, and a request that is admitted later copies the prompt's KV cache from the row of a
    sibling that is still in flight. If there are few rows and draft tokens are available
    (`engine.speculation`), the draft tokens are verified in the same pass: the token at each
    position is sampled with its own random number, and belongs to the completion if all draft
    tokens before it equal the sampled ones.

    If no request is admitted, `engine.steps_per_sync` steps may run on the device without host
    synchronization; the tokens behind a completion's end are dropped.

    The row of a completed request that may be continued (`EngineRequest.is_continued`) stays
    resident as long as no other request needs the row. The request that continues it prefills only
    the new tokens. A resident row does not move: a move would take longer with every turn. Only on
    GPUs, where CUDA graphs know the first rows alone, resident rows and rows in flight are swapped.

    All ranks of a replica have a scheduler, and make the same calls in the same order.
    """

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine = machine
        self._seed = seed
        self._options: SamplingOptions | None = None
        """Sampling parameters of the batch, except token limits."""
        self._later: deque[EngineRequest] = deque()
        """Requests that the batch cannot hold."""
        self._waiting: deque[DecodedResponse] = deque()
        """Requests without a row."""
        self._rows: list[DecodedResponse] = []
        """Requests in flight, in the order of their rows."""
        self._complete: list[DecodedResponse] = []
        """Completed requests that `step` has not returned yet."""
        self._resident: dict[tuple[int, int], list[_ResidentSequence]] = {}
        """Sequences that later requests may continue, by prompt id and sample index."""
        self._table = RowTable(machine.cache.size.rows)

    @property
    def has_work(self) -> bool:
        """Whether a request is queued or in flight."""
        return bool(self._waiting or self._rows or self._complete or self._later)

    @property
    def is_idle(self) -> bool:
        """Whether no request has a row or waits for one."""
        return not (self._waiting or self._rows)

    def queue(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests, in this order."""
        self._later.extend(requests)

    def next_batch(self) -> list[EngineRequest]:
        """Return the queued requests that a new batch may hold; none while a batch is in flight."""
        if not self.is_idle or not self._later:
            return []
        options = self._later[0].sampling
        return [request for request in self._later if request.sampling.is_batchable_with(options)]

    def drop(self, request: EngineRequest) -> None:
        """Remove a queued request."""
        self._later.remove(request)

    def join_batch(self) -> None:
        """Add the queued requests that fit the batch; requests with the same prompt are grouped.

        Requests with other sampling parameters, or with more tokens than a row of the KV cache
        holds, wait for the next batch.
        """
        if self.is_idle and self._later:
            self._start_batch(self._later[0].sampling)
        options = self._options
        if options is None:
            return

        columns = self._machine.cache.size.columns
        joining: list[EngineRequest] = []
        waiting: deque[EngineRequest] = deque()
        for request in self._later:
            fits = request.total_tokens - 1 <= columns
            is_batchable = request.sampling.is_batchable_with(options)
            (joining if fits and is_batchable else waiting).append(request)
        self._later = waiting

        # Requests with the same prompt are admitted together, so that one prefill serves all.
        responses = [DecodedResponse.begin(request, self._seed) for request in joining]
        first_index: dict[tuple[int, ...], int] = {}
        for index, response in enumerate(responses):
            first_index.setdefault(response.prompt, index)
        self._waiting += sorted(responses, key=lambda response: first_index[response.prompt])

    def _start_batch(self, options: SamplingOptions) -> None:
        if self._options is None or not options.is_batchable_with(self._options):
            self._options = options
            self._sampler = Drawing(self._machine, options)
            self._stops = frozenset(options.stop_token_ids)

    def step(self) -> list[DecodedResponse]:
        """Run one step: one more token for every row, or several with draft tokens or several steps
        per synchronization.

        Returns the completed requests. Raises AlignerError if the engine has no weights.
        """
        if self._waiting or self._rows:
            if self._machine.version is None and not self._complete:
                raise AlignerError(
                    "the engine has no weights; its responses in flight resume after the next"
                    " weight sync"
                )
            if self._machine.version is not None:
                self._advance(admit=True)
        complete = self._complete
        self._complete = []
        return complete

    def interrupt(self) -> list[DecodedResponse]:
        """Return all requests as they are, and forget them."""
        stopped = [*self._complete, *self._rows, *self._waiting]
        stopped += [DecodedResponse.begin(request, self._seed) for request in self._later]
        self.clear()
        return stopped

    def clear(self) -> None:
        """Forget every request and every resident row."""
        self._waiting.clear()
        self._later.clear()
        self._rows = []
        self._complete = []
        self.clear_rows()

    def clear_rows(self) -> None:
        """Forget the resident rows, because the KV cache is allocated with another size."""
        self._resident.clear()
        self._table = RowTable(self._machine.cache.size.rows)

    def release(self, prompt_id: int, sample_index: int) -> None:
        """Free the resident rows of a sample."""
        for sequence in self._resident.pop((prompt_id, sample_index), []):
            self._table.drop(sequence)

    def finish_rows(self) -> None:
        """Complete every request in flight; admit none."""
        while self._rows:
            self._advance(admit=False)
        self._forget_resident()

    def restart_rows(self) -> None:
        """Forget the KV cache.

        The requests in flight move to the front of the queue, and are prefilled again.
        """
        self._waiting.extendleft(reversed(self._rows))
        self._rows = []
        self.clear_rows()

    def _forget_resident(self) -> None:
        self._resident.clear()
        self._table.forget()

    def _resident_prefix(self, response: DecodedResponse) -> "_ResidentSequence | None":
        """Return the longest resident sequence of the same sample that the input begins with."""
        key = response.request.key
        sequences = self._resident.get((key.prompt_id, key.sample_index), [])
        if not sequences or len(response.tokens) > response.input_tokens:
            return None
        context = [*response.prompt, *response.tokens]
        prefixes = [
            sequence
            for sequence in sequences
            if sequence in self._table
            and len(sequence.tokens) < len(context)
            and context[: len(sequence.tokens)] == sequence.tokens
        ]
        return max(prefixes, key=lambda sequence: len(sequence.tokens), default=None)

    @property
    def _batch_options(self) -> SamplingOptions:
        assert self._options is not None, "a batch has sampling parameters"
        return self._options

    def _advance(self, *, admit: bool) -> None:
        """Run one forward pass, or several without host synchronization between them.

        Args:
            admit: Whether waiting requests may get a row.
        """
        start = time.perf_counter()
        if admit:
            self._resume_resident()
        self._close_gaps()

        prefix_copies, prefills = self._admit() if admit else ([], [])
        rows = in_order([*self._rows, *prefix_copies])
        # A step that prefills has one token per decoding row, so it verifies no draft tokens.
        drafts = [()] * len(rows) if prefills else self._guess(rows)
        step = self._plan(rows, drafts, prefills)
        self._rows = rows + prefills
        count = 1 if prefills or step.width > 1 else self._steps_ahead()

        try:
            with torch.inference_mode():
                tokens, logprobs, supports = self._sampler.draw(self._rows, step, count)
            self._check_finite(logprobs)
            if step.routes is not None:
                self._record_routes(step, torch.stack(step.routes, 1).cpu())
        except BaseException:
            # The failed step may have left the KV cache incomplete. If the caller continues after
            # the error, the next step must not use it.
            self.restart_rows()
            raise

        width = max(count, step.width)
        for index, row in enumerate(self._rows):
            span = slice(index * width, (index + 1) * width)
            draft = drafts[index] if index < len(drafts) else ()
            self._take(
                row, tokens[span], logprobs[span], supports[span], draft if count == 1 else None
            )
        self._release_completed()

        if prefills and self._machine.listener is not None:
            self._machine.listener("prefill", start, time.perf_counter())

    def _resume_resident(self) -> None:
        """Give each waiting request that continues a resident sequence the row of that sequence,
        and prefill its new tokens."""
        if not self._resident:
            return

        continuations = []
        for response in [*self._waiting]:
            sequence = self._resident_prefix(response)
            if sequence is not None:
                key = response.request.key
                self._resident[key.prompt_id, key.sample_index].remove(sequence)
                self._waiting.remove(response)
                response.row, response.cached = self._table.resume(sequence)
                continuations.append(response)
        if not continuations:
            return
        continuations = in_order(continuations)
        self._rows = in_order([*self._rows, *continuations])

        columns = self._machine.cache.size.columns
        device = self._machine.device
        # The newest token is the input of the next decode step, so it is not prefilled here.
        width = max(response.length - 1 - response.cached for response in continuations)
        tokens = []
        positions = []
        for response in continuations:
            new_tokens = [*response.prompt, *response.tokens][response.cached : -1]
            tokens += new_tokens + [0] * (width - len(new_tokens))
            # All rows of a step have equally many tokens. The padding is written behind the end of
            # the sequence, where later tokens overwrite it before any token attends to it.
            positions += [min(response.cached + ahead, columns - 1) for ahead in range(width)]
        if not width:
            return

        inputs = torch.tensor([tokens, positions], device=device)
        rows = [response.row for response in continuations]
        step = Step(
            inputs[0], inputs[1], columns=max(positions) + 1, width=width, rows=rows, scores=False
        )
        try:
            with torch.inference_mode():
                self._machine.forward(step, self._machine.cache)
        except BaseException:
            self.restart_rows()
            raise

    def _check_finite(self, logprobs: Sequence[float]) -> None:
        """Raise AlignerError if a log-prob is NaN or infinite."""
        if not all(map(math.isfinite, logprobs)):
            # Attention multiplies masked entries of the cache by zero, and 0 * NaN is NaN.
            self._machine.cache.clear()
            raise AlignerError(
                "the engine computed a log-prob that is not finite: check the weights of version"
                f" {self._machine.version} for NaN and infinite values"
            )

    def _admit(self) -> tuple[list[DecodedResponse], list[DecodedResponse]]:
        """Give rows to waiting requests, in their order, while rows are free.

        Returns:
            The requests whose prompt was copied from the row of a sibling in flight, and the
            requests whose tokens have to be prefilled.
        """
        cache = self._machine.cache
        prefix_copies = list[DecodedResponse]()
        prefills = list[DecodedResponse]()
        siblings = {row.prompt: row for row in self._rows}
        contexts = set[tuple[int, ...]]()
        width = 0
        while (
            self._waiting and len(self._rows) + len(prefix_copies) + len(prefills) < cache.size.rows
        ):
            response = self._waiting[0]
            sibling = None if response.tokens else siblings.get(response.prompt)
            if sibling is not None:
                response.read = sibling.read
                prefix_copies.append(self._waiting.popleft())
                continue

            # Equal contexts are prefilled once, so only a new context adds tokens to the step.
            context = (*response.prompt, *response.tokens)
            if context not in contexts:
                if contexts and (len(contexts) + 1) * max(width, len(context)) > _PROMPT_TOKENS:
                    break
                contexts.add(context)
                width = max(width, len(context))
            prefills.append(self._waiting.popleft())

        for response in (*prefix_copies, *prefills):
            response.row = self._table.take()
        # The last token of the prompt is not copied: the row decodes it in this step.
        for response in prefix_copies:
            cache.copy_rows(
                [siblings[response.prompt].row], [response.row], len(response.prompt) - 1
            )
        return prefix_copies, prefills

    def _guess(self, rows: Sequence[DecodedResponse]) -> list[Sequence[int]]:
        """Return the draft tokens of each row.

        All rows have equally many. They have none if no row has a draft, if there are more rows
        than `engine.speculation.rows`, or if the batch records expert routing.
        """
        settings = self._machine.speculation
        no_drafts: list[Sequence[int]] = [()] * len(rows)
        if not settings.tokens or not 0 < len(rows) <= settings.rows or self._batch_options.routes:
            return no_drafts

        # A step also samples the token after the last draft token.
        length = min(settings.tokens, *(row.limit - len(row.tokens) - 1 for row in rows))
        drafts = []
        for row in rows if length else ():
            row.lookup = row.lookup or Lookup(settings.ngram)
            drafts.append(row.lookup.draft((*row.prompt, *row.tokens), length))
        if not any(drafts):
            return no_drafts

        self._machine.guessed += sum(map(len, drafts))
        # A row without a draft gets placeholders, because all rows of a step have the same width.
        return [draft or [row.newest] * length for row, draft in zip(rows, drafts, strict=True)]

    def _plan(
        self,
        rows: Sequence[DecodedResponse],
        guesses: Sequence[Sequence[int]],
        beginning: Sequence[DecodedResponse],
    ) -> Step:
        """Return the input of the next forward pass.

        Args:
            rows: Decoding rows.
            guesses: Draft tokens of each decoding row, equally many.
            beginning: Requests to prefill.
        """
        device = self._machine.device
        prompts = None
        if beginning:
            context_indices: dict[tuple[int, ...], int] = {}
            copies = [
                context_indices.setdefault(
                    (*response.prompt, *response.tokens), len(context_indices)
                )
                for response in beginning
            ]
            lengths = [len(context) for context in context_indices]
            prompts = Prompts(
                tokens=torch.tensor(
                    [token for context in context_indices for token in context], device=device
                ),
                lengths=torch.tensor(lengths, device=device),
                width=max(lengths),
                copies=torch.tensor(copies, device=device),
                rows=[response.row for response in beginning],
            )

        tokens = [
            token
            for row, draft in zip(rows, guesses, strict=True)
            for token in (row.newest, *draft)
        ]
        width = len(tokens) // len(rows) if rows else 1
        row_indices = [row.row for row in rows]
        positions = [row.length - 1 + ahead for row in rows for ahead in range(width)]
        # One copy to the device instead of two.
        inputs = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(device)
        return Step(
            tokens=inputs[0],
            positions=inputs[1],
            columns=max(positions, default=0) + 1,
            prompts=prompts,
            routes=[] if self._batch_options.routes else None,
            width=width,
            rows=None if row_indices == list(range(len(rows))) else row_indices,
        )

    def _steps_ahead(self) -> int:
        """Return the number of decode steps that may run without host synchronization.

        No row reaches its limit before the last of these steps. The number is 1 if the host needs
        the results of each step: the sampling support, the expert routing, or the tokens for the
        next draft.
        """
        options = self._batch_options
        speculation = self._machine.speculation
        if (
            options.tells_kept
            or options.routes
            or (speculation.tokens and len(self._rows) <= speculation.rows)
        ):
            return 1
        return min(
            self._machine.steps_per_sync, *(row.limit - len(row.tokens) for row in self._rows)
        )

    def _record_routes(self, step: Step, routes: Tensor) -> None:
        """Append the expert routing of a step to its rows.

        If a token is prefilled again, its first record stays: that is the routing with which the
        next token was sampled.

        Args:
            step: The step; its decoding rows have one token each.
            routes: Experts of each token, [R + N, L, K], with the decoding rows first.
        """
        for row, newest in zip(self._rows, routes[: len(step.tokens)].unbind(), strict=False):
            # The row has copied the prompt from a sibling, and takes over its routing too.
            if not row.tokens and row.read is not None:
                row.routes = [row.read[: len(row.prompt) - 1]]
            row.routes.append(newest[None])
        if step.prompts is None:
            return

        prompt_routes = routes[len(step.tokens) :].split(step.prompts.lengths.tolist())
        for row, index in zip(
            self._rows[len(step.tokens) :], step.prompts.copies.tolist(), strict=True
        ):
            row.read = prompt_routes[index]
            row.routes.append(row.read[sum(map(len, row.routes)) :])

    def _take(
        self,
        row: DecodedResponse,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        kept: Sequence[Tensor],
        guessed: Sequence[int] | None,
    ) -> None:
        """Append the sampled tokens of a row up to its end, or up to the first rejected draft
        token.

        Args:
            row: Request in flight.
            tokens: Sampled tokens of the row's next positions.
            logprobs: Log-prob of each token.
            kept: Sampling support of each token, int32.
            guessed: Draft tokens on which all tokens but the first depend; None if each token
                depends on the sampled token before it.
        """
        assert self._machine.version is not None
        count = len(tokens)
        if guessed is not None:
            # tokens[i + 1] was sampled as if tokens[i] were guessed[i]. At the first mismatch,
            # tokens[i] itself is still valid, because all draft tokens before it were right.
            count = 1 + next(
                (index for index, draft in enumerate(guessed) if draft != tokens[index]),
                len(guessed),
            )
        if self._stops:
            count = next(
                (end for end, token in enumerate(tokens[:count], 1) if token in self._stops), count
            )
        if guessed is not None:
            self._machine.accepted += count - 1

        row.tokens += tokens[:count]
        row.logprobs += logprobs[:count]
        row.versions += [self._machine.version] * count
        if self._batch_options.tells_kept or row.kept:
            row.kept += kept[:count]
        if row.tokens[-1] in self._stops:
            row.finish_reason = "stop"
        elif len(row.tokens) == row.limit:
            row.finish_reason = "length"

    def _release_completed(self) -> None:
        """Move completed requests out of their rows; the rows of those that may be continued stay
        resident."""
        completed = [row for row in self._rows if row.finish_reason is not None]
        self._rows = in_order([row for row in self._rows if row.finish_reason is None])
        for row in completed:
            self._complete.append(row)
            # With expert routing, the next turn prefills the whole sequence again, because its
            # completion reports the routing of all tokens.
            if row.request.is_continued and not self._batch_options.routes:
                key = row.request.key
                sequence = _ResidentSequence([*row.prompt, *row.tokens])
                self._resident.setdefault((key.prompt_id, key.sample_index), []).append(sequence)
                self._table.park(sequence, row.row, row.length - 1)
            else:
                self._table.release(row.row)

    def _close_gaps(self) -> None:
        """Move the last rows in flight to free rows before them.

        On GPUs they also swap with resident rows, because CUDA graphs read only the first rows.
        """
        moves = self._table.moves(
            [row.row for row in self._rows], past_waiting=self._machine.device.type != "cpu"
        )
        if not moves:
            return

        sources = list[int]()
        targets = list[int]()
        width = 0
        for response, target in zip(self._rows[-len(moves) :], moves, strict=True):
            # Number of tokens of the resident sequence in the target row; 0 if the row is free.
            resident_tokens = self._table.exchange(response.row, target)
            sources += [response.row, target] if resident_tokens else [response.row]
            targets += [target, response.row] if resident_tokens else [target]
            width = max(width, resident_tokens, response.length)
            response.row = target
        self._machine.cache.copy_rows(sources, targets, width)
        self._rows = in_order(self._rows)
