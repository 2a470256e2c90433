"""Layers that compose attention, feed-forward network and residual connections."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class ResidualAdd(nn.Module):
    """Residual connection: the residual stream plus the scaled norm of a module's output.

    It replaces megatron-core's bias-dropout-add.
    """

    def __init__(
        self, config: TransformerConfig, norm: type[nn.Module] | None, scale: float
    ) -> None:
        """Create the connection.

        Args:
            config: Configuration of the model.
            norm: Class of the norm after the module; None if there is none.
            scale: Factor of the module's output.
        """
        super().__init__()
        self.norm = (
            None if norm is None else norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        )
        self._scale = scale

    def forward(
        self, is_training: bool, is_fused: bool
    ) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function that megatron-core calls with (output, bias), residual and
        dropout."""
        return self._add

    def _add(
        self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """Return the new residual stream [T, 1, H]; there is no dropout."""
        output, bias = output_with_bias
        if bias is not None:
            output = output + bias
        if self.norm is not None:
            output = self.norm(output)
        return residual + output if self._scale == 1 else residual + output * self._scale


class DecoderLayer(TransformerLayer):
    """megatron-core's layer, without its gradients in passes that need none."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # megatron-core enables gradients for its fused bias-dropout-add. The norm in `ResidualAdd`
        # would then build a graph in every inference.
        self.bias_dropout_add_exec_handler = nullcontext


class ParallelResidualLayer(DecoderLayer):
    """Layer with a parallel residual: x + attention(norm(x)) + mlp(other norm(x)).

    GPT-NeoX uses it (Black et al. 2022, section 2.1).
    """

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [T, 1, H], with megatron-core's (output, context) convention.

        Args:
            hidden_states: [T, 1, H].
            **kwargs: Arguments of megatron-core's attention.
        """
        attended, context = self._forward_attention(hidden_states, **kwargs)
        mlp_output = self.mlp(self._forward_pre_mlp_layernorm(hidden_states))
        return self._forward_post_mlp(mlp_output, attended), context
