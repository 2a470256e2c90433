"""Sampling options of requests whose own sampling parameters apply."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aligner.agents.protocols.requests import ModelRequest, RequestError
from aligner.engines.engine_protocol import SamplingOptions

# Sampling parameters that the engine does not have, with their values that have no effect.
_UNSUPPORTED_PARAMETERS: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
}


def check_sampling(request: ModelRequest, vocab_size: int) -> None:
    """Raise RequestError if a request has sampling parameters that the engine does not support."""
    for name, neutral in _UNSUPPORTED_PARAMETERS.items():
        value = getattr(request.sampling, name)
        if value is not None and value != neutral:
            raise RequestError(
                400, f"{name}={value}: is not supported; must be {neutral}", "unsupported", name
            )
    if not all(0 <= token < vocab_size for token in request.stop_token_ids):
        raise RequestError(
            400,
            f"stop_token_ids: each must be between 0 and {vocab_size - 1}",
            param="stop_token_ids",
        )


def build_sampling_options(
    request: ModelRequest, defaults: SamplingOptions, max_tokens: int, grammar: str | None
) -> SamplingOptions:
    """Return the sampling options of a request.

    Args:
        request: The request, for which `check_sampling` raises no error.
        defaults: Values of the parameters that the request does not set. Stop strings, grammar and
            minimum number of tokens are those of the request alone.
        max_tokens: Maximum number of tokens of an answer.
        grammar: Grammar that the request requires of its answers; None if it requires none.

    Raises:
        AlignerError: The parameters are invalid.
    """
    sampling = request.sampling
    own_values: dict[str, Any] = {}
    if sampling.temperature is not None:
        # greedy decoding reports log-probs at temperature 1
        own_values["temperature"] = sampling.temperature or 1.0
        own_values["greedy"] = sampling.temperature == 0
    if sampling.top_k is not None:
        # -1 is vLLM's value for "all tokens"
        own_values["top_k"] = max(0, sampling.top_k)
    if sampling.top_p is not None:
        own_values["top_p"] = sampling.top_p
    if sampling.min_p is not None:
        own_values["min_p"] = sampling.min_p

    # the sampling support belongs to the distribution that the run trains on
    is_truncation_changed = not own_values.keys().isdisjoint(("top_k", "top_p", "min_p"))
    stop_token_ids = () if request.ignore_eos else defaults.stop_token_ids
    return replace(
        defaults,
        **own_values,
        renormalize=defaults.renormalize and not is_truncation_changed,
        max_new_tokens=max_tokens,
        min_new_tokens=request.min_tokens,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *request.stop_token_ids))),
        stop=request.stop,
        grammar=grammar,
    )
