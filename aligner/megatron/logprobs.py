"""Log-probabilities of tokens from final hidden states, over a vocabulary that is cut over tensor
ranks.

Logits exist for one chunk of tokens at a time. With s a token's logits over the temperature, Z the
sum of exp(s) and p = exp(s) / Z, a target's log-probability is s[target] - log Z and the entropy is
H = log Z - sum(p s), so that

    d logprob / d s = onehot(target) - p          d H / d s = -p (log p + H)

and the log-probability of all tokens but some candidates, whose exponentials sum to R, is log R -
log Z, with the gradient exp(s) / R - p at these, and -p at the candidates.

What is kept between the passes is relative to each token's largest score on this rank: exponentials
e = exp(s - peak), and `log_scale` with p = e exp(-log_scale).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.data.types import KeptTokens
from aligner.megatron import score_passes
from aligner.megatron.cpu_backend import add_product, told_of_gradient
from aligner.models import batch_invariant

# On a CPU, element-wise passes go over so many elements at a time, which then stay in its caches.
_BLOCK_ELEMENTS = 1 << 21
_LEFT_OUT = -1e30
"""Score of what a target was not drawn among. Finite: a rank that has none of its tokens has it as
the peak, and a share of exactly 0 once the ranks' peaks are known."""


class _VocabParallelLogprobs(Function):
    """Keeps the last chunk's exponentials alone, or scores where `score_passes` are taken; the
    backward pass computes those of the others again.
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
        kept: KeptTokens | None,
        candidates: Tensor | None,
        vocab_size: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `vocab_parallel_logprobs`."""
        own_tokens = _own_tokens(vocab_size, len(weight), group)
        wanted = (
            targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], 1)
        )
        local, here = _local_targets(wanted, len(weight), group)
        # By token: the largest score, and relative to it the sum of exponentials, that sum weighted
        # with the scores, the sum without the candidates, and the scores of the target and the
        # candidates.
        peak, normalizer, weighted, rest = hidden.new_zeros(4, len(targets), dtype=torch.float32)
        chosen = hidden.new_zeros(local.shape, dtype=torch.float32)
        rows = max(min(chunk_tokens, len(targets)), batch_invariant.ROWS)
        buffer = hidden.new_empty(rows, len(weight), dtype=torch.float32)
        fused = score_passes.are_fused(buffer) and candidates is None
        spare = (
            buffer.new_empty(_block_rows(buffer), len(weight))
            if with_entropy and not fused
            else None
        )
        for tokens in _chunks(len(targets), chunk_tokens):
            scores = _scores(hidden[tokens], weight, temperature, buffer)
            scores[:, own_tokens:] = _LEFT_OUT
            _leave_out(scores, kept, tokens, group)
            if fused:
                found = score_passes.compiled(score_passes.sums)(scores, local[tokens, 0])
                peak[tokens], normalizer[tokens], weighted[tokens], chosen[tokens, 0] = found
                continue
            for part, block in _blocks(scores, tokens.start):
                peak[part] = block.amax(-1)
                block.sub_(peak[part, None])
                chosen[part] = block.gather(-1, local[part])
                relative = None if spare is None else spare[: len(block)].copy_(block)
                normalizer[part] = block.exp_().sum(-1)
                if relative is not None:
                    weighted[part] = relative.mul_(block).sum(-1)
                if candidates is not None:
                    places = _places_of_candidates(local[part], here[part])
                    among, block[places] = block[places], 0.0
                    rest[part] = block.sum(-1)
                    block[places] = among
        shift = _shift_to_common_peak(peak, group)
        scale = shift.exp()
        totals = torch.stack(
            [normalizer * scale, (weighted + normalizer * shift) * scale, rest * scale]
        )
        sums = torch.cat([totals, torch.where(here, chosen + shift[:, None], 0.0).t()])
        if group is not None and group.size() > 1:
            dist.all_reduce(sums, group=group)
        normalizer, weighted, rest, chosen = *sums[:3], sums[3:].t()
        log_normalizer, log_rest = (
            normalizer.log(),
            rest.clamp(min=torch.finfo(rest.dtype).tiny).log(),
        )
        entropy = log_normalizer - weighted / normalizer
        logprobs = torch.cat([chosen, log_rest[:, None]], 1) - log_normalizer[:, None]
        scales = log_normalizer - shift, log_rest - shift
        context.save_for_backward(hidden, weight, local, here, peak, *scales, entropy, buffer)
        context.temperature, context.chunk_tokens, context.kept, context.group = (
            temperature,
            chunk_tokens,
            kept,
            group,
        )
        context.own_tokens = own_tokens
        context.weight, context.has_candidates = weight, candidates is not None
        context.set_materialize_grads(False)
        return logprobs if candidates is not None else logprobs[:, 0], (
            entropy if with_entropy else None
        )

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, for_logprobs: Tensor | None, for_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states (this rank's part) and of the weight, which goes into its
        buffer where it has one."""
        hidden, weight, local, here, peak, log_scale, log_rest_scale, entropy, buffer = (
            context.saved_tensors
        )
        temperature, has_candidates = context.temperature, context.has_candidates
        upstream = hidden.new_zeros(len(peak), local.shape[1] + has_candidates, dtype=torch.float32)
        if for_logprobs is not None:
            upstream = for_logprobs.reshape(upstream.shape) / temperature
        scale = (-log_scale).exp()
        # The gradient of a score is factor e + entropy_factor e log(e), `upstream` more at the
        # target and the candidates, and rest_factor e more where there is no candidate.
        factor, entropy_factor = -upstream.sum(1) * scale, torch.zeros_like(scale)
        if has_candidates:
            rest_factor = upstream[:, -1] * (-log_rest_scale).exp()
        if for_entropy is not None:
            entropy_factor = -for_entropy / temperature * scale
            factor += entropy_factor * (entropy - log_scale)
        upstream = torch.where(here, upstream[:, : local.shape[1]], 0.0)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = total = getattr(context.weight, "main_grad", None)  # megatron-core's buffer
        chunks = _chunks(len(local), context.chunk_tokens)
        fused = score_passes.are_fused(buffer) and not has_candidates
        for tokens in reversed(chunks):
            if tokens is chunks[-1]:
                gradient = buffer[: tokens.stop - tokens.start]
            else:
                gradient = _scores(hidden[tokens], weight, temperature, buffer)
                gradient[:, context.own_tokens :] = _LEFT_OUT
                _leave_out(gradient, context.kept, tokens, context.group)
            if fused:
                columns = (
                    each[tokens]
                    for each in (peak, factor, entropy_factor, upstream[:, 0], local[:, 0])
                )
                gradient = score_passes.compiled(score_passes.gradient)(
                    gradient, *columns, hidden.dtype
                )
            else:
                for part, block in _blocks(gradient, tokens.start):
                    if tokens is not chunks[-1]:
                        block.sub_(peak[part, None]).exp_()
                    spread = None if for_entropy is None else torch.xlogy(block, block)
                    if has_candidates:
                        places = _places_of_candidates(local[part], here[part])
                        among = block[places] * factor[part][places[0]]
                        block.mul_((factor + rest_factor)[part, None])
                        block[places] = among
                    else:
                        block.mul_(factor[part, None])
                    if spread is not None:
                        block.addcmul_(spread, entropy_factor[part, None])
                    block.scatter_add_(-1, local[part], upstream[part])
            gradient = gradient.to(hidden.dtype)
            grad_hidden[tokens] = gradient @ weight
            if context.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, gradient.t(), hidden[tokens])
        if total is not None or not context.needs_input_grad[1]:
            return grad_hidden, told_of_gradient(context.weight), *[None] * 8
        grad_weight = (
            torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return grad_hidden, grad_weight, *[None] * 8


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _block_rows(matrix: Tensor) -> int:
    rows = max(1, len(matrix))
    return rows if matrix.is_cuda else min(rows, max(1, _BLOCK_ELEMENTS // matrix.shape[1]))


def _blocks(matrix: Tensor, first: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut [m, V] by rows; with each block, which tokens it speaks of when the matrix begins at
    token `first`."""
    for piece in _chunks(len(matrix), _block_rows(matrix)):
        yield slice(first + piece.start, first + piece.stop), matrix[piece]


def _scores(hidden: Tensor, weight: Tensor, temperature: float, buffer: Tensor) -> Tensor:
    """Logits over the temperature in the first rows of a float32 buffer; the product runs in the
    weight's precision."""
    scores = buffer[: len(hidden)]
    # from torch 2.8 on
    if hidden.is_cuda and hidden.dtype != torch.float32 and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=scores)  # type: ignore[call-overload]
        return scores if temperature == 1 else scores.mul_(1 / temperature)
    if hidden.dtype != torch.float32:
        return scores.copy_(
            torch.addmm(hidden.new_empty(()), hidden, weight.t(), beta=0, alpha=1 / temperature)
        )
    padded = batch_invariant.enough_rows(hidden)
    torch.mm(padded, weight.t(), out=buffer[: len(padded)])
    return scores if temperature == 1 else scores.mul_(1 / temperature)


def _leave_out(
    scores: Tensor, kept: KeptTokens | None, tokens: slice, group: dist.ProcessGroup | None
) -> None:
    """Overwrite this rank's scores [m, V/TP] of what these targets were not drawn among."""
    if kept is None:
        return
    row, ids = kept.at(tokens).in_rows()
    local, here = _local_targets(ids, scores.shape[1], group)
    row, local = row[here], local[here]
    inside = scores[row, local]
    scores.masked_fill_((kept.counts[tokens] > 0)[:, None], _LEFT_OUT)
    scores[row, local] = inside


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add left @ right to a float32 total, in place."""
    return (left @ right).float() if total is None else add_product(total, left, right)


def _local_targets(
    targets: Tensor, size: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Targets as indices into this rank's part of the vocabulary (0 when elsewhere), and whether
    they lie in it."""
    local = targets - (0 if group is None else group.rank() * size)
    here = (local >= 0) & (local < size)
    return torch.where(here, local, 0), here


def _own_tokens(vocab_size: int | None, rows: int, group: dist.ProcessGroup | None) -> int:
    """Return how many of this rank's rows of the vocabulary projection are tokens; the others, at
    the end, are padding."""
    if vocab_size is None:
        return rows
    rank = 0 if group is None else group.rank()
    return max(0, min(rows, vocab_size - rank * rows))


def _places_of_candidates(local: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, and columns in this rank's part, of what `_local_targets` found behind each target [m,
    1 + k]."""
    row, column = here[:, 1:].nonzero().unbind(1)
    return row, local[row, column + 1]


def _shift_to_common_peak(peak: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """What to add to scores relative to this rank's peaks [M] to make them relative to the largest
    over the ranks."""
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
    kept: KeptTokens | None = None,
    candidates: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, if asked for, entropy of each distribution, at a sampling
    temperature.

    `hidden` [M, H] are final hidden states, `weight` [V/TP, H] is this tensor rank's part of the
    vocabulary projection, `targets` int64 [M] are global token ids; both results are float32 [M],
    equal on every rank of `group`, and both can be differentiated, once. `kept` [M] has what each
    target was drawn among: the distribution, and so the entropy, is then that of these tokens
    alone. With `candidates` int64 [M, k], different ids for each target, log-probabilities are [M,
    2 + k]: the target's, those of its candidates, and that of all other tokens together. A rank's
    gradient of `hidden` is its part of a sum over the group, which is left to the caller. Never
    more than `chunk_tokens` rows of float32 logits [., V/TP] exist, or sixteen. Rows of the weights
    at and behind `vocab_size`, of all ranks together, are padding and not tokens; None: there are
    none.
    """
    return _VocabParallelLogprobs.apply(
        hidden,
        weight,
        targets,
        temperature,
        chunk_tokens,
        group,
        with_entropy,
        kept,
        candidates,
        vocab_size,
    )


@torch.no_grad()
def vocab_parallel_top(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    below: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The `count` most probable tokens behind each of M, of the ids below `below`, int64 [M,
    count], equal on every rank.

    Hidden states, weight and chunks as `vocab_parallel_logprobs` has them; `count` is `below` at
    most.
    """
    found, first = [], 0 if group is None else group.rank() * len(weight)
    buffer = hidden.new_empty(
        max(min(chunk_tokens, len(hidden)), batch_invariant.ROWS), len(weight), dtype=torch.float32
    )
    for tokens in _chunks(len(hidden), chunk_tokens):
        scores = _scores(hidden[tokens], weight, 1.0, buffer)
        scores[:, max(below - first, 0) :] = -torch.inf
        best, ids = scores.topk(min(count, len(weight)))
        ids += first
        if group is not None and group.size() > 1:
            best, ids = (_gathered(each, group) for each in (best, ids))
            ids = ids.gather(1, best.topk(count).indices)
        found.append(ids)
    return (
        torch.cat(found)
        if found
        else torch.empty(0, count, dtype=torch.int64, device=hidden.device)
    )


def _gathered(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's columns [m, k] beside each other."""
    parts = [torch.empty_like(columns) for _ in range(group.size())]
    dist.all_gather(parts, columns.contiguous(), group=group)
    return torch.cat(parts, 1)
