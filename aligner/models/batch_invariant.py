"""Arithmetic whose bits do not hang on what else is in a batch, for `engine.exact`.

He et al. 2025, "Defeating Nondeterminism in LLM Inference", has such kernels for GPUs.

On a CPU a matrix product of few rows sums in another order than one of many. From `ROWS` rows on
every row gets the same bits, however many there are and wherever it stands, in one thread; norms,
softmax rows of whole units of columns and element-wise functions do at any rate. So rows and
columns are padded to whole units here, and attention is spelled out: a fused kernel sums in blocks
that hang on the lengths of the whole batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape

ROWS = 16
"""Rows of a product, and columns of attention's scores, come in whole units of so many."""
_COLUMNS = 128
"""So many of attention's columns are summed by one product: of more (129 without AVX-512, 257 with
it), what it sums first hangs on how many there are."""
_PROBED = 512
"""Rows and outputs of the products that are tried."""


def rounded(count: int) -> int:
    """The next whole number of units."""
    return -(-count // ROWS) * ROWS


def enough_rows(x: Tensor) -> Tensor:
    """x [N, inputs] with rows of zeros behind, where it has too few for a product."""
    return x if len(x) >= ROWS else F.pad(x, (0, 0, 0, ROWS - len(x)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [N, inputs], where no row's bits hang on the others; the bias is added
    behind, as Megatron does."""
    product = F.linear(enough_rows(x), weight)[: len(x)]
    return product if bias is None else product + bias


def logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability, float32 [N], of a token int64 [N] of each row of scores, float32 [N, V],
    which are overwritten.

    The sums are those of `aligner.megatron.logprobs`.
    """
    scores.sub_(scores.amax(-1, keepdim=True))
    chosen = scores.gather(-1, tokens[:, None])[:, 0]
    return chosen - scores.exp_().sum(-1).log()


def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None = None
) -> Tensor:
    """Attention of query [N, heads, L, dim] over key and value [N, key/value heads, W, dim], to [N,
    heads, L, dim].

    seen: bool, to be broadcast to [N, L, W]: which keys a query sees, at least one each. `scale` is
    1/√dim where None.
    """
    (rows, heads, length, size), (groups, width) = query.shape, key.shape[1:3]
    missing = rounded(width) - width
    key, value = F.pad(key, (0, 0, 0, missing)), F.pad(value, (0, 0, 0, missing))
    unseen = F.pad(~seen, (0, missing), value=True).expand(rows, length, width + missing)
    # The queries that share a key/value head are the rows of one product.
    lines = heads // groups * length
    query = (query * (size**-0.5 if scale is None else scale)).reshape(rows, groups, lines, size)
    more = max(0, ROWS - lines)
    scores = F.pad(query, (0, 0, 0, more)) @ key.mT
    scores = (
        scores[:, :, :lines]
        .unflatten(2, (-1, length))
        .masked_fill(unseen[:, None, None], float("-inf"))
    )
    weights = F.pad(scores.softmax(-1).flatten(2, 3), (0, 0, 0, more))
    parts = zip(weights.split(_COLUMNS, -1), value.split(_COLUMNS, -2), strict=True)
    attended = sum((some @ its for some, its in parts), weights.new_zeros(()))
    return attended[:, :, :lines].reshape(rows, heads, length, size)


def require(shape: ModelShape) -> None:
    """Raise ConfigError where this model's products are not batch-invariant on this machine, which
    is found by trying."""
    if torch.get_num_threads() > 1:
        raise ConfigError(
            "engine.exact=true: requires one thread per rank, but torch uses"
            f" {torch.get_num_threads()}; set the environment variable OMP_NUM_THREADS=1"
        )
    draw = torch.Generator().manual_seed(0)
    for inputs in {shape.hidden_size, shape.num_heads * shape.head_dim, shape.ffn_hidden_size}:
        weight, x = torch.randn(2, _PROBED, inputs, generator=draw)
        whole = F.linear(x, weight)
        for rows in (1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5, _PROBED // 2):
            if not torch.equal(linear(x[-rows:], weight), whole[-rows:]):
                raise ConfigError(
                    f"engine.exact=true: on this machine a matmul of {rows} rows and {inputs}"
                    " inputs is not batch-invariant: the result differs from the same rows of a"
                    f" matmul of {_PROBED} rows; set engine.exact=false"
                )
    query, key, value = torch.randn(3, 1, 1, _PROBED, shape.head_dim, generator=draw)
    whole = attend(query, key, value, torch.ones(_PROBED, _PROBED, dtype=torch.bool).tril())
    for length in (ROWS, _COLUMNS - 1, _COLUMNS + ROWS, 2 * _COLUMNS - 1, 3 * _COLUMNS + 1):
        last, seen = slice(length - 1, length), torch.ones(1, length, dtype=torch.bool)
        if not torch.equal(
            attend(query[:, :, last], key[:, :, :length], value[:, :, :length], seen),
            whole[:, :, last],
        ):
            raise ConfigError(
                f"engine.exact=true: on this machine attention over {length} tokens is not"
                " batch-invariant: the result differs from the result of the same tokens in a"
                f" sequence of {_PROBED} tokens; set engine.exact=false"
            )
