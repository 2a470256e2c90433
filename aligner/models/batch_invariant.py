"""Batch-invariant kernels for CPUs, which `engine.exact` uses.

A kernel is batch-invariant if the bits of a row's result do not depend on the other rows of the
batch. He et al. 2025, "Defeating Nondeterminism in LLM Inference", describe such kernels for GPUs.

On a CPU a matmul with few rows sums in another order than a matmul with many rows. In one thread,
every row of a matmul with at least `ROWS` rows gets the same bits, whatever the number of rows and
its position. This is also true of norms, of element-wise functions, and of softmax over a multiple
of `ROWS` columns. Therefore this module pads rows and columns. Attention consists of separate
operations, because a fused kernel sums in blocks that depend on the lengths of the whole batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape

ROWS = 16
"""Minimum number of rows of a matmul; the columns of attention scores are padded to a multiple."""
# Number of columns of attention weights in one matmul. From 129 columns on (257 with AVX-512), the
# order of the sum depends on the number of columns.
_COLUMNS = 128
# Number of rows and outputs of the matmuls that `require_batch_invariance` compares.
_TEST_SIZE = 512


def round_up_to_rows(count: int) -> int:
    """Round a number up to a multiple of `ROWS`."""
    return -(-count // ROWS) * ROWS


def pad_rows(x: Tensor) -> Tensor:
    """Append rows of zeros to x [N, inputs] if it has fewer than `ROWS` rows."""
    return x if len(x) >= ROWS else F.pad(x, (0, 0, 0, ROWS - len(x)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` of x [N, inputs] with batch-invariant results.

    The bias is added after the matmul, as in Megatron.
    """
    product = F.linear(pad_rows(x), weight)[: len(x)]
    return product if bias is None else product + bias


def logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-prob of one token of each row, float32 [N].

    The sums have the same order as those of `aligner.megatron.logprobs`.

    Args:
        scores: Logits, float32 [N, V]; the function overwrites them.
        tokens: Token ids, int64 [N].
    """
    # Subtracting the maximum prevents an overflow of exp.
    scores.sub_(scores.amax(-1, keepdim=True))
    target_scores = scores.gather(-1, tokens[:, None])[:, 0]
    return target_scores - scores.exp_().sum(-1).log()


def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None = None
) -> Tensor:
    """Compute attention with batch-invariant results.

    Args:
        query: [N, heads, L, dim].
        key: [N, KV heads, W, dim].
        value: [N, KV heads, W, dim].
        visible: Attention mask, bool, broadcastable to [N, L, W]: the keys to which a query
            attends, at least one for each query.
        scale: Factor of the scores; None means 1/√dim.

    Returns:
        The attention output [N, heads, L, dim].
    """
    rows, heads, length, size = query.shape
    groups, width = key.shape[1:3]
    missing = round_up_to_rows(width) - width
    if missing:
        key, value = F.pad(key, (0, 0, 0, missing)), F.pad(value, (0, 0, 0, missing))
    is_hidden = F.pad(~visible, (0, missing), value=True).expand(rows, length, width + missing)

    # The queries that share a KV head are the rows of one matmul.
    query_rows = heads // groups * length
    query = (query * (size**-0.5 if scale is None else scale)).reshape(
        rows, groups, query_rows, size
    )
    padding = max(0, ROWS - query_rows)
    scores = F.pad(query, (0, 0, 0, padding)) @ key.mT
    scores = (
        scores[:, :, :query_rows]
        .unflatten(2, (-1, length))
        .masked_fill(is_hidden[:, None, None], float("-inf"))
    )
    weights = F.pad(scores.softmax(-1).flatten(2, 3), (0, 0, 0, padding))

    # Sum over blocks of columns in a fixed order.
    parts = zip(weights.split(_COLUMNS, -1), value.split(_COLUMNS, -2), strict=True)
    attended = sum(
        (block_weights @ block_values for block_weights, block_values in parts),
        weights.new_zeros(()),
    )
    return attended[:, :, :query_rows].reshape(rows, heads, length, size)


def require_batch_invariance(shape: ModelShape) -> None:
    """Raise ConfigError unless this module's kernels are batch-invariant on this machine.

    The function compares results for batches and sequences of several sizes, with the dimensions of
    the model's matmuls.
    """
    if shape.delta_net is not None:
        raise ConfigError(
            "engine.exact=true: is not supported for models with gated delta nets; set"
            " engine.exact=false"
        )
    if torch.get_num_threads() > 1:
        raise ConfigError(
            "engine.exact=true: requires one thread per rank, but torch uses"
            f" {torch.get_num_threads()}; set the environment variable OMP_NUM_THREADS=1"
        )
    generator = torch.Generator().manual_seed(0)
    for inputs in {shape.hidden_size, shape.num_heads * shape.head_dim, shape.ffn_hidden_size}:
        weight, x = torch.randn(2, _TEST_SIZE, inputs, generator=generator)
        expected = F.linear(x, weight)
        for rows in (1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5, _TEST_SIZE // 2):
            if not torch.equal(linear(x[-rows:], weight), expected[-rows:]):
                raise ConfigError(
                    f"engine.exact=true: on this machine a matmul of {rows} rows and {inputs}"
                    " inputs is not batch-invariant: the result differs from the same rows of a"
                    f" matmul of {_TEST_SIZE} rows; set engine.exact=false"
                )

    query, key, value = torch.randn(3, 1, 1, _TEST_SIZE, shape.head_dim, generator=generator)
    causal = torch.ones(_TEST_SIZE, _TEST_SIZE, dtype=torch.bool).tril()
    expected = attend(query, key, value, causal)
    for length in (ROWS, _COLUMNS - 1, _COLUMNS + ROWS, 2 * _COLUMNS - 1, 3 * _COLUMNS + 1):
        last = slice(length - 1, length)
        visible = torch.ones(1, length, dtype=torch.bool)
        if not torch.equal(
            attend(query[:, :, last], key[:, :, :length], value[:, :, :length], visible),
            expected[:, :, last],
        ):
            raise ConfigError(
                f"engine.exact=true: on this machine attention over {length} tokens is not"
                " batch-invariant: the result differs from the result of the same tokens in a"
                f" sequence of {_TEST_SIZE} tokens; set engine.exact=false"
            )
