"""Gated delta net (Yang et al. 2024, "Gated Delta Networks"), for the trainer and the engine.

Each value head has a state S, a matrix that maps keys to values. A token decays the state, corrects
the value that the state has for the token's key k towards the token's value v, and reads the value
for its query q (equation 10, with S transposed):

    S <- exp(g) S
    S <- S + beta k (v - S^T k)^T
    o  = S^T q

`apply_chunked_rule` computes all tokens of a sequence with a few matmuls for each chunk of tokens,
`apply_step` computes one token.

Shapes: N is the number of rows, L the number of tokens of a row, H the number of value heads, K and
V are the dimensions of a key head and a value head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.shape import DELTA_NET_CHUNK_TOKENS, DeltaNet

_EPSILON = 1e-6
"""Epsilon of the normalization of queries and keys."""


def convolve(x: Tensor, weight: Tensor, history: Tensor | None = None) -> Tensor:
    """Return the SiLU of a causal convolution of each channel, in float32.

    Args:
        x: Inputs, [N, L, channels].
        weight: Weights of each channel; the last one belongs to the token itself,
            [channels, 1, width].
        history: Inputs of the `width` - 1 tokens before `x`, [N, width - 1, channels]; None means
            zeros.

    Returns:
        float32 [N, L, channels].
    """
    width = weight.shape[-1]
    length = x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0)) if history is None else torch.cat((history, x), 1)
    padded = padded.float()
    taps = weight.float()[:, 0].unbind(-1)
    products = [padded[:, tap : tap + length] * taps[tap] for tap in range(width)]
    return F.silu(sum(products[1:], products[0]))


def split_channels(channels: Tensor, net: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values from the output of the convolution.

    Args:
        channels: Channels of this rank's heads: all queries, all keys, all values,
            [N, L, channels].
        net: Dimensions of the delta net.

    Returns:
        Normalized queries and keys, [N, L, H, K] each, and values [N, L, H, V].
    """
    heads = channels.shape[-1] // (net.channels // net.key_heads)
    key_width = heads * net.key_dim
    query, key, value = channels.split(
        (key_width, key_width, channels.shape[-1] - 2 * key_width), -1
    )
    query = _normalize(query.unflatten(-1, (heads, net.key_dim))) * net.key_dim**-0.5
    key = _normalize(key.unflatten(-1, (heads, net.key_dim)))
    value = value.unflatten(-1, (-1, net.value_dim))
    repeats = net.value_heads // net.key_heads
    if repeats > 1:
        query, key = (tensor.repeat_interleave(repeats, 2) for tensor in (query, key))
    return query, key, value


def _normalize(x: Tensor) -> Tensor:
    """Return x divided by the Euclidean norm of its last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def compute_gates(
    beta: Tensor, decay: Tensor, decay_rate: Tensor, decay_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the strength of each token's correction, and the logarithm of the decay before it.

    See Gu and Dao 2023, "Mamba", section 3.6 for the form of the decay.

    Args:
        beta: Projection of each token for each value head, [..., H].
        decay: Another projection, [..., H].
        decay_rate: Logarithm of the rate of each value head, [H].
        decay_bias: Bias of the second projection, [H].

    Returns:
        Two float32 tensors [..., H]: one in (0, 1), the other negative.
    """
    rate = decay_rate.float().exp()
    return beta.float().sigmoid(), -rate * F.softplus(decay.float() + decay_bias.float())


def apply_chunked_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    needs_state: bool = True,
    chunk_tokens: int = DELTA_NET_CHUNK_TOKENS,
) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule to all tokens of sequences, from a state of zeros.

    Within a chunk, token i sees the corrections of the tokens before it. With the accumulated decay
    d_i = exp(g_1 + ... + g_i) and D_ij = d_i / d_j, the corrected values U and the keys W that read
    the state S before the chunk solve triangular systems (Yang et al. 2024, section 3.3):

        (1 + tril(diag(beta) K K^T * D, -1)) [U, W] = diag(beta) [V, diag(d) K]

    The corrections are then C = U - W S, the outputs diag(d) Q S + tril(Q K^T * D) C, and the next
    state is d_last S + (diag(d_last / d) K)^T C.

    Args:
        query: Scaled queries, float32 [N, L, H, K].
        key: Normalized keys, float32 [N, L, H, K].
        value: float32 [N, L, H, V].
        beta: Strength of the correction, float32 [N, L, H]. A token with 0 does not change the
            state.
        log_decay: Logarithm of the decay, float32 [N, L, H].
        needs_state: Whether to compute the states after the last token.
        chunk_tokens: Maximum number of tokens of a chunk.

    Returns:
        The outputs, float32 [N, L, H, V], and the states after the last token, [N, H, K, V], or
        None.
    """
    length = query.shape[1]
    size = min(chunk_tokens, length)
    padding = -length % size

    def split_chunks(x: Tensor) -> Tensor:
        # [N, L, H, ...] -> [chunks, N, H, size, ...]; padding has beta 0 and decay 1
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        # One contiguous tensor, so that the matmuls below save no copies for the backward pass.
        return padded.unflatten(1, (-1, size)).transpose(2, 3).transpose(0, 1).contiguous()

    query, key, value = split_chunks(query), split_chunks(key), split_chunks(value)
    beta = split_chunks(beta)[..., None]
    total = split_chunks(log_decay).cumsum(-1)
    decay = total.exp()[..., None]
    # D_ij; its upper part could overflow, and is not used
    difference = total[..., :, None] - total[..., None, :]
    lower = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    pairwise = difference.masked_fill(~lower, float("-inf")).exp()

    system = ((beta * key) @ key.mT) * pairwise
    # The solver takes the diagonal as ones and does not read the upper part.
    solved = torch.linalg.solve_triangular(
        system, beta * torch.cat((value, decay * key), -1), upper=False, unitriangular=True
    )
    corrected, readers = solved.split((value.shape[-1], key.shape[-1]), -1)
    scores = (query @ key.mT) * pairwise
    decayed_query = query * decay

    chunks = len(query)
    state = query.new_zeros(*query.shape[1:3], query.shape[-1], value.shape[-1])
    outputs = []
    for chunk in range(chunks):
        corrections = corrected[chunk] - readers[chunk] @ state
        outputs.append(decayed_query[chunk] @ state + scores[chunk] @ corrections)
        if needs_state or chunk < chunks - 1:
            last_total = total[chunk, ..., -1:]
            written = key[chunk] * (last_total - total[chunk]).exp()[..., None]
            state = last_total.exp()[..., None] * state + written.mT @ corrections
    # [N, chunks, H, size, V] -> [N, L, H, V]
    output = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)
    return output[:, :length], state if needs_state else None


def apply_step(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one token of each sequence.

    Args:
        query: Scaled queries, float32 [N, H, K].
        key: Normalized keys, float32 [N, H, K].
        value: float32 [N, H, V].
        beta: Strength of the correction, float32 [N, H].
        log_decay: Logarithm of the decay, float32 [N, H].
        state: States before the token, float32 [N, H, K, V].

    Returns:
        The outputs, float32 [N, H, V], and the states after the token.
    """
    state = state * log_decay.exp()[..., None, None]
    predicted = (key[..., None, :] @ state)[..., 0, :]
    correction = beta[..., None] * (value - predicted)
    state = state + key[..., None] * correction[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def normalize_output(output: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the root-mean-square norm of each value head, times the SiLU of the gate.

    Args:
        output: Outputs of the delta rule, float32 [..., V].
        gate: Gate of each output, [..., V].
        weight: Weight of the norm, [V].
        epsilon: Epsilon of the norm.

    Returns:
        [..., V], in the dtype of the gate.
    """
    normed = F.rms_norm(output, weight.shape, weight.float(), epsilon)
    return (normed * F.silu(gate.float())).to(gate.dtype)
