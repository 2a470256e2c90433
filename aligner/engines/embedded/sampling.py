"""Sample tokens from logits.

Every sample has its own random stream, and every token uses one number of the stream.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.data.types import SamplingSupport
from aligner.engines.engine_protocol import SamplingOptions

# Number of vocabulary entries per chunk. The sampler first selects a chunk by the sums of all
# chunks, and then searches a token in that chunk only: this avoids a
# float64 cumulative sum over the whole vocabulary.
_CHUNK_SIZE = 128
# Number of most probable tokens that are sorted in the first attempt to reach `top_p`.
_INITIAL_SORT_WIDTH = 256


def generate_uniforms(entropy: Sequence[int], count: int) -> np.ndarray:
    """Return the first `count` numbers of a random stream, float64 [count] in [0, 1).

    The stream depends only on the integers in `entropy`: a larger count only appends numbers. For a
    request, `EngineRequest.get_stream_entropy` returns them; entry t of the result then belongs to
    the token at position `stream_start` + t of input and completion.
    """
    # Philox: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3". The seed sequence
    # mixes its integers, so that the streams of adjacent prompts and samples are independent.
    bit_generator = np.random.Philox(np.random.SeedSequence(entropy))
    return np.random.Generator(bit_generator).random(count)


def sample_tokens(
    logits: Tensor,
    options: SamplingOptions,
    uniforms: Tensor | None,
    is_stop_allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, SamplingSupport | None]:
    """Sample one token per row by inverse transform sampling. Overwrites `logits`.

    The token of a row is the inverse of the cumulative distribution of the allowed tokens at
    `uniforms`. Sums within a chunk of the vocabulary are float32, sums over chunks float64. A token
    of probability zero is never sampled.

    Args:
        logits: [B, V].
        options: Sampling parameters of the batch.
        uniforms: Random numbers, float64 [B] in [0, 1); None selects the most probable token.
        is_stop_allowed: bool [B], False if a stop token is not allowed yet; None: allowed in every
            row.

    Returns:
        The tokens, int64 [B]; their log-probs at the temperature, float32 [B]; and with
        `options.returns_support` the sampling support of each token, else None. The log-probs are
        those of the distribution over the support if it is returned, and else of the full
        distribution.
    """
    logits = logits.float()
    if options.temperature != 1.0:
        logits.div_(options.temperature)

    normalizer = None
    support = None
    if is_stop_allowed is not None and options.stop_token_ids:
        # Log-probs are those of the distribution that includes the stop tokens.
        normalizer = logits.logsumexp(-1, keepdim=True)
        stop_ids = torch.tensor(options.stop_token_ids, device=logits.device)
        logits[:, stop_ids] = logits[:, stop_ids].masked_fill(
            ~is_stop_allowed[:, None], float("-inf")
        )

    if uniforms is None:
        max_logits, token = logits.max(-1, keepdim=True)
    else:
        # `amax` takes a third of the time of `max`, because it does not return indices.
        max_logits = logits.amax(-1, keepdim=True)

    # The greatest weight is 1, so that nothing overflows and the total is at least 1.
    weights = logits.sub_(max_logits).exp_()
    chunks, cumulative = _compute_chunked_cumsum(weights)
    total = cumulative[:, -1:]
    if uniforms is not None:
        if options.has_truncation:
            truncated_weights = _truncate(weights, total, options)
            chunks, cumulative = _compute_chunked_cumsum(truncated_weights)
            if options.returns_support:
                support = _find_support(truncated_weights)
                # The trainer renormalizes over the support too.
                total = cumulative[:, -1:]
                normalizer = None
        # In a row with NaN, `_invert_cdf` returns the last entry, which may be padding of the last
        # chunk.
        target = uniforms[:, None] * cumulative[:, -1:]
        token = _invert_cdf(chunks, cumulative, target).clamp_max_(weights.shape[1] - 1)

    # log p = log(weight / total), or z - logsumexp(z) if stop tokens were masked.
    log_weight = weights.gather(1, token).double().log_()
    if normalizer is not None:
        logprob = log_weight + max_logits - normalizer
    else:
        logprob = log_weight - total.log()
    return token.squeeze(1), logprob.squeeze(1).float(), support


def _compute_chunked_cumsum(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide weights into chunks, and compute the cumulative sum over chunks.

    Args:
        weights: [B, V].

    Returns:
        The weights, padded with zeros, [B, chunks, entries]; and the cumulative sum of the chunks'
        sums, float64 [B, chunks].
    """
    padding = -weights.shape[1] % _CHUNK_SIZE
    if padding:
        weights = F.pad(weights, (0, padding))
    chunks = weights.unflatten(1, (-1, _CHUNK_SIZE))
    return chunks, chunks.sum(-1).cumsum(-1, dtype=torch.float64)


def _truncate(weights: Tensor, total: Tensor, options: SamplingOptions) -> Tensor:
    """Set the weights that `min_p`, `top_k` and `top_p` exclude to zero.

    The three apply in this order, as in vLLM. `top_p` keeps the smallest set of tokens whose
    probability mass reaches this share of the mass that the other two have left (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration", section 3.1). The function sorts only as
    much of the vocabulary as necessary.

    Args:
        weights: [B, V]; the greatest weight of each row is 1.
        total: Sum of the weights of each row, float64 [B, 1].
        options: Sampling parameters.

    Returns:
        The weights [B, V].
    """
    top_k = options.top_k
    top_p = options.top_p
    # The greatest weight is 1, so a weight is the probability relative to the most probable token.
    if options.min_p:
        weights = weights.masked_fill(weights < options.min_p, 0.0)
        if not top_k and top_p == 1:
            return weights
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)

    vocab_size = weights.shape[1]
    width = min(top_k, vocab_size) if top_k else min(_INITIAL_SORT_WIDTH, vocab_size)
    # Most distributions reach `top_p` within the first tokens; otherwise sort eight times as many.
    while True:
        top_weights, tokens = weights.topk(width)
        if top_p == 1:
            break
        mass = top_weights.cumsum(-1, dtype=torch.float64)
        target_mass = top_p * (mass[:, -1:] if top_k else total)
        if top_k or width == vocab_size or bool((mass[:, -1:] >= target_mass).all()):
            # Exclude each token before which the mass is reached already.
            top_weights = top_weights.masked_fill(mass - top_weights >= target_mass, 0.0)
            break
        width = min(8 * width, vocab_size)
    return torch.zeros_like(weights).scatter_(1, tokens, top_weights)


def _find_support(weights: Tensor) -> SamplingSupport:
    """Return the sampling support of each row: the tokens with a weight above 0.

    Args:
        weights: [B, V].
    """
    is_in_support = weights > 0
    return SamplingSupport.from_counts(is_in_support.sum(-1), is_in_support.nonzero()[:, 1].int())


def _invert_cdf(chunks: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index at which the cumulative sum of each row first exceeds the target.

    Args:
        chunks: Weights in chunks, [B, chunks, entries].
        cumulative: Cumulative sum of the chunks' sums, float64 [B, chunks].
        target: float64 [B, 1].

    Returns:
        Indices in the vocabulary, int64 [B, 1].
    """
    chunk_index = _find_first_above(cumulative, target)
    # Weight of all chunks before the selected one. Index -1 is clamped for `gather`, then masked.
    previous = cumulative.gather(1, (chunk_index - 1).clamp_min_(0))
    offset = previous.where(chunk_index > 0, 0.0)
    chunk = chunks[torch.arange(len(chunks), device=chunks.device), chunk_index.squeeze(1)]
    entry_index = _find_first_above(chunk.cumsum(-1, dtype=torch.float64), target - offset)
    return chunk_index * _CHUNK_SIZE + entry_index


def _find_first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first entry of each row that is greater than the target.

    The target is clamped to [0, total of the row), so that rounding never selects an entry of
    weight zero.

    Args:
        cumulative: Cumulative sums, float64 [B, N].
        target: float64 [B, 1].

    Returns:
        int64 [B, 1].
    """
    ceiling = cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    indices = torch.searchsorted(cumulative, target.clamp_min(0.0).minimum(ceiling), right=True)
    # In a row with NaN no entry is greater, and `searchsorted` returns N.
    return indices.clamp_max_(cumulative.shape[1] - 1)
