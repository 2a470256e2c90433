"""Decode steps captured as CUDA graphs.

Replaying a graph takes one launch, whereas an eager decode step launches dozens of kernels per
layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.engines.embedded.cache import KVCache
from aligner.engines.embedded.decoder import Decoder
from aligner.engines.embedded.decoder_step import Step

# Graphs are captured for numbers of rows that are powers of two. Where a step reads all columns of
# the KV cache, the number of columns is rounded up to a multiple of this number, so that a growing
# sequence replays the same graph for many steps.
_COLUMN_MULTIPLE = 256


@dataclass(frozen=True)
class _CapturedGraph:
    """CUDA graph of a decode step, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    step: Step
    """Input tensors of the graph; each replay overwrites their contents."""
    logits: Tensor
    """Output of the graph; each replay overwrites it."""


class GraphedForward:
    """Forward pass that replays CUDA graphs for decode steps.

    A step is padded to the next larger size for which graphs are captured. The graph of a size is
    captured when the size first occurs. Steps with prompts or draft tokens, without logits, or with
    explicit rows are not captured, and run eagerly.

    A graph contains the addresses of the weights and of the KV cache. Call `clear` whenever one of
    them moves.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._captured_graphs: dict[tuple[int, int], _CapturedGraph] = {}
        """Captured graphs by number of rows and number of columns."""
        self._pool: Any = None
        """Memory pool that all graphs share."""
        self._stream: torch.cuda.Stream | None = None
        """Stream on which graphs are captured.

        All graphs share one stream, because cuBLAS keeps a workspace for every stream on which it
        has computed.
        """

    @property
    def has_graphs(self) -> bool:
        """Whether any graph is captured."""
        return bool(self._captured_graphs)

    def clear(self) -> None:
        """Delete all captured graphs."""
        self._captured_graphs.clear()
        self._pool = None

    def forward(self, step: Step, cache: KVCache) -> Tensor:
        """Compute the same logits as `Decoder.forward`.

        The returned tensor is valid only until the next call, which may overwrite it.
        """
        rows = len(step.tokens)
        if (
            step.prompts is not None
            or rows == 0
            or step.tokens_per_row > 1
            or not step.needs_logits
            or step.rows is not None
        ):
            return self._decoder.forward(step, cache)

        # The next power of two: few graphs serve all batch sizes, at less than twice the rows.
        graph_rows = min(1 << (rows - 1).bit_length(), cache.size.rows)
        graph_columns = cache.size.columns
        # A sliced decoder reads only the tokens that its rows have, so one graph serves all numbers
        # of columns.
        if not self._decoder.is_sliced:
            rounded_columns = -(-step.columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
            graph_columns = min(rounded_columns, graph_columns)

        captured = self._captured_graphs.get((graph_rows, graph_columns))
        if captured is None:
            captured = self._capture(graph_rows, graph_columns, step, cache)
            self._captured_graphs[graph_rows, graph_columns] = captured

        self._copy_inputs(captured.step, step, cache)
        captured.graph.replay()
        return captured.logits[:rows]

    def _copy_inputs(self, static_step: Step, step: Step, cache: KVCache) -> None:
        """Copy a step's inputs into the static input tensors of a captured step.

        The rows after the step's own rows are padding. Their tokens are written to the last column
        of the cache, where a resident row has no token, and they read as little of the cache as
        possible.
        """
        rows = len(step.tokens)
        static_step.tokens[:rows] = step.tokens
        static_step.positions[:rows] = step.positions
        static_step.positions[rows:] = cache.size.columns - 1
        if static_step.lengths is not None:
            static_step.lengths[:rows] = step.positions + 1
            static_step.lengths[rows:] = 1

    def _build_static_step(self, rows: int, columns: int, step: Step, cache: KVCache) -> Step:
        """Return a step of the given size with tensors of its own, filled with a step's inputs.

        Args:
            rows: Number of rows of the new step, at least the number of rows of `step`.
            columns: Number of columns of the KV cache that the new step reads.
            step: Step whose inputs are copied.
            cache: KV cache.
        """
        lengths = (
            step.positions.new_ones(rows, dtype=torch.int32) if self._decoder.is_sliced else None
        )
        static_step = Step(
            step.tokens.new_zeros(rows), step.positions.new_zeros(rows), columns, lengths=lengths
        )
        self._copy_inputs(static_step, step, cache)
        return static_step

    def _capture(self, rows: int, columns: int, step: Step, cache: KVCache) -> _CapturedGraph:
        """Capture a CUDA graph of a decode step of the given size."""
        static_step = self._build_static_step(rows, columns, step, cache)

        # A warm-up run on a side stream, outside the graph, lets libraries allocate their
        # workspaces.
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._decoder.forward(static_step, cache)
        torch.cuda.current_stream().wait_stream(self._stream)

        graph = torch.cuda.CUDAGraph()
        # Only one graph runs at a time, so all graphs can share one memory pool.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # "thread_local" permits other threads, such as the weight sync, to use the device during
        # the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = self._decoder.forward(static_step, cache)
        return _CapturedGraph(graph, static_step, logits)
