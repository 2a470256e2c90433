"""Sample tokens from logits.

Every sample has its own random stream, and every token uses one number of the stream.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from aligner.data.types import KeptTokens
from aligner.engines.engine_protocol import EngineRequest, SamplingOptions

# Number of vocabulary entries per chunk. The sampler first selects a chunk by the sums of all
# chunks, and then searches a token in that chunk only.
_CHUNK = 128
# Number of most probable tokens that are sorted in the first attempt to reach `top_p`.
_SORTED_FIRST = 256


def uniforms(
    seed: int, prompt_id: int, sample_index: int, count: int, turn: Sequence[int] = ()
) -> np.ndarray:
    """Return the first `count` numbers of a random stream, float64 [count] in [0, 1).

    The stream depends on all arguments except `count`: a larger count only appends numbers.

    Args:
        seed: Seed of the run.
        prompt_id: Id of the prompt.
        sample_index: Index of the sample among the prompt's samples.
        count: Number of random numbers.
        turn: Integers that identify a turn with its own stream; empty for the sample's stream.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, prompt_id, sample_index, *turn]))
    return np.random.Generator(bits).random(count)


def request_uniforms(seed: int, request: EngineRequest, count: int) -> np.ndarray:
    """Return the random numbers of a request, float64 [count]: entry t belongs to the token at
    position `stream_start` + t of input and completion."""
    key = request.key
    turn: tuple[int, ...] = ()
    if key.repeats is not None:
        context = request.tokens[: key.stream_start].numpy().astype(np.int64, copy=False)
        turn = (xxhash.xxh3_128_intdigest(context.tobytes()), key.repeats)
    return uniforms(seed, key.prompt_id, key.sample_index, count, turn)


def choose(
    logits: Tensor, options: SamplingOptions, uniform: Tensor | None, may_stop: Tensor | None = None
) -> tuple[Tensor, Tensor, KeptTokens | None]:
    """Sample one token per row by inverse transform sampling. Overwrites `logits`.

    The token of a row is the inverse of the cumulative distribution of the allowed tokens at
    `uniform`. Sums within a chunk of the vocabulary are float32, sums over chunks float64. A token
    of probability zero is never sampled.

    Args:
        logits: [B, V].
        options: Sampling parameters of the batch.
        uniform: Random numbers, float64 [B] in [0, 1); None selects the most probable token.
        may_stop: bool [B], False if a stop token is not allowed yet; None: allowed in every row.

    Returns:
        The tokens, int64 [B]; their log-probs at the temperature, float32 [B]; and with
        `options.tells_kept` the sampling support of each token, else None. The log-probs are those
        of the distribution over the support if it is returned, and else of the full distribution.
    """
    logits = logits.float()
    if options.temperature != 1.0:
        logits.div_(options.temperature)

    normalizer = kept = None
    if may_stop is not None and options.stop_token_ids:
        # Log-probs are those of the distribution that includes the stop tokens.
        normalizer = logits.logsumexp(-1, keepdim=True)
        stops = torch.tensor(options.stop_token_ids, device=logits.device)
        logits[:, stops] = logits[:, stops].masked_fill(~may_stop[:, None], float("-inf"))

    if uniform is None:
        best, token = logits.max(-1, keepdim=True)
    else:
        # `amax` takes a third of the time of `max`, because it does not return indices.
        best = logits.amax(-1, keepdim=True)

    # The greatest weight is 1, so that nothing overflows and the total is at least 1.
    weights = logits.sub_(best).exp_()
    chunks, cumulative = _cumulate(weights)
    total = cumulative[:, -1:]
    if uniform is not None:
        if options.truncates:
            truncated_weights = _truncate(weights, total, options)
            chunks, cumulative = _cumulate(truncated_weights)
            if options.tells_kept:
                kept = _kept(truncated_weights)
                total = cumulative[:, -1:]
                normalizer = None
        # In a row with NaN, `_invert` returns the last entry, which may be padding of the last
        # chunk.
        token = _invert(chunks, cumulative, uniform[:, None] * cumulative[:, -1:]).clamp_max_(
            weights.shape[1] - 1
        )

    # log p = log(weight / total), or z - logsumexp(z) if stop tokens were masked.
    logprob = weights.gather(1, token).double().log_()
    logprob = logprob - total.log() if normalizer is None else logprob + best - normalizer
    return token.squeeze(1), logprob.squeeze(1).float(), kept


def _cumulate(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide weights into chunks, and compute the cumulative sum over chunks.

    Args:
        weights: [B, V].

    Returns:
        The weights, padded with zeros, [B, chunks, entries]; and the cumulative sum of the chunks'
        sums, float64 [B, chunks].
    """
    padding = -weights.shape[1] % _CHUNK
    chunks = (F.pad(weights, (0, padding)) if padding else weights).unflatten(1, (-1, _CHUNK))
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

    size = weights.shape[1]
    width = min(top_k, size) if top_k else min(_SORTED_FIRST, size)
    while True:
        greatest, tokens = weights.topk(width)
        if top_p == 1:
            break
        mass = greatest.cumsum(-1, dtype=torch.float64)
        target_mass = top_p * (mass[:, -1:] if top_k else total)
        if top_k or width == size or bool((mass[:, -1:] >= target_mass).all()):
            # Exclude each token before which the mass is reached already.
            greatest = greatest.masked_fill(mass - greatest >= target_mass, 0.0)
            break
        width = min(8 * width, size)
    return torch.zeros_like(weights).scatter_(1, tokens, greatest)


def _kept(weights: Tensor) -> KeptTokens:
    """Return the sampling support of each row: the tokens with a weight above 0.

    Args:
        weights: [B, V].
    """
    is_kept = weights > 0
    return KeptTokens.from_counts(is_kept.sum(-1), is_kept.nonzero()[:, 1].int())


def _invert(chunks: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index at which the cumulative sum of each row first exceeds the target.

    Args:
        chunks: Weights in chunks, [B, chunks, entries].
        cumulative: Cumulative sum of the chunks' sums, float64 [B, chunks].
        target: float64 [B, 1].

    Returns:
        Indices in the vocabulary, int64 [B, 1].
    """
    chunk_index = _first_above(cumulative, target)
    before = cumulative.gather(1, (chunk_index - 1).clamp_min_(0)).where(chunk_index > 0, 0.0)
    chunk = chunks[torch.arange(len(chunks), device=chunks.device), chunk_index.squeeze(1)]
    entry_index = _first_above(chunk.cumsum(-1, dtype=torch.float64), target - before)
    return chunk_index * _CHUNK + entry_index


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
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
