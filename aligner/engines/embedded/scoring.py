"""Log-probs of given tokens, for `EmbeddedEngine.score`.

The sequences run through the decoder without blocks of the KV cache, so that scoring disturbs no
request in flight. The logits are computed in chunks of positions: the logits of a long prompt at
all positions would need more memory than the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.engines.embedded.decoder_step import Prompts, Step
from aligner.engines.embedded.engine_state import EngineState
from aligner.engines.engine_protocol import ScoringRequest, TokenScores

_MAX_PASS_TOKENS = 8192
"""Maximum number of tokens of one forward pass, padded to the longest sequence. A single sequence
may be longer."""
_MAX_CHUNK_LOGITS = 1 << 25
"""Maximum number of logits that are in memory at the same time: 128 MiB in float32."""


def select_next_pass(requests: Sequence[ScoringRequest]) -> int:
    """Return the number of requests, at least 1, that the next forward pass can score."""
    longest = 0
    for count, request in enumerate(requests):
        longest = max(longest, len(request.tokens))
        # Attention pads the sequences to the longest one, so the padding counts, too.
        if count and longest * (count + 1) > _MAX_PASS_TOKENS:
            return count
    return len(requests)


@torch.inference_mode()
def score_sequences(
    state: EngineState, requests: Sequence[ScoringRequest], vocab_size: int
) -> list[TokenScores]:
    """Compute the scores of some sequences in one forward pass. Collective.

    Returns:
        The scores of each request. They are empty on the ranks of a replica other than the first.
    """
    device = state.device
    lengths = [len(request.tokens) for request in requests]
    no_rows = torch.zeros(0, dtype=torch.int64, device=device)
    prompts = Prompts(
        tokens=torch.cat([request.tokens for request in requests]).to(device),
        lengths=torch.tensor(lengths, device=device),
        max_length=max(lengths),
        prompt_indices=no_rows,
        stored_tokens=no_rows,
        stored_blocks=no_rows,
        stored_offsets=no_rows,
        state_rows=no_rows,
    )
    hidden_states = state.decoder.compute_hidden_states(
        Step(no_rows, no_rows, no_rows.view(0, 1), prompts), state.cache
    )
    # The hidden state of a token predicts the next one.
    return [
        _score_sequence(state, request, sequence[request.start - 1 : -1], vocab_size)
        for request, sequence in zip(requests, hidden_states.split(lengths), strict=True)
    ]


def _score_sequence(
    state: EngineState, request: ScoringRequest, hidden_states: Tensor, vocab_size: int
) -> TokenScores:
    """Return the scores of one sequence. Collective.

    Args:
        state: State of the engine.
        request: The request.
        hidden_states: Hidden states that predict the scored tokens, [S, hidden].
        vocab_size: Number of tokens of the vocabulary, V.
    """
    decoder = state.decoder
    top_count = min(request.top_logprobs, vocab_size)
    targets = request.tokens[request.start :].to(state.device)
    chunk_size = max(1, _MAX_CHUNK_LOGITS // vocab_size)
    # Empty tensors, so that a sequence without scored tokens has results of the right shape.
    logprobs = [torch.zeros(0)]
    top_ids = [torch.zeros(0, top_count, dtype=torch.int64)]
    top_logprobs = [torch.zeros(0, top_count)]
    for first in range(0, len(targets), chunk_size):
        chunk = slice(first, first + chunk_size)
        logits = decoder.gather_logits(decoder.compute_logits(hidden_states[chunk]))
        # Only the replica's first rank has the logits.
        if logits is None:
            continue
        scaled_logits = logits.float() / request.temperature
        # The sums have the order of `batch_invariant.logprobs`. Both results have the same formula,
        # because clients compare the two numbers to find out whether a token is the most probable.
        scaled_logits -= scaled_logits.amax(-1, keepdim=True)
        target_logits = scaled_logits.gather(-1, targets[chunk, None])
        chunk_top_logits, chunk_top_ids = scaled_logits.topk(top_count)
        log_total = scaled_logits.exp_().sum(-1, keepdim=True).log()
        logprobs.append((target_logits - log_total)[:, 0].cpu())
        top_ids.append(chunk_top_ids.cpu())
        top_logprobs.append((chunk_top_logits - log_total).cpu())
    return TokenScores(torch.cat(logprobs), torch.cat(top_ids), torch.cat(top_logprobs))
