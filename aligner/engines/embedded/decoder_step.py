"""Input of one forward pass of the decoder: rows that decode, and prompts to prefill."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """Prompts to prefill, and the rows of the KV cache that receive them.

    Several rows can start with the same prompt, which is computed only once. Without rows, the keys
    and values are not stored.
    """

    tokens: Tensor
    """Token ids of all U prompts, concatenated without padding, int64 [N]."""
    lengths: Tensor
    """Number of tokens of each prompt, int64 [U]."""
    max_length: int
    """Number of tokens of the longest prompt, P."""
    prompt_indices: Tensor
    """Index of the prompt of each new row, int64 [C]."""
    rows: list[int]
    """Index of each new row in the KV cache, of length C."""


@dataclass(frozen=True)
class Step:
    """Input of one forward pass: rows that decode their next token, and prompts to prefill."""

    tokens: Tensor
    """Newest token of each decoding row, int64 [R].

    If `tokens_per_row` is greater than 1, each row has as many consecutive entries: its newest
    token, followed by its draft tokens. R is then the number of rows times `tokens_per_row`.
    """
    positions: Tensor
    """Position of each token in its sequence, int64 [R]."""
    columns: int
    """Number of columns of the KV cache that the pass reads; greater than every position."""
    prompts: Prompts | None = None
    """Prompts to prefill; None if there are none."""
    tokens_per_row: int = 1
    """Number of tokens per decoding row: 1, or more with speculative decoding."""
    rows: list[int] | None = None
    """Indices of the decoding rows in the KV cache, in ascending order.

    None means the first rows of the cache.
    """
    needs_logits: bool = True
    """Whether the pass computes logits."""
    lengths: Tensor | None = None
    """Number of tokens of its row to which each token attends, int32 [R].

    Only a sliced decoder uses it, in a step with one token per row. None means all tokens up to the
    token's position.
    """
    expert_routing: list[Tensor] | None = None
    """List to which each layer appends its expert routing; None disables the recording.

    Each entry has the experts of every token, uint8 or int16 [R + N, K], with the decoding rows
    first.
    """

    def build_next_step(self, tokens: Tensor) -> "Step":
        """Return the decode step that follows this one.

        Args:
            tokens: Tokens that were sampled from this step's logits, int64 [R]. This step must have
                one token per row.
        """
        return Step(tokens, self.positions + 1, self.columns + 1, rows=self.rows)
