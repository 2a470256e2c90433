"""Output heads of the last pipeline stage: log-probs of tokens, or one number for each token."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from aligner.data.types import SamplingSupport
from aligner.megatron.logprobs import TokenMasks, vocab_parallel_logprobs, vocab_parallel_top_ids
from aligner.megatron.sharded_parameters import mark_for_sequence_parallelism
from aligner.models.weight_slices import Head


class VocabularyHead(ColumnParallelLinear):
    """Vocabulary projection that computes logits only for the tokens that are scored.

    The model's output is the final hidden states. `logprobs` projects them, one chunk of tokens at
    a time. The weight [V/TP, H] stays in the module in which megatron-core created it: this module
    or, if head and embedding are tied and on the same pipeline stage, the embedding.
    """

    def __init__(
        self,
        replaced: ColumnParallelLinear,
        tied_weight: nn.Parameter | None = None,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        """Take over the weight of an output layer.

        Args:
            replaced: megatron-core's output layer.
            tied_weight: Weight of the embedding if the head has none of its own.
            vocab_size: Number of tokens in the vocabulary. The weights of all ranks together may
                have more rows, which are padding; None means that all rows are tokens.
            logit_scale: Factor of the logits.
            logit_softcap: Soft cap of the logits; None means no cap.
        """
        super().__init__(
            replaced.input_size,
            replaced.output_size,
            config=replaced.config,
            init_method=replaced.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=replaced.tp_group,
        )
        self.weight = replaced.weight
        self._vocab_size = vocab_size
        self._logit_scale = logit_scale
        self._logit_softcap = logit_softcap
        # A tuple hides a tied embedding from torch, which would register it as a parameter of this
        # module too.
        self._projection = (replaced.weight if tied_weight is None else tied_weight,)

    @property
    def projection(self) -> nn.Parameter:
        """The weight [V/TP, H], in this module or in a tied embedding."""
        return self._projection[0]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return the hidden states unchanged, with megatron-core's (output, bias) convention."""
        return hidden, None

    def logprobs(
        self,
        hidden: Tensor,
        index: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool = False,
        sampling_support: SamplingSupport | None = None,
        candidates: Tensor | None = None,
        token_masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of targets and, optionally, entropies.

        Collective over the tensor ranks; see `vocab_parallel_logprobs`.

        Args:
            hidden: The model's output, [T, H], or [T/TP, H] with sequence parallelism.
            index: Indices of the tokens before the targets, int64 [M].
            targets: Global token ids, int64 [M].
            temperature: Temperature of the distribution.
            chunk_tokens: Maximum number of tokens whose logits exist at the same time.
            with_entropy: Whether to compute entropies.
            sampling_support: Sampling support of each target, [M]; None means the whole vocabulary.
            candidates: Candidate token ids of each target, int64 [M, k].
            token_masks: Allowed tokens of each target; None means the whole vocabulary.

        Returns:
            Log-probs, float32 [M], or [M, 2 + k] with candidates, and entropies, float32 [M], or
            None. They are equal on every tensor rank and differentiable.
        """
        return vocab_parallel_logprobs(
            self._select_hidden(hidden, index),
            self.projection,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            group=self.tp_group,
            with_entropy=with_entropy,
            sampling_support=sampling_support,
            candidates=candidates,
            vocab_size=self._vocab_size,
            token_masks=token_masks,
            softcap=self._logit_softcap,
        )

    def top_ids(
        self,
        hidden: Tensor,
        index: Tensor,
        count: int,
        *,
        id_limit: int,
        chunk_tokens: int,
        token_masks: TokenMasks | None = None,
    ) -> Tensor:
        """Return the `count` most probable next token ids below `id_limit` after each token at
        `index`.

        Collective over the tensor ranks.

        Args:
            hidden: The model's output, [T, H], or [T/TP, H] with sequence parallelism.
            index: Indices of the tokens, int64 [M].
            count: Number of ids of each token; at most `id_limit`.
            id_limit: Only ids below this value are returned.
            chunk_tokens: Maximum number of tokens whose logits exist at the same time.
            token_masks: Allowed tokens after each token, which come before all others; None means
                the whole vocabulary.

        Returns:
            int64 [M, count], most probable first.
        """
        options: dict[str, Any] = {
            "id_limit": id_limit,
            "chunk_tokens": chunk_tokens,
            "group": self.tp_group,
            "token_masks": token_masks,
        }
        # a soft cap does not change the order of the logits
        return vocab_parallel_top_ids(
            self._select_hidden(hidden, index), self.projection, count, **options
        )

    def _select_hidden(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Return the hidden states [M, H] of the tokens at `index`, int64 [M], times the factor of
        the logits.

        Each tensor rank computes the part of the gradients that results from its part of the
        vocabulary. The backward pass sums these parts over the tensor ranks, by a reduce-scatter
        with sequence parallelism and by an all-reduce without it.
        """
        if self.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
            selected = gathered.index_select(0, index)
        else:
            selected = copy_to_tensor_model_parallel_region(
                hidden.index_select(0, index), group=self.tp_group
            )
        return selected if self._logit_scale == 1 else selected * self._logit_scale


class ScalarHead(nn.Module):
    """Output head that computes one number for each token, for critics and reward models.

    It replaces the vocabulary projection. Every tensor rank holds the whole head.
    """

    def __init__(self, hidden_size: int, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        mark_for_sequence_parallelism(self.weight, is_enabled=sequence_parallel)
        self._is_sequence_parallel = sequence_parallel

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return the head's numbers [T, 1, 1], with megatron-core's (output, bias) convention.

        Args:
            hidden: Final hidden states, [T, 1, H], or [T/TP, 1, H] with sequence parallelism.
            weight: Ignored.
            runtime_gather_output: Ignored.
        """
        values = F.linear(hidden, self.weight)
        if self._is_sequence_parallel:
            # Every tensor rank computes the same loss from all tokens, so in the backward pass each
            # rank takes the gradients of its own tokens instead of summing them.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def install_head(
    model: GPTModel,
    head: Head,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> None:
    """Replace the output layer of a last pipeline stage by one of our heads.

    Call it before the model is wrapped for training.

    Args:
        model: Model chunk of the last stage.
        head: Vocabulary head or scalar head.
        vocab_size: Number of tokens without padding; None means that all rows are tokens.
        logit_scale: Factor of the logits.
        logit_softcap: Soft cap of the logits; None means no cap.
    """
    if head == "vocabulary":
        is_tied = model.output_layer.weight is None
        model.output_layer = VocabularyHead(
            model.output_layer,
            model.embedding.word_embeddings.weight if is_tied else None,
            vocab_size,
            logit_scale,
            logit_softcap,
        )
    else:
        model.output_layer = ScalarHead(
            model.config.hidden_size, sequence_parallel=model.config.sequence_parallel
        )
