"""Input of one forward pass of the decoder: rows that decode, and prompts to prefill."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """Prompts to prefill, and the places in the KV cache that receive their keys and values.

    Several requests can start with the same prompt, which is computed only once. Prompts that are
    only scored are not stored.
    """

    tokens: Tensor
    """Token ids of all U prompts, concatenated without padding, int64 [N]."""
    lengths: Tensor
    """Number of tokens of each prompt, int64 [U]."""
    max_length: int
    """Number of tokens of the longest prompt, P."""
    prompt_indices: Tensor
    """Index of the prompt of each new request, int64 [C]."""
    stored_tokens: Tensor
    """Index in `tokens` of each token to store, int64 [K].

    A token occurs once for each block that it is stored in. Tokens in shared blocks that already
    contain them are left out.
    """
    stored_blocks: Tensor
    """Block of the KV cache that receives each of these tokens, int64 [K]."""
    stored_offsets: Tensor
    """Index of each of these tokens in its block, int64 [K]."""
    state_rows: Tensor
    """Row of each new request in the states of delta nets, int64 [C]; empty without delta nets."""


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
    block_tables: Tensor
    """Blocks of the KV cache of each row, in the order of its tokens, int64 [rows, M].

    The entries after the block of a row's last token are not read.
    """
    prompts: Prompts | None = None
    """Prompts to prefill; None if there are none."""
    tokens_per_row: int = 1
    """Number of tokens per decoding row: 1, or more with speculative decoding."""
    state_rows: Tensor | None = None
    """Row of each decoding row in the states of delta nets, int64 [rows]; None without them."""
    needs_logits: bool = True
    """Whether the pass computes logits."""
    expert_routing: list[Tensor] | None = None
    """List to which each layer appends its expert routing; None disables the recording.

    Each entry has the experts of every token, uint8 or int16 [R + N, K], with the decoding rows
    first.
    """

    def build_next_step(self, tokens: Tensor) -> "Step":
        """Return the decode step that follows this one.

        Args:
            tokens: Tokens that were sampled from this step's logits, int64 [R]. This step must have
                one token per row, and the block tables must contain the blocks of the new tokens.
        """
        return replace(self, tokens=tokens, positions=self.positions + 1, prompts=None)
