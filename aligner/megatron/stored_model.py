"""Log-probs under a stored language model, in this process alone."""

from __future__ import annotations

from torch import Tensor

from aligner.data.export import Source
from aligner.megatron import world as worlds
from aligner.megatron.heads import VocabularyHead
from aligner.megatron.packing import PackedBatch
from aligner.megatron.runner import ModelRunner
from aligner.models.families import read_config
from aligner.schema import MegatronModelConfig

_CHUNK_TOKENS = 1024
"""Logits exist for so many tokens at a time."""


def stored_logprobs(source: Source, settings: MegatronModelConfig, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Log-probability of each next token at temperature 1; int64 [B, S] and [B] to float32 [B, S-1].

    No world may be there: one is made, and left at the end. Raises AlignerError for a sequence that is longer than the
    model's positions.
    """
    world = worlds.initialize_alone(seed=1)
    try:
        runner = ModelRunner(read_config(source.config, "the model's config.json"), world, source.head, settings)
        for weights in source.weights():
            for name, tensor in weights.items():
                runner.weights.write(name, tensor)

        def read(output: Tensor, batch: PackedBatch) -> Tensor:
            head: VocabularyHead = runner.chunks[-1].output_layer
            logprobs, _ = head.logprobs(
                output[0],
                batch.target_index,
                batch.targets,
                temperature=1.0,
                chunk_tokens=_CHUNK_TOKENS,
                with_entropy=False,
            )
            return batch.unpack_targets(logprobs)

        return runner.rows(tokens, lengths, tokens.shape[1] - 1, read)
    finally:
        worlds.shutdown()
