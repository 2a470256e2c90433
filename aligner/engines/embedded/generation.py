"""Continuous batching: responses join the batch as others leave it."""

import math
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aligner.data.types import Sample
from aligner.engines.embedded.decoded_response import DecodedResponse, begin, in_order
from aligner.engines.embedded.decoder import Prompts, Step
from aligner.engines.embedded.engine_machine import Machine
from aligner.engines.embedded.row_table import RowTable
from aligner.engines.embedded.sampling import renew
from aligner.engines.embedded.speculation import Lookup
from aligner.engines.embedded.token_drawing import Drawing
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError

_PROMPT_TOKENS = 8192
"""Prompts join in one step as long as they have no more tokens, padded to the longest for their
attention."""


class EmbeddedGeneration:
    """A `Generation`: the responses of one call, in rows of the cache or waiting for one.

    A step runs the newest token of every row, and the prompts of those that get a free row, in one
    pass. Distinct prompts are run once: samples that join together share the pass, and one that
    joins later copies the prompt's keys and values from the row of a sibling that still runs. Where
    rows are few and the next tokens can be guessed (`engine.speculation`) they run in the same
    pass: each place's token is drawn with its own random number, and is the response's as long as
    all guesses before it were what was drawn.

    Where nothing joins, `engine.steps_per_sync` steps may follow each other on the device, each of
    the tokens that the one before has drawn there; what a response has drawn behind its end is
    dropped.

    A response that has ended a turn keeps its row as long as nobody else needs one; told to go on,
    it runs what is new in a pass of its own, or else everything anew. Its keys and values stay
    where they are meanwhile, among the rows in use: to move them would take longer with every turn.
    Only on GPUs, where recorded steps know the first rows alone, they change places.
    """

    def __init__(
        self,
        machine: Machine,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        seed: int,
    ) -> None:
        self._machine, self._options, self._seed, self._count = (
            machine,
            options,
            seed,
            len(requests),
        )
        self._drawing = Drawing(machine, options)
        self._stops = frozenset(options.stop_token_ids)
        responses = [begin(index, request, options, seed) for index, request in enumerate(requests)]
        first = {response.prompt: response.index for response in reversed(responses)}
        siblings_together = sorted(responses, key=lambda response: first[response.prompt])
        self._waiting = deque(
            response for response in siblings_together if not response.request.waits
        )
        self._rows: list[DecodedResponse] = []
        """In the order of their rows."""
        self._complete: list[tuple[int, Sample]] = []
        """Complete, but not yet given out."""
        self._between_turns = {
            response.index: response for response in responses if response.request.waits
        }
        """Given out; they may be told to go on."""
        self._table = RowTable(machine.cache.size.rows)
        """Some of them have rows that wait, by their places among the requests."""

    @property
    def done(self) -> bool:
        """Whether every response is complete, and given out."""
        return not (self._waiting or self._rows or self._complete)

    def step(self) -> list[tuple[int, Sample]]:
        """As `Generation.step`: one more token for every row, or several where they were guessed or
        drawn in one go."""
        if self._waiting or self._rows:
            if self._machine.version is None and not self._complete:
                raise AlignerError(
                    "the engine has no weights; its responses in flight resume after the next"
                    " weight sync"
                )
            if self._machine.version is not None:
                self._advance(admit=True)
        complete, self._complete = self._complete, []
        return complete

    def go_on(self, place: int, tokens: Sequence[int]) -> None:
        """As `TurnGeneration.go_on`."""
        response = self._between_turns[place]
        response.give(tokens)
        renew(response.numbers, self._seed, response.request, response.tokens)
        self._waiting.append(self._between_turns.pop(place))

    def add(self, request: GenerationRequest) -> int:
        """As `TurnGeneration.add`."""
        columns, limit = self._machine.cache.size.columns, request.limit(self._options)
        if (longest := len(request.prompt.tokens) + limit - 1) > columns:
            raise AlignerError(
                f"prompt {request.prompt.id}: a new branch of the episode needs KV cache for"
                f" {longest} tokens, but the cache has room for {columns} tokens per sequence"
            )
        self._waiting.append(begin(self._count, request, self._options, self._seed))
        self._count += 1
        return self._count - 1

    def leave(self, place: int) -> None:
        """A complete response, of the request at that place, will not be told to go on."""
        del self._between_turns[place]
        self._table.drop(place)

    def unfinished(self) -> list[tuple[int, Sample]]:
        """The responses that are not complete as they are now, each with its place among the
        requests."""
        return [(response.index, response.sample()) for response in (*self._rows, *self._waiting)]

    def finish_rows(self) -> None:
        """Complete every response that has a row; none joins."""
        while self._rows:
            self._advance(admit=False)
        self._table.forget()

    def restart_rows(self) -> None:
        """Forget keys and values: every response that had a row waits, first in line, and is run
        anew from its tokens."""
        self._waiting.extendleft(reversed(self._rows))
        self._rows, self._table = [], RowTable(self._machine.cache.size.rows)

    def cancel(self) -> None:
        """Drop every response."""
        self._waiting.clear()
        self._between_turns.clear()
        self._rows, self._complete, self._table = [], [], RowTable(self._machine.cache.size.rows)

    def _advance(self, *, admit: bool) -> None:
        start = time.perf_counter()
        if admit:
            self._read_on()
        self._close_gaps()
        joining, beginning = self._admit() if admit else ([], [])
        rows = in_order([*self._rows, *joining])
        guesses = [()] * len(rows) if beginning else self._guess(rows)
        step = self._plan(rows, guesses, beginning)
        self._rows = rows + beginning
        count = 1 if beginning or step.width > 1 else self._steps_ahead()
        try:
            with torch.inference_mode():
                tokens, logprobs, kept = self._drawing.draw(self._rows, step, count)
            self._check_finite(logprobs)
            if step.routes is not None:
                self._record_routes(step, torch.stack(step.routes, 1).cpu())
        except BaseException:
            # who steps on must not build on keys and values that may not be there
            self.restart_rows()
            raise
        width = max(count, step.width)
        for at, row in enumerate(self._rows):
            its, guessed = (
                slice(at * width, (at + 1) * width),
                (guesses[at] if at < len(guesses) else ()),
            )
            self._take(row, tokens[its], logprobs[its], kept[its], guessed if count == 1 else None)
        self._release()
        if beginning and self._machine.listener is not None:
            self._machine.listener("prefill", start, time.perf_counter())

    def _read_on(self) -> None:
        """Have rows again for those whose keys and values are still there, and run what they were
        given since."""
        returning = [response for response in self._waiting if response.index in self._table]
        if not returning:
            return
        for response in returning:
            self._waiting.remove(response)
            response.row, response.held = self._table.resume(response.index)
        returning = in_order(returning)
        self._rows = in_order([*self._rows, *returning])
        columns, device = self._machine.cache.size.columns, self._machine.device
        width = max(response.length - 1 - response.held for response in returning)
        tokens, positions = [], []
        for response in returning:
            new = [*response.prompt, *response.tokens][response.held : -1]
            tokens += new + [0] * (width - len(new))
            # What fills up a row is written behind it, and overwritten before it is seen.
            positions += [min(response.held + ahead, columns - 1) for ahead in range(width)]
        if not width:
            return
        both = torch.tensor([tokens, positions], device=device)
        rows = [response.row for response in returning]
        step = Step(
            both[0], both[1], columns=max(positions) + 1, width=width, rows=rows, scores=False
        )
        try:
            with torch.inference_mode():
                self._machine.forward(step, self._machine.cache)
        except BaseException:
            self.restart_rows()
            raise

    def _check_finite(self, logprobs: Sequence[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            self._machine.cache.clear()
            raise AlignerError(
                "the engine computed a log-prob that is not finite: check the weights of version"
                f" {self._machine.version} for NaN and infinite values"
            )

    def _admit(self) -> tuple[list[DecodedResponse], list[DecodedResponse]]:
        """Those that join a sibling's prompt, and those whose own tokens have to be run."""
        cache = self._machine.cache
        joining, beginning = list[DecodedResponse](), list[DecodedResponse]()
        siblings = {row.prompt: row for row in self._rows}
        distinct, width = set[tuple[int, ...]](), 0
        while self._waiting and len(self._rows) + len(joining) + len(beginning) < cache.size.rows:
            response = self._waiting[0]
            sibling = None if response.tokens else siblings.get(response.prompt)
            if sibling is not None:
                response.read = sibling.read
                joining.append(self._waiting.popleft())
                continue
            context = (*response.prompt, *response.tokens)
            if context not in distinct:
                if distinct and (len(distinct) + 1) * max(width, len(context)) > _PROMPT_TOKENS:
                    break
                distinct.add(context)
                width = max(width, len(context))
            beginning.append(self._waiting.popleft())
        for response in (*joining, *beginning):
            response.row = self._table.take()
        for response in joining:
            cache.copy_rows(
                [siblings[response.prompt].row], [response.row], len(response.prompt) - 1
            )
        return joining, beginning

    def _guess(self, rows: Sequence[DecodedResponse]) -> list[Sequence[int]]:
        """The next tokens of each row, as many of each; of none when no row's can be guessed, or
        there are too many rows."""
        settings = self._machine.speculation
        none: list[Sequence[int]] = [()] * len(rows)
        if not settings.tokens or not 0 < len(rows) <= settings.rows or self._options.routes:
            return none
        most = min(settings.tokens, *(row.turn_limit - len(row.tokens) - 1 for row in rows))
        found = []
        for row in rows if most else ():
            row.lookup = row.lookup or Lookup(settings.ngram)
            found.append(row.lookup.draft((*row.prompt, *row.tokens), most))
        if not any(found):
            return none
        self._machine.guessed += sum(map(len, found))
        return [guessed or [row.newest] * most for row, guessed in zip(rows, found, strict=True)]

    def _plan(
        self,
        rows: Sequence[DecodedResponse],
        guesses: Sequence[Sequence[int]],
        beginning: Sequence[DecodedResponse],
    ) -> Step:
        device = self._machine.device
        prompts = None
        if beginning:
            places: dict[tuple[int, ...], int] = {}
            copies = [
                places.setdefault((*one.prompt, *one.tokens), len(places)) for one in beginning
            ]
            lengths = [len(context) for context in places]
            prompts = Prompts(
                tokens=torch.tensor(
                    [token for context in places for token in context], device=device
                ),
                lengths=torch.tensor(lengths, device=device),
                width=max(lengths),
                copies=torch.tensor(copies, device=device),
                rows=[response.row for response in beginning],
            )
        tokens = [
            token
            for row, guessed in zip(rows, guesses, strict=True)
            for token in (row.newest, *guessed)
        ]
        width = len(tokens) // len(rows) if rows else 1
        taken = [row.row for row in rows]
        positions = [row.length - 1 + ahead for row in rows for ahead in range(width)]
        both = torch.from_numpy(np.array([tokens, positions], dtype=np.int64)).to(device)
        return Step(
            tokens=both[0],
            positions=both[1],
            columns=max(positions, default=0) + 1,
            prompts=prompts,
            routes=[] if self._options.routes else None,
            width=width,
            rows=None if taken == list(range(len(rows))) else taken,
        )

    def _steps_ahead(self) -> int:
        """Steps that may follow each other without a look at what they draw: no row reaches its
        limit before the last."""
        options, speculation = self._options, self._machine.speculation
        if (
            options.tells_kept
            or options.routes
            or (speculation.tokens and len(self._rows) <= speculation.rows)
        ):
            return 1
        return min(
            self._machine.steps_per_sync, *(row.turn_limit - len(row.tokens) for row in self._rows)
        )

    def _record_routes(self, step: Step, routes: Tensor) -> None:
        """Add the step's routes [R + N, L, K]. Of a token whose successor was drawn before, those
        first recorded stay."""
        for row, newest in zip(self._rows, routes[: len(step.tokens)].unbind(), strict=False):
            if not row.tokens and row.read is not None:  # it has joined the prompt of a sibling
                row.routes = [row.read[: len(row.prompt) - 1]]
            row.routes.append(newest[None])
        if step.prompts is None:
            return
        contexts = routes[len(step.tokens) :].split(step.prompts.lengths.tolist())
        for row, context in zip(
            self._rows[len(step.tokens) :], step.prompts.copies.tolist(), strict=True
        ):
            row.read = contexts[context]
            row.routes.append(row.read[sum(map(len, row.routes)) :])

    def _take(
        self,
        row: DecodedResponse,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        kept: Sequence[Tensor],
        guessed: Sequence[int] | None,
    ) -> None:
        """What a row's next places have drawn, up to its end or to the first that came after a
        wrong guess.

        `guessed` is None where each place has followed what was drawn before it.
        """
        assert self._machine.version is not None
        count = len(tokens)
        if guessed is not None:
            count = 1 + next(
                (at for at, guess in enumerate(guessed) if guess != tokens[at]), len(guessed)
            )
        if self._stops:
            count = next(
                (at for at, token in enumerate(tokens[:count], 1) if token in self._stops), count
            )
        if guessed is not None:
            self._machine.accepted += count - 1
        row.tokens += tokens[:count]
        row.logprobs += logprobs[:count]
        row.versions += [self._machine.version] * count
        if self._options.tells_kept or row.kept:
            row.kept += kept[:count]
        if row.tokens[-1] in self._stops:
            row.finish_reason = "stop"
        elif len(row.tokens) == row.turn_limit:
            row.finish_reason = "length"

    def _release(self) -> None:
        """Give out complete responses; their rows wait for those that may go on."""
        ended = [row for row in self._rows if row.finish_reason is not None]
        self._rows = in_order([row for row in self._rows if row.finish_reason is None])
        for row in ended:
            self._complete.append((row.index, row.sample()))
            goes_on = row.request.turn_tokens is not None
            if goes_on:
                self._between_turns[row.index] = row
            if goes_on and not self._options.routes:  # which are told as everything is run anew
                self._table.park(row.index, row.row, row.length - 1)
            else:
                self._table.release(row.row)

    def _close_gaps(self) -> None:
        """Move the last rows to where nobody's are before them; on GPUs also to where some wait,
        which change places."""
        moves = self._table.moves(
            [row.row for row in self._rows], past_waiting=self._machine.device.type != "cpu"
        )
        if not moves:
            return
        sources, targets, width = list[int](), list[int](), 0
        for response, target in zip(self._rows[-len(moves) :], moves, strict=True):
            held = self._table.exchange(response.row, target)
            sources += [response.row, target] if held else [response.row]
            targets += [target, response.row] if held else [target]
            width, response.row = max(width, held, response.length), target
        self._machine.cache.copy_rows(sources, targets, width)
        self._rows = in_order(self._rows)
