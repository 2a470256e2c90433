"""The reward of an experiment: one finite number for each response, in their order."""

from collections.abc import Sequence

from aligner.rewards.scorers import ScoringRequest


def score(requests: Sequence[ScoringRequest]) -> list[float]:
    """1 for a response that has the answer in it, less a little for its length.

    A request has `prompt` and `response`, texts, and `metadata`: what the record has beside its
    prompt.
    """
    return [
        float(request.metadata["answer"] in request.response) - 0.001 * len(request.response)
        for request in requests
    ]
