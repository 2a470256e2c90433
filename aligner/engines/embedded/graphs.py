"""Decoding steps recorded as CUDA graphs: one launch instead of some dozen a layer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.engines.embedded.cache import Cache
from aligner.engines.embedded.decoder import Decoder, Step

_COLUMNS = 256
"""Steps are recorded for powers of two of rows and, where they read all columns, for multiples of
so many."""


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    step: Step
    logits: Tensor


class GraphedForward:
    """Replays a step of as many rows and columns, or a few more, where there are no prompts to run.

    A recorded step knows the addresses of weights and cache: `forget` it when one of them moves.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        """Where steps are recorded: cuBLAS keeps memory for every stream that it has computed on.
        """

    @property
    def recorded(self) -> bool:
        """Whether there is any recorded step."""
        return bool(self._recorded)

    def forget(self) -> None:
        """Drop every recorded step."""
        self._recorded.clear()
        self._pool = None

    def forward(self, step: Step, cache: Cache) -> Tensor:
        """What the decoder's own `forward` returns; valid until the next call."""
        rows = len(step.tokens)
        if (
            step.prompts is not None
            or rows == 0
            or step.width > 1
            or not step.scores
            or step.rows is not None
        ):
            return self._decoder.forward(step, cache)
        wanted_rows = min(1 << (rows - 1).bit_length(), cache.size.rows)
        wanted_columns = cache.size.columns
        # else a step reads as much as its rows have, whatever it is recorded for
        if not self._decoder.sliced:
            wanted_columns = min(-(-step.columns // _COLUMNS) * _COLUMNS, wanted_columns)
        recorded = self._recorded.get((wanted_rows, wanted_columns))
        if recorded is None:
            recorded = self._record(wanted_rows, wanted_columns, step, cache)
            self._recorded[wanted_rows, wanted_columns] = recorded
        self._fill(recorded.step, step, cache)
        recorded.graph.replay()
        return recorded.logits[:rows]

    def _fill(self, recorded: Step, step: Step, cache: Cache) -> None:
        """What is computed for rows past the step's is written at their last column, which has
        nothing of one that waits, and reads as little as it can.
        """
        rows = len(step.tokens)
        recorded.tokens[:rows] = step.tokens
        recorded.positions[:rows] = step.positions
        recorded.positions[rows:] = cache.size.columns - 1
        if recorded.lengths is not None:
            recorded.lengths[:rows] = step.positions + 1
            recorded.lengths[rows:] = 1

    def _fixed(self, rows: int, columns: int, step: Step, cache: Cache) -> Step:
        """A step whose tensors stay, with what another one of no more rows has in its."""
        lengths = step.positions.new_ones(rows, dtype=torch.int32) if self._decoder.sliced else None
        fixed = Step(
            step.tokens.new_zeros(rows), step.positions.new_zeros(rows), columns, lengths=lengths
        )
        self._fill(fixed, step, cache)
        return fixed

    def _record(self, rows: int, columns: int, step: Step, cache: Cache) -> _Recorded:
        fixed = self._fixed(rows, columns, step, cache)
        # A first run outside the graph, on another stream, lets libraries allocate what they need.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._decoder.forward(fixed, cache)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # one at a time runs: they share what they compute in
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Other threads, such as the one that publishes, may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = self._decoder.forward(fixed, cache)
        return _Recorded(graph, fixed, logits)
