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
from aligner.models.layouts import count_blocks


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
    captured when the size first occurs. Steps with prompts or draft tokens, or without logits, are
    not captured, and run eagerly. The block tables are input tensors, so a graph works for all
    places of the blocks.

    A graph contains the addresses of the weights and of the KV cache. Call `clear` whenever one of
    them moves.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._captured_graphs: dict[tuple[int, int], _CapturedGraph] = {}
        """Captured graphs by number of rows and number of blocks per row."""
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
        ):
            return self._decoder.forward(step, cache)

        # The next powers of two: few graphs serve all batch sizes and lengths, at less than twice
        # the rows and blocks.
        size = cache.size
        graph_rows = min(_round_up_to_power(rows), size.sequences)
        max_width = count_blocks(size.tokens, size.block_tokens)
        graph_width = min(_round_up_to_power(step.block_tables.shape[1]), max_width)
        captured = self._captured_graphs.get((graph_rows, graph_width))
        if captured is None:
            captured = self._capture(graph_rows, graph_width, step, cache)
            self._captured_graphs[graph_rows, graph_width] = captured

        self._copy_inputs(captured.step, step, cache)
        captured.graph.replay()
        return captured.logits[:rows]

    def _copy_inputs(self, static_step: Step, step: Step, cache: KVCache) -> None:
        """Copy a step's inputs into the static input tensors of a captured step.

        The rows after the step's own rows are padding. They have one token, which is written to the
        null block.
        """
        rows, width = step.block_tables.shape
        static_step.tokens[:rows] = step.tokens
        static_step.positions[:rows] = step.positions
        static_step.positions[rows:] = 0
        static_step.block_tables.fill_(cache.null_block)
        static_step.block_tables[:rows, :width] = step.block_tables

    def _build_static_step(self, rows: int, width: int, step: Step, cache: KVCache) -> Step:
        """Return a step of the given size with tensors of its own, filled with a step's inputs.

        Args:
            rows: Number of rows of the new step, at least the number of rows of `step`.
            width: Number of blocks per row of the new step, at least the number of `step`.
            step: Step whose inputs are copied.
            cache: KV cache.
        """
        static_step = Step(
            step.tokens.new_zeros(rows),
            step.positions.new_zeros(rows),
            step.block_tables.new_zeros(rows, width),
        )
        self._copy_inputs(static_step, step, cache)
        return static_step

    def _capture(self, rows: int, width: int, step: Step, cache: KVCache) -> _CapturedGraph:
        """Capture a CUDA graph of a decode step of the given size."""
        static_step = self._build_static_step(rows, width, step, cache)

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


def _round_up_to_power(count: int) -> int:
    """Round a number up to a power of two."""
    return 1 << (count - 1).bit_length()
