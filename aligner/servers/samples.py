"""Samples as tensors of the endpoint `generate`: in its answers, and in requests that send them back to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aligner.data.types import FinishReason, Sample

_CODES: dict[FinishReason, int] = {"unfinished": -1, "length": 0, "stop": 1}


def response_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Their responses, as `protocol.DRAWN` names and shapes them; zeros behind a response."""
    lengths = [len(sample.response) for sample in samples]
    responses = torch.zeros(len(samples), max(1, *lengths), dtype=torch.int64)
    versions, logprobs = torch.zeros_like(responses), torch.zeros(responses.shape)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        responses[row, :length] = sample.response
        versions[row, :length] = sample.weight_versions
        logprobs[row, :length] = sample.engine_logprobs
    return {
        "responses": responses,
        "response_lengths": torch.tensor(lengths)[:, None],
        "logprobs": logprobs,
        "weight_versions": versions,
        "stopped": torch.tensor([[_CODES[sample.finish_reason]] for sample in samples]),
    }


def with_responses(samples: Sequence[Sample], tensors: Mapping[str, Tensor]) -> list[Sample]:
    """The same samples with the responses that `response_tensors` made these of."""
    reasons = {code: reason for reason, code in _CODES.items()}
    changed = []
    for row, sample in enumerate(samples):
        length = int(tensors["response_lengths"][row, 0])
        prompt = sample.tokens[: sample.prompt_length]
        changed.append(
            replace(
                sample,
                tokens=torch.cat([prompt, tensors["responses"][row, :length]]),
                engine_logprobs=tensors["logprobs"][row, :length],
                weight_versions=tensors["weight_versions"][row, :length],
                finish_reason=reasons[int(tensors["stopped"][row, 0])],
            )
        )
    return changed
