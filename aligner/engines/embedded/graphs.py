"""Decode steps recorded as CUDA graphs.

Replaying a graph takes one launch, whereas an eager decode step launches dozens of kernels per
layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.engines.embedded.cache import Cache
from aligner.engines.embedded.decoder import Decoder, Step

# Graphs are recorded for numbers of rows that are powers of two. Where a step reads all columns of
# the KV cache, the number of columns is rounded up to a multiple of this number.
_COLUMNS = 256


@dataclass(frozen=True)
class _Recorded:
    """CUDA graph of a decode step, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    step: Step
    """Input tensors of the graph; each replay overwrites their contents."""
    logits: Tensor
    """Output of the graph; each replay overwrites it."""


class GraphedForward:
    """Forward pass that replays CUDA graphs for decode steps.

    A step is padded to the next larger size for which graphs are recorded. The graph of a size is
    recorded when the size first occurs. Steps with prompts or draft tokens, without logits, or with
    explicit rows are not recorded, and run eagerly.

    A graph contains the addresses of the weights and of the KV cache. Call `forget` whenever one of
    them moves.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        """Recorded graphs by number of rows and number of columns."""
        self._pool: Any = None
        """Memory pool that all graphs share."""
        self._stream: torch.cuda.Stream | None = None
        """Stream on which graphs are recorded.

        All graphs share one stream, because cuBLAS keeps a workspace for every stream on which it
        has computed.
        """

    @property
    def recorded(self) -> bool:
        """Return whether any graph is recorded."""
        return bool(self._recorded)

    def forget(self) -> None:
        """Delete all recorded graphs."""
        self._recorded.clear()
        self._pool = None

    def forward(self, step: Step, cache: Cache) -> Tensor:
        """Compute the same logits as `Decoder.forward`.

        The returned tensor is valid only until the next call, which may overwrite it.
        """
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
        # A sliced decoder reads only the tokens that its rows have, so one graph serves all numbers
        # of columns.
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
        """Copy a step's inputs into the input tensors of a recorded step.

        The rows after the step's own rows are padding. Their tokens are written to the last column
        of the cache, where a parked row has no token, and they read as little of the cache as
        possible.
        """
        rows = len(step.tokens)
        recorded.tokens[:rows] = step.tokens
        recorded.positions[:rows] = step.positions
        recorded.positions[rows:] = cache.size.columns - 1
        if recorded.lengths is not None:
            recorded.lengths[:rows] = step.positions + 1
            recorded.lengths[rows:] = 1

    def _fixed(self, rows: int, columns: int, step: Step, cache: Cache) -> Step:
        """Return a step of the given size with tensors of its own, filled with a step's inputs.

        Args:
            rows: Number of rows of the new step, at least the number of rows of `step`.
            columns: Number of columns of the KV cache that the new step reads.
            step: Step whose inputs are copied.
            cache: KV cache.
        """
        lengths = step.positions.new_ones(rows, dtype=torch.int32) if self._decoder.sliced else None
        fixed = Step(
            step.tokens.new_zeros(rows), step.positions.new_zeros(rows), columns, lengths=lengths
        )
        self._fill(fixed, step, cache)
        return fixed

    def _record(self, rows: int, columns: int, step: Step, cache: Cache) -> _Recorded:
        """Record a CUDA graph of a decode step of the given size."""
        fixed = self._fixed(rows, columns, step, cache)

        # A warm-up run on a side stream, outside the graph, lets libraries allocate their
        # workspaces.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._decoder.forward(fixed, cache)
        torch.cuda.current_stream().wait_stream(self._stream)

        graph = torch.cuda.CUDAGraph()
        # Only one graph runs at a time, so all graphs can share one memory pool.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # "thread_local" permits other threads, such as the weight sync, to use the device during
        # the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = self._decoder.forward(fixed, cache)
        return _Recorded(graph, fixed, logits)
