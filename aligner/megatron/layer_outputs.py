"""Outputs of the decoder layers of a model, for comparisons with other implementations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner
from aligner.models.pipeline_stages import stage_layers


@torch.no_grad()
def compute_layer_outputs(runner: ModelRunner, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return the output of each decoder layer for each token, at any layout. Collective.

    Args:
        runner: The model.
        tokens: Right-padded rows of the whole batch, int64 [B, S].
        lengths: Lengths of the rows in tokens, int64 [B].

    Returns:
        float32 [layers, B, S, H] in host memory, equal on every rank; 0 past the end of a row.
    """
    world = runner.world
    batches = runner.pack(tokens, lengths)
    with _recorded_outputs(runner) as outputs:
        runner.forward(batches, lambda output, batch: output.new_zeros(len(batch.batch_rows), 1))

    shape = (runner.shape.num_layers, *tokens.shape, runner.shape.hidden_size)
    whole = torch.zeros(shape)
    # The outputs are equal on the tensor and context ranks, so only one of these ranks contributes
    # its outputs.
    contributes = world.coordinates.tensor == 0 and world.coordinates.context == 0
    for layer, parts in outputs.items():
        for part, batch in zip(parts, batches, strict=True):
            rows = _unpack(part, batch, is_scattered=world.layout.sequence)
            if contributes and not batch.is_filler:
                whole[layer, batch.batch_rows, : batch.width] = rows.float().cpu()
    return world.all_reduce_sum(whole)


@contextmanager
def _recorded_outputs(runner: ModelRunner) -> Iterator[dict[int, list[Tensor]]]:
    """Yield the outputs of this rank's layers, one for each micro-batch, by the layer's index."""
    outputs: dict[int, list[Tensor]] = {}
    handles = []

    def record(layer: int) -> Any:
        # megatron-core's layers return the output and the context of cross-attention.
        return lambda module, inputs, result: outputs[layer].append(result[0])

    layout, stage = runner.world.layout, runner.world.coordinates.pipeline
    for chunk, indices in zip(
        runner.chunks, stage_layers(runner.shape, layout, stage), strict=True
    ):
        for module, layer in zip(chunk.decoder.layers, indices, strict=True):
            outputs[layer] = []
            handles.append(module.register_forward_hook(record(layer)))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _unpack(output: Tensor, batch: PackedBatch, *, is_scattered: bool) -> Tensor:
    """Return a layer's output [T, 1, H] as rows [N, L, H]. Collective with context or sequence
    parallelism."""
    if is_scattered:
        # Sequence parallelism splits the tokens over the tensor ranks.
        output = gather_from_sequence_parallel_region(
            output, group=parallel_state.get_tensor_model_parallel_group()
        )
    return batch.unpack_tokens(output[:, 0])
