"""Attention over packed micro-batches, rotary positions included, where transformer-engine's is
not."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.megatron import shared_prefixes
from aligner.megatron.packing import PackedSequences
from aligner.models import batch_invariant
from aligner.models.rotary import rotate


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed micro-batch, through PyTorch's fused
    kernels, or the `exact` one.

    `frequencies` are radians a position, one for each rotated pair of a head's dimensions: queries
    and keys are rotated here, by the positions that the micro-batch has, for megatron-core's own
    way makes the angles again in every layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        exact: bool = False,
        frequencies: Sequence[float] | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.exact = exact
        self._frequencies = frequencies
        self.scale = config.softmax_scale
        self.window = None if config.window_size is None else config.window_size[0]
        """So many keys before its own does a query see."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Attend; query [T, heads, dim], key and value [T, key/value heads, dim] to [T, heads·dim].

        The sequences are laid out as rows, padded on the right: a causal mask alone keeps a token
        from seeing padding, so no mask tensor is made for whole sequences. Under context
        parallelism the T tokens are this rank's, and keys and values of all context ranks are
        gathered (their gradients are summed and scattered back).
        """
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                "attention requires packed micro-batches (PackedSequences), got"
                f" {type(packed_seq_params).__name__}"
            )
        packed, grouped = packed_seq_params, query.shape[1] != key.shape[1]
        if self._frequencies is not None:
            query, key = self._rotated(query, key, packed)
        if packed.tree is not None:
            return shared_prefixes.attend(query, key, value, packed.tree, self.scale).flatten(1)
        if packed.context_group is not None:
            both = gather_from_sequence_parallel_region(
                torch.cat([key, value], 1), group=packed.context_group
            )
            key, value = both.chunk(2, 1)
        mask = self._mask(packed, query.device)
        query = _to_rows(query, packed.query_index, packed.query_rows)
        key, value = (_to_rows(each, packed.key_index, packed.key_rows) for each in (key, value))
        if self.exact:
            width = packed.key_rows[1]
            seen = (
                torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
                if mask is None
                else mask[:, 0]
            )
            attended = batch_invariant.attend(query, key, value, seen, self.scale)
        else:
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=grouped,
            )
        # By index_select, whose gradient is added up without sorting what may come twice.
        return attended.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, packed.query_index)

    def _rotated(
        self, query: Tensor, key: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor]:
        if packed.rotation is None:
            # In float32, since positions of long contexts need the digits.
            angles = packed.positions[:, None, None].float() * torch.tensor(
                self._frequencies, device=query.device
            )
            packed.rotation = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        cosine, sine = packed.rotation
        return _Rotate.apply(query, cosine, sine), _Rotate.apply(key, cosine, sine)

    def _mask(self, packed: PackedSequences, device: torch.device) -> Tensor | None:
        """Which keys each query sees, bool [N or 1, 1, L/C, L]; None for plain causal rows."""
        width = packed.key_rows[1]
        window = self.window if self.window is not None and self.window < width - 1 else None
        keys = torch.arange(width, device=device)
        if packed.query_positions is not None:
            queries = packed.query_positions[..., None]
        elif window is not None:
            queries = keys[None, :, None]
        else:
            return None
        seen = keys <= queries
        if window is not None:
            seen &= keys >= queries - window
        return seen[:, None]


def _to_rows(tensor: Tensor, index: Tensor, rows: tuple[int, int]) -> Tensor:
    """[T, heads, dim] to [N, heads, L, dim], zeros at the padding; `index` int64 [T] is each
    token's place in [N·L]."""
    padded = tensor.new_zeros(rows[0] * rows[1], *tensor.shape[1:]).index_copy(0, index, tensor)
    return padded.view(*rows, *tensor.shape[1:]).transpose(1, 2)


class _Rotate(Function):
    """`rotate`, whose gradient is the rotation back."""

    @staticmethod
    def forward(context: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return rotate(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = context.saved_tensors
        return rotate(gradient, cosine, -sine), None, None
