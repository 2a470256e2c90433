"""Drawing tokens: every sample has a random stream of its own, and every token takes one number of
it."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from aligner.data.types import KeptTokens
from aligner.engines.engine_protocol import EngineRequest, SamplingOptions

_CHUNK = 128
"""Vocabulary entries whose probabilities are summed first, so that only one chunk a row is looked
at closely."""
_SORTED_FIRST = 256
"""Tokens that are sorted first in search of those that reach `top_p`."""


def uniforms(
    seed: int, prompt_id: int, sample_index: int, count: int, turn: Sequence[int] = ()
) -> np.ndarray:
    """float64 [count] in [0, 1): the first numbers of a sample's stream, or a turn's; they depend
    on all but `count`."""
    bits = np.random.Philox(np.random.SeedSequence([seed, prompt_id, sample_index, *turn]))
    return np.random.Generator(bits).random(count)


def request_uniforms(seed: int, request: EngineRequest, count: int) -> np.ndarray:
    """Return the random numbers of a request, float64 [count]: entry t belongs to the token at
    position `stream_start` + t of input and completion."""
    key = request.key
    turn: tuple[int, ...] = ()
    if key.repeats is not None:
        read = request.tokens[: key.stream_start].numpy().astype(np.int64, copy=False)
        turn = (xxhash.xxh3_128_intdigest(read.tobytes()), key.repeats)
    return uniforms(seed, key.prompt_id, key.sample_index, count, turn)


def choose(
    logits: Tensor, options: SamplingOptions, uniform: Tensor | None, may_stop: Tensor | None = None
) -> tuple[Tensor, Tensor, KeptTokens | None]:
    """Token of each row, its log-probability at the temperature, and what it was drawn among;
    overwrites `logits`.

    logits: [B, V]; uniform: float64 [B] in [0, 1), or None for the most probable token; may_stop:
    bool [B], false where a stop token may not come yet, or None where it may everywhere. Returns
    int64 [B], float32 [B] and, where `options.tells_kept`, the tokens [B] that are left: log-probs
    are then of these alone, and else of all. The token is the inverse of the allowed tokens'
    cumulative distribution at `uniform`, which is summed in float64 above chunks of float32; a
    token of probability zero is never drawn.
    """
    logits = logits.float()
    if options.temperature != 1.0:
        logits.div_(options.temperature)
    normalizer = kept = None
    if may_stop is not None and options.stop_token_ids:
        normalizer = logits.logsumexp(-1, keepdim=True)
        stops = torch.tensor(options.stop_token_ids, device=logits.device)
        logits[:, stops] = logits[:, stops].masked_fill(~may_stop[:, None], float("-inf"))
    if uniform is None:
        best, token = logits.max(-1, keepdim=True)
    else:
        best = logits.amax(-1, keepdim=True)  # a third of the time that telling where it is takes
    # the greatest is 1: no overflow, and the total is at least 1
    weights = logits.sub_(best).exp_()
    chunks, cumulative = _cumulate(weights)
    total = cumulative[:, -1:]
    if uniform is not None:
        if options.truncates:
            drawn_from = _truncate(weights, total, options)
            chunks, cumulative = _cumulate(drawn_from)
            if options.tells_kept:
                kept, total, normalizer = _kept(drawn_from), cumulative[:, -1:], None
        # Where there is a NaN the last entry is found, which may be padding.
        token = _invert(chunks, cumulative, uniform[:, None] * cumulative[:, -1:]).clamp_max_(
            weights.shape[1] - 1
        )
    logprob = weights.gather(1, token).double().log_()
    logprob = logprob - total.log() if normalizer is None else logprob + best - normalizer
    return token.squeeze(1), logprob.squeeze(1).float(), kept


def _cumulate(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [B, V] in chunks, [B, chunks, entries], and the float64 running sum over chunks, [B,
    chunks]."""
    missing = -weights.shape[1] % _CHUNK
    chunks = (F.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, _CHUNK))
    return chunks, chunks.sum(-1).cumsum(-1, dtype=torch.float64)


def _truncate(weights: Tensor, total: Tensor, options: SamplingOptions) -> Tensor:
    """Weights [B, V], the greatest 1, with zeros at what `min_p`, `top_k` and then `top_p` leave
    out: vLLM's order.

    total: float64 [B, 1], the weights' sum. `top_p` keeps the fewest that reach this share of what
    the others left (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section
    3.1). Sorts no more of the vocabulary than it must.
    """
    top_k, top_p = options.top_k, options.top_p
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
        goal = top_p * (mass[:, -1:] if top_k else total)
        if top_k or width == size or bool((mass[:, -1:] >= goal).all()):
            greatest = greatest.masked_fill(mass - greatest >= goal, 0.0)
            break
        width = min(8 * width, size)
    return torch.zeros_like(weights).scatter_(1, tokens, greatest)


def _kept(weights: Tensor) -> KeptTokens:
    """The tokens of each row [B, V] that can be drawn."""
    inside = weights > 0
    return KeptTokens.from_counts(inside.sum(-1), inside.nonzero()[:, 1].int())


def _invert(chunks: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """int64 [B, 1]: where the running sum of [B, chunks, entries] first exceeds `target` [B, 1]."""
    index = _first_above(cumulative, target)
    before = cumulative.gather(1, (index - 1).clamp_min_(0)).where(index > 0, 0.0)
    chunk = chunks[torch.arange(len(chunks), device=chunks.device), index.squeeze(1)]
    inside = _first_above(chunk.cumsum(-1, dtype=torch.float64), target - before)
    return index * _CHUNK + inside


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First entry of each row above `target`, kept within [0, the row's total): its own share is
    never zero."""
    ceiling = cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    found = torch.searchsorted(cumulative, target.clamp_min(0.0).minimum(ceiling), right=True)
    return found.clamp_max_(cumulative.shape[1] - 1)  # where there is a NaN nothing is above
