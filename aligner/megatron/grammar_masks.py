"""Masks of the tokens that follow a grammar, recomputed for each micro-batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aligner.data.grammar_matcher import GrammarVocabulary
from aligner.data.types import GuidedTokens
from aligner.errors import AlignerError
from aligner.megatron.logprobs import TokenMasks
from aligner.megatron.packing import PackedBatch


@dataclass(frozen=True)
class GrammarMasks:
    """Computes the masks of some rows from their tokens and grammars.

    The masks of a whole batch would need too much memory: a mask has one bit per token of the
    vocabulary, 16 KiB for 128,000 tokens.
    """

    vocabulary: GrammarVocabulary
    tokens: Tensor
    """Tokens of the rows, int64 [B, S]."""
    guided_tokens: GuidedTokens
    """[B, S-1]"""

    def compute(self, batch: PackedBatch) -> TokenMasks | None:
        """Return the masks of a micro-batch's targets; None if no target follows a grammar.

        Raises AlignerError if a grammar does not allow a token that was sampled with it.
        """
        width = batch.width - 1
        spans = self.guided_tokens.spans[batch.batch_rows.cpu(), :width]
        tokens = self.tokens[batch.batch_rows.cpu(), 1 : batch.width]

        masks: list[np.ndarray] = []
        # Index of the mask of each token of the micro-batch; -1 if it follows no grammar.
        mask_indices = torch.full_like(spans, -1)
        mask_count = 0
        for row in (spans >= 0).any(1).nonzero()[:, 0].tolist():
            for span in spans[row].unique().tolist():
                if span < 0:
                    continue
                positions = (spans[row] == span).nonzero()[:, 0]
                masks.append(self._compute_span(span, tokens[row, positions].tolist()))
                mask_indices[row, positions] = torch.arange(len(positions)) + mask_count
                mask_count += len(positions)
        if not masks:
            return None
        device = batch.target_rows.device
        bits = torch.from_numpy(np.concatenate(masks)).to(device)
        return TokenMasks(mask_indices.flatten().to(device)[batch.target_rows], bits)

    def _compute_span(self, span: int, tokens: list[int]) -> np.ndarray:
        """Return the masks of a span's tokens, int32 [T, V / 32]."""
        grammar = self.guided_tokens.grammars[span]
        try:
            return self.vocabulary.compute_masks(grammar.text, grammar.stop_token_ids, tokens)
        except ValueError as error:
            raise AlignerError(
                f"a response does not follow its grammar: {error}; the engine must use the same"
                " version of llguidance as the trainer"
            ) from error
