"""Chunked log-probs and entropies from hidden states equal the dense computation in float64."""

from __future__ import annotations

import functools
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.data.types import SamplingSupport
from aligner.megatron import score_passes
from aligner.megatron.logprobs import (
    TokenMasks,
    vocab_parallel_logprobs,
    vocab_parallel_top_ids,
)

HIDDEN, VOCABULARY, TEMPERATURE = 8, 16, 0.6
CHUNKS = (1, 3, 7, 1024)  # tokens per chunk, of 7 tokens


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states [8, H], weight [V, H], indices of 7 scored tokens, and targets [7]."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (8, VOCABULARY))
    return (
        hidden,
        2 * weight,
        torch.tensor([0, 1, 2, 4, 5, 6, 7]),
        torch.randint(0, VOCABULARY, (7,), generator=generator),
    )


def kept_tokens() -> SamplingSupport:
    """Return kept token ids of the 7 targets: all tokens, only the target, tokens of one half of
    the vocabulary, and random tokens; each set contains its target."""
    targets, halves = inputs()[3].tolist(), (range(8), range(8, 16))
    draw = torch.Generator().manual_seed(9)
    sets: list[list[int]] = [[], [targets[1]]]
    sets += [
        [token for token in halves[targets[place] // 8] if token % 3 or token == targets[place]]
        for place in (2, 3)
    ]
    sets += [
        sorted({targets[place], *torch.randperm(16, generator=draw)[:5].tolist()})
        for place in (4, 5, 6)
    ]
    counts = torch.tensor([len(ids) for ids in sets])
    return SamplingSupport.from_counts(
        counts, torch.tensor([token for ids in sets for token in ids]).int()
    )


def candidate_tokens(count: int) -> Tensor:
    """Return candidates int64 [7, count] without duplicates: up to 8 are of one half of the
    vocabulary; the target may be among them."""
    draw = torch.Generator().manual_seed(11)
    halves = [8 * (place % 2) + torch.randperm(8, generator=draw) for place in range(7)]
    return torch.stack([torch.cat([half, (half + 8) % 16])[:count] for half in halves])


def outside() -> Tensor:
    """Return a mask, bool [7, V], of the tokens that are not in `kept_tokens`."""
    left = torch.ones(7, VOCABULARY, dtype=torch.bool)
    left[kept_tokens().flatten_ids()] = False
    left[kept_tokens().counts == 0] = False
    return left


def objective(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a loss with a different upstream gradient per token, and per entropy if given."""
    total = (logprobs * torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)).sum()
    return total if entropy is None else total + (entropy * torch.linspace(3, -1, 7)).sum()


def dense(
    with_entropy: bool, *, kept: bool = False, candidates: int = 0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and gradients of hidden states and weight, in float64 rounded to
    float32.

    With `candidates`, a row of log-probs has the target, the candidates, and all other tokens.
    """
    hidden, weight, index, targets = inputs()
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    left = outside() if kept else torch.zeros(7, VOCABULARY, dtype=torch.bool)
    logits = hidden[index] @ weight.t()
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    scores = (logits / TEMPERATURE).masked_fill(left, -torch.inf).log_softmax(-1)
    logprobs, entropy = (
        scores.gather(-1, targets[:, None])[:, 0],
        -(scores.exp() * scores.masked_fill(left, 0)).sum(-1),
    )
    if candidates:
        ids = candidate_tokens(candidates)
        rows = []
        for place in range(7):
            others = [token for token in range(VOCABULARY) if token not in ids[place].tolist()]
            rows.append(
                torch.cat(
                    [
                        logprobs[place, None],
                        scores[place, ids[place]],
                        scores[place, others].logsumexp(0)[None],
                    ]
                )
            )
        logprobs = torch.stack(rows)
    objective(logprobs, entropy if with_entropy else None).backward()
    return tuple(
        tensor.detach().float() for tensor in (logprobs, entropy, hidden.grad, weight.grad)
    )


def token_masks() -> TokenMasks:
    """Return `kept_tokens` as masks; a target without restriction has none."""
    is_kept = ~outside()
    bits = torch.from_numpy(np.packbits(is_kept.numpy(), axis=1, bitorder="little"))
    restricted = (~is_kept).any(1)
    words = torch.zeros(int(restricted.sum()), 4, dtype=torch.uint8)
    words[:, : bits.shape[1]] = bits[restricted]
    rows = torch.where(restricted, restricted.cumsum(0) - 1, -1)
    return TokenMasks(rows, words.view(torch.int32))


def head_results(
    sequence: bool,
    with_entropy: bool,
    kept: bool,
    candidates: int = 0,
    masked: bool = False,
    softcap: float | None = None,
) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """Return the results of this rank's vocabulary-parallel head at every chunk size."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from aligner.megatron import world as worlds
    from aligner.megatron.output_heads import VocabularyHead
    from aligner.schema import ParallelConfig

    size = dist.get_world_size()
    world = worlds.initialize(ParallelConfig(tensor=size, sequence=sequence), seed=1, timeout_s=120)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=size,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    hidden, weight, index, targets = inputs()
    if sequence:
        hidden = hidden.chunk(size)[world.rank].clone()
    replaced = ColumnParallelLinear(
        HIDDEN, VOCABULARY, config=config, init_method=config.init_method, bias=False
    )
    replaced.weight.data.copy_(weight.chunk(size)[world.rank])
    head = VocabularyHead(replaced, logit_softcap=softcap)
    results = []
    for chunk in CHUNKS:
        head.weight.grad, states = None, hidden.clone().requires_grad_()
        options = {"temperature": TEMPERATURE, "chunk_tokens": chunk, "with_entropy": with_entropy}
        sets, ids = (
            kept_tokens() if kept else None,
            (candidate_tokens(candidates) if candidates else None),
        )
        logprobs, entropy = head.logprobs(
            head(states)[0],
            index,
            targets,
            sampling_support=sets,
            candidates=ids,
            token_masks=token_masks() if masked else None,
            **options,
        )
        objective(logprobs, entropy).backward()
        results.append(
            (
                logprobs.detach(),
                None if entropy is None else entropy.detach(),
                states.grad,
                head.weight.grad,
            )
        )
    worlds.shutdown()
    return results


LAYOUTS = pytest.mark.parametrize(
    ("size", "sequence"),
    [(1, False), (2, False), (4, False), (2, True)],
    ids=["1", "tp2", "tp4", "sp2"],
)


@pytest.mark.promise("truncated-sampling-first-ratio-is-one")
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@LAYOUTS
def test_chunked_logprobs_equal_dense_logprobs(pool, size, sequence, kept, with_entropy):
    check(
        pool.run(head_results, size, sequence, with_entropy, kept),
        dense(with_entropy, kept=kept),
        sequence,
        with_entropy,
    )


@pytest.mark.promise("guided-logprobs-are-exact")
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
@LAYOUTS
def test_logprobs_over_masked_tokens_equal_dense_logprobs(pool, size, sequence, with_entropy):
    check(
        pool.run(head_results, size, sequence, with_entropy, False, 0, True),
        dense(with_entropy, kept=True),
        sequence,
        with_entropy,
    )


@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@LAYOUTS
def test_logprobs_with_softcap_equal_dense_logprobs(pool, size, sequence, kept):
    check(
        pool.run(head_results, size, sequence, True, kept, 0, False, 2.0),
        dense(True, kept=kept, softcap=2.0),
        sequence,
        True,
    )


def test_candidate_logprobs_with_softcap_equal_unsharded_reference(pool):
    ranks = pool.run(head_results, 2, False, True, False, 5, False, 2.0)
    check(ranks, dense(True, candidates=5, softcap=2.0), False, True)


@LAYOUTS
@pytest.mark.parametrize("count", [1, 5, 15])
def test_candidate_token_logprobs_equal_unsharded_reference(pool, size, sequence, count):
    ranks = pool.run(head_results, size, sequence, True, False, count)
    check(ranks, dense(True, candidates=count), sequence, True)


def check(
    ranks: list[list[tuple[Tensor, ...]]],
    expected: tuple[Tensor, ...],
    sequence: bool,
    with_entropy: bool,
) -> None:
    """Assert that every rank's results at every chunk size are as expected."""
    logprobs, entropy, grad_hidden, grad_weight = expected
    for results in zip(*ranks, strict=True):  # one chunk size, every rank
        for result in results:
            torch.testing.assert_close(result[0], logprobs, rtol=1e-5, atol=1e-5)
            if with_entropy:
                torch.testing.assert_close(result[1], entropy, rtol=1e-5, atol=1e-5)
        hidden_parts = [result[2] for result in results]
        parts = [torch.cat(hidden_parts)] if sequence else hidden_parts
        for part in parts:
            torch.testing.assert_close(part, grad_hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            torch.cat([result[3] for result in results]), grad_weight, rtol=1e-4, atol=1e-5
        )


COMPILES = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU"),
]


@pytest.mark.parametrize(
    "make",
    [lambda function: function, pytest.param(torch.compile, marks=COMPILES)],
    ids=["plain", "compiled"],
)
@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_fused_logprobs_equal_dense_logprobs(monkeypatch, with_entropy, kept, make):
    """The fused pass is otherwise used only on GPUs."""
    monkeypatch.setattr(score_passes, "should_fuse", lambda scores: True)
    monkeypatch.setattr(score_passes, "compile_pass", functools.cache(make))
    expected = dense(with_entropy, kept=kept)
    for chunk in CHUNKS:
        hidden, weight, index, targets = inputs()
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        logprobs, entropy = vocab_parallel_logprobs(
            hidden[index],
            weight,
            targets,
            temperature=TEMPERATURE,
            chunk_tokens=chunk,
            with_entropy=with_entropy,
            sampling_support=kept_tokens() if kept else None,
        )
        objective(logprobs, entropy).backward()
        for got, wanted in zip(
            (logprobs, entropy, hidden.grad, weight.grad), expected, strict=True
        ):
            if got is not None:
                torch.testing.assert_close(got.detach(), wanted, rtol=1e-4, atol=1e-5)


def half_results(with_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return log-probs, entropies and both gradients of this rank's half of the vocabulary.

    All kept tokens are in the first half.
    """
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(4)
    hidden, weight = (
        torch.randn(5, HIDDEN, generator=generator),
        100 * torch.randn(2, 8, HIDDEN, generator=generator),
    )
    hidden.requires_grad_()
    mine = weight[dist.get_rank()].requires_grad_()
    kept = SamplingSupport.from_counts(torch.full((5,), 3), torch.tensor([0, 2, 5] * 5).int())
    logprobs, entropy = vocab_parallel_logprobs(
        hidden,
        mine,
        torch.tensor([0, 2, 5, 0, 2]),
        temperature=TEMPERATURE,
        chunk_tokens=2,
        group=dist.group.WORLD,
        with_entropy=with_entropy,
        sampling_support=kept,
    )
    (logprobs.sum() + (0 if entropy is None else entropy.sum())).backward()
    return logprobs.detach(), None if entropy is None else entropy.detach(), hidden.grad, mine.grad


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "entropy"])
def test_rank_without_kept_tokens_has_zero_gradients(pool, with_entropy):
    first, second = pool.run(half_results, 2, with_entropy)
    assert torch.equal(first[0], second[0]) and first[0].isfinite().all() and (first[0] <= 0).all()
    if with_entropy:
        assert torch.equal(first[1], second[1]) and first[1].isfinite().all()
    assert first[2].any() and first[3].any()
    assert not second[2].any() and not second[3].any()


def test_frozen_projection_passes_gradient_to_hidden_states():
    hidden, weight, index, targets = inputs()
    hidden.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(
        hidden[index], weight, targets, temperature=TEMPERATURE, chunk_tokens=3
    )
    objective(logprobs, None).backward()
    torch.testing.assert_close(hidden.grad, dense(False)[2], rtol=1e-4, atol=1e-5)
    assert weight.grad is None


def test_entropy_only_gradient_equals_dense_gradient():
    hidden, weight, index, targets = inputs()
    hidden.requires_grad_()
    _, entropy = vocab_parallel_logprobs(
        hidden[index], weight, targets, temperature=TEMPERATURE, chunk_tokens=3, with_entropy=True
    )
    objective(torch.zeros(7), entropy).backward()
    torch.testing.assert_close(hidden.grad, dense(True)[2] - dense(False)[2], rtol=1e-4, atol=1e-5)


def test_tiny_remainder_keeps_its_logprob_and_gradient():
    """The remainder is at most exp(-60), so that 1 minus the candidates' probability would be 0."""
    hidden, weight = torch.eye(4), 60 * torch.eye(4).index_fill(1, torch.tensor(3), 0.0)
    states, targets, ids = (
        hidden[:1].clone().requires_grad_(),
        torch.tensor([1]),
        torch.tensor([[0]]),
    )
    found, _ = vocab_parallel_logprobs(
        states, weight, targets, temperature=1.0, chunk_tokens=3, candidates=ids
    )
    exact = (states.detach().double() @ weight.double().t()).requires_grad_()
    rest = exact.log_softmax(-1)[0, 1:].logsumexp(0)
    torch.testing.assert_close(found[0, -1], rest.float())
    (expected,) = torch.autograd.grad(rest, exact)
    (gradient,) = torch.autograd.grad(found[0, -1], states)
    torch.testing.assert_close(gradient, (expected @ weight.double()).float())


@pytest.mark.parametrize("below", [16, 11, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sharded_top_tokens_equal_full_vocabulary_top(pool, size, below):
    hidden, weight, index, _ = inputs()
    expected = (hidden[index] @ weight.t())[:, :below].topk(5).indices
    for found in pool.run(most_probable, size, 5, below):
        assert torch.equal(found, expected)


def most_probable(count: int, below: int) -> Tensor:
    """Return the top tokens of the whole vocabulary from this rank's part of it."""
    import torch.distributed as dist

    hidden, weight, index, _ = inputs()
    part = weight.chunk(dist.get_world_size())[dist.get_rank()]
    sizes = {"id_limit": below, "chunk_tokens": 3, "group": dist.group.WORLD}
    return vocab_parallel_top_ids(hidden[index], part, count, **sizes)


def test_large_logits_give_finite_results():
    hidden, weight, index, targets = inputs()
    hidden, weight = (100 * hidden).requires_grad_(), weight.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        hidden[index], weight, targets, temperature=TEMPERATURE, chunk_tokens=3, with_entropy=True
    )
    objective(logprobs, entropy).backward()
    expected = (
        hidden.detach()[index].double() @ weight.detach().double().t() / TEMPERATURE
    ).log_softmax(-1)
    torch.testing.assert_close(
        logprobs, expected.gather(-1, targets[:, None])[:, 0].float(), rtol=1e-4, atol=1e-3
    )
    assert all(tensor.isfinite().all() for tensor in (entropy, hidden.grad, weight.grad))


def test_bf16_inputs_give_float32_logprobs_and_entropy():
    hidden, weight, index, targets = inputs()
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    logprobs, entropy = vocab_parallel_logprobs(
        hidden[index], weight, targets, temperature=TEMPERATURE, chunk_tokens=3, with_entropy=True
    )
    objective(logprobs, entropy).backward()
    expected = dense(True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for got, wanted in zip((logprobs, entropy, hidden.grad, weight.grad), expected, strict=True):
        assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_empty_targets_give_zero_gradients():
    hidden, weight, index, targets = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(
        hidden[index[:0]], weight, targets[:0], temperature=1.0, chunk_tokens=3
    )
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not hidden.grad.any()
    assert not weight.grad.any()


class LargestLogits(TorchDispatchMode):
    """Record the largest number of rows of any [rows, vocabulary] tensor that is created."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == 64:
                self.rows = max(self.rows, len(tensor))
        return result


@pytest.mark.promise("logits-are-chunked")
@pytest.mark.parametrize("tokens", [16, 84])
def test_logits_are_materialized_for_one_chunk_at_most(tokens):
    hidden, weight = (
        torch.randn(tokens, 4, requires_grad=True),
        torch.randn(64, 4, requires_grad=True),
    )
    targets = torch.randint(0, 64, (tokens,))
    with LargestLogits() as seen:
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, weight, targets, temperature=1.0, chunk_tokens=16, with_entropy=True
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.rows == 16
