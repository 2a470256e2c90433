"""What keeps a request from being served, by any engine."""

from __future__ import annotations

from collections.abc import Sequence

from aligner.engines.protocol import GenerationRequest, SamplingOptions, response_limit
from aligner.models.shape import ModelShape


def request_problems(requests: Sequence[GenerationRequest], options: SamplingOptions, shape: ModelShape) -> list[str]:
    """One line for each thing that is wrong, each naming its prompt; the samples of a prompt share their lines."""
    problems = [problem for request in requests for problem in _problems(request, options, shape)]
    if unknown := [token for token in options.stop_token_ids if not 0 <= token < shape.vocab_size]:
        problems.append(f"stop_token_ids={unknown}: the vocabulary is [0, {shape.vocab_size})")
    return list(dict.fromkeys(problems))


def _problems(request: GenerationRequest, options: SamplingOptions, shape: ModelShape) -> list[str]:
    prompt, tokens, limit = request.prompt, request.prompt.tokens, response_limit(request, options)
    if not len(tokens):
        return [f"prompt {prompt.id} is empty; it needs at least one token"]
    problems = []
    if request.sample_index < 0:
        problems.append(f"prompt {prompt.id}: sample_index={request.sample_index} must be at least 0")
    if limit < max(1, options.min_new_tokens):
        problems.append(
            f"prompt {prompt.id} asks for max_new_tokens={limit}; at least {max(1, options.min_new_tokens)} are needed"
        )
    if request.begun is not None and len(request.begun.response) >= limit:
        problems.append(
            f"prompt {prompt.id}: sample {request.sample_index} goes on from {len(request.begun.response)} tokens, but"
            f" max_new_tokens={limit} allows it no more"
        )
    if len(tokens) + limit > shape.max_positions:
        problems.append(
            f"prompt {prompt.id} has {len(tokens)} tokens; with max_new_tokens={limit} that exceeds the model's"
            f" {shape.max_positions} positions: shorten the prompt or the response"
        )
    low, high = (int(token) for token in tokens.aminmax())
    if low < 0 or high >= shape.vocab_size:
        problems.append(
            f"prompt {prompt.id} has token ids from {low} to {high}; the vocabulary is [0, {shape.vocab_size}):"
            " was it tokenized with this model's tokenizer?"
        )
    return problems
