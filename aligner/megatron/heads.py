"""What the last pipeline stage makes of the final hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from aligner.megatron.logprobs import vocab_parallel_logprobs
from aligner.models.weight_slices import Head


class VocabularyHead(ColumnParallelLinear):
    """The vocabulary projection, put off until it is known which tokens to score.

    The model's output is the final hidden states; `logprobs` projects them, a chunk of tokens at a time. The weight [V/TP, H]
    stays where megatron-core put it: here, or in the embedding when that is tied and on the same stage.
    """

    def __init__(self, replaced: ColumnParallelLinear, tied_weight: nn.Parameter | None = None) -> None:
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
        # In a tuple, which keeps a tied embedding from being counted as this module's too.
        self._projection = (replaced.weight if tied_weight is None else tied_weight,)

    @property
    def projection(self) -> nn.Parameter:
        """The weight [V/TP, H], wherever it lies."""
        return self._projection[0]

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The hidden states as they are, with megatron-core's (output, bias) convention."""
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
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of `targets` int64 [M] after the tokens at `index` int64 [M], and entropies if asked for.

        `hidden` is the model's output, [T, H], or [T/TP, H] with sequence parallelism. Results are float32 [M], equal on
        every tensor rank and differentiable.
        """
        if self.sequence_parallel:
            chosen = gather_from_sequence_parallel_region(hidden, group=self.tp_group).index_select(0, index)
        else:
            chosen = copy_to_tensor_model_parallel_region(hidden.index_select(0, index), group=self.tp_group)
        return vocab_parallel_logprobs(
            chosen,
            self.projection,
            targets,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            group=self.tp_group,
            with_entropy=with_entropy,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the vocabulary's logits of every token, [T, V/TP], all of them at once: for small models."""
        return super().forward(hidden, weight=self.projection)[0]


class ScalarHead(nn.Module):
    """One number a token, in the place of the vocabulary projection; the whole head lives on every tensor rank."""

    def __init__(self, hidden_size: int, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        # Tells megatron-core to add this weight's gradients up over the tensor ranks when each saw part of the tokens.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self._gather = sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[T, 1, H] to [T, 1, 1] with megatron-core's (output, bias) convention; from [T/TP, 1, H] if sequence parallel."""
        values = F.linear(hidden, self.weight)
        if self._gather:
            # Every tensor rank computes the same loss of the whole, so each takes its own tokens' gradients.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def install_head(model: GPTModel, head: Head) -> None:
    """Put our head in the place of a last stage's output layer; call before the model is wrapped for training."""
    if head == "vocabulary":
        tied = model.output_layer.weight is None
        model.output_layer = VocabularyHead(model.output_layer, model.embedding.word_embeddings.weight if tied else None)
    else:
        model.output_layer = ScalarHead(model.config.hidden_size, sequence_parallel=model.config.sequence_parallel)
