"""Log-probs, entropies and most probable tokens over a vocabulary that is split over tensor ranks.

The functions compute them from final hidden states and this rank's part of the vocabulary
projection. Logits exist for one chunk of tokens at a time.

Notation: s are a token's scores, that is, its logits divided by the temperature; Z is the sum of
exp(s), and p = exp(s) / Z. The log-prob of a target is s[target] - log Z. The entropy is
H = log Z - sum(p s). Their gradients are

    d logprob / d s = onehot(target) - p          d H / d s = -p (log p + H)

The log-prob of all tokens except some candidates is log R - log Z, where R is the sum of exp(s)
over these tokens. Its gradient is exp(s) / R - p at these tokens, and -p at the candidates.

Between the forward and the backward pass, values are stored relative to each token's largest score
on this rank: e = exp(s - peak), and `log_scale` such that p = e exp(-log_scale).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.data.types import SamplingSupport, unpack_token_masks
from aligner.megatron import score_passes
from aligner.megatron.cpu_backend import accumulate_matmul, mark_gradient_accumulated
from aligner.models import batch_invariant

# On a CPU, element-wise passes process blocks of this number of elements, which fit into its
# caches.
_BLOCK_ELEMENTS = 1 << 21
# Score of tokens that could not be sampled. The score is finite, because it is the peak of a
# rank that holds no token of the support. The probabilities on this rank become exactly 0 when the
# ranks' peaks are combined.
_MASKED_SCORE = -1e30


@dataclass(frozen=True)
class TokenMasks:
    """Token ids that are allowed at some of M targets, as bits."""

    rows: Tensor
    """Index in `bits` of each target's mask, int64 [M]; -1 if all tokens are allowed."""
    bits: Tensor
    """int32 [N, V / 32]; see `unpack_token_masks`."""


class _VocabParallelLogprobs(Function):
    """Autograd function of `vocab_parallel_logprobs`.

    For the backward pass, the function stores only the exponentials of the last chunk (with
    `score_passes`, the scores). The backward pass recomputes the exponentials of the other chunks.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        sampling_support: SamplingSupport | None,
        candidates: Tensor | None,
        vocab_size: int | None,
        token_masks: TokenMasks | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies; see `vocab_parallel_logprobs`."""
        local_vocab = _local_vocab_size(vocab_size, len(weight), group)
        scored_ids = (
            targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], 1)
        )
        local, is_local = _to_local_ids(scored_ids, len(weight), group)
        # For each token: the largest score on this rank (the peak). Relative to the peak: the sum
        # of the exponentials, their sum weighted with the scores, their sum without the candidates,
        # and the scores of the target and the candidates.
        peak, normalizer, weighted, rest = hidden.new_zeros(4, len(targets), dtype=torch.float32)
        scored = hidden.new_zeros(local.shape, dtype=torch.float32)
        rows = max(min(chunk_tokens, len(targets)), batch_invariant.ROWS)
        buffer = hidden.new_empty(rows, len(weight), dtype=torch.float32)
        is_fused = score_passes.should_fuse(buffer) and candidates is None and softcap is None
        spare = (
            buffer.new_empty(_block_rows(buffer), len(weight))
            if with_entropy and not is_fused
            else None
        )
        for tokens in _split_range(len(targets), chunk_tokens):
            scores = _compute_scores(hidden[tokens], weight, temperature, buffer, softcap)
            scores[:, local_vocab:] = _MASKED_SCORE
            _mask_scores(scores, sampling_support, token_masks, tokens, group)
            if is_fused:
                statistics = score_passes.compile_pass(score_passes.reduce_scores)(
                    scores, local[tokens, 0]
                )
                peak[tokens], normalizer[tokens], weighted[tokens], scored[tokens, 0] = statistics
                continue
            for part, block in _split_blocks(scores, tokens.start):
                peak[part] = block.amax(-1)
                block.sub_(peak[part, None])
                scored[part] = block.gather(-1, local[part])
                relative = None if spare is None else spare[: len(block)].copy_(block)
                normalizer[part] = block.exp_().sum(-1)
                if relative is not None:
                    weighted[part] = relative.mul_(block).sum(-1)
                if candidates is not None:
                    # Sum the other tokens directly: the difference of two sums would be inaccurate
                    # if the candidates have almost all of the probability.
                    index = _candidate_index(local[part], is_local[part])
                    saved = block[index]
                    block[index] = 0.0
                    rest[part] = block.sum(-1)
                    block[index] = saved

        # Make the sums relative to the largest score over all ranks, then add them up.
        shift = _shift_to_common_peak(peak, group)
        scale = shift.exp()
        totals = torch.stack(
            [normalizer * scale, (weighted + normalizer * shift) * scale, rest * scale]
        )
        sums = torch.cat([totals, torch.where(is_local, scored + shift[:, None], 0.0).t()])
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        normalizer, weighted, rest, scored = *sums[:3], sums[3:].t()
        log_normalizer = normalizer.log()
        log_rest = rest.clamp(min=torch.finfo(rest.dtype).tiny).log()
        entropy = log_normalizer - weighted / normalizer  # H = log Z - sum(p s)
        logprobs = torch.cat([scored, log_rest[:, None]], 1) - log_normalizer[:, None]
        scales = log_normalizer - shift, log_rest - shift

        context.save_for_backward(hidden, weight, local, is_local, peak, *scales, entropy, buffer)
        context.temperature = temperature
        context.softcap = softcap
        context.chunk_tokens = chunk_tokens
        context.sampling_support = sampling_support
        context.token_masks = token_masks
        context.group = group
        context.local_vocab = local_vocab
        # Store the parameter itself, since a saved tensor does not have the attribute `main_grad`.
        context.weight = weight
        context.has_candidates = candidates is not None
        context.set_materialize_grads(False)
        return logprobs if candidates is not None else logprobs[:, 0], (
            entropy if with_entropy else None
        )

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, for_logprobs: Tensor | None, for_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states and the weight.

        The gradient of the hidden states is this rank's part of a sum over the tensor ranks. The
        weight's gradient is added to its DDP gradient buffer (`main_grad`), if it has one.

        Args:
            context: Autograd context of the forward pass.
            for_logprobs: Gradient of the log-probs, float32 [M], or [M, 2 + k] with candidates.
            for_entropy: Gradient of the entropies, float32 [M].
        """
        hidden, weight, local, is_local, peak, log_scale, log_rest_scale, entropy, buffer = (
            context.saved_tensors
        )
        temperature = context.temperature
        softcap = context.softcap
        has_candidates = context.has_candidates
        upstream = hidden.new_zeros(len(peak), local.shape[1] + has_candidates, dtype=torch.float32)
        if for_logprobs is not None:
            upstream = for_logprobs.reshape(upstream.shape) / temperature
        scale = (-log_scale).exp()
        # The gradient of a score is factor e + entropy_factor e log(e), plus `upstream` at the
        # target and the candidates, plus rest_factor e at tokens that are not candidates.
        factor = -upstream.sum(1) * scale
        entropy_factor = torch.zeros_like(scale)
        if has_candidates:
            rest_factor = upstream[:, -1] * (-log_rest_scale).exp()
        if for_entropy is not None:
            # d H / d s = -p (log p + H) with log p = log(e) - log_scale.
            entropy_factor = -for_entropy / temperature * scale
            factor += entropy_factor * (entropy - log_scale)
        upstream = torch.where(is_local, upstream[:, : local.shape[1]], 0.0)

        grad_hidden = torch.empty_like(hidden)
        grad_weight = total = getattr(context.weight, "main_grad", None)  # DDP's gradient buffer
        chunks = _split_range(len(local), context.chunk_tokens)
        is_fused = score_passes.should_fuse(buffer) and not has_candidates and softcap is None
        for tokens in reversed(chunks):
            # The buffer still contains the last chunk of the forward pass, as exponentials. With a
            # soft cap, the gradient needs the scores.
            is_kept = tokens is chunks[-1] and softcap is None
            if is_kept:
                gradient = buffer[: tokens.stop - tokens.start]
            else:
                gradient = _compute_scores(hidden[tokens], weight, temperature, buffer, softcap)
                gradient[:, context.local_vocab :] = _MASKED_SCORE
                _mask_scores(
                    gradient, context.sampling_support, context.token_masks, tokens, context.group
                )
            if is_fused:
                columns = (
                    column[tokens]
                    for column in (peak, factor, entropy_factor, upstream[:, 0], local[:, 0])
                )
                gradient = score_passes.compile_pass(score_passes.compute_score_gradient)(
                    gradient, *columns, hidden.dtype
                )
            else:
                for part, block in _split_blocks(gradient, tokens.start):
                    slope = None if softcap is None else _cap_slope(block, temperature, softcap)
                    if not is_kept:
                        block.sub_(peak[part, None]).exp_()
                    # e log(e), which is 0 where e is 0.
                    entropy_term = None if for_entropy is None else torch.xlogy(block, block)
                    if has_candidates:
                        index = _candidate_index(local[part], is_local[part])
                        candidate_gradient = block[index] * factor[part][index[0]]
                        block.mul_((factor + rest_factor)[part, None])
                        block[index] = candidate_gradient
                    else:
                        block.mul_(factor[part, None])
                    if entropy_term is not None:
                        block.addcmul_(entropy_term, entropy_factor[part, None])
                    block.scatter_add_(-1, local[part], upstream[part])
                    if slope is not None:
                        block.mul_(slope)
            gradient = gradient.to(hidden.dtype)
            grad_hidden[tokens] = gradient @ weight
            if context.needs_input_grad[1]:
                grad_weight = _accumulate(grad_weight, gradient.t(), hidden[tokens])
        if total is not None or not context.needs_input_grad[1]:
            return grad_hidden, mark_gradient_accumulated(context.weight), *[None] * 10
        grad_weight = (
            torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return grad_hidden, grad_weight, *[None] * 10


def _split_range(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _block_rows(matrix: Tensor) -> int:
    """Return the number of rows of a block of `matrix` [m, V]: all on a GPU, few on a CPU."""
    rows = max(1, len(matrix))
    return rows if matrix.is_cuda else min(rows, max(1, _BLOCK_ELEMENTS // matrix.shape[1]))


def _split_blocks(matrix: Tensor, first: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of `matrix` [m, V], each with the slice of the tokens in its rows.

    `first` is the index of the token in the first row.
    """
    for piece in _split_range(len(matrix), _block_rows(matrix)):
        yield slice(first + piece.start, first + piece.stop), matrix[piece]


def _compute_scores(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    buffer: Tensor,
    softcap: float | None = None,
) -> Tensor:
    """Return logits divided by the temperature, in the first rows of the buffer, float32 [m, V/TP].

    The GEMM runs in the weight's precision.

    Args:
        hidden: Final hidden states, [m, H].
        weight: This rank's part of the vocabulary projection, [V/TP, H].
        temperature: Temperature of the distribution.
        buffer: float32 [at least m, V/TP].
        softcap: Soft cap of the logits; None means no cap.
    """
    if softcap is not None:
        # c tanh(logit / c) / temperature
        scores = _compute_scores(hidden, weight, softcap, buffer)
        return scores.tanh_().mul_(softcap / temperature)
    scores = buffer[: len(hidden)]
    # A GEMM with a float32 output of bf16 operands exists since torch 2.8.
    if hidden.is_cuda and hidden.dtype != torch.float32 and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=scores)  # type: ignore[call-overload]
        return scores if temperature == 1 else scores.mul_(1 / temperature)
    if hidden.dtype != torch.float32:
        return scores.copy_(
            torch.addmm(hidden.new_empty(()), hidden, weight.t(), beta=0, alpha=1 / temperature)
        )
    padded = batch_invariant.pad_rows(hidden)
    torch.mm(padded, weight.t(), out=buffer[: len(padded)])
    return scores if temperature == 1 else scores.mul_(1 / temperature)


def _cap_slope(scores: Tensor, temperature: float, softcap: float) -> Tensor:
    """Return the derivative of the soft cap, 1 - (logit / c)^2, of scores [m, V/TP].

    The derivative of a masked score is 0.
    """
    return (scores * (temperature / softcap)).square_().neg_().add_(1).clamp_(min=0)


def _mask_scores(
    scores: Tensor,
    sampling_support: SamplingSupport | None,
    token_masks: TokenMasks | None,
    tokens: slice,
    group: dist.ProcessGroup | None,
) -> None:
    """Overwrite the scores of tokens that could not be sampled, in place.

    Args:
        scores: This rank's scores, float32 [m, V/TP].
        sampling_support: Sampling support of all M targets; None means the whole vocabulary.
        token_masks: Allowed tokens of all M targets; None means the whole vocabulary.
        tokens: The m targets to which the scores belong.
        group: The tensor ranks.
    """
    if token_masks is not None:
        first = 0 if group is None else group.rank() * scores.shape[1]
        rows = token_masks.rows[tokens]
        masked_targets = (rows >= 0).nonzero()[:, 0]
        # Blocks limit the memory of the unpacked masks.
        for targets in masked_targets.split(_block_rows(scores)):
            is_allowed = unpack_token_masks(token_masks.bits[rows[targets]], first, scores.shape[1])
            scores[targets] = scores[targets].masked_fill(~is_allowed, _MASKED_SCORE)
    if sampling_support is None:
        return
    row, ids = sampling_support.select(tokens).flatten_ids()
    local, is_local = _to_local_ids(ids, scores.shape[1], group)
    row = row[is_local]
    local = local[is_local]
    supported_scores = scores[row, local]
    # A count of 0 means that the target was sampled from the whole vocabulary.
    scores.masked_fill_((sampling_support.counts[tokens] > 0)[:, None], _MASKED_SCORE)
    scores[row, local] = supported_scores


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add left @ right to a float32 total in place, or return the product if there is no total."""
    return (left @ right).float() if total is None else accumulate_matmul(total, left, right)


def _to_local_ids(ids: Tensor, size: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return token ids as indices into this rank's part of the vocabulary.

    Args:
        ids: Global token ids, int64 of any shape.
        size: Number of rows of this rank's part.
        group: The tensor ranks.

    Returns:
        The indices, 0 for ids on other ranks; and whether each id is on this rank, bool.
    """
    local = ids - (0 if group is None else group.rank() * size)
    is_local = (local >= 0) & (local < size)
    return torch.where(is_local, local, 0), is_local


def _local_vocab_size(vocab_size: int | None, rows: int, group: dist.ProcessGroup | None) -> int:
    """Return the number of this rank's rows of the vocabulary projection that are tokens.

    The other rows, at the end, are padding.
    """
    if vocab_size is None:
        return rows
    rank = 0 if group is None else group.rank()
    return max(0, min(rows, vocab_size - rank * rows))


def _candidate_index(local: Tensor, is_local: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of the candidates in this rank's scores.

    Args:
        local: Local ids of each target and its candidates, int64 [m, 1 + k].
        is_local: Whether each of them is on this rank, bool [m, 1 + k].
    """
    row, column = is_local[:, 1:].nonzero().unbind(1)
    return row, local[row, column + 1]


def _shift_to_common_peak(peak: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the differences between this rank's peaks and the largest peaks of all ranks.

    Args:
        peak: Largest score of each token on this rank, float32 [M].
        group: The tensor ranks.

    Returns:
        float32 [M]. Adding them to scores relative to this rank's peaks gives scores relative to
        the largest peaks.
    """
    if group is None or group.size() == 1:
        return torch.zeros_like(peak)
    common = peak.clone()
    dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
    return peak - common


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    sampling_support: SamplingSupport | None = None,
    candidates: Tensor | None = None,
    vocab_size: int | None = None,
    token_masks: TokenMasks | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each target and, optionally, the entropy of each distribution.

    Both results can be differentiated once. A rank's gradient of `hidden` is its part of a sum over
    the group, which the caller must compute. Collective over `group`.

    Args:
        hidden: Final hidden states, [M, H].
        weight: This tensor rank's part of the vocabulary projection, [V/TP, H].
        targets: Global token ids, int64 [M].
        temperature: Temperature of the distribution.
        chunk_tokens: Maximum number of rows of float32 logits [·, V/TP] that exist at the same
            time; the buffer has at least `batch_invariant.ROWS` rows.
        group: The tensor ranks; None without tensor parallelism.
        with_entropy: Whether to compute entropies.
        sampling_support: Sampling support of each target, [M]. Log-probs and entropies are
            normalized over it; None means the whole vocabulary.
        candidates: Candidate token ids of each target, int64 [M, k]; distinct for each target.
        vocab_size: Number of tokens of the vocabulary. In the concatenated weights of all ranks,
            the rows from this index on are padding; None means that there is no padding.
        token_masks: Allowed tokens of each target. Log-probs and entropies are normalized over
            them; None means the whole vocabulary.
        softcap: Soft cap c of the logits, c tanh(logit / c), before the temperature (Gemma Team
            2024, "Gemma 2", section 2); None means no cap.

    Returns:
        The log-probs, float32 [M], or [M, 2 + k] with candidates: of the target, of its candidates,
        and of all other tokens together; and the entropies, float32 [M], or None. Both are equal on
        every rank of `group`.
    """
    return _VocabParallelLogprobs.apply(
        hidden,
        weight,
        targets,
        temperature,
        chunk_tokens,
        group,
        with_entropy,
        sampling_support,
        candidates,
        vocab_size,
        token_masks,
        softcap,
    )


@torch.no_grad()
def vocab_parallel_top_ids(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    id_limit: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    token_masks: TokenMasks | None = None,
) -> Tensor:
    """Return the ids of the most probable next tokens, most probable first.

    Collective over `group`.

    Args:
        hidden: Final hidden states, [M, H].
        weight: This tensor rank's part of the vocabulary projection, [V/TP, H].
        count: Number of ids of each token; at most `id_limit`.
        id_limit: Only ids below this value are returned.
        chunk_tokens: Maximum number of rows of logits that exist at the same time.
        group: The tensor ranks; None without tensor parallelism.
        token_masks: Allowed tokens of each of the M tokens, which come before all others; None
            means the whole vocabulary.

    Returns:
        int64 [M, count], equal on every rank of `group`.
    """
    chunk_ids: list[Tensor] = []
    first = 0 if group is None else group.rank() * len(weight)
    buffer = hidden.new_empty(
        max(min(chunk_tokens, len(hidden)), batch_invariant.ROWS), len(weight), dtype=torch.float32
    )
    for tokens in _split_range(len(hidden), chunk_tokens):
        scores = _compute_scores(hidden[tokens], weight, 1.0, buffer)
        _mask_scores(scores, None, token_masks, tokens, group)
        scores[:, max(id_limit - first, 0) :] = -torch.inf
        best, ids = scores.topk(min(count, len(weight)))
        ids += first
        if group is not None and group.size() > 1:
            # The overall top ids are among the ranks' own top ids.
            best, ids = (_all_gather_columns(columns, group) for columns in (best, ids))
            ids = ids.gather(1, best.topk(count).indices)
        chunk_ids.append(ids)
    return (
        torch.cat(chunk_ids)
        if chunk_ids
        else torch.empty(0, count, dtype=torch.int64, device=hidden.device)
    )


def _all_gather_columns(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the columns [m, k] of every rank, concatenated to [m, TP·k]."""
    parts = [torch.empty_like(columns) for _ in range(group.size())]
    dist.all_gather(parts, columns.contiguous(), group=group)
    return torch.cat(parts, 1)
